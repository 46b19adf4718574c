"""Events that others recorded of a guest, beside its kernel's own text of the same ones.

The guest's own ``trace`` file, and Debian's trace-cmd, run in the guest.
"""

import io
import re
import shutil
import subprocess
import tarfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest

from kprobes.open_recording import opened_recording
from kprobes.sinks.print_fmt import PrintedEvent
from kprobes.transport.qemu import Machine
from kprobes.transport.qemu_command import MachineOptions
from tests.build.command import Command
from tests.build.json_lines import objects
from tests.system.conftest import SUITES, boot_or_skip

pytestmark = [pytest.mark.guest, pytest.mark.kernels("7.x")]

_GROUPS = "sched irq timer syscalls signal workqueue kmem task exceptions rcu printk"
_RECORD = f"""
cd /sys/kernel/tracing
echo 0 > tracing_on; echo > trace; echo 8000 > buffer_size_kb
for group in {_GROUPS}; do echo 1 > events/$group/enable; done
echo 'p:open do_sys_openat2 dfd=$arg1:s32 path=+0($arg2):ustring' >> kprobe_events
echo 'r:back do_sys_openat2 $retval' >> kprobe_events
echo 1 > events/kprobes/enable
echo 1 > tracing_on
for i in 1 2 3 4 5; do cat /proc/version /nosuch; kill -0 1; done > /dev/null 2>&1
echo marker one > trace_marker; echo -n marker two > trace_marker
sleep 0.2
echo 0 > tracing_on
cat trace > /tmp/trace.txt
mkdir /tmp/copy; cd /tmp/copy
for file in $(for group in {_GROUPS} ftrace kprobes; do
    ls /sys/kernel/tracing/events/$group/*/format; done) /sys/kernel/tracing/events/header_page; do
  name=${{file#/sys/kernel/tracing/}}; mkdir -p ${{name%/*}}; cat $file > $name
done
for name in trace_clock saved_cmdlines printk_formats; do
  cat /sys/kernel/tracing/$name > $name
done
cat /proc/kallsyms > kallsyms; uname -a > uname
for cpu in 0 1; do
  mkdir -p per_cpu/cpu$cpu
  timeout 2 cat /sys/kernel/tracing/per_cpu/cpu$cpu/trace_pipe_raw > per_cpu/cpu$cpu/trace_pipe_raw
done
echo 0 > /sys/kernel/tracing/events/enable
"""
_TRACE_CMD = f"""
cd /tmp
trace-cmd record -q -b 8000 {" ".join(f"-e {group}" for group in _GROUPS.split())} \
  sh -c 'for i in 1 2 3 4; do cat /proc/version /nosuch; done; sleep 0.1' > /tmp/log 2>&1
"""
_HASHED = re.compile(r"\b0{8}[0-9a-f]{8}\b|\bff[0-9a-f]{14}\b|\(____ptrval____\)")
"""What ``%p`` prints: hashed by the kernel, as it is in records, or what they do not have."""
_LINE = re.compile(r"^.{16}-(\d+) +\[(\d+)\] +(\d+)\.(\d{6}): (\w+): +(.*)$", re.MULTILINE)

_BY_FIELDS = {
    "hrtimer_init", "hrtimer_setup", "hrtimer_start",
    "sys_enter_openat", "sys_enter_write",
}  # fmt: skip
"""Of which the kernel's print fmt has names without numbers, or which it prints in its own way."""


def _files() -> dict[str, Path | bytes]:
    # trace-cmd of this machine, with its libraries.
    program = shutil.which("trace-cmd")
    assert program is not None
    told = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
    names = re.findall(r"(?:=> )?(/\S+) \(0x", told)
    return {name: Path(name).resolve() for name in (program, *names)}


@pytest.fixture(scope="module", params=["6.1", "7.x"])
def guest(request: pytest.FixtureRequest) -> Iterator[Machine]:
    options = MachineOptions(suite=SUITES[request.param], cpus=2, files=_files())
    with boot_or_skip(options) as machine:
        yield machine


@pytest.fixture
def kprobe(tmp_path: Path) -> Iterator[Command]:
    with Command(tmp_path) as command:
        yield command


@pytest.fixture(scope="module")
def copy(guest: Machine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of tracefs, and ``trace.txt``, the kernel's text."""
    told = guest.run(_RECORD, 300)
    found = guest.run("cd /tmp && tar cf - copy trace.txt", 120)
    assert found.status == 0, told.output
    path = tmp_path_factory.mktemp("tracefs")
    with tarfile.open(fileobj=io.BytesIO(found.output)) as archive:
        archive.extractall(path, filter="data")
    return path


def _told(text: str, left_out: Collection[str]) -> list[str]:
    # System calls have other names in the kernel's text.
    names = {*left_out, *(name.replace("sys_enter_", "sys_") for name in left_out), "-"}
    odd = re.compile(rf"\d: ({'|'.join(sorted(names))})[:(]")
    lines = (line for line in text.splitlines() if re.match(r".{16}-\d+ +\[", line))
    return [_HASHED.sub("(pointer)", line).rstrip() for line in lines if not odd.search(line)]


def test_raw_pages_are_printed_as_the_kernel_prints_them(copy: Path, kprobe: Command) -> None:
    with opened_recording(copy / "copy") as pages:
        read = [len(events) for boot in pages.boots() for events in boot.rounds]
        layouts = [layout for layout in pages.layouts.values() if layout.print_fmt]
    by_fields = {layout.event for layout in layouts if PrintedEvent(layout).unknown}
    whole = (copy / "trace.txt").read_text()

    shown = kprobe("report", str(copy / "copy"))

    assert shown.returncode == 0, shown.stderr
    assert f"# entries-in-buffer/entries-written: {sum(read)}/{sum(read)} " in whole
    ours, theirs = (_told(text, by_fields) for text in (shown.stdout.decode(), whole))
    assert [pair for pair in zip(ours, theirs, strict=True) if pair[0] != pair[1]] == []
    assert len(ours) > max(1000, 0.7 * sum(read))
    assert by_fields <= _BY_FIELDS


def test_a_file_of_trace_cmd_has_the_fields_that_it_says(
    guest: Machine, kprobe: Command, tmp_path: Path
) -> None:
    assert guest.run(_TRACE_CMD, 300).status == 0
    path = tmp_path / "trace.dat"
    path.write_bytes(guest.run("cat /tmp/trace.dat", 120).output)
    raw = subprocess.run(
        ["trace-cmd", "report", "-R", "-i", path], capture_output=True, text=True, check=True
    ).stdout

    shown = kprobe("report", str(path), "--format", "json", "--json-numbers", "number")

    assert shown.returncode == 0, shown.stderr
    ours = objects("line", shown.stdout)[1:]
    theirs = _LINE.findall(raw)
    assert len(ours) == len(theirs) > 1000
    compared = 0
    for got, (pid, cpu, seconds, us, event, values) in zip(ours, theirs, strict=True):
        moment = (got["ts_ns"] + 500) // 1000
        assert (got["pid"], got["cpu"], moment) == (int(pid), int(cpu), int(seconds + us))
        assert got["event"] == event
        compared += _compared(got["args"], values)
    assert compared > 2 * len(theirs)


def _compared(args: dict[str, Any], values: str) -> int:
    # How many of them are the same; what trace-cmd names is not compared.
    form = " ".join(f"{name}=(.*)" for name in args)
    found = re.fullmatch(form, values.rstrip(), re.DOTALL)
    if found is None:
        return 0
    same = 0
    for (name, value), text in zip(args.items(), found.groups(), strict=True):
        number = int(value, 16) if str(value).startswith("0x") else value
        if re.fullmatch(r"-?\d+|(0x)?[0-9a-f]+", text) and isinstance(number, int):
            # %lx is printed without 0x there, and %x has 32 bits.
            told = {int(text, base) for base in (10, 16) if base == 16 or text.isdecimal()}
            told |= {int(text)} if text[0] == "-" else set()
            # Of files that are created.
            told |= {int(text, 8)} if name == "mode" and set(text) <= set("01234567") else set()
            assert any((number - each) % (1 << 32) == 0 for each in told), (args, values)
            same += 1
        elif isinstance(value, str) and not value.startswith("0x"):
            assert value.rstrip("\n") == text, (args, values)
            same += 1
    return same
