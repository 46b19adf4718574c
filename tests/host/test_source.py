"""Lines and variables of the source on this machine's kernel: as what it is told of them."""

import pytest
from msgspec.structs import replace

from kprobes.errors import DefinitionError, TargetError
from kprobes.host.machine import HostMachine
from kprobes.host.prepare import HostPreparer
from kprobes.lang.parser import parse
from kprobes.model.kernel import Kernel
from kprobes.model.options import Tasks
from kprobes.model.source import SourceInfo
from tests.build.host_machine import machine_of, make_machine
from tests.build.kernel import TEXT, make_kernel, symbol
from tests.build.source_info import KERNEL, NAMES, FakeSource
from tests.build.typed import types

TYPED = replace(KERNEL, types=types(), release="6.1.0-56-cloud-amd64")


def opened(kernel: Kernel, module: str = "") -> SourceInfo:
    del kernel, module
    return FakeSource()


MACHINE = machine_of(TYPED, (each.name for each in NAMES), open_source=opened)


def told(text: str, machine: HostMachine = MACHINE) -> list[str]:
    """Return what the kernel is told of a definition, without groups and events."""
    definition = parse(text, registers=machine.arch.registers)
    found = HostPreparer(machine).prepare(definition, Tasks())
    return [each.declaration.line("g", "e").partition(" ")[2] for each in found]


def test_a_line_is_so_far_from_its_function() -> None:
    assert told("p vfs_read:6 %dx") == ["vfs_read+16 arg1=%dx"]
    assert told("p read_write.c:456") == ["vfs_read+16"]


def test_several_places_are_events_that_say_which() -> None:
    assert told("p vfs_read:11") == ["vfs_read+32", "vfs_write+8"]


def test_of_several_those_that_it_takes_no_probe_at_are_left_out() -> None:
    machine = machine_of(TYPED, ["vfs_write"], open_source=opened)

    assert told("p vfs_read:11", machine) == ["vfs_write+8"]
    # Of one it says so itself.
    assert told("p vfs_read:6", machine) == ["vfs_read+16"]


def test_where_several_functions_have_the_name_it_is_told_the_address() -> None:
    twin = replace(KERNEL, symbols=make_kernel([*NAMES, symbol("vfs_write", TEXT + 0x400)]).symbols)
    machine = machine_of(twin, (each.name for each in NAMES), open_source=opened)

    assert told("p vfs_read:11", machine) == ["vfs_read+32", f"{TEXT + 0x48:#x}"]


def test_variables_are_where_they_are_then() -> None:
    assert told("p vfs_read:6 count flags limit argv[1]") == [
        "vfs_read+16 count=%dx:u32 flags=-8(%sp):u32 limit=@0xffffffff82000000:u32 arg4=+8(%si):x64"
    ]
    assert told("p vfs_read:6 file->f_mode") == ["vfs_read+16 arg1=+0(%di):u32"]
    assert told("p vfs_read+16 count") == ["vfs_read+16 count=%dx:u32"]


def test_what_its_language_has_no_word_for_is_refused() -> None:
    with pytest.raises(DefinitionError, match="only guests have"):
        told("p vfs_read:6 here=far")
    with pytest.raises(DefinitionError, match="per-CPU addresses"):
        told("p vfs_read:6 mine")


def test_without_debug_information_it_is_said() -> None:
    with pytest.raises(TargetError, match="need debug information"):
        told("p vfs_read:6", make_machine())
