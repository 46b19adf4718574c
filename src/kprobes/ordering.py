"""Events in the order of a field's values: all of them, or those with the greatest."""

import numpy as np
from numpy.typing import NDArray

from kprobes.errors import UsageError
from kprobes.model.events import NO_EVENTS, Batch, Column, Events
from kprobes.model.resolved import Storage
from kprobes.ring.merge import join

_OWN = ("ts", "cpu", "pid")
_SPARE = 4
"""So many times what is kept is held at most before the rest is let go of."""
_SIGN = np.uint64(1 << 63)


class GreatestFirst:
    """Takes events, and gives them by a field, greatest first, those of one value oldest first.

    Attributes:
        left_out: events that have no such field, or none that could be read.
    """

    def __init__(self, name: str, most: int | None = None) -> None:
        """Hold nothing yet.

        Args:
            name: of a field that is a number, ``ts``, ``cpu``, ``pid``, or ``duration``, whatever
                the field is called that has it.
            most: how many events are kept; None for all.
        """
        self.left_out = 0
        self._name = name
        self._most = most
        self._held: dict[int, list[Batch]] = {}
        self._keys: dict[int, list[NDArray[np.uint64]]] = {}
        self._rows = 0
        self._known: set[str] = set()

    def __len__(self) -> int:
        """Return how many events are held."""
        return self._rows

    def take(self, events: Events) -> None:
        """Take events, oldest first.

        Raises:
            UsageError: the field is no number.
        """
        for index, batch in enumerate(events.batches):
            rows = np.sort(events.row[events.batch == index])
            if len(rows):
                self._take(batch.take(rows))
        if self._most is not None and self._rows > _SPARE * max(self._most, 1 << 10):
            self._keep(self._order()[: self._most])

    def ordered(self) -> Events:
        """Return what was taken.

        Raises:
            UsageError: there were events, and none of them has the field.
        """
        if not self._rows:
            if self._known and self.left_out and self._name not in self._known:
                fields = ", ".join(sorted(self._known))
                raise UsageError(f"no event has a number {self._name!r}; there are: {fields}")
            return NO_EVENTS
        order = self._order()[: self._most]
        batches = tuple(map(join, self._held.values()))
        lengths = list(map(len, batches))
        which = np.repeat(np.arange(len(batches), dtype=np.uint16), lengths)
        rows = np.concatenate([np.arange(n, dtype=np.uint32) for n in lengths])
        return Events(batches=batches, batch=which[order], row=rows[order])

    def _take(self, batch: Batch) -> None:
        found = self._values(batch)
        if found is None:
            self.left_out += len(batch)
            return
        values, faulted = found
        if faulted is not None and faulted.any():
            self.left_out += int(faulted.sum())
            batch, values = batch.take(~faulted), values[~faulted]
        self._rows += len(batch)
        # Of several kernels, numbers are not one event's alone.
        number = id(batch.layout)
        self._held.setdefault(number, []).append(batch)
        self._keys.setdefault(number, []).append(_keys(values))

    def _values(self, batch: Batch) -> tuple[Column, Column | None] | None:
        for field, values, faulted in zip(
            batch.layout.fields, batch.values, batch.faulted, strict=True
        ):
            if field.storage not in (Storage.NUMBER, Storage.DURATION) or field.count is not None:
                if field.name == self._name:
                    raise UsageError(f"{self._name} of {batch.layout.event} is no number")
                continue
            self._known.add(field.name)
            is_duration = field.storage is Storage.DURATION and self._name == Storage.DURATION
            if field.name == self._name or is_duration:
                return values, faulted
        self._known.update(_OWN)
        return (getattr(batch, self._name), None) if self._name in _OWN else None

    def _order(self) -> NDArray[np.intp]:
        keys = np.concatenate([each for parts in self._keys.values() for each in parts])
        times = np.concatenate([batch.ts for parts in self._held.values() for batch in parts])
        return np.lexsort((times, ~keys[:, 1], ~keys[:, 0]))

    def _keep(self, order: NDArray[np.intp]) -> None:
        kept = np.zeros(self._rows, bool)
        kept[order] = True
        start = 0
        for number, parts in [*self._held.items()]:
            batch, keys = join(parts), np.concatenate(self._keys[number])
            own = kept[start : start + len(batch)]
            start += len(batch)
            if own.any():
                self._held[number], self._keys[number] = [batch.take(own)], [keys[own]]
            else:
                del self._held[number], self._keys[number]
        self._rows = len(order)


def _keys(values: Column) -> NDArray[np.uint64]:
    # (n, 2): one order for signed and unsigned numbers of up to 64 bits.
    if values.dtype.kind == "i":
        bits = values.astype(np.int64).view(np.uint64)
        return np.stack([np.zeros_like(bits), bits ^ _SIGN], axis=1)
    bits = values.astype(np.uint64)
    return np.stack([bits >> np.uint64(63), bits ^ _SIGN], axis=1)
