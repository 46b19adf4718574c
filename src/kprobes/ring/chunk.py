"""What decoding takes and gives: a ring's bytes, and the columns made of them."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kprobes.model.batch import Batch

POSITION_MASK = (1 << 48) - 1
"""Positions are 48 bits wide: what is left of a commit word beside the event id."""

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chunk:
    """Bytes of one CPU's ring, without a wrap inside.

    Attributes:
        cpu: whose ring.
        position: of the first byte; a record begins there.
        limit: bytes of ``data`` in which records begin; the last one may end behind it.
        data: a private copy, at least ``limit`` bytes. Columns become views of it.
        commits: the same bytes as they were before ``data`` was copied, of which only commit
            words are read; ``data`` itself when nobody wrote meanwhile. A copy is not made
            in order: it can hold a commit word newer than the values behind it.
    """

    cpu: int
    position: int
    limit: int
    data: Bytes
    commits: Bytes

    def __post_init__(self) -> None:
        if not 0 <= self.limit <= len(self.data) or len(self.commits) < self.limit:
            raise ValueError(f"records begin in {self.limit} of {len(self.data)} bytes")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Decoded:
    """The committed records of one chunk.

    Attributes:
        cpu: whose they are.
        batches: one per layout that occurs, by event id; rows in ring order.
        position: where to go on.
        is_blocked: whether an uncommitted record stands there.
        is_lost: whether damage left no sound record to go on with; ``position`` is then
            the end of what was searched and need not be where a record begins.
        damaged: how many times a record had to be passed over.
        last_counter: of the record that was written last, or None when there is none.
    """

    cpu: int
    batches: tuple[Batch, ...]
    position: int
    is_blocked: bool
    is_lost: bool
    damaged: int
    last_counter: int | None

    def __len__(self) -> int:
        """Return the number of events."""
        return sum(map(len, self.batches))
