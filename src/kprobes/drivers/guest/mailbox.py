"""Python's side of the mailbox: who asks, what it asks, and the answer; see ``model.mailbox``.

The guest runs meanwhile, and may be hostile: nothing that it writes is used as a place or a size.
"""

import struct
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from kprobes.drivers.guest.arena import Arena
from kprobes.drivers.guest.memory import GuestMemory
from kprobes.drivers.guest.rings import Window
from kprobes.drivers.pump import nothing
from kprobes.model.mailbox import CONTEXTS, REQUEST_HEAD, registers_of
from kprobes.model.upcall import Waiting
from kprobes.units import U64, Addr

_WORD = 8


class Mailbox:
    """The words of one arena, as Python reads and writes them.

    No method may be called by two threads at a time.
    """

    def __init__(
        self,
        arena: Arena,
        memory: GuestMemory,
        saved: Sequence[str],
        check: Callable[[], None] = nothing,
    ) -> None:
        """Find its pages.

        Args:
            arena: that it is in.
            memory: of the guest.
            saved: the registers of a request, in order; see ``UpcallFacts``.
            check: raises GuestReplacedError unless the mailbox is still ours.
        """
        self.check = check
        self._layout = layout = arena.mailbox_layout
        self._names = registers_of(saved)
        self._base, self._memory = arena.mailbox, memory
        words = len(REQUEST_HEAD) + len(self._names)
        if words * _WORD > layout.room:
            raise ValueError(f"{words} words do not fit into {layout.room} bytes")
        self._absent, self._present = self._words(layout.absent, 1), self._words(layout.present, 1)
        self._asked, self._gave_up, self._answered = (
            self._words(offset, layout.slots)
            for offset in (layout.asked, layout.gave_up, layout.answered)
        )
        rooms = [layout.room * slot for slot in range(layout.slots)]
        self._requests = [self._words(layout.requests + at, words) for at in rooms]
        self._answers = [self._words(layout.answers + at, len(self._names)) for at in rooms]
        self._area = Window(memory, arena.mailbox, layout.size)
        self._seen = b""
        self._seqs = self._answered.all()
        self._turn = 0

    def open(self) -> None:
        """Let vCPUs wait from now on."""
        # Somebody may have asked before, and still wait.
        self._seen, self._seqs = b"", self._answered.all()
        self._renew()

    def close(self) -> None:
        """Let none wait any more: whoever does goes on at once."""
        self.check()
        self._present.set(0, 0)

    def come_back(self) -> None:
        """Tell vCPUs that somebody attends, though one gave up."""
        if self._absent.raw() == self._present.raw():
            self._renew()

    def asking(self) -> Iterator[int]:
        """Yield slots that have asked since they were last looked at."""
        raw = self._asked.raw()
        if raw == self._seen:
            return
        now, before = struct.unpack(f"<{len(raw) // _WORD}Q", raw), self._seqs
        self._seen, self._seqs = raw, now
        for slot, (new, old) in enumerate(zip(now, before, strict=True)):
            if new != old:
                yield slot

    def read(self, slot: int) -> Waiting | None:
        """Return who waits in a slot, or None when it has given up meanwhile."""
        words = self._requests[slot].all()
        if self._gave_up.all()[slot] == self._seqs[slot]:
            return None
        head, registers = words[: len(REQUEST_HEAD)], words[len(REQUEST_HEAD) :]
        upcall, task, page_table = head
        return Waiting(
            upcall=upcall,
            cpu=slot // CONTEXTS,
            task=Addr(task),
            page_table=page_table,
            registers=dict(zip(self._names, registers, strict=True)),
        )

    def answer(self, slot: int, waiting: Waiting) -> None:
        """Let who waits in a slot go on with these registers."""
        values = [waiting.registers[name] & U64 for name in self._names]
        self._answers[slot].write(values)
        self._answered.set(slot, self._seqs[slot])

    def set_ticks(self, upcall: int, ticks: int) -> None:
        """Say how long vCPUs wait for an upcall, in ticks of their counter."""
        self._area.set_u64(self._layout.ticks + _WORD * upcall, ticks)

    def missed(self, upcall: int) -> int:
        """Return how many hits of an upcall have gone on without it."""
        return self._area.u64(self._layout.missed + _WORD * upcall)

    def _renew(self) -> None:
        self.check()
        # Never again what it was for one who has yet to give up.
        self._turn += 1
        self._present.set(0, self._turn)

    def _words(self, offset: int, count: int) -> "_Words":
        return _words(self._memory, self._base + offset, count)


class _Words(Protocol):
    # Some adjacent words; each is read and written at once.

    def raw(self) -> bytes: ...

    def all(self) -> tuple[int, ...]: ...

    def set(self, index: int, value: int) -> None: ...

    def write(self, values: Sequence[int]) -> None: ...


class _Viewed:
    """Words that are mapped here, side by side."""

    def __init__(self, view: memoryview) -> None:
        self._view = view.cast("Q")

    def raw(self) -> bytes:
        return self._view.tobytes()

    def all(self) -> tuple[int, ...]:
        return tuple(self._view)

    def set(self, index: int, value: int) -> None:
        self._view[index] = value

    def write(self, values: Sequence[int]) -> None:
        self._view[:] = array("Q", values)


class _Copied:
    """Words that are read and written through whatever reaches the guest's RAM."""

    def __init__(self, memory: GuestMemory, addr: int, count: int) -> None:
        self._window = Window(memory, addr, _WORD * count)
        self._count = count

    def raw(self) -> bytes:
        return self._window.read(0, _WORD * self._count).tobytes()

    def all(self) -> tuple[int, ...]:
        return struct.unpack(f"<{self._count}Q", self.raw())

    def set(self, index: int, value: int) -> None:
        self._window.set_u64(_WORD * index, value)

    def write(self, values: Sequence[int]) -> None:
        self._window.write(0, struct.pack(f"<{self._count}Q", *values))


def _words(memory: GuestMemory, addr: int, count: int) -> _Words:
    size = _WORD * count
    runs = memory.tables.mapped_runs(addr, addr + size)
    if len(runs) == 1:
        (run,) = runs
        view = memory.ram.view(run.phys + addr - run.virt, size) if run.virt <= addr else None
        if view is not None:
            return _Viewed(view.data)
    return _Copied(memory, addr, count)
