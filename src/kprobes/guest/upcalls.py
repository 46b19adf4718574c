"""Python's side of the mailbox: who asks, what it asks, and the answer; see ``model.upcall``.

The guest runs meanwhile, and may be hostile: nothing that it writes is used as a place or a size.

Whoever answers vCPUs that wait for Python: a thread that looks at the mailbox.

It looks all the time as long as hits come, then with naps between looks, and after a while with
longer ones. One vCPU is served at a time. A hit that a handler causes itself, or that comes while
one is slow, waits until its own deadline, goes on, and is counted.

Start and stop the upcall server of one arena; set the deadlines of its upcalls.

Modules that come and go while probes are armed.

At two steps of the kernel's own the vCPU waits until we have done our part (kernel/module/main.c,
kernel/trace/ftrace.c):

    static int do_init_module(struct module *mod);      // text is final, mod->init comes next
    void ftrace_release_mod(struct module *mod);        // mod->exit is over, or init failed; the
                                                        // sites' records and the text go next
"""

import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from operator import itemgetter
from typing import Protocol

from kprobes.drain import nothing, short_switch_interval, sleep_exactly
from kprobes.errors import KprobesError, RefusedError, UsageError
from kprobes.guest.arena import Arena
from kprobes.guest.clock import find_line
from kprobes.guest.guest import Guest, GuestMemory
from kprobes.guest.rings import MappedRange
from kprobes.model.kernel import Symbol
from kprobes.model.upcall import (
    CONTEXTS,
    MAX_UPCALLS,
    REQUEST_HEAD,
    Upcall,
    UpcallGroup,
    WaitingVcpu,
    registers_of,
)
from kprobes.transport.ram import StubRam
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
            saved: the registers of a request, in order; see ``UpcallOps``.
            check: raises GuestReplacedError unless the mailbox is still ours.
        """
        self.check = check
        self._layout = layout = arena.mailbox_layout
        self._names = registers_of(saved)
        self._values: Callable[[Mapping[str, int]], tuple[int, ...]] = itemgetter(*self._names)
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
        self._area = MappedRange(memory, arena.mailbox, layout.size)
        # What was asked when it was last looked at, and before that what was answered.
        self._seen: tuple[int, ...] | None = None
        self._seqs = self._answered.all()
        self._turn = 0

    def open(self) -> None:
        """Let vCPUs wait from now on."""
        # Somebody may have asked before, and still wait.
        self._seen, self._seqs = None, self._answered.all()
        self._renew()

    def close(self) -> None:
        """Let none wait any more: whoever does goes on at once."""
        self.check()
        self._present.set(0, 0)

    def come_back(self) -> None:
        """Set ``present`` anew: after one vCPU gave up, the others wait for Python again."""
        if self._absent.get(0) == self._present.get(0):
            self._renew()

    def newly_asked(self) -> Iterator[int]:
        """Yield slots that have asked since they were last looked at."""
        now, before = self._asked.all(), self._seqs
        if now == self._seen:
            return
        self._seen = self._seqs = now
        for slot, (new, old) in enumerate(zip(now, before, strict=True)):
            if new != old:
                yield slot

    def read(self, slot: int) -> WaitingVcpu | None:
        """Return who waits in a slot, or None when it has given up meanwhile."""
        upcall, task, page_table, *registers = self._requests[slot].all()
        if self._gave_up.get(slot) == self._seqs[slot]:
            return None
        return WaitingVcpu(
            upcall=upcall,
            cpu=slot // CONTEXTS,
            task=Addr(task),
            page_table=page_table,
            registers=dict(zip(self._names, registers, strict=True)),
        )

    def answer(self, slot: int, vcpu: WaitingVcpu) -> None:
        """Let who waits in a slot go on with these registers."""
        values = self._values(vcpu.registers)
        try:
            self._answers[slot].write(values)
        except struct.error:
            # Below zero, or of more than 64 bits: a handler that raised may have left it so.
            self._answers[slot].write([value & U64 for value in values])
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

    def all(self) -> tuple[int, ...]: ...

    def get(self, index: int) -> int: ...

    def set(self, index: int, value: int) -> None: ...

    def write(self, values: Sequence[int]) -> None: ...


class _Viewed:
    """Words that are mapped here, side by side."""

    def __init__(self, view: memoryview) -> None:
        self._view = view.cast("Q")
        self._all = struct.Struct(f"{len(self._view)}Q")

    def all(self) -> tuple[int, ...]:
        return self._all.unpack_from(self._view)

    def get(self, index: int) -> int:
        return self._view[index]

    def set(self, index: int, value: int) -> None:
        self._view[index] = value

    def write(self, values: Sequence[int]) -> None:
        self._all.pack_into(self._view, 0, *values)


class _Copied:
    """Words that are read and written through whatever reaches the guest's RAM."""

    def __init__(self, memory: GuestMemory, addr: int, count: int) -> None:
        self._window = MappedRange(memory, addr, _WORD * count)
        self._count = count

    def all(self) -> tuple[int, ...]:
        raw = self._window.read(0, _WORD * self._count).tobytes()
        return struct.unpack(f"<{self._count}Q", raw)

    def get(self, index: int) -> int:
        return self.all()[index]

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


_SPIN_S = 0.00005
"""Where every vCPU that waits has a CPU of the host's, whoever only spins gets a turn of
milliseconds taken away from it; whoever has slept is let in at once."""
_BUSY_S = 0.002
_NAP_S, _REST_S = 0.000001, 0.0002
_QUIET_S = 0.005
"""Without a question for so long, nobody is on the way to one: sites were put back before."""
_LEAVE_S = 1.0
_CHECK_S = 0.001
"""Between looks whether the mailbox is still ours."""


class UpcallServer:
    """Answers some questions until it is stopped.

    Attributes:
        groups: what is asked, by number: others may add some, and take some away.
        served: hits that were answered.
        error: what ended it, or None: the guest is gone.
    """

    def __init__(self, mailbox: Mailbox, groups: Mapping[int, UpcallGroup]) -> None:
        """Start: from now on vCPUs wait."""
        self.groups = dict(groups)
        self.served = 0
        self.error: KprobesError | None = None
        self._mailbox = mailbox
        self._serving: int | None = None
        self._last = self._checked = time.monotonic()
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._is_left = False
        mailbox.open()
        self._thread = threading.Thread(target=self._run, name="kprobes-upcalls", daemon=True)
        self._thread.start()

    @property
    def is_current(self) -> bool:
        """Whether this thread is the one that runs handlers, while a vCPU waits for it."""
        return threading.current_thread() is self._thread

    def stop(self) -> None:
        """Answer who still asks, and then nobody any more; no site may lead here.

        A handler that does not end is left behind: what it answers is not heard.
        """
        self._stopping.set()
        if not self.is_current:
            self._thread.join(_LEAVE_S)
        self._leave()

    def await_end(self, numbers: Collection[int]) -> None:
        """Return when none of some groups is being served, or it has lasted for a second.

        They must have been taken away before.
        """
        deadline = time.monotonic() + _LEAVE_S
        while (
            self._serving in numbers
            and threading.current_thread() is not self._thread
            and time.monotonic() < deadline
        ):
            time.sleep(_REST_S)

    def _run(self) -> None:
        try:
            with short_switch_interval():
                sleep_exactly()
                while not self._is_done():
                    self._poll()
        except KprobesError as error:
            self.error = error
        finally:
            self._leave()

    def _leave(self) -> None:
        with self._lock:
            if not self._is_left:
                self._is_left = True
                with suppress(KprobesError):
                    self._mailbox.close()

    def _is_done(self) -> bool:
        is_quiet = time.monotonic() > self._last + _QUIET_S
        return self._is_left or (self._stopping.is_set() and is_quiet)

    def _poll(self) -> None:
        if time.monotonic() > self._checked + _CHECK_S:
            self._mailbox.check()
            self._checked = time.monotonic()
        self._mailbox.come_back()
        for slot in self._mailbox.newly_asked():
            self._serve(slot)
            self._last = time.monotonic()
        quiet_s = time.monotonic() - self._last
        if quiet_s > _SPIN_S:
            time.sleep(_NAP_S if quiet_s < _BUSY_S else _REST_S)

    def _serve(self, slot: int) -> None:
        vcpu = self._mailbox.read(slot)
        if vcpu is None:
            return
        # Before the look: who takes a group away waits for what is served then.
        self._serving = vcpu.upcall
        group, stack = self.groups.get(vcpu.upcall), vcpu.registers["sp"]
        try:
            if group is not None:
                group.serve(vcpu)
        finally:
            self._serving = None
            # Below the stack are the words that it goes on with.
            vcpu.registers["sp"] = max(vcpu.registers["sp"], stack)
            self._answer(slot, vcpu)

    def _answer(self, slot: int, vcpu: WaitingVcpu) -> None:
        with self._lock:
            if not self._is_left:
                self._mailbox.answer(slot, vcpu)
                self.served += 1


MAX_TIMEOUT_S = 10.0
"""A guest's watchdogs take a CPU for stuck after 20 s."""
_TICKS_PER_S = 1_000_000_000
"""Of an emulated CPU, for guests that do not tell."""
_PLAUSIBLE = range(1_000_000, 10_000_000_000)


class UpcallControl:
    """Serves one arena's upcalls, as long as there are any."""

    def __init__(
        self, guest: Guest, arena: Arena, check_guest: Callable[[], None] = nothing
    ) -> None:
        self._mailbox = Mailbox(arena, guest.memory, guest.arch.upcall.saved, check_guest)
        self._ticks_per_s = ticks_per_s(guest)
        self._server: UpcallServer | None = None
        self._groups: dict[int, UpcallGroup] = {}
        self._before: dict[int, int] = {}
        # By upcall: the groups that have it, and what was missed in those that are gone.
        self._numbers: dict[int, set[int]] = {}
        self._missed: Counter[int] = Counter()

    def add(self, groups: Iterable[UpcallGroup]) -> None:
        """Serve more upcalls, whose sites are about to be patched."""
        new = {group.number: group for group in groups}
        for number, group in new.items():
            # Who waits, waits for all of them.
            timeout_s = min(sum(each.timeout_s for each in group.upcalls), MAX_TIMEOUT_S)
            self._mailbox.set_ticks(number, int(timeout_s * self._ticks_per_s))
            self._before[number] = self._mailbox.missed(number)
            for upcall in group.upcalls:
                self._numbers.setdefault(upcall.number, set()).add(number)
        self._groups |= new
        if self._server is not None:
            self._server.groups.update(new)
        elif new:
            self._server = UpcallServer(self._mailbox, new)

    def remove(self, numbers: Iterable[int]) -> None:
        """Serve some no more, whose sites lead there no more; who still asks goes on at once.

        What is being served comes to its end before this returns.
        """
        gone = [number for number in numbers if number in self._groups]
        server = self._server
        for number in gone:
            if server is not None:
                server.groups.pop(number, None)
            group = self._groups[number]
            for upcall in group.upcalls:
                self._missed[upcall.number] += self._lately(number)
                self._numbers[upcall.number].discard(number)
            del self._groups[number]
        if server is not None and gone:
            server.await_end(gone)
        if not self._groups:
            self.end()

    @property
    def is_current(self) -> bool:
        """Whether this thread runs handlers."""
        return self._server is not None and self._server.is_current

    def end(self) -> None:
        """Stop serving; the sites must be disarmed before, or no vCPU waits at them."""
        if self._server is not None:
            self._server.stop()
            self._server = None
        if self._groups:
            self.remove(list(self._groups))

    def missed(self, upcall: int) -> int:
        """Return how many hits went on without an upcall since the arena was allocated."""
        numbers = self._numbers.get(upcall, ())
        return self._missed[upcall] + sum(map(self._lately, numbers))

    def _lately(self, number: int) -> int:
        return self._mailbox.missed(number) - self._before[number]


def can_ask(guest: Guest) -> bool:
    """Whether more than the stub, which stops a guest for every look, reaches its memory."""
    return not isinstance(guest.memory.ram, StubRam)


def check(guest: Guest, upcalls: Sequence[Upcall]) -> None:
    """Check that a guest's hits can wait for Python.

    Raises:
        RefusedError: nothing but the stub reaches its memory.
        UsageError: there are too many, or one may take too long.
    """
    if not upcalls:
        return
    if not can_ask(guest):
        raise RefusedError(
            "Python handlers need the guest's RAM, which only its stub can read here, and that "
            "stops the guest for every look; run kprobes as QEMU's user on QEMU's machine, or "
            "start QEMU with a memory backend that has share=on"
        )
    if len(upcalls) > MAX_UPCALLS or any(not 0 <= u.number < MAX_UPCALLS for u in upcalls):
        raise UsageError(f"too many Python handlers: at most {MAX_UPCALLS} in a session")
    for upcall in upcalls:
        if not 0 < upcall.timeout_s <= MAX_TIMEOUT_S:
            raise UsageError(
                f"a handler's timeout of {upcall.timeout_s:g} s: more than 0, and at most "
                f"{MAX_TIMEOUT_S:g} s, or the guest's watchdogs take its CPU for stuck"
            )


def ticks_per_s(guest: Guest) -> int:
    """Return how fast the guest says that its CPUs' counter runs."""
    found = find_line(guest.memory, guest.kernel)
    rate = _rate(guest) if found is None else found[1].rate
    return rate if rate in _PLAUSIBLE else _TICKS_PER_S


def _rate(guest: Guest) -> int:
    symbol, register = guest.arch.machine.rate
    if symbol:
        # Not every kernel's table has names of data.
        found = guest.kernel.symbols.find(symbol)
        khz = b"" if found is None else guest.memory.read(found.addr, 4)
        return 1000 * int.from_bytes(khz, "little")
    with guest.stub.paused():
        return guest.stub.register(guest.stub.ids()[0], register)


_COMES, _GOES = "do_init_module", "ftrace_release_mod"

Step = Callable[[int], None]
"""Gets the address of a ``struct module``; must not raise."""


def can_watch(guest: Guest) -> bool:
    """Whether modules of a guest can be waited for: a vCPU has to wait for Python then."""
    has_steps = all(guest.kernel.symbols.find(name) is not None for name in (_COMES, _GOES))
    return has_steps and can_ask(guest)


def watching(
    guest: Guest, locate: Callable[[Symbol], Addr], steps: tuple[Step, Step]
) -> tuple[Upcall, ...]:
    """Return the upcalls that tell of modules; their numbers are the highest.

    Args:
        guest: one that ``can_watch``.
        locate: a function to where a probe at its entry is.
        steps: what to do when one comes, and when one goes.
    """
    first = guest.arch.arguments[0]
    return tuple(
        Upcall(
            number=MAX_UPCALLS - 1 - index,
            addr=locate(guest.kernel.symbols.named(name)),
            is_after=False,
            timeout_s=MAX_TIMEOUT_S,
            serve=partial(_serve, step, first),
        )
        for index, (name, step) in enumerate(zip((_COMES, _GOES), steps, strict=True))
    )


def _serve(step: Step, first: str, vcpu: WaitingVcpu) -> None:
    step(vcpu.registers[first])
