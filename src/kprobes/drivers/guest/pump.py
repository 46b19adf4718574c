"""The pump that suits a guest's memory."""

import time
from collections.abc import Callable

from kprobes.drivers.guest.guest import Guest
from kprobes.drivers.guest.recorder import Recorder
from kprobes.drivers.pump import ROOM, Pump, ThreadPump, nothing
from kprobes.model.batch import Events
from kprobes.transport.ram import StubRam
from kprobes.transport.stub import Stub

_PAUSING_S = 0.25
"""Between pauses of a guest whose RAM is reached through the stub only."""


def open_pump(
    recorder: Recorder,
    guest: Guest,
    between: Callable[[], None] = nothing,
    *,
    room: float = ROOM,
) -> Pump:
    """Start the pump that suits a guest's memory; ``stop`` ends it.

    Args:
        recorder: of the records.
        guest: that makes them.
        between: is called after each look, in the pump's thread.
        room: bytes of events that may wait to be taken.
    """
    if isinstance(guest.memory.ram, StubRam):
        return PausingPump(recorder, guest.stub, between)
    return ThreadPump(recorder, between, room=room)


class PausingPump:
    """Drains when it is asked, in one pause of the guest: its RAM is behind the stub only."""

    def __init__(
        self, recorder: Recorder, stub: Stub, between: Callable[[], None] = nothing
    ) -> None:
        self._recorder = recorder
        self._between = between
        self._stub = stub
        self._next = 0.0

    def take(self, timeout_s: float) -> Events | None:
        """Return the next events, or None when it is too early or there are none."""
        time.sleep(min(timeout_s, max(self._next - time.monotonic(), 0)))
        if timeout_s == 0 or time.monotonic() < self._next:
            return None
        with self._stub.paused():
            events = self._recorder.drain()
        self._between()
        self._next = time.monotonic() + _PAUSING_S
        return events if len(events) else None

    def stop(self) -> None:
        """Do nothing: it drains only when it is asked."""
