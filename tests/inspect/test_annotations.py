"""Code of ours, explained: which instruction is for which fetch argument."""

import numpy as np
from msgspec.structs import replace

from kprobes.guest.arena import LOADS_SIZE
from kprobes.inspect.model import ChangeSource
from kprobes.inspect.subject import TextSnapshot
from kprobes.inspect.xray import function_at, xray
from kprobes.plan.ftrace import Sites
from kprobes.units import Addr
from tests.build.kernel import SITE
from tests.build.our_code import ABI, CODE, ours
from tests.build.snapshot import NOP, REST, call, make_snapshot


def notes(snapshot: TextSnapshot) -> list[str]:
    (detour,) = xray(snapshot, function_at(snapshot, Addr(SITE))).detours
    return [row.note for row in detour.rows if row.note]


def test_every_field_is_told_where_it_is_stored() -> None:
    said = notes(ours())

    assert "first: one, x64, at 0x28" in said
    assert "first: two, u32, at 0x30" in said
    assert "first: header: the cycle counter" in said
    assert "first: header: pid and context" in said
    assert said.count("first: header: comm") == 2
    assert "first: commit: the record is whole now" in said
    assert "this CPU's reservation word" in said
    assert "records lost because the ring was full" in said


def test_fields_that_are_stored_at_once_are_told_together() -> None:
    said = notes(ours("p:first f one=\\1:u32 two=\\2:u32"))

    assert "first: one, u32, at 0x28; two, u32, at 0x2c" in said


def test_two_probes_of_one_site_are_told_apart() -> None:
    said = notes(ours("p:first f one=%di", "p:second f other=%si:u16 more=%dx"))

    assert "first: one, x64, at 0x28" in said
    assert "second: other, u16, at 0x28" in said
    assert "second: more, x64, at 0x30" in said
    assert said.index("first: one, x64, at 0x28") < said.index("second: other, u16, at 0x28")


def test_the_site_names_probe_process_and_what_was_there() -> None:
    snapshot = ours()

    (change,) = xray(snapshot, function_at(snapshot, Addr(SITE))).changes

    assert change.source is ChangeSource.OURS
    assert change.probe == "first"
    assert change.leads_to == CODE
    assert change.description.startswith("our probe first, a call, of process")
    assert (
        f"process {snapshot.entries[0].pid}, which is at work; before: {NOP}" in change.description
    )
    assert "p:first f one=%di two=%si:u32" in change.description


def test_a_reader_that_is_called_by_a_veneer_is_told() -> None:
    def veneer(target: Addr) -> bytes:
        # movabs target, %r11; jmp *%r11
        return b"\x49\xbb" + target.to_bytes(8, "little") + b"\x41\xff\xe3"

    snapshot = ours("p:first f one=+u0(%di)", veneer=veneer(ABI.readers.copy_user) + bytes(3))
    far = replace(snapshot.arch, code=replace(snapshot.arch.code, veneer=veneer))

    said = notes(replace(snapshot, arch=far))

    assert said.count("fault-safe reader of the guest") == 1
    assert "the compiled probes, with all registers saved" not in said
    assert "first: one, x64, at 0x30" in said


def test_a_definition_that_this_kernel_has_not_leaves_offsets() -> None:
    snapshot = ours()
    entry = snapshot.entries[0]
    strange = [replace(probe, definition="p:first nosuch one=%di") for probe in entry.probes]
    snapshot = replace(snapshot, entries=(replace(entry, probes=tuple(strange)),))

    assert "record at 0x28" in notes(snapshot)


def test_a_journal_that_describes_no_probes_still_leads_to_the_code() -> None:
    snapshot = ours()
    snapshot = replace(snapshot, entries=(replace(snapshot.entries[0], probes=()),))

    (detour,) = xray(snapshot, function_at(snapshot, Addr(SITE))).detours

    assert detour.addr == CODE
    assert len(detour.rows) > 20


def test_code_that_cannot_be_read_is_an_empty_detour() -> None:
    snapshot = ours()
    memory = make_snapshot(call(CODE) + REST).memory

    (detour,) = xray(replace(snapshot, memory=memory), function_at(snapshot, Addr(SITE))).detours

    assert detour.rows == ()


def test_a_kernel_without_ftrace_sites_has_fields_too() -> None:
    none = Sites(addrs=np.zeros(0, np.uint64), records=np.zeros(0, np.uint64))

    assert "first: one, x64, at 0x28" in notes(replace(ours(), sites=none))


def test_what_limits_have_counted_is_told() -> None:
    counted = replace(ABI, loads=Addr(ABI.rings - LOADS_SIZE))

    assert "counts what hits take" in notes(ours(abi=counted))
    assert "counts what hits take" not in notes(ours())
