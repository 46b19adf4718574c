"""The words of a session's triggers in a guest, which ``model.trigger`` draws."""

from collections.abc import Iterable, Mapping

from kprobes.guest.guest import GuestMemory
from kprobes.guest.rings import MappedRange
from kprobes.model.options import Wanted
from kprobes.model.trigger import (
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
from kprobes.units import Addr


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

    def _set(self, soft_enables: Mapping[int, SoftEnable]) -> None:
        for number, (is_on, _) in soft_enables.items():
            self._data.set_u64(soft_enable_offset(number), int(is_on))
        self._soft_enables |= soft_enables


def _state_offset(trigger: Trigger) -> int:
    if trigger.command is Command.HIST:
        return soft_enable_offset(trigger.soft_enable)
    return left_offset(trigger.number)
