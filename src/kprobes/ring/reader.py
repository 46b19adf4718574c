"""One CPU's ring from where it was read last to its head: keeps the tail, minds the wrap.

A record never wraps: one that begins before the ring's end runs on into the slack behind it,
and the next begins where the first lap's bytes would have been overwritten by it. So the end
of the ring and its beginning are two chunks.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kprobes.errors import RingError
from kprobes.model.layout import ALIGN
from kprobes.ports import Clock
from kprobes.ring.chunk import POSITION_MASK, Bytes, Chunk, Decoded
from kprobes.ring.decode import decode
from kprobes.ring.shapes import Shapes

Copy = Callable[[int, int], Bytes]
"""(offset, size) to a private copy of the ring's bytes there, the slack behind it included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """Where a CPU's ring ends: ``size`` bytes, a power of two, and ``slack`` behind them."""

    cpu: int
    size: int
    slack: int

    def __post_init__(self) -> None:
        if self.size < ALIGN or self.size & (self.size - 1) or self.slack < 0:
            raise ValueError(f"a ring of {self.size} bytes and {self.slack} behind it")


class RingReader:
    """Reads one CPU's ring. Does no input or output but through the functions it is given.

    Attributes:
        tail: position up to which records were taken; what the guest may overwrite.
        lost: records that the guest dropped, as last told to ``note_lost``.
        damaged: how many times a record had to be passed over.
    """

    def __init__(self, geometry: Geometry, copy: Copy, *, peek: Copy | None = None) -> None:
        """Start at position 0.

        Args:
            geometry: of the ring.
            copy: called after ``peek`` for the same bytes.
            peek: the same bytes as they are now, of which only commit words are read: a live
                view costs nothing. By default ``copy`` is called twice.
        """
        self._geometry = geometry
        self._copy = copy
        self._peek = peek or copy
        self.tail = 0
        self.lost = 0
        self.damaged = 0

    def read(
        self, head: int, shapes: Shapes, clock: Clock, *, is_live: bool = True
    ) -> list[Decoded]:
        """Decode what was committed up to ``head``: one value per side of the wrap.

        The caller reads ``head`` from the guest before, and tells it ``tail`` afterwards.

        Args:
            head: position up to which the guest has reserved.
            shapes: of all events whose records may be there.
            clock: for the timestamps.
            is_live: whether the guest may be writing meanwhile; one that stands still is not
                looked at twice.

        Raises:
            RingError: the guest's head is none that our writer could have reached.
        """
        self._check(head)
        done: list[Decoded] = []
        for chunk in self._chunks(head, is_live):
            decoded = decode(chunk, shapes, clock)
            done.append(decoded)
            self.tail = head if decoded.is_lost else decoded.position
            self.damaged += decoded.damaged
            if decoded.is_blocked:
                break
        return done

    def note_lost(self, total: int) -> int:
        """Take the guest's count of dropped records, and return how many are new.

        A count that goes back is not believed: nothing is new then.
        """
        new = max(total - self.lost, 0)
        self.lost += new
        return new

    def _check(self, head: int) -> None:
        ahead = (head - self.tail) & POSITION_MASK
        if ahead > self._geometry.size or head % ALIGN or not 0 <= head <= POSITION_MASK:
            raise RingError(
                f"cpu {self._geometry.cpu}: head {head:#x} after tail {self.tail:#x} "
                f"in a ring of {self._geometry.size} bytes"
            )

    def _chunks(self, head: int, is_live: bool) -> Iterator[Chunk]:
        # At most two: behind the wrap less than a lap is left.
        for _ in range(2):
            ahead = (head - self.tail) & POSITION_MASK
            # Beyond the size: the last record that was taken ends behind this head.
            if ahead == 0 or ahead > self._geometry.size:
                return
            yield self._chunk(ahead, is_live)

    def _chunk(self, ahead: int, is_live: bool) -> Chunk:
        size, slack = self._geometry.size, self._geometry.slack
        offset = self.tail % size
        # The guest gives back what strings did not need. After ``head`` was read, a record can
        # have shrunk and the next one, begun inside, have been committed past ``head``.
        beyond = slack if is_live else 0
        length = min(ahead + beyond, size - offset + slack)
        # Commit words first, then what they vouch for; see Chunk.
        commits = self._peek(offset, length) if is_live else None
        data = self._copy(offset, length)
        return Chunk(
            cpu=self._geometry.cpu,
            position=self.tail,
            limit=min(ahead, size - offset),
            data=data,
            commits=data if commits is None else commits,
        )
