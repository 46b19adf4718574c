"""Tasks, CPUs and contexts of events, as they are shown: they repeat, and are shown once each."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kprobes.model.definition import TGID
from kprobes.model.events import Batch, Column
from kprobes.native.library import function, function_for
from kprobes.native.lines import Texts

_REMEMBERED = 1 << 14
_INFO = np.dtype(
    [("comm", "S16"), ("pid", "<i4"), ("cpu", "<u4"), ("context", "<u4"), ("tgid", "<i4")]
)
_WORDS = _INFO.itemsize // 8


class ContextInfo(NamedTuple):
    """Where an event happened; ``tgid`` is 0 where its record does not have it."""

    comm: bytes
    pid: int
    cpu: int
    context: int
    tgid: int


class ContextTexts:
    """What is shown of a task, its CPU and its context: each once, as they repeat."""

    def __init__(self, show: Callable[[ContextInfo], bytes]) -> None:
        """Have them be shown by a function."""
        self._show = show
        self._forget()

    def of(self, batch: Batch) -> Texts:
        """Return what is shown of each event."""
        if len(self._keys) > _REMEMBERED:
            self._forget()
        keys = np.empty(len(batch), _INFO)
        keys["comm"], keys["pid"] = batch.comm, batch.pid
        keys["cpu"], keys["context"] = batch.cpu, batch.context
        keys["tgid"] = _tgids(batch)
        codes = self._keys.of(keys.view(np.uint64).reshape(len(keys), _WORDS))
        new = self._keys.known[len(self._texts) :].view(_INFO)[:, 0]
        self._texts += [self._show(ContextInfo(*each)) for each in new.tolist()]
        return Texts(codes=codes, table=self._texts)

    def _forget(self) -> None:
        self._keys, self._texts = Keys(_WORDS), list[bytes]()


def _tgids(batch: Batch) -> Column | int:
    fields = zip(batch.layout.fields, batch.values, strict=True)
    return next((values for field, values in fields if field.name == TGID), 0)


_KEYS = np.dtype([(name, "u8") for name in ("known", "count", "room", "slots", "mask")])
_CODE = "keys", "keys_code", 5
"""What codes them in C."""
_ROOM = 1 << 10
"""Keys that there is room for at first."""
_RUN = 4
"""Rows of one key in a row, on average, from which on Python takes them together."""


class Keys:
    """Keys of so many 64-bit words, which are remembered.

    Args:
        words: of each.
    """

    def __init__(self, words: int) -> None:
        self._known = np.empty((_ROOM, words), np.uint64)
        self._count = 0
        # Python's way to find them, and C's, which comes with the first rows that are worth it.
        self._codes = _Codes(self._add)
        self._slots = np.empty(0, np.uint32)

    def __len__(self) -> int:
        """Return how many are known."""
        return self._count

    @property
    def known(self) -> NDArray[np.uint64]:
        """Those that are known, by their codes: a view, shape (n, words)."""
        return self._known[: self._count]

    def of(self, rows: NDArray[np.uint64]) -> NDArray[np.int32]:
        """Return the codes of rows, shape (n, words), in C's order; new ones are known then."""
        if not len(self._slots):
            if function_for(len(rows), *_CODE) is None:
                return self._by_python(rows)
            self._make_slots()
        return self._by_c(rows)

    def _by_python(self, rows: NDArray[np.uint64]) -> NDArray[np.int32]:
        begins = np.flatnonzero((rows[1:] != rows[:-1]).any(axis=1)) + 1
        if len(begins) > len(rows) // _RUN:
            return np.fromiter(map(self._codes.__getitem__, _as_bytes(rows)), np.int32, len(rows))
        begins = np.concatenate([[0], begins])[: len(rows)]
        keys = _as_bytes(rows[begins])
        codes = np.fromiter(map(self._codes.__getitem__, keys), np.int32, len(begins))
        return codes.repeat(np.diff(begins, append=len(rows)))

    def _add(self, key: bytes) -> int:
        if self._count == len(self._known):
            self._grow()
        self._known[self._count] = np.frombuffer(key, np.uint64)
        self._count += 1
        return self._count - 1

    def _by_c(self, rows: NDArray[np.uint64]) -> NDArray[np.int32]:
        rows, codes, done = np.ascontiguousarray(rows), np.empty(len(rows), np.int32), 0
        while (done := done + self._code_from(rows[done:], codes[done:])) < len(rows):
            self._grow()
            self._make_slots()
        return codes

    def _code_from(self, rows: NDArray[np.uint64], codes: NDArray[np.int32]) -> int:
        known, slots = self._known, self._slots
        places = known.ctypes.data, self._count, len(known), slots.ctypes.data, len(slots) - 1
        state = np.array([places], _KEYS)
        words = known.shape[1]
        given = rows.ctypes.data, words, len(rows), codes.ctypes.data
        done = function(*_CODE)(state.ctypes.data, *given)
        self._count = int(state["count"][0])
        return done

    def _grow(self) -> None:
        self._known = np.concatenate([self._known, np.empty_like(self._known)])

    def _make_slots(self) -> None:
        # Never more than half full; coded again, those that are known have the same codes.
        known, self._count = self.known, 0
        self._slots = np.zeros(2 * len(self._known), np.uint32)
        self._code_from(known, np.empty(len(known), np.int32))


class _Codes(dict[bytes, int]):
    # Found in half of the time of a function's call.
    def __init__(self, add: Callable[[bytes], int]) -> None:
        super().__init__()
        self._add = add

    def __missing__(self, key: bytes) -> int:
        code = self[key] = self._add(key)
        return code


def _as_bytes(rows: NDArray[np.uint64]) -> list[bytes]:
    rows = np.ascontiguousarray(rows)
    found: list[bytes] = rows.view(f"V{8 * rows.shape[1]}")[:, 0].tolist()
    return found
