"""Upcalls: Python's part at a site, and the vCPU that waits there for it.

Where a vCPU and Python leave each other words: one area of the guest's memory, shared.

Every CPU has a slot per context (task, softirq, hardirq, NMI), so that whoever asks owns its slot.
A word has one writer, so that none need be changed atomically. A slot's question is its ``asked``,
a number that goes up by one; it is settled when ``answered`` (by Python) or ``gave_up`` (by the
guest) holds the same number. Until then the request stays as it is.

``present`` is Python's: 0 while nobody attends. Who gives up puts into ``absent`` what ``present``
was; while the two are equal nobody waits. Python then changes ``present`` as soon as it looks.
"""

from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct

from kprobes.units import Addr


class WaitingVcpu(Struct, kw_only=True):
    """One vCPU that waits for Python.

    Attributes:
        upcall: number of the upcall that it came to.
        cpu: its number in the guest.
        task: its ``task_struct``.
        page_table: what its register of that has, for the memory of its task's user.
        registers: of the probed code by pt_regs name: r15 ... di, ``flags``, ``sp``, ``ip``. What
            is changed here is what it goes on with. ``ip`` is where it goes on unless changed:
            before the instruction its address, after it the one that comes next. ``sp`` may go
            up: a lower one is not taken.
    """

    upcall: int
    cpu: int
    task: Addr
    page_table: int
    registers: dict[str, int]


class Upcall(Struct, frozen=True, kw_only=True):
    """What Python does at one site.

    Attributes:
        number: tells it from every other upcall of its session; counts what it missed.
        addr: of the probed instruction; of one at all returns of a function that of its entry.
        is_after: whether it comes after the instruction, as a post_handler, or before.
        timeout_s: how long a vCPU waits for ``serve`` before it goes on without.
        serve: gets the vCPU, and may change its registers; must not raise.
    """

    number: int
    addr: Addr
    is_after: bool
    timeout_s: float = 1.0
    serve: Callable[[WaitingVcpu], None]


class SiteUpcalls(Struct, frozen=True, kw_only=True):
    """What the code of one site asks Python.

    Attributes:
        entry_stub: where all code asks.
        before: the number to ask by before the instruction, or None.
        after: the number to ask by after it, or None.
    """

    entry_stub: Addr
    before: int | None
    after: int | None


class Detour(Struct, frozen=True, kw_only=True):
    """Code of one site.

    Attributes:
        code: where the patch leads.
        copies: where the code goes on as if at some addresses that the patch may cover, or after
            which it has still something to do.
    """

    code: bytes
    copies: Mapping[Addr, Addr]


class UpcallGroup(Struct, frozen=True, kw_only=True):
    """All upcalls that are served at one time: before one instruction, or after it.

    Attributes:
        number: what the guest asks by; counts what was not answered.
        upcalls: at least one; in the order in which they are served. Another question may have
            them, too: they are the same at all returns of a function.
        copies: as the site's detour has them.
    """

    number: int
    upcalls: tuple[Upcall, ...]
    copies: Mapping[Addr, Addr]

    def serve(self, vcpu: WaitingVcpu) -> None:
        """Have every upcall served; who goes elsewhere before the instruction is the last.

        As the kernel's aggr_pre_handler(): what a handler has redirected nobody else is shown.
        """
        at = vcpu.registers["ip"]
        shown = next((addr for addr, copy in self.copies.items() if copy == at), at)
        vcpu.registers["ip"] = shown
        for upcall in self.upcalls:
            vcpu.upcall = upcall.number
            upcall.serve(vcpu)
            if not upcall.is_after and vcpu.registers["ip"] != shown:
                break
        ip = Addr(vcpu.registers["ip"])
        vcpu.registers["ip"] = self.copies.get(ip, ip)


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


class MailboxLayout(Struct, frozen=True, kw_only=True):
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
