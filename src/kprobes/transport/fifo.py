"""The two FIFOs of a QEMU ``pipe`` character device, as one line to the guest."""

import os
import select
import time
from collections.abc import Callable
from pathlib import Path

from kprobes.errors import GuestGoneError, TargetError
from kprobes.transport.keeper import Keeper
from kprobes.units import MIB

_CHUNK = MIB


class FifoPair:
    """PATH.in and PATH.out, made here before QEMU starts: QEMU reads the first.

    Both ends are opened for reading and writing, so neither opening waits for QEMU; that the
    other side is gone is therefore learnt from its keeper.
    """

    def __init__(self, path: Path) -> None:
        names = [f"{path}.in", f"{path}.out"]
        for name in names:
            os.mkfifo(name, 0o600)
        self._to_guest, self._from_guest = (os.open(n, os.O_RDWR | os.O_NONBLOCK) for n in names)

    def close(self) -> None:
        """Close our ends."""
        os.close(self._to_guest)
        os.close(self._from_guest)

    def wire(self, keeper: Keeper, gone: Callable[[], GuestGoneError]) -> "GuestWire":
        """Return the line, once QEMU runs; ``gone`` says what there is to say of its end."""
        return GuestWire(self._to_guest, self._from_guest, keeper=keeper, gone=gone)


class GuestWire:
    """An ``agent.Wire`` that knows when its guest is gone."""

    def __init__(
        self, to_guest: int, from_guest: int, *, keeper: Keeper, gone: Callable[[], GuestGoneError]
    ) -> None:
        self._to_guest = to_guest
        self._from_guest = from_guest
        self._keeper = keeper
        self._gone = gone

    def read(self, timeout_s: float) -> bytes:
        """Return what has come, or b"" when nothing came in time."""
        if self._keeper.is_closed:
            raise self._gone()
        # What a guest wrote before its end is still there, so the end is looked at last.
        ready, _, _ = select.select([self._from_guest, self._keeper], [], [], timeout_s)
        if self._from_guest in ready:
            return os.read(self._from_guest, _CHUNK)
        if self._keeper in ready:
            raise self._gone()
        return b""

    def write(self, data: bytes, timeout_s: float | None) -> None:
        """Send everything."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while data:
            if self._keeper.is_closed:
                raise self._gone()
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ended, ready, _ = select.select([self._keeper], [self._to_guest], [], left)
            if ended:
                raise self._gone()
            if ready:
                data = data[os.write(self._to_guest, data) :]
            elif left == 0:
                raise TargetError("the guest does not read its console")
