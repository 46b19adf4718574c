"""Small static programs for the guest: loops with the clock around them, built here.

A program repeats a loop of steps on one CPU, or on each of several at once, and writes its times
to standard output: for each loop two ``struct timespec``.
"""

import struct
from collections.abc import Sequence

from msgspec import Struct

from bench.isa import Isa
from kprobes.units import MIB, Addr

DATA = 0x10_0000_0000
"""Zeroes for ``setup`` and ``body`` to use, above what four bytes can name, like kernel memory."""

_BASE = 0x400000
_TIMES = 0x600000
_TIMES_ROOM = 1 << 16
_DATA_ROOM = 8 * MIB
_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_SEGMENTS = 3
_HEADERS = _HEADER.size + _SEGMENTS * _SEGMENT.size
_TIMESPECS = struct.Struct("<4Q")
_NS = 1_000_000_000

PATH = "/tmp/0123456789abcd"
"""With its NUL 20 bytes."""
FILE = "/proc/self/sched"
"""What is written to it is not looked at."""


class Loop(Struct, frozen=True, kw_only=True):
    """What a program does.

    Attributes:
        isa: of the guest.
        step: assembly; registers that calls preserve are taken.
        steps: per loop.
        repeats: of the loop.
        hits: of the function that is probed, per step.
        cpus: how many do all of that at once.
        setup: assembly that runs before.
        body: code that a step may call as ``body``.
    """

    isa: Isa
    step: str
    steps: int
    repeats: int = 1
    hits: int = 1
    cpus: int = 1
    setup: str = ""
    body: bytes = b""

    @property
    def total(self) -> int:
        """How many hits it makes."""
        return self.hits * self.steps * self.repeats * self.cpus

    def program(self) -> bytes:
        """Return the ELF file."""
        size = _TIMESPECS.size * self.repeats
        if size > _TIMES_ROOM:
            raise ValueError(f"{self.repeats} repeats")
        texts = self.isa.programs
        text = texts.whole.format(
            forks="\n".join(texts.fork.format(mask=1 << cpu) for cpu in range(1, self.cpus)),
            waits=texts.wait * (self.cpus - 1),
            times=_TIMES,
            setup=self.setup,
            repeats=self.repeats,
            steps=self.steps,
            step=self.step,
            size=size,
            path=PATH,
            file=FILE,
        )
        code = self.isa.assemble(text).link(Addr(_BASE + _HEADERS), {})
        return _elf(self.isa, code + self.body)

    def ns_per_hit(self, output: bytes) -> list[float]:
        """Return what one hit took, for each repeat on each CPU, from the program's output."""
        if len(output) != _TIMESPECS.size * self.repeats * self.cpus:
            raise ValueError(f"the guest's program wrote {output[:200]!r}")
        times, hits = _TIMESPECS.iter_unpack(output), self.hits * self.steps
        return [((s1 - s0) * _NS + n1 - n0) / hits for s0, n0, s1, n1 in times]


def _elf(isa: Isa, code: bytes) -> bytes:
    # System V ABI, chapters 4 and 5: ET_EXEC; PT_LOADs of code and of zeroes.
    size = _HEADERS + len(code)
    ident = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    counts = (_HEADER.size, _SEGMENT.size, _SEGMENTS, 0, 0, 0)
    head = (2, isa.elf, 1, _BASE + _HEADERS, _HEADER.size, 0, 0, *counts)
    code_segment, zeroes = (5, _BASE, size, size), ((_TIMES, _TIMES_ROOM), (DATA, _DATA_ROOM))
    segments = _segments([code_segment, *((6, at, 0, room) for at, room in zeroes)])
    return _HEADER.pack(ident, *head) + segments + code


def _segments(segments: Sequence[tuple[int, int, int, int]]) -> bytes:
    return b"".join(
        _SEGMENT.pack(1, flags, 0, addr, addr, size, room, 4096)
        for flags, addr, size, room in segments
    )
