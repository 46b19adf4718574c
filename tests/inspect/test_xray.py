"""X-rays of one function: its lines on both sides, and who changed it."""

import numpy as np
import pytest
from msgspec.structs import replace

from kprobes.arch.aarch64.arch import AARCH64
from kprobes.arch.aarch64.encode import MOV_X9_X30, bl
from kprobes.arch.aarch64.encode import NOP as A64_NOP
from kprobes.errors import TargetError
from kprobes.guest.armed import ArmedPatch
from kprobes.guest.tracers import GuestProbe
from kprobes.inspect.model import ChangeSource, FunctionText, Side, Subject, TextChange
from kprobes.inspect.subject import TextSnapshot
from kprobes.inspect.xray import around, function_at, xray
from kprobes.model.kernel import TextTables
from kprobes.plan.ftrace import Sites
from kprobes.units import Addr, Phys
from tests.build.journals import make_entry
from tests.build.kernel import SITE, symbol
from tests.build.our_code import ours
from tests.build.snapshot import FENTRY, NOP, REST, SLIDE, call, make_snapshot

OPERATIONS = 0xFFFF_8000_0200_0000
JUMP = 0xFFFF_FFFF_C000_0000


def seen(snapshot: TextSnapshot) -> FunctionText:
    return xray(snapshot, function_at(snapshot, Addr(SITE)))


def sides(function_text: FunctionText) -> list[tuple[str, str]]:
    return [(row.side.value, row.line.code.hex()) for row in function_text.rows]


def only(function_text: FunctionText) -> TextChange:
    (change,) = function_text.changes
    return change


def test_what_boot_made_of_a_site_is_shown_from_both_sides() -> None:
    function_text = seen(make_snapshot())

    assert sides(function_text)[:3] == [
        ("image", call(FENTRY)),
        ("memory", NOP),
        ("both", "4157"),
    ]
    assert only(function_text).source is ChangeSource.FTRACE
    assert only(function_text).description == (
        "ftrace site, idle: a nop, which boot made of the call to __fentry__"
    )
    assert function_text.rows[0].name == "__fentry__"


def test_without_a_file_there_is_nothing_to_compare() -> None:
    function_text = seen(make_snapshot(was=None))

    assert not function_text.is_compared
    assert {row.side for row in function_text.rows} == {Side.BOTH}
    assert only(function_text).description == "ftrace site, idle: a nop"


def test_a_file_alone_says_what_boot_will_do() -> None:
    function_text = seen(make_snapshot(None))

    assert not function_text.is_running
    assert (
        only(function_text).description == "ftrace site: boot makes a nop of the call to __fentry__"
    )


def test_what_nobody_explains_is_said_to_be_unknown() -> None:
    function_text = seen(make_snapshot(NOP + REST.replace("4155", "4154")))

    assert function_text.changes[1].source is ChangeSource.UNKNOWN
    assert (function_text.changes[1].start, function_text.changes[1].stop) == (SITE + 10, SITE + 11)


@pytest.mark.parametrize(
    ("code", "description"),
    [
        ("cc56", "a breakpoint of somebody whom nothing here names"),
        (f"{call(JUMP, place=SITE + 5, opcode='e9')}", f"a branch to {JUMP:#x}"),
    ],
)
def test_a_breakpoint_and_a_branch_of_strangers_are_recognised(code: str, description: str) -> None:
    now = bytes.fromhex(NOP + REST)
    patch = bytes.fromhex(code)
    patched = now[:5] + patch + now[5 + len(patch) :]

    function_text = seen(make_snapshot(patched.hex()))

    assert description in function_text.changes[1].description


def test_addresses_that_kaslr_moved_are_no_change() -> None:
    old, new = 0xFFFF_FFFF_8100_2000 - SLIDE, 0xFFFF_FFFF_8100_2000
    load = "48c7c7" + (old & 0xFFFF_FFFF).to_bytes(4, "little").hex() + "c3"
    moved = "48c7c7" + (new & 0xFFFF_FFFF).to_bytes(4, "little").hex() + "c3"

    function_text = seen(make_snapshot(NOP + moved, NOP + load, slide=SLIDE))

    assert [side for side, _ in sides(function_text)] == ["both"] * 3
    assert function_text.rows[1].note == "moved by KASLR"
    assert [change.source for change in function_text.changes] == [ChangeSource.FTRACE]
    assert function_text.linked(SITE) == SITE - SLIDE


def test_a_byte_that_differs_as_if_kaslr_had_moved_it_is_a_change() -> None:
    # push imm8, mov r8b: nothing in them is an address.
    function_text = seen(
        make_snapshot(f"{NOP} 4157 4156 41b411 c3", f"{NOP} 4157 4156 41b401 c3", slide=SLIDE)
    )

    assert function_text.changes[-1].source is ChangeSource.UNKNOWN


def probe(code: str, *, detour: int | None = None, copied: str = "") -> GuestProbe:
    return GuestProbe(
        addr=Addr(SITE + 5),
        opcode=bytes.fromhex(code),
        handlers=("event mid",),
        is_ftrace=False,
        is_disabled=False,
        slot=Addr(JUMP),
        detour=Addr(detour) if detour else None,
        copied=bytes.fromhex(copied),
    )


def test_the_guests_own_breakpoint_is_named_and_judged_without_it() -> None:
    code = NOP + REST.replace("4157", "cc57")
    snapshot = make_snapshot(
        code, probes=[probe("41")], pieces={JUMP: "4157 e900000000" + "00" * 64}
    )

    function_text = xray(snapshot, around(snapshot, Addr(SITE + 5)))

    change = function_text.changes[0]
    assert change.description == "the guest's own kprobe: a breakpoint; event mid; before: 41"
    assert function_text.verdict is not None
    assert function_text.verdict.verdict == "copy"
    assert function_text.detours[0].rows[0].line.code.hex() == "4157"


def test_the_guests_own_jump_is_named_and_its_detour_followed() -> None:
    patch = call(JUMP, place=SITE + 5, opcode="e9")
    now = NOP + patch + bytes.fromhex(REST)[5:].hex()
    back = call(SITE + 11, place=JUMP + 6, opcode="e9")
    detour = {JUMP: f"4157 4156 4155 {back}" + "00" * 64}
    probes = [probe("41", detour=JUMP, copied="57415641")]

    snapshot = make_snapshot(now, probes=probes, pieces=detour)
    function_text = xray(snapshot, around(snapshot, Addr(SITE + 5)))

    assert (
        "optimised: a jump to its detour; event mid; before: 4157415641"
        in function_text.changes[0].description
    )
    assert function_text.detours[0].rows[-1].name == "f+0xb"
    assert function_text.verdict is not None
    assert function_text.verdict.verdict == "copy"
    jump = next(row for row in function_text.rows if row.side is Side.MEMORY)
    assert jump.name == function_text.detours[0].title


def test_jump_labels_and_static_calls_tell_their_state() -> None:
    label, static = SITE + 5, SITE + 10
    tables = TextTables(jump_labels={label: SITE + 15}, static_calls=frozenset({static}))
    code = f"{NOP} {NOP} {call(FENTRY, place=static)} c3"

    description = [
        change.description for change in seen(make_snapshot(code, code, tables=tables)).changes
    ]

    assert "jump label: off, a nop instead of a jump to f+0xf" in description
    assert any("now it is a call to __fentry__" in each for each in description)


def test_a_static_calls_trampoline_tells_where_it_leads() -> None:
    code = f"{call(FENTRY, opcode='e9')} 0fb9cc c3"
    area = [symbol("__SCT__f", SITE, size=8), symbol("__static_call_text_start", SITE)]
    area.append(symbol("__static_call_text_end", SITE + 9))

    function_text = seen(replace(make_snapshot(code, code, symbols=area), sites=None))

    assert only(function_text).description == "static call's trampoline: now a jmp to __fentry__"


def test_a_site_is_shown_with_some_instructions_after_it() -> None:
    snapshot = make_snapshot()

    subject = around(snapshot, Addr(SITE + 6))

    assert subject == Subject(start=Addr(SITE + 5), stop=Addr(SITE + 14), site=Addr(SITE + 6))
    verdict = xray(snapshot, subject).verdict
    assert verdict is not None
    assert "inside the 2-byte instruction" in verdict.why


def test_a_site_in_no_function_is_shown_as_bytes() -> None:
    elsewhere = 0xFFFF_FFFF_C000_0000
    snapshot = make_snapshot(pieces={elsewhere: "90" * 64})

    function_text = xray(snapshot, around(snapshot, Addr(elsewhere)))

    assert len(function_text.rows) == 16
    assert function_text.verdict is None


def test_an_ftrace_site_carries_a_probe_by_ftrace() -> None:
    snapshot = make_snapshot()

    verdict = xray(snapshot, around(snapshot, Addr(SITE))).verdict

    assert verdict is not None
    assert verdict.verdict == "ftrace"


def test_a_piece_of_an_instruction_carries_no_probe() -> None:
    snapshot = make_snapshot(was=None)

    rows = xray(snapshot, Subject(start=Addr(SITE), stop=Addr(SITE + 6))).rows

    assert [row.line.mnemonic for row in rows] == ["nopl", "(bad)"]
    assert [row.verdict is None for row in rows] == [False, True]


def test_addresses_where_nothing_is_are_refused() -> None:
    snapshot = make_snapshot()

    with pytest.raises(TargetError, match="nothing is mapped at 0x1000"):
        xray(snapshot, around(snapshot, Addr(0x1000)))
    with pytest.raises(TargetError, match="is in no function"):
        function_at(snapshot, Addr(0x1000))
    with pytest.raises(TargetError, match="not in the kernel's file"):
        xray(make_snapshot(None), Subject(start=Addr(0x1000), stop=Addr(0x1010)))


def test_a_journal_whose_bytes_are_not_there_any_more_claims_nothing() -> None:
    entry = make_entry("qemu:/s.sock", ours().entries[0].patches[0])

    function_text = seen(make_snapshot(entries=[entry]))

    assert [change.source for change in function_text.changes] == [ChangeSource.FTRACE]
    assert "idle" in function_text.changes[0].description


def test_a_stale_journal_does_not_hide_the_guests_own_call() -> None:
    entry = make_entry("qemu:/s.sock", ours().entries[0].patches[0])

    function_text = seen(make_snapshot(call(JUMP + 0x100) + REST, entries=[entry]))

    assert only(function_text).description.startswith("the guest's own ftrace: it calls")
    assert only(function_text).leads_to == JUMP + 0x100


def test_what_boot_put_before_a_call_of_ours_is_the_tracers() -> None:
    site, nop = Addr(SITE + 4), A64_NOP
    call_of_ours = bl(site, Addr(SITE + 0x1000))
    undo = ArmedPatch(phys=Phys(0), addr=site, old=nop, new=call_of_ours, what="open")
    snapshot = make_snapshot(
        (MOV_X9_X30 + call_of_ours + nop).hex(),
        (nop * 3).hex(),
        entries=[make_entry("qemu:/s.sock", undo)],
    )
    sites = Sites(addrs=np.array([site], np.uint64), records=np.array([0], np.uint64))

    preamble, ours_ = seen(replace(snapshot, arch=AARCH64, sites=sites)).changes

    assert (preamble.source, preamble.start, preamble.stop) == (ChangeSource.FTRACE, SITE, site)
    assert preamble.description == "ftrace site: mov x9, x30 and a nop, which boot made of two nops"
    assert (ours_.source, ours_.start, ours_.stop) == (ChangeSource.OURS, site, site + 4)


def test_a_pointer_in_front_of_the_next_function_is_the_tracers() -> None:
    nop, place = A64_NOP, Addr(SITE + 8)
    snapshot = make_snapshot(
        (nop * 2 + OPERATIONS.to_bytes(8, "little") + nop * 4).hex(),
        (nop * 8).hex(),
        symbols=[symbol("ftrace_nop_ops", OPERATIONS, size=8)],
        tables=TextTables(pointers=frozenset({place})),
    )

    found = seen(replace(snapshot, arch=AARCH64, sites=None)).changes

    pointer = next(change for change in found if change.start == place)
    assert (pointer.source, pointer.stop, pointer.is_changed) == (
        ChangeSource.FTRACE,
        place + 8,
        True,
    )
    assert pointer.description.endswith("in place of two nops: ftrace_nop_ops")
