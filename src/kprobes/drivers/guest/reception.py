"""What a session's questions need in a guest: the mailbox, its deadlines, and who attends."""

from collections import Counter
from collections.abc import Callable, Sequence

from kprobes.drivers.guest.arena import Arena
from kprobes.drivers.guest.attendant import Attendant
from kprobes.drivers.guest.guest import Guest
from kprobes.drivers.guest.layout import first_of
from kprobes.drivers.guest.mailbox import Mailbox
from kprobes.drivers.guest.sched_clock import find_line
from kprobes.drivers.pump import nothing
from kprobes.errors import RefusedError, UsageError
from kprobes.model.mailbox import MAX_UPCALLS
from kprobes.model.upcall import Question, Upcall
from kprobes.transport.ram import StubRam

MAX_TIMEOUT_S = 10.0
"""A guest's watchdogs take a CPU for stuck after 20 s."""
_TICKS_PER_S = 1_000_000_000
"""Of an emulated CPU, for guests that do not tell."""
_PLAUSIBLE = range(1_000_000, 10_000_000_000)


class Reception:
    """Attends to one arena's questions between ``begin`` and ``end``."""

    def __init__(
        self, guest: Guest, arena: Arena, check_guest: Callable[[], None] = nothing
    ) -> None:
        self._mailbox = Mailbox(arena, guest.memory, guest.arch.upcall.saved, check_guest)
        self._ticks_per_s = ticks_per_s(guest)
        self._attendant: Attendant | None = None
        self._questions: tuple[Question, ...] = ()
        self._before: dict[int, int] = {}
        self._missed: Counter[int] = Counter()

    def begin(self, questions: Sequence[Question]) -> None:
        """Attend to questions whose sites are about to be patched."""
        self.end()
        self._questions = tuple(questions)
        if not questions:
            return
        for question in questions:
            # Who waits, waits for all of them.
            timeout_s = min(sum(each.timeout_s for each in question.upcalls), MAX_TIMEOUT_S)
            self._mailbox.set_ticks(question.number, int(timeout_s * self._ticks_per_s))
            self._before[question.number] = self._mailbox.missed(question.number)
        self._attendant = Attendant(self._mailbox, {each.number: each for each in questions})

    def end(self) -> None:
        """Attend no more; sites must have been put back before, or nobody waits at them."""
        if self._attendant is not None:
            self._attendant.stop()
            self._attendant = None
        for question in self._questions:
            for upcall in question.upcalls:
                self._missed[upcall.number] += self._lately(question)
        self._questions = ()

    def missed(self, upcall: int) -> int:
        """Return how many hits went on without an upcall since the arena was allocated."""
        found = [q for q in self._questions if any(upcall == each.number for each in q.upcalls)]
        return self._missed[upcall] + sum(map(self._lately, found))

    def _lately(self, question: Question) -> int:
        return self._mailbox.missed(question.number) - self._before[question.number]


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
    rate = _told_rate(guest) if found is None else found[1].rate
    return rate if rate in _PLAUSIBLE else _TICKS_PER_S


def _told_rate(guest: Guest) -> int:
    symbol, register = guest.arch.machine.rate
    if symbol:
        khz = guest.memory.read(first_of(guest.kernel, symbol), 4)
        return 1000 * int.from_bytes(khz, "little")
    with guest.stub.paused():
        return guest.stub.register(guest.stub.ids()[0], register)
