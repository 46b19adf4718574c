import struct

import pytest
from msgspec.structs import replace

from kprobes.model.hist import HistField, HistKind
from kprobes.sinks.names import NEWEST, Names, TraceSource, flags

ON = 1 << 24
NO_RESCHED = 1 << 31
QUIET = ON | NO_RESCHED


@pytest.mark.parametrize(
    ("context", "old", "middle", "new"),
    [
        (QUIET, "....", ".....", "....."),
        (NO_RESCHED, "d...", "d....", "d...."),
        (QUIET | 0x200, "....", "b....", "b...."),  # local_bh_disable
        (NO_RESCHED | 0x200, "d...", "D....", "D...."),
        (QUIET | 0x100, "..s.", "..s..", "..s.."),
        (QUIET | 0x300, "..s.", "b.s..", "b.s.."),
        (QUIET | 0x10000, "..h.", "..h..", "..h.."),
        (QUIET | 0x10100, "..H.", "..H..", "..H.."),
        (QUIET | 0x100000, "..z.", "..z..", "..z.."),
        (QUIET | 0x110000, "..Z.", "..Z..", "..Z.."),
        (QUIET | 1 << 25, ".n..", ".n...", ".n..."),
        (ON, ".p..", ".p...", ".p..."),
        (ON | 1 << 25, ".N..", ".N...", ".N..."),
        (QUIET | 1 << 26, "....", ".....", ".l..."),
        (ON | 1 << 26, ".p..", ".p...", ".L..."),
        (QUIET | 3 << 25, ".n..", ".n...", ".b..."),
        (ON | 3 << 25, ".N..", ".N...", ".B..."),
        (QUIET | 3, "...3", "...3.", "...3."),
        (QUIET | 0x12, "...12", "...f.", "...f."),
        (QUIET | 2 << 27, "....", "....2", "....2"),
        (QUIET | 15 << 27 | 10, "...a", "...af", "...af"),
    ],
)
def test_a_context_prints_as_each_kernel_family_does(
    context: int, old: str, middle: str, new: str
) -> None:
    shown = [flags(context, version) for version in ((5, 10), (6, 1), NEWEST)]

    assert shown == [old, middle, new]


def test_the_migrate_column_came_before_the_bottom_half_letters() -> None:
    assert flags(QUIET | 0x200 | 1 << 27, (5, 15)) == "....1"


def test_a_programs_stack_is_named_by_its_program() -> None:
    def program_at(program: int, addr: int) -> bytes | None:
        return b"main+0x%x [%d]" % (addr - 0x1000, program) if addr < 0x2000 else None

    names = Names(replace(TraceSource(version=NEWEST, cpus=1), program_at=program_at))
    key = HistField(name="ustack", source=0, kind=HistKind.STACK, is_kept=True, has_program=True)
    stack = struct.pack("<3Q", 5 << 32 | 7, 0x1004, 0x3000)

    shown = names.key_stack(key, stack)

    assert shown == (b"main+0x4 [%d]" % (5 << 32 | 7), b"0x3000")
    assert names.key_stack(replace(key, has_program=False), stack[8:]) == (b"0x1004", b"0x3000")
