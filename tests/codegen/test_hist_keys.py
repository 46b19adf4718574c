"""Keys of hist triggers that are strings or stacks: each kept once, whatever comes in between."""

from functools import partial

import pytest

from tests.build import arm64, machine
from tests.build.counted import Counted, Table, make_counted
from tests.build.machine import EXEC_ID
from tests.build.overridden import ARM64, Isa
from tests.build.reference import packed
from tests.codegen.test_hist import EVERY_ISA, SIZE, counted

STRING, USTRING = "p f s=+0($arg1):string n=$arg2:u8", "p f s=+0($arg1):ustring n=$arg2:u8"
CALLERS = [0xFFFF_FFFF_8100_0000 + 16 * n for n in range(200)]
NOWHERE = 1 << 63


def place_of(isa: Isa, definition: str = STRING) -> int:
    """Return where texts of a test can be."""
    memory = arm64 if isa is ARM64 else machine
    return memory.USER if "ustring" in definition else memory.KERNEL


def put(found: Counted, text: bytes, definition: str = STRING) -> int:
    """Write a string into the guest, and return where it is."""
    place = place_of(found.isa, definition)
    found.machine.cpu.write(place, text + b"\0" + b"garbage")
    return place


def keys_of(found: Counted, table: Table | None = None) -> dict[tuple[bytes | int, ...], int]:
    """Return the hits of each key, the first of which is kept."""
    table = table or found.tables.read()
    hits: dict[tuple[bytes | int, ...], int] = {}
    for entry in table.entries:
        key = found.tables.kept(entry.keys[0]), *entry.keys[1:]
        hits[key] = hits.get(key, 0) + entry.hitcount
    return hits


@EVERY_ISA
@pytest.mark.parametrize("definition", [STRING, USTRING], ids=["string", "ustring"])
def test_hits_are_counted_by_the_first_255_bytes_of_a_string(isa: Isa, definition: str) -> None:
    found = counted(isa, definition, "keys=s,n")
    texts = [b"", b"a", b"seven b", b"eight by", b"nine byte", b"b" * 254, b"b" * 255, b"b" * 300]

    for n, text in enumerate([*texts, *reversed(texts)]):
        found.hit(put(found, text, definition), n % 2)

    expected: dict[tuple[bytes | int, ...], int] = {}
    for n, text in enumerate([*texts, *reversed(texts)]):
        key = text[:255], n % 2
        expected[key] = expected.get(key, 0) + 1
    assert keys_of(found) == expected
    assert found.tables.read().dropped == 0


@EVERY_ISA
def test_a_string_that_cannot_be_read_is_an_empty_one(isa: Isa) -> None:
    found = counted(isa, STRING, "keys=s")

    found.hit(NOWHERE)
    found.hit(put(found, b""))

    assert keys_of(found) == {(b"",): 2}


@EVERY_ISA
def test_a_text_is_kept_once_and_what_is_after_its_end_does_not_count(isa: Isa) -> None:
    found = counted(isa, STRING, "keys=s,n")
    for n in range(100):
        place = put(found, b"/etc/passwd")
        found.machine.cpu.write(place + 12, bytes([n]) * 20)
        found.hit(place, n)

    words = {entry.keys[0] for entry in found.tables.read().entries}

    assert len(words) == 1


@EVERY_ISA
def test_two_strings_are_two_keys(isa: Isa) -> None:
    found = counted(isa, "p f s=+0($arg1):string t=+0($arg2):string", "keys=s,t")
    place = put(found, b"/etc/passwd")
    other = place + 0x800
    found.machine.cpu.write(other, b"/etc/group\0")

    for pair in ((place, other), (other, place), (place, other), (place, place)):
        found.hit(*pair)

    table = found.tables.read()
    counts = {tuple(map(found.tables.kept, entry.keys)): entry.hitcount for entry in table.entries}
    one, two = b"/etc/passwd", b"/etc/group"
    assert counts == {(one, two): 2, (two, one): 1, (one, one): 1}


@EVERY_ISA
def test_a_filter_that_reads_a_string_changes_no_key(isa: Isa) -> None:
    found = counted(isa, STRING, "keys=s", 's ~ "/etc/*"')

    for text in (b"/etc/passwd", b"/tmp/x", b"/etc/group", b"/etc/passwd"):
        found.hit(put(found, text))

    assert keys_of(found) == {(b"/etc/passwd",): 2, (b"/etc/group",): 1}


@EVERY_ISA
@pytest.mark.parametrize("depth", [0, 1, 14, 15, 16, 126, 199])
def test_hits_are_counted_by_their_stack_whole_or_its_first_16(isa: Isa, depth: int) -> None:
    for name, most in (("stack", 127), ("common_stacktrace", 16)):
        found = counted(isa, "p f a=$arg1", f"keys={name}")
        found.machine.readers.stack = CALLERS[:depth]
        for _ in range(3):
            # On arm64 the caller is in a register.
            found.hit(1, x30=CALLERS[199]) if isa is ARM64 else found.hit(1)

        ((key,),) = keys_of(found)
        link = [CALLERS[199]] if isa is ARM64 else []
        (entry,) = found.tables.read().entries
        assert entry.hitcount == 3
        assert isinstance(key, bytes)
        assert key[8:] == packed([*link, *CALLERS[:depth]][: most - 1])


@EVERY_ISA
def test_a_programs_stack_is_of_a_process_and_what_that_has_executed(isa: Isa) -> None:
    found = counted(isa, "p f a=$arg1", "keys=ustack")
    stack = found.machine.readers.user_stack
    for tgid, executed in ((5, 1), (7, 2), (5, 1), (5, 2)):
        found.set_task(tgid=tgid)
        found.machine.cpu.set_number(found.task + EXEC_ID, executed)
        found.hit(1)
    found.machine.readers.user_stack = []
    for tgid in (5, 7):
        found.set_task(tgid=tgid)
        found.hit(1)

    programs = {5 | 1 << 32: 2, 7 | 2 << 32: 1, 5 | 2 << 32: 1}
    expected = {(packed([program, *stack]),): hits for program, hits in programs.items()}
    assert keys_of(found) == expected | {(bytes(8),): 2}


@EVERY_ISA
def test_without_room_for_a_key_the_hit_is_dropped_and_known_ones_count(isa: Isa) -> None:
    found = counted(isa, STRING, "keys=s,n")
    texts = [b"%03d" % n + b"x" * 240 for n in range(100)]

    for text in (*texts, *texts):
        found.hit(put(found, text), 1)

    table = found.tables.read()
    kept = keys_of(found, table)
    # 16 KiB, 16 and 248 bytes each: those that came first.
    assert kept == {(text, 1): 2 for text in texts[:62]}
    assert table.dropped == 2 * (100 - 62)


@EVERY_ISA
@pytest.mark.parametrize("is_same", [True, False], ids=["same", "other"])
def test_an_interrupt_before_any_instruction_keeps_its_key_and_so_does_the_hit(
    isa: Isa, *, is_same: bool
) -> None:
    text = f"keys=s:vals=n:size={SIZE}"
    sites = ([make_counted(isa, STRING, text, number=number)] for number in range(2))
    found = Counted(isa, *sites, is_watched=True)
    place = put(found, b"/etc/passwd")
    other = place if is_same else place + 0x800
    if not is_same:
        found.machine.cpu.write(other, b"/etc/group\0")
    start = found.tables.copy()
    interrupt = partial(found.interrupt, other, 5, site=1)

    both = {(b"/etc/passwd",): 2} if is_same else {(b"/etc/passwd",): 1, (b"/etc/group",): 1}

    for step in range(found.steps(place, 3)):
        found.tables.restore(start)

        found.hit(place, 3, at={step: interrupt})

        assert keys_of(found) == both, step
        assert found.tables.read().dropped == 0
