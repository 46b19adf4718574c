"""Lines and variables on a guest, by the debug information of Debian's package of its kernel.

What a probe in the middle of a function reads by name is what the kernel's own probe records at
the function's entry of the same calls, by its types.
"""

import re
from collections.abc import Generator
from pathlib import Path

import pytest

import kprobes
from kprobes.arch.x86_64.arch import X86_64
from kprobes.errors import DefinitionError, UsageError
from kprobes.guest.attach import Access
from kprobes.lang.parser import parse
from kprobes.open import GuestSession
from kprobes.transport.qemu import Machine
from kprobes.transport.qemu_command import MachineOptions
from tests.build.command import Command
from tests.build.debug_info import debug_vmlinux

pytestmark = pytest.mark.guest

_WORK = "head -c 5 /proc/version > /dev/null; head -c 7 /etc/passwd > /dev/null"


@pytest.fixture(scope="module")
def vmlinux() -> Path:
    return debug_vmlinux()


@pytest.fixture(scope="module")
def kernel(vmlinux: Path) -> Generator[GuestSession]:
    with kprobes.boot(MachineOptions(), access=Access(image=vmlinux)) as session:
        yield session


@pytest.fixture(autouse=True)
def _nothing_stays(kernel: GuestSession) -> Generator[None]:
    yield
    kernel.choose_tasks()
    if kernel.definitions:
        kernel.select().delete()


def test_variables_in_the_middle_are_the_parameters_of_the_entry(kernel: GuestSession) -> None:
    kernel.probe("p:entry vfs_read mode=file->f_mode:x32 count pos buf")
    kernel.probe("p:later vfs_read:12 mode=file->f_mode:x32 count pos buf ret")
    kernel.choose_tasks(comms=["head"])
    with kernel.record() as trace:
        kernel.run(_WORK, timeout_s=300)

    entries, later = trace["entry"], trace["later"]
    assert len(entries) >= 2
    assert [(e.pid, e["mode"], e["count"], e["pos"], e["buf"]) for e in entries] == [
        (e.pid, e["mode"], e["count"], e["pos"], e["buf"]) for e in later
    ]
    assert {event["ret"] for event in later} == {0}


def test_locals_and_what_is_inlined_are_read(kernel: GuestSession) -> None:
    # fsnotify_open(f) is inlined there: its own `file` and `mask` are beside its caller's.
    kernel.probe("p:opened do_sys_openat2:21 fd path=tmp->name:string file->f_mode:x32 mask")
    kernel.probe("r:done do_sys_openat2 got=$retval:s32")
    kernel.choose_tasks(comms=["head"])
    with kernel.record() as trace:
        kernel.run(_WORK, timeout_s=300)

    opened = [(event.pid, event["fd"]) for event in trace["opened"]]
    assert {"/proc/version", "/etc/passwd"} <= {event["path"] for event in trace["opened"]}
    assert opened == [(event.pid, event["got"]) for event in trace["done"] if event["got"] >= 0]
    # FS_OPEN.
    assert {event["mask"] for event in trace["opened"]} == {0x20}


def test_a_function_that_is_inlined_is_probed_with_its_parameters(kernel: GuestSession) -> None:
    kernel.probe("p:copy file_ppos file mode=file->f_mode:x32")
    kernel.probe("p:entry vfs_read file mode=file->f_mode:x32")
    kernel.choose_tasks(comms=["head"])
    with kernel.record() as trace:
        kernel.run(_WORK, timeout_s=300)

    # Which is inlined where the kernel writes, too.
    copies = [each for each in trace["copy"] if each.function == "ksys_read"]
    assert len(copies) >= 2
    assert {each.function for each in trace["copy"]} == {"ksys_read", "ksys_write"}
    assert [(e.pid, e["file"], e["mode"]) for e in copies] == [
        (e.pid, e["file"], e["mode"]) for e in trace["entry"]
    ]


def test_members_of_a_struct_on_the_stack_are_read(kernel: GuestSession) -> None:
    kernel.probe(
        "p:here do_sys_openat2:16 flag=op.open_flag:x32 mode=op.acc_mode intent=op.intent:s32"
    )
    kernel.probe(
        "p:there do_filp_open flag=op->open_flag:x32 mode=op->acc_mode intent=op->intent:s32"
    )
    kernel.choose_tasks(comms=["head"])
    with kernel.record() as trace:
        kernel.run(_WORK, timeout_s=300)

    names = "flag", "mode", "intent"
    here, there = ([(e.pid, *(e[n] for n in names)) for e in trace[k]] for k in ("here", "there"))
    assert len(here) >= 2
    # What programs are made of is opened by the kernel itself.
    assert [each for each in there if each in here] == here
    assert {intent for *_, intent in here} == {0x100}


def test_members_of_a_struct_that_is_in_several_places_are_read(kernel: GuestSession) -> None:
    # struct fd f, of which `file` is in a register.
    kernel.probe("p:here ksys_read:7 file=f.file mode=f.file->f_mode:x32")
    kernel.probe("p:there vfs_read file mode=file->f_mode:x32")
    kernel.choose_tasks(comms=["head"])
    with kernel.record() as trace:
        kernel.run(_WORK, timeout_s=300)

    here, there = (
        [(e.pid, e["file"], e["mode"]) for e in trace[name]] for name in ("here", "there")
    )
    assert len(here) >= 2
    assert here == there


def test_whole_structs_elements_and_addresses_are_what_their_parts_are(
    kernel: GuestSession,
) -> None:
    names = "f_mode", "f_flags", "f_pos", "f_inode", "private_data"
    kernel.probe("p:parts vfs_read " + " ".join(f"file->{name}" for name in names))
    kernel.probe("p:entry vfs_read *file")
    kernel.probe("p:later vfs_read:12 **file at=+0(&file->f_mode):u32 comm=$current->comm[1]:char")
    kernel.probe("p:op do_sys_openat2:16 *op flag=op.open_flag at=+0(&op.open_flag):s32")
    kernel.choose_tasks(comms=["head"])
    with kernel.record() as trace:
        kernel.run(_WORK, timeout_s=300)

    parts = [tuple(event[f"arg{n}"] for n in range(1, 6)) for event in trace["parts"]]
    assert len(parts) >= 2
    assert parts == [tuple(event[name] for name in names) for event in trace["entry"]]
    assert parts == [tuple(event[name] for name in names) for event in trace["later"]]
    assert all(event["f_path_dentry"] for event in trace["later"])
    assert all(event["at"] == event["f_mode"] for event in trace["later"])
    assert {event["comm"] for event in trace["later"]} == {ord("e")}
    opened = [(event["flag"], event["at"], event["open_flag"]) for event in trace["op"]]
    assert opened
    assert all(flag == at == open_flag for flag, at, open_flag in opened)


def test_variables_of_the_whole_file_are_read(kernel: GuestSession) -> None:
    # Each CPU has its run queue, which knows whose it is.
    kernel.probe("p:in schedule:9 cpu=runqueues.cpu:s32 tsk current=$current")
    # Which other files have.
    kernel.probe(
        "p:read vfs_read:12 task=current_task current=$current name=current_task->comm[0]:char"
    )
    kernel.probe("p:count schedule:9 count=nr_cpu_ids wanted=@nr_cpu_ids:u32")
    with kernel.record() as trace:
        kernel.run(_WORK, timeout_s=300)

    assert len(trace["in"]) >= 2
    assert all(event.cpu == event["cpu"] for event in trace["in"])
    assert all(event["tsk"] == event["current"] for event in trace["in"])
    assert len(trace["read"]) >= 2
    assert all(event["task"] == event["current"] for event in trace["read"])
    assert all(event["name"] == ord(event.comm[0]) for event in trace["read"])
    assert {(event["count"], event["wanted"]) for event in trace["count"]} == {(2, 2)}


def test_a_line_of_a_header_is_one_event_at_all_its_places(kernel: GuestSession) -> None:
    kernel.probe("p:told include/linux/fsnotify.h:315")
    with kernel.record() as trace:
        kernel.run(_WORK, timeout_s=300)

    places = {event.function for event in trace["told"]}
    assert "vfs_read" in places
    assert len(kernel.hits()) >= 5


def test_lines_are_found_by_their_text(vmlinux: Path, tmp_path: Path) -> None:
    # Of a source that has some text only where it is looked for.
    (tmp_path / "fs").mkdir()
    text = [""] * 500
    for line in (452, 453, 462):
        text[line - 1] = "\tif (a  >= b) {"
    (tmp_path / "fs" / "read_write.c").write_text("\n".join(text))
    with kprobes.boot(MachineOptions(), access=Access(image=vmlinux, source=tmp_path)) as kernel:
        kernel.probe("p:line vfs_read:12 count")
        # The other two have no code.
        kernel.probe("p:like vfs_read;if(a>=b)* count")
        kernel.choose_tasks(comms=["head"])
        with kernel.record() as trace:
            kernel.run(_WORK, timeout_s=300)
        assert len(trace["line"]) >= 2
        assert [(e.pid, e["count"]) for e in trace["line"]] == [
            (e.pid, e["count"]) for e in trace["like"]
        ]
        with pytest.raises(DefinitionError, match="no line of vfs_read that has code is like this"):
            kernel.probe("p vfs_read;nowhere*")
        with pytest.raises(UsageError, match=r"mm/memory\.c: No such file"):
            kernel.probe("p handle_mm_fault;*")
    with (
        kprobes.boot(MachineOptions(), access=Access(image=vmlinux)) as kernel,
        pytest.raises(UsageError, match="give that by --source"),
    ):
        kernel.probe("p vfs_read;*")


def test_a_file_and_a_function_name_the_same_line(kernel: GuestSession) -> None:
    by_file = kernel.driver.places.expand(
        parse("p fs/read_write.c:462 count", registers=X86_64.registers)
    )
    by_function = kernel.driver.places.expand(
        parse("p vfs_read:12 count", registers=X86_64.registers)
    )

    assert [(each.place.symbol, each.place.offset) for each in by_file] == [
        (each.place.symbol, each.place.offset) for each in by_function
    ]


def test_what_cannot_be_read_is_refused_with_where_it_can(kernel: GuestSession) -> None:
    with pytest.raises(DefinitionError, match=r"ret cannot be read: it is optimised out; it can"):
        kernel.probe("p vfs_read:11 ret")
    with pytest.raises(DefinitionError, match=r"some at 6, 8, 11, 12"):
        kernel.probe("p vfs_read:9")
    with pytest.raises(DefinitionError, match=r"file_ppos is inlined: it has no return"):
        kernel.probe("r file_ppos")
    with pytest.raises(DefinitionError, match=r"did you mean files"):
        kernel.probe("p file_ppso")
    with pytest.raises(DefinitionError, match=r"in scope there: buf count file pos ret"):
        kernel.probe("p vfs_read:12 nosuch")


def test_without_debug_information_it_is_said_how_to_get_it(guest: Machine, tmp_path: Path) -> None:
    with Command(tmp_path / "state") as command:
        done = command("check", "-t", f"qemu:{guest.stub_address}", "p vfs_read:12 count")

    assert done.returncode == 1
    assert b"give its vmlinux by --vmlinux" in done.stderr


def test_a_file_is_enough_to_check(vmlinux: Path, tmp_path: Path) -> None:
    probes = "p vfs_read:12 count", "p file_ppos $params"
    with Command(tmp_path / "state") as command:
        done = command("check", "--image", str(vmlinux), *probes)

    assert done.returncode == 0, done.stderr.decode()
    assert re.search(rb"p_vfs_read_L12 vfs_read\+\d+ count=%\w+:u64\n", done.stdout)
    assert b"accepted for 4 functions, as for the first one\n" in done.stdout


def test_lines_and_variables_are_listed(guest: Machine, vmlinux: Path, tmp_path: Path) -> None:
    target = ("-t", f"qemu:{guest.stub_address}", "--vmlinux", str(vmlinux))
    with Command(tmp_path / "state") as command:
        lines = command("lines", *target, "vfs_read").stdout.decode()
        of_file = command("lines", *target, "fs/read_write.c:460-463").stdout.decode()
        inlined = command("lines", *target, "file_ppos").stdout.decode()
        variables = command("vars", *target, "vfs_read:12").stdout.decode()
        of_all = command("vars", *target, "schedule:9", "--externs").stdout.decode()

    assert re.search(r"^  runqueues +struct rq +this_cpu_read\(@0x\w+\)", of_all, re.MULTILINE)
    assert "runqueues" not in variables
    assert inlined.startswith("file_ppos at fs/read_write.c:597\n")
    assert re.search(r"^ +\d  .*ksys_read\+0x\w+/0x\w+, ksys_write", inlined, re.MULTILINE)
    assert lines.startswith("vfs_read at fs/read_write.c:450\n")
    assert re.search(r"^ +12  vfs_read\+0x\w+/0x\w+$", lines, re.MULTILINE)
    assert re.search(r"^ +462  vfs_read\+0x\w+/0x\w+$", of_file, re.MULTILINE)
    assert re.search(r"^  count +size_t +%\w+$", variables, re.MULTILINE)
