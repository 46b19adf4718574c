"""The words of a session's triggers in a guest, which ``model.trigger`` draws.

The stop of a guest that one asks for, for a debugger that is there or joins.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

from kprobes.arch.registry import machine
from kprobes.errors import GuestGoneError, GuestReplacedError
from kprobes.guest.guest import Guest, GuestMemory
from kprobes.guest.rings import MappedRange
from kprobes.model.kernel import place_of
from kprobes.model.options import Wanted
from kprobes.model.trigger import (
    PAUSED_CPU_SHIFT,
    WORD_GONE_ON,
    WORD_PAUSED,
    WORD_PAUSES,
    WORD_SNAPSHOTS,
    WORD_STOPPED,
    WORD_TRACING_ON,
    WORDS_SIZE,
    Command,
    SoftEnable,
    Trigger,
    is_there_offset,
    left_offset,
    soft_enable_offset,
)
from kprobes.units import U64, Addr

_LATE = "; it came too late, and the hit has gone on"
_UNSEEN = "a trigger has asked for the guest to be stopped when nobody looked; it was not"


class TriggerWords:
    """What hits and this process tell each other about triggers.

    Attributes:
        addr: where it is.
    """

    def __init__(self, memory: GuestMemory, addr: Addr) -> None:
        """Find its pages; all of it is zero."""
        self.addr = addr
        self._data = MappedRange(memory, addr, WORDS_SIZE)
        # Triggers whose count is there, of this recording; and those that it has now.
        self._counted: set[int] = set()
        self._present: dict[int, Trigger] = {}
        self._soft_enables: dict[int, SoftEnable] = {}
        self._checks_tracing_on = False

    def begin(self, *, tracing_on: bool) -> None:
        """Begin a recording, while nothing is armed: all counts are whole again."""
        self._counted, self._present = set(), {}
        self._soft_enables, self._checks_tracing_on = {}, True
        self._data.write(0, bytes(WORDS_SIZE))
        self._data.set_u64(WORD_TRACING_ON, int(tracing_on))

    def add(self, wanted: Wanted) -> None:
        """Give words that nothing looks at yet their first values."""
        triggers = wanted.triggers
        if wanted.checks_tracing_on and not self._checks_tracing_on:
            # Whatever a trigger left there that was taken away: it was on again since.
            self._data.set_u64(WORD_TRACING_ON, 1)
        for each in triggers:
            if each.number not in self._counted & self._present.keys():
                self._data.set_u64(left_offset(each.number), each.count or 0)
                if each.command is not Command.HIST:
                    self._data.set_u64(is_there_offset(each), 1)
        # Of those that go the count stays: it is asked for, and a change may be refused.
        self._counted |= {each.number for each in triggers}
        self._set(
            {n: each for n, each in wanted.soft_enables.items() if n not in self._soft_enables}
        )

    def soft_enable(self, wanted: Wanted) -> None:
        """Enable and disable events whose state has changed otherwise than by triggers.

        Those that were taken away do nothing any more, whoever still comes to their code.
        """
        self._checks_tracing_on = wanted.checks_tracing_on
        present = {each.number: each for each in wanted.triggers}
        for number in self._present.keys() - present.keys():
            gone = self._present[number]
            self._data.set_u64(is_there_offset(gone), 0)
            if gone.command is Command.HIST:
                # The word may be another one's at once.
                self._soft_enables.pop(gone.soft_enable, None)
        self._present = present
        found = wanted.soft_enables
        self._set({n: each for n, each in found.items() if self._soft_enables.get(n) != each})
        self._soft_enables = dict(found)

    def left(self, triggers: Iterable[Trigger]) -> dict[int, int]:
        """Return what is left of counts, and whether hist triggers count, by their numbers."""
        found = [each for each in triggers if each.number in self._counted]
        return {each.number: self._data.u64(_state_offset(each)) for each in found}

    @property
    def is_stopped(self) -> bool:
        """Whether a trigger has ended the recording."""
        return self._data.u64(WORD_STOPPED) != 0

    @property
    def snapshots(self) -> int:
        """How many snapshots triggers have asked for."""
        return self._data.u64(WORD_SNAPSHOTS)

    @property
    def pauses(self) -> int:
        """How often triggers have asked for the guest to be stopped."""
        return self._data.u64(WORD_PAUSES)

    @property
    def paused(self) -> tuple[Trigger | None, int]:
        """The trigger that asked for that last, None if it was taken away, and its CPU's number."""
        word = self._data.u64(WORD_PAUSED)
        return self._present.get(word % (1 << PAUSED_CPU_SHIFT)), word >> PAUSED_CPU_SHIFT

    def go_on(self) -> bool:
        """Let the CPUs go on that wait, of a guest that stands; return whether they still do."""
        has_waited = self._data.u64(WORD_GONE_ON) != U64
        self._data.set_u64(WORD_GONE_ON, self.pauses)
        return has_waited

    def end_pauses(self) -> None:
        """Have no CPU wait any more, until another recording begins."""
        self._data.set_u64(WORD_GONE_ON, U64)

    def _set(self, soft_enables: Mapping[int, SoftEnable]) -> None:
        for number, (is_on, _) in soft_enables.items():
            self._data.set_u64(soft_enable_offset(number), int(is_on))
        self._soft_enables |= soft_enables


class TriggerPause:
    """Stops a guest of one recording when a trigger ``pause`` asks for it, and lets it run in time.

    The CPU that was hit waits for that: see ``model.trigger``. If our process dies nobody stops the
    guest, and the CPU goes on by itself; or the guardian lets the guest run that was stopped. One
    thread checks at a time.
    """

    def __init__(
        self,
        words: Callable[[], TriggerWords | None],
        guest: Guest,
        leave_code: Callable[[], None],
        timeout_s: float,
        warn: Callable[[str], None],
    ) -> None:
        """Stop nothing yet.

        Args:
            words: returns the session's, or None before there are any; it raises GuestReplacedError
                where the guest is not ours any more.
            guest: that is stopped.
            leave_code: leads its CPUs out of our code.
            timeout_s: after which it goes on where no debugger is there.
            warn: is told of each stop.
        """
        self._find_words, self._guest, self._leave_code = words, guest, leave_code
        self._timeout_s, self._warn = timeout_s, warn
        self._seen = 0

    def check(self) -> None:
        """Stop the guest if a trigger has asked for that since the last look; to be called often.

        One that no debugger lets run goes on when its time is over. Raises GuestReplacedError.
        """
        words, stub = self._find_words(), self._guest.stub
        if words is not None and self._is_asked(words):
            with stub.paused():
                # What others have stopped stands until they let it run.
                if stub.is_debugged or not stub.is_held:
                    self._pause(words)
        if stub.is_debugged and time.monotonic() > stub.held_until_s:
            self._let_go()

    def end(self) -> None:
        """Look no more: the guest runs, unless it stands for a debugger that is there."""
        with suppress(GuestGoneError, GuestReplacedError):
            words = self._find_words()
            if words is not None and self._ends_unseen(words):
                self._warn(_UNSEEN)
            self._let_go()

    def _ends_unseen(self, words: TriggerWords) -> bool:
        with self._guest.readable():
            words.end_pauses()
            before, self._seen = self._seen, words.pauses
            return self._seen != before

    def _let_go(self) -> None:
        stub = self._guest.stub
        with stub.turn:
            if stub.is_debugged and stub.held_until_s < math.inf:
                stub.go()

    def _is_asked(self, words: TriggerWords) -> bool:
        with self._guest.readable():
            return words.pauses != self._seen

    def _pause(self, words: TriggerWords) -> None:
        stub = self._guest.stub
        self._seen = words.pauses
        trigger, number = words.paused
        has_waited = words.go_on()
        if stub.is_debugged:
            # It stands already.
            return
        stub.hold(time.monotonic() + self._timeout_s)
        self._leave_code()
        ids = stub.ids()
        # The word is the guest's.
        cpu = ids[number % len(ids)]
        at = stub.registers(cpu)[machine(self._guest.kernel.arch).inject_ops.pc]
        where = f"{place_of(self._guest.kernel.symbols, at)}, CPU {number}"
        why = "" if trigger is None else f" ({trigger.listed(None).replace(':unlimited', '')})"
        is_served = stub.debugger is not None and stub.debugger.pause(cpu)
        how = " for the debugger" if is_served else f"; it goes on in {self._timeout_s:g} s"
        late = "" if has_waited else _LATE
        self._warn(f"a trigger has stopped the guest at {where}{why}{how}{late}")


def _state_offset(trigger: Trigger) -> int:
    if trigger.command is Command.HIST:
        return soft_enable_offset(trigger.soft_enable)
    return left_offset(trigger.number)
