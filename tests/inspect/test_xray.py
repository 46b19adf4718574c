"""X-rays of one function: its lines on both sides, and who changed it."""

from dataclasses import replace

import numpy as np
import pytest

from kprobes.arch.aarch64.arch import AARCH64
from kprobes.arch.aarch64.encode import MOV_X9_X30, bl
from kprobes.arch.aarch64.encode import NOP as A64_NOP
from kprobes.errors import TargetError
from kprobes.guest.journal import Undo
from kprobes.guest.tracers import GuestProbe
from kprobes.inspect.model import Anatomy, Author, Mark, Side, Subject
from kprobes.inspect.subject import Specimen
from kprobes.inspect.xray import around, function_at, xray
from kprobes.model.kernel import TextTables
from kprobes.plan.ftrace import Sites
from kprobes.units import Addr, Phys
from tests.build.journals import make_entry
from tests.build.kernel import SITE, symbol
from tests.build.our_code import ours
from tests.build.specimen import FENTRY, NOP, REST, SLIDE, call, make_specimen

OPERATIONS = 0xFFFF_8000_0200_0000
JUMP = 0xFFFF_FFFF_C000_0000


def seen(specimen: Specimen) -> Anatomy:
    return xray(specimen, function_at(specimen, Addr(SITE)))


def sides(anatomy: Anatomy) -> list[tuple[str, str]]:
    return [(row.side.value, row.line.code.hex()) for row in anatomy.rows]


def only(anatomy: Anatomy) -> Mark:
    (mark,) = anatomy.marks
    return mark


def test_what_boot_made_of_a_site_is_shown_from_both_sides() -> None:
    anatomy = seen(make_specimen())

    assert sides(anatomy)[:3] == [
        ("image", call(FENTRY)),
        ("memory", NOP),
        ("both", "4157"),
    ]
    assert only(anatomy).author is Author.FTRACE
    assert only(anatomy).says == (
        "ftrace site, idle: a nop, which boot made of the call to __fentry__"
    )
    assert anatomy.rows[0].name == "__fentry__"


def test_without_a_file_there_is_nothing_to_compare() -> None:
    anatomy = seen(make_specimen(was=None))

    assert not anatomy.is_compared
    assert {row.side for row in anatomy.rows} == {Side.BOTH}
    assert only(anatomy).says == "ftrace site, idle: a nop"


def test_a_file_alone_says_what_boot_will_do() -> None:
    anatomy = seen(make_specimen(None))

    assert not anatomy.is_running
    assert only(anatomy).says == "ftrace site: boot makes a nop of the call to __fentry__"


def test_what_nobody_explains_is_said_to_be_unknown() -> None:
    anatomy = seen(make_specimen(NOP + REST.replace("4155", "4154")))

    assert anatomy.marks[1].author is Author.UNKNOWN
    assert (anatomy.marks[1].start, anatomy.marks[1].stop) == (SITE + 10, SITE + 11)


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("cc56", "a breakpoint of somebody whom nothing here names"),
        (f"{call(JUMP, place=SITE + 5, opcode='e9')}", f"a branch to {JUMP:#x}"),
    ],
)
def test_a_breakpoint_and_a_branch_of_strangers_are_recognised(code: str, says: str) -> None:
    now = bytes.fromhex(NOP + REST)
    patch = bytes.fromhex(code)
    patched = now[:5] + patch + now[5 + len(patch) :]

    anatomy = seen(make_specimen(patched.hex()))

    assert says in anatomy.marks[1].says


def test_addresses_that_kaslr_moved_are_no_change() -> None:
    old, new = 0xFFFF_FFFF_8100_2000 - SLIDE, 0xFFFF_FFFF_8100_2000
    load = "48c7c7" + (old & 0xFFFF_FFFF).to_bytes(4, "little").hex() + "c3"
    moved = "48c7c7" + (new & 0xFFFF_FFFF).to_bytes(4, "little").hex() + "c3"

    anatomy = seen(make_specimen(NOP + moved, NOP + load, slide=SLIDE))

    assert [side for side, _ in sides(anatomy)] == ["both"] * 3
    assert anatomy.rows[1].note == "moved by KASLR"
    assert [mark.author for mark in anatomy.marks] == [Author.FTRACE]
    assert anatomy.linked(SITE) == SITE - SLIDE


def test_a_byte_that_differs_as_if_kaslr_had_moved_it_is_a_change() -> None:
    # push imm8, mov r8b: nothing in them is an address.
    anatomy = seen(
        make_specimen(f"{NOP} 4157 4156 41b411 c3", f"{NOP} 4157 4156 41b401 c3", slide=SLIDE)
    )

    assert anatomy.marks[-1].author is Author.UNKNOWN


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
    specimen = make_specimen(
        code, probes=[probe("41")], pieces={JUMP: "4157 e900000000" + "00" * 64}
    )

    anatomy = xray(specimen, around(specimen, Addr(SITE + 5)))

    mark = anatomy.marks[0]
    assert mark.says == "the guest's own kprobe: a breakpoint; event mid; before: 41"
    assert anatomy.opinion is not None
    assert anatomy.opinion.verdict == "copy"
    assert anatomy.detours[0].rows[0].line.code.hex() == "4157"


def test_the_guests_own_jump_is_named_and_its_detour_followed() -> None:
    patch = call(JUMP, place=SITE + 5, opcode="e9")
    now = NOP + patch + bytes.fromhex(REST)[5:].hex()
    back = call(SITE + 11, place=JUMP + 6, opcode="e9")
    detour = {JUMP: f"4157 4156 4155 {back}" + "00" * 64}
    probes = [probe("41", detour=JUMP, copied="57415641")]

    specimen = make_specimen(now, probes=probes, pieces=detour)
    anatomy = xray(specimen, around(specimen, Addr(SITE + 5)))

    assert "optimised: a jump to its detour; event mid; before: 4157415641" in anatomy.marks[0].says
    assert anatomy.detours[0].rows[-1].name == "f+0xb"
    assert anatomy.opinion is not None
    assert anatomy.opinion.verdict == "copy"
    jump = next(row for row in anatomy.rows if row.side is Side.MEMORY)
    assert jump.name == anatomy.detours[0].title


def test_jump_labels_and_static_calls_tell_their_state() -> None:
    label, static = SITE + 5, SITE + 10
    tables = TextTables(jump_labels={label: SITE + 15}, static_calls=frozenset({static}))
    code = f"{NOP} {NOP} {call(FENTRY, place=static)} c3"

    says = [mark.says for mark in seen(make_specimen(code, code, tables=tables)).marks]

    assert "jump label: off, a nop instead of a jump to f+0xf" in says
    assert any("now it is a call to __fentry__" in each for each in says)


def test_a_static_calls_trampoline_tells_where_it_leads() -> None:
    code = f"{call(FENTRY, opcode='e9')} 0fb9cc c3"
    area = [symbol("__SCT__f", SITE, size=8), symbol("__static_call_text_start", SITE)]
    area.append(symbol("__static_call_text_end", SITE + 9))

    anatomy = seen(replace(make_specimen(code, code, symbols=area), sites=None))

    assert only(anatomy).says == "static call's trampoline: now a jmp to __fentry__"


def test_a_site_is_shown_with_some_instructions_behind_it() -> None:
    specimen = make_specimen()

    subject = around(specimen, Addr(SITE + 6))

    assert subject == Subject(start=Addr(SITE + 5), stop=Addr(SITE + 14), site=Addr(SITE + 6))
    opinion = xray(specimen, subject).opinion
    assert opinion is not None
    assert "inside the 2-byte instruction" in opinion.why


def test_a_site_in_no_function_is_shown_as_bytes() -> None:
    elsewhere = 0xFFFF_FFFF_C000_0000
    specimen = make_specimen(pieces={elsewhere: "90" * 64})

    anatomy = xray(specimen, around(specimen, Addr(elsewhere)))

    assert len(anatomy.rows) == 16
    assert anatomy.opinion is None


def test_an_ftrace_site_carries_a_probe_by_ftrace() -> None:
    specimen = make_specimen()

    opinion = xray(specimen, around(specimen, Addr(SITE))).opinion

    assert opinion is not None
    assert opinion.verdict == "ftrace"


def test_a_piece_of_an_instruction_carries_no_probe() -> None:
    specimen = make_specimen(was=None)

    rows = xray(specimen, Subject(start=Addr(SITE), stop=Addr(SITE + 6))).rows

    assert [row.line.mnemonic for row in rows] == ["nopl", "(bad)"]
    assert [row.opinion is None for row in rows] == [False, True]


def test_addresses_where_nothing_is_are_refused() -> None:
    specimen = make_specimen()

    with pytest.raises(TargetError, match="nothing is mapped at 0x1000"):
        xray(specimen, around(specimen, Addr(0x1000)))
    with pytest.raises(TargetError, match="is in no function"):
        function_at(specimen, Addr(0x1000))
    with pytest.raises(TargetError, match="not in the kernel's file"):
        xray(make_specimen(None), Subject(start=Addr(0x1000), stop=Addr(0x1010)))


def test_a_journal_whose_bytes_are_not_there_any_more_claims_nothing() -> None:
    entry = make_entry("qemu:/s.sock", ours().entries[0].undos[0])

    anatomy = seen(make_specimen(entries=[entry]))

    assert [mark.author for mark in anatomy.marks] == [Author.FTRACE]
    assert "idle" in anatomy.marks[0].says


def test_a_stale_journal_does_not_hide_the_guests_own_call() -> None:
    entry = make_entry("qemu:/s.sock", ours().entries[0].undos[0])

    anatomy = seen(make_specimen(call(JUMP + 0x100) + REST, entries=[entry]))

    assert only(anatomy).says.startswith("the guest's own ftrace: it calls")
    assert only(anatomy).leads_to == JUMP + 0x100


def test_what_boot_put_before_a_call_of_ours_is_the_tracers() -> None:
    site, nop = Addr(SITE + 4), A64_NOP
    call_of_ours = bl(site, Addr(SITE + 0x1000))
    undo = Undo(phys=Phys(0), addr=site, old=nop, new=call_of_ours, what="open")
    specimen = make_specimen(
        (MOV_X9_X30 + call_of_ours + nop).hex(),
        (nop * 3).hex(),
        entries=[make_entry("qemu:/s.sock", undo)],
    )
    sites = Sites(addrs=np.array([site], np.uint64), records=np.array([0], np.uint64))

    lead, ours_ = seen(replace(specimen, arch=AARCH64, sites=sites)).marks

    assert (lead.author, lead.start, lead.stop) == (Author.FTRACE, SITE, site)
    assert lead.says == "ftrace site: mov x9, x30 and a nop, which boot made of two nops"
    assert (ours_.author, ours_.start, ours_.stop) == (Author.OURS, site, site + 4)


def test_a_pointer_in_front_of_the_next_function_is_the_tracers() -> None:
    nop, place = A64_NOP, Addr(SITE + 8)
    specimen = make_specimen(
        (nop * 2 + OPERATIONS.to_bytes(8, "little") + nop * 4).hex(),
        (nop * 8).hex(),
        symbols=[symbol("ftrace_nop_ops", OPERATIONS, size=8)],
        tables=TextTables(pointers=frozenset({place})),
    )

    found = seen(replace(specimen, arch=AARCH64, sites=None)).marks

    pointer = next(mark for mark in found if mark.start == place)
    assert (pointer.author, pointer.stop, pointer.is_changed) == (Author.FTRACE, place + 8, True)
    assert pointer.says.endswith("in place of two nops: ftrace_nop_ops")
