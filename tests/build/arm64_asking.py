"""An arm64 guest whose CPUs come to code that asks Python, whose part is in a test's hands."""

from collections.abc import Callable, Mapping

from kprobes.arch.aarch64 import encode
from kprobes.arch.aarch64.arch import AARCH64
from kprobes.codegen.upcall import compile_upcall
from kprobes.model.plan import Displaced
from kprobes.model.upcall import (
    CONTEXTS,
    REQUEST_HEAD,
    Detour,
    MailboxLayout,
    SiteUpcalls,
    registers_of,
)
from kprobes.units import Addr
from tests.build.arm64 import MAILBOX, PERCPU, TEXT, Arm64Machine, random_state

LAYOUT = MailboxLayout(cpus=len(PERCPU))
REGISTERS = registers_of(AARCH64.upcall.saved)
FUNCTION = TEXT + 0x3000
SITE, AFTER = FUNCTION + 4, FUNCTION + 8
ELSEWHERE = TEXT + 0x3800
BEFORE, BEHIND = 7, 8
FOREVER = 1 << 62
IN_THE_LOOP = 400
"""After so many instructions a CPU waits."""

Answer = Callable[[dict[str, int]], None]
Make = Callable[[Addr, SiteUpcalls], Detour]


class AskingGuest:
    """Code that asks, after a branch at SITE or another place.

    Attributes:
        machine: the guest.
        requests: what was asked so far, registers among the rest.
        change: what Python does with the registers of each.
        is_there: whether Python answers at all.
    """

    def __init__(self, make: Make, at: int, *, exits: tuple[int, ...], before: bool = True) -> None:
        self.machine = machine = Arm64Machine(is_watched=True)
        template = compile_upcall(AARCH64, machine.abi, Addr(MAILBOX), LAYOUT)
        upcall = machine.put(lambda place: template.link(place, {}))
        entry_stub = machine.put(lambda place: AARCH64.upcall.entry_stub(place, upcall))
        number = BEFORE if before else None
        upcalls = SiteUpcalls(entry_stub=entry_stub, before=number, after=BEHIND)
        detour = machine.put(lambda place: make(place, upcalls).code)
        machine.cpu.write(
            at, encode.bl(Addr(at), detour) if at == SITE else encode.b(Addr(at), detour)
        )
        for place in exits:
            machine.cpu.add_exit(place)
        for asked in (BEFORE, BEHIND):
            self.set(LAYOUT.ticks + 8 * asked, FOREVER)
        self.set(LAYOUT.present, 1)
        self.requests: list[dict[str, int]] = []
        self.change: Answer = lambda _: None
        self.is_there = True

    def set(self, offset: int, value: int) -> None:
        """Set a word of the mailbox."""
        self.machine.cpu.set_number(MAILBOX + offset, value)

    def missed(self, number: int) -> int:
        return self.machine.cpu.number(MAILBOX + LAYOUT.missed + 8 * number)

    def hit(
        self, start: int, state: Mapping[str, int] | None = None
    ) -> tuple[int, dict[str, int], dict[str, int]]:
        """Run from a place; return where it went on, and registers before and after."""
        cpu = self.machine.cpu
        before = dict(state or random_state(self.machine.random))
        cpu.trace, cpu.actions = [], {IN_THE_LOOP: self._answer} if self.is_there else {}
        cpu.set_registers(before)
        went = self.machine.run(start)
        return went, before, cpu.registers()

    def _answer(self) -> None:
        cpu, slot = self.machine.cpu, self.machine.number * CONTEXTS
        at = MAILBOX + LAYOUT.requests + LAYOUT.room * slot
        names = (*REQUEST_HEAD, *REGISTERS)
        request = {name: cpu.number(at + 8 * n) for n, name in enumerate(names)}
        self.requests.append(dict(request))
        self.change(request)
        at = MAILBOX + LAYOUT.answers + LAYOUT.room * slot
        for n, name in enumerate(REGISTERS):
            cpu.set_number(at + 8 * n, request[name])
        self.set(LAYOUT.answered + 8 * slot, cpu.number(MAILBOX + LAYOUT.asked + 8 * slot))
        # The next question comes as late again.
        cpu.actions[len(cpu.trace) + IN_THE_LOOP] = self._answer


def site_guest(**more: bool) -> AskingGuest:
    """Return a guest whose function's ftrace site asks, before it and perhaps after it."""

    def make(place: Addr, upcalls: SiteUpcalls) -> Detour:
        only = SiteUpcalls(entry_stub=upcalls.entry_stub, before=upcalls.before, after=None)
        asked = upcalls if more.get("is_after") else only
        return AARCH64.upcall.at_call(place, None, asked, Addr(AFTER))

    guest = AskingGuest(make, SITE, exits=(AFTER, ELSEWHERE))
    guest.machine.cpu.write(FUNCTION, AARCH64.site.preamble)
    return guest


def instruction_guest(code: bytes, *, exits: tuple[int, ...], before: bool = False) -> AskingGuest:
    """Return a guest where an instruction at FUNCTION asks after it, and perhaps before."""
    displaced = Displaced(addr=Addr(FUNCTION), code=code, count=1, stop=Addr(FUNCTION + 4))

    def make(place: Addr, upcalls: SiteUpcalls) -> Detour:
        return AARCH64.upcall.at_instruction(place, None, upcalls, displaced)

    return AskingGuest(make, FUNCTION, exits=exits, before=before)
