"""The real ``kprobe check``: on a guest, and on the file that the guest was booted from."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec.structs import replace

from kprobes.errors import RefusedError
from kprobes.guest.obstacles import check_possible
from kprobes.guest.open import attached
from kprobes.guest.places import places_of
from kprobes.inspect.status import probeable, read_status
from kprobes.lang.parser import parse
from kprobes.model.kernel import Symbol, Symbols
from kprobes.transport.debian import kernel_image
from kprobes.transport.qemu import Machine
from tests.build.json_lines import objects
from tests.build.words import WORDS
from tests.system.conftest import SUITES, Boot

pytestmark = [pytest.mark.guest, pytest.mark.arches("amd64", "arm64", matrix="arm64")]

KPROBE = Path(sys.executable).with_name("kprobe")
ENTRY = {"amd64": "exc_page_fault", "arm64": "el1h_64_sync_handler"}
"""How exceptions come in: on a list of what must not be probed."""
HOLDS = {"amd64": "0f1f440000", "arm64": "1f2003d5"}
"""An idle site."""
GOOD = (
    "p:open do_sys_openat2 dfd=$arg1:s32 path=+0($arg2):ustring",
    "p:open vfs_statx dfd=$arg1:s32 path=+0($arg2):ustring",
    "p vfs_read $arg* name=file->f_path.dentry->d_name.name:string",
    "p vfs_write* mode=+0(%di):u16[2]",
    "-:open vfs_statx",
    "p nosuch:function",
)
BAD = {
    "p vfs_raed": "BAD_PROBE_ADDR",
    "p:open vfs_write": "DIFF_ARG_TYPE",
    "p vfs_read a=$foo": "BAD_VAR",
    "p:a vfs_read file->nosuch": "NO_BTF_FIELD",
    "p vfs_read+1": "BAD_INSN_BNDRY",
}


def check(arch: str, *words: str) -> tuple[int, list[dict[str, Any]]]:
    command = [KPROBE, "check", "--format", "json", *words, *good(arch), *bad(arch)]
    done = subprocess.run(command, capture_output=True, timeout=180, check=False)
    assert done.stderr == b""
    return done.returncode, objects("check", done.stdout)


def good(arch: str) -> list[str]:
    return [WORDS[arch].of(line) for line in GOOD]


def bad(arch: str) -> dict[str, str | None]:
    return {**BAD, f"p {ENTRY[arch]}": None}


def expected(arch: str) -> dict[str, tuple[str, str | None]]:
    accepted = dict.fromkeys(good(arch), ("accepted", None))
    return accepted | {line: ("refused", code) for line, code in bad(arch).items()}


def results(found: list[dict[str, Any]]) -> dict[str, Any]:
    return {one["definition"]: (one["verdict"], one.get("code")) for one in found}


def test_a_guest_s_functions_are_checked_and_nothing_is_written_there(
    guest: Machine, arch: str
) -> None:
    before = guest.run("cat /proc/kallsyms /proc/modules /proc/interrupts | wc -l").output

    code, found = check(arch, "--target", f"qemu:{guest.stub_address}")

    assert code == 5
    assert results(found) == expected(arch)
    places = [place for one in found for place in one.get("places", ())]
    assert {place["holds"] for place in places} == {HOLDS[arch]}
    assert guest.run("cat /proc/kallsyms /proc/modules /proc/interrupts | wc -l").output == before
    status = subprocess.run(
        [KPROBE, "status", "--target", f"qemu:{guest.stub_address}"],
        capture_output=True,
        timeout=180,
        check=True,
    )
    assert b"all of them idle" in status.stdout


@pytest.mark.kernels("5.10", "7.x")
@pytest.mark.parametrize("suite", SUITES.values(), ids=list(SUITES))
def test_a_kernel_s_file_is_checked_without_a_guest(suite: str, arch: str) -> None:
    code, found = check(arch, "--image", str(kernel_image(suite=suite, arch=arch)))

    assert code == 5
    assert results(found) == expected(arch)


def test_the_file_and_the_guest_it_runs_in_say_the_same(guest: Machine, arch: str) -> None:
    _, there = check(arch, "--target", f"qemu:{guest.stub_address}")
    _, here = check(arch, "--image", str(guest.kernel))

    for one in (*there, *here):
        for place in one.get("places", ()):
            # KASLR, and what only a running kernel holds.
            del place["address"], place["holds"]
    assert here == there


def test_a_return_probe_is_listed_as_by_the_guest(guest: Machine) -> None:
    events = "/sys/kernel/tracing/kprobe_events"
    definition = "r:back vfs_read n=$retval"
    theirs = guest.run(
        f"echo '{definition}' >{events}; cat {events}; echo >{events}"
    ).output.decode()

    done = subprocess.run(
        [KPROBE, "check", "--target", f"qemu:{guest.stub_address}", definition],
        capture_output=True,
        timeout=180,
        check=False,
        text=True,
    )

    assert theirs.startswith("r10:kprobes/back ")
    assert f"\n  listed as {theirs}" in done.stdout


def test_all_is_accepted_exits_with_0_in_words(guest: Machine, arch: str) -> None:
    command = [KPROBE, "check", "--image", str(guest.kernel), "--event-format", GOOD[0]]

    done = subprocess.run(command, capture_output=True, timeout=180, check=False, text=True)

    assert (done.returncode, done.stderr) == (0, "")
    assert WORDS[arch].of("    path:  ustring at %si, read from user space") in done.stdout
    assert "field:__data_loc char[] path;" in done.stdout
    assert done.stdout.endswith("\n1 definition accepted\n")


class Without:
    """A kernel's names but for some, as if it was built without them."""

    def __init__(self, symbols: Symbols, *hidden: str) -> None:
        self._symbols = symbols
        self._hidden = hidden

    def __getattr__(self, name: str) -> Any:
        return getattr(self._symbols, name)

    def __len__(self) -> int:
        return len(self._symbols)

    def find(self, name: str) -> Symbol | None:
        return None if name in self._hidden else self._symbols.find(name)


NO_FTRACE = ("ftrace_pages_start", "ftrace_location", "ftrace_location_range")
NOINSTR = {"amd64": "exc_int[3]", "arm64": "el1h_64_sync_handle[r]"}
LACKS = {
    ("ftrace_pages_start",): "CONFIG_KALLSYMS_ALL",
    ("__per_cpu_offset",): "no __per_cpu_offset",
    ("vzalloc", "vzalloc_noprof"): "no vzalloc_noprof or vzalloc",
}


def test_what_a_kernel_lacks_for_probing_is_named(guest: Machine) -> None:
    with attached(str(guest.stub_address)) as found:
        check_possible(found)
        with pytest.raises(RefusedError, match="CONFIG_DEBUG_INFO_BTF"):
            check_possible(replace(found, kernel=replace(found.kernel, types=None)))
        for hidden, why in LACKS.items():
            symbols = cast("Symbols", Without(found.kernel.symbols, *hidden))
            less = replace(found, kernel=replace(found.kernel, symbols=symbols))
            with pytest.raises(RefusedError, match=why):
                check_possible(less)


def test_a_kernel_without_ftrace_needs_no_sites(guest: Machine, arch: str) -> None:
    with attached(str(guest.stub_address)) as found:
        symbols = cast("Symbols", Without(found.kernel.symbols, *NO_FTRACE))
        less = replace(found, kernel=replace(found.kernel, symbols=symbols))
        check_possible(less)

        listed = probeable(less.memory, less.kernel, less.arch.site, pattern="vfs_read")
        status = read_status(less.memory, less.kernel, less.arch.site, ())
        places = places_of(less)
        matching, trap = (
            parse(text, registers=less.arch.registers)
            for text in ("p vfs_rea*", f"p {NOINSTR[arch]}")
        )
        named = [each.place.symbol for each in places.expand(matching)]
        with pytest.raises(RefusedError, match="1 match, 1 of them where no probe can be"):
            places.expand(trap)

    assert [function.symbol.name for function in listed] == ["vfs_read"]
    assert (status.sites, status.armed) == (0, ())
    assert {"vfs_read", "vfs_readv"} <= set(named)


@pytest.mark.arches("amd64")
def test_the_kernels_boot_parameter_is_what_the_kernel_takes_it_for(boot: Boot) -> None:
    word = "kprobe_event=p:one,vfs_read,n=$arg3:u64;r,vfs_write,$retval;p:my/two,vfs_open,a=+8(%di)"
    machine = boot(append=word)

    theirs = machine.run("cat /sys/kernel/tracing/kprobe_events").output.decode().splitlines()
    command = [KPROBE, "check", "-t", f"qemu:{machine.stub_address}", "-q", word]
    ours = subprocess.run(command, capture_output=True, timeout=180, check=True).stdout.decode()

    assert len(theirs) == 3
    assert re.findall("listed as (.*)\n", ours) == theirs
