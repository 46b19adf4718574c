"""Where a vCPU and Python leave each other words: one area of the guest's memory, shared.

Every CPU has a slot per context (task, softirq, hardirq, NMI), so that whoever asks owns its slot.
A word has one writer, so that none need be changed atomically. A slot's question is its ``asked``,
a number that goes up by one; it is settled when ``answered`` (by Python) or ``gave_up`` (by the
guest) holds the same number. Until then the request stays as it is.

``present`` is Python's: 0 while nobody attends. Who gives up puts into ``absent`` what ``present``
was; while the two are equal nobody waits. Python then changes ``present`` as soon as it looks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

CONTEXTS = 4
"""Slots of a CPU."""
MAX_UPCALLS = 4096
"""Upcalls of a session at most: each has a deadline and a counter."""
REQUEST_HEAD = ("upcall", "task", "page_table")
"""Words of a request before the registers."""
_WORD = 8
_LINE = 64
_ROOM = 5 * _LINE
"""Bytes of a request, and of an answer: arm64's are 37 words, and 34."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MailboxLayout:
    """Offsets in the area of a guest with so many CPUs.

    Args:
        cpus: that may ask.
    """

    cpus: int

    @property
    def slots(self) -> int:
        """How many may ask at the same time."""
        return self.cpus * CONTEXTS

    @property
    def absent(self) -> int:
        """The guest's word."""
        return 0

    @property
    def present(self) -> int:
        """Python's word."""
        return _LINE

    @property
    def asked(self) -> int:
        """The guest's: a word per slot."""
        return 2 * _LINE

    @property
    def gave_up(self) -> int:
        """The guest's: a word per slot."""
        return self.asked + self._words

    @property
    def answered(self) -> int:
        """Python's: a word per slot."""
        return self.gave_up + self._words

    @property
    def ticks(self) -> int:
        """Python's: for how many ticks of its counter a vCPU waits, a word per upcall."""
        return self.answered + self._words

    @property
    def missed(self) -> int:
        """The guest's: hits that went on without Python, a word per upcall."""
        return self.ticks + _WORD * MAX_UPCALLS

    @property
    def requests(self) -> int:
        """The guest's: REQUEST_HEAD and registers, ``room`` bytes per slot."""
        return self.missed + _WORD * MAX_UPCALLS

    @property
    def answers(self) -> int:
        """Python's: registers, ``room`` bytes per slot."""
        return self.requests + self.slots * self.room

    @property
    def size(self) -> int:
        """Bytes of it all."""
        return self.answers + self.slots * self.room

    @property
    def room(self) -> int:
        """Bytes of a request, and of an answer."""
        return _ROOM

    @property
    def _words(self) -> int:
        return -(-_WORD * self.slots // _LINE) * _LINE


def registers_of(saved: Sequence[str]) -> tuple[str, ...]:
    """Return the registers of a request and an answer, in order, for those that are saved."""
    return (*saved, "ip", "sp")
