"""X-rays of whole functions with their ways out, in words and as JSON."""

import pytest

from kprobes.cli.xray_print import as_text, exits_as_json, exits_as_lines, with_exits
from kprobes.errors import TargetError
from kprobes.guest.text import Classified
from kprobes.inspect.model import FunctionText, Side
from kprobes.inspect.subject import TextSnapshot
from kprobes.inspect.xray import exits_at, parts_at, xray
from kprobes.model.plan import ReturnMethod
from kprobes.units import Addr
from tests.build.json_lines import objects
from tests.build.kernel import SITE, TEXT, symbol
from tests.build.snapshot import NOP, call, make_snapshot

G, COLD = TEXT + 0x200, TEXT + 0x300
SYMBOLS = (symbol("g", G, size=1), symbol("f.cold", COLD, size=6))
CODE = (
    f"{NOP} 85c0 7506"  # test eax, eax; jne to the jump
    f"0f85 {(COLD - SITE - 15).to_bytes(4, 'little', signed=True).hex()}"
    f"{call(G, place=SITE + 15, opcode='e9')}"
)
PIECES = {COLD: f"90 {call(SITE + 15, place=COLD + 1, opcode='e9')}", G: "c3"}


def seen(code: str = CODE, was: str | None = None) -> tuple[list[FunctionText], Classified]:
    snapshot = make_snapshot(code, was, pieces=PIECES, symbols=SYMBOLS)
    return parts_of(snapshot), exits_at(snapshot, Addr(SITE))


def parts_of(snapshot: TextSnapshot) -> list[FunctionText]:
    return [xray(snapshot, subject) for subject in parts_at(snapshot, Addr(SITE))]


def text_of(parts: list[FunctionText], found: Classified) -> str:
    return as_text(exits_as_lines(parts, found, has_verdicts=False))


def test_the_way_out_is_marked_where_it_stands_and_told_below() -> None:
    text = text_of(*seen()).splitlines()

    assert text[-2:] == [
        "exits: tail, as these are proven to be all",
        "    f+0xf/0x14  tail jump to g+0x0/0x1  one jump",
    ]
    (marked,) = [line for line in text if "# exit" in line]
    assert marked.startswith(f"    {SITE + 15:x}  e9 ")
    assert marked.endswith("<g>  # exit: tail jump to g+0x0/0x1, by one jump")


def test_a_cold_part_follows_without_another_heading() -> None:
    text = text_of(*seen())

    assert text.count("6.1.0-56-cloud-amd64, ") == 1
    assert f"\nf.cold  {COLD:#x} in memory" in text


def test_a_jump_that_does_not_fit_tells_why() -> None:
    parts, found = seen(f"{NOP} c3")

    assert found.exits.return_method is ReturnMethod.RETINSN
    assert "# exit: return, by a breakpoint: " in text_of(parts, found)


def test_a_gap_in_the_proof_is_marked_where_it_is() -> None:
    parts, found = seen(f"{NOP} 7501 c3 90")

    text = text_of(parts, found)

    assert f"{SITE + 8:x}  90" in text
    assert "# the proof fails here: it runs on into what is after the function" in text
    assert "exits: rethook, as these may not be all: f+0x8/0x9: it runs on" in text


def test_a_path_that_ends_says_so() -> None:
    text = text_of(*seen(f"{NOP} 7501 c3 0f0b"))

    (line,) = [line for line in text.splitlines() if "its path ends here" in line]
    assert "ud2" in line


def test_where_file_and_memory_differ_memory_has_the_mark() -> None:
    (part, *_), found = seen(f"{NOP} c3", f"{NOP} cb")

    rows = with_exits(part, found).rows

    marked = [row for row in rows if "exit" in row.note]
    assert [row.side for row in marked] == [Side.MEMORY]
    assert {row.side for row in rows if row.line.addr == SITE + 5} == {Side.IMAGE, Side.MEMORY}


def test_a_place_in_the_cold_part_is_one_of_the_function() -> None:
    snapshot = make_snapshot(CODE, None, pieces=PIECES, symbols=SYMBOLS)

    subjects = parts_at(snapshot, Addr(COLD + 1))

    assert [subject.start for subject in subjects] == [SITE, COLD]


def test_a_place_in_no_function_has_no_ways_out() -> None:
    snapshot = make_snapshot(CODE, None)

    with pytest.raises(TargetError, match="is in no function"):
        parts_at(snapshot, Addr(TEXT + 0x900))


def test_json_has_the_proof_and_the_cold_part() -> None:
    (found,) = objects("xray", exits_as_json(*seen()))

    assert found["exits"]["class"] == "tail"
    assert [e["address"] for e in found["exits"]["exits"]] == [f"{SITE + 15:#x}"]
    assert [part["start"] for part in found["cold"]] == [f"{COLD:#x}"]
    notes = {row["address"]: row["note"] for row in found["text"] if "note" in row}
    assert notes == {f"{SITE + 15:#x}": "exit: tail jump to g+0x0/0x1, by one jump"}
