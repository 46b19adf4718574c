"""A guest whose CPUs come to a site that waits for Python, and Python's part in a test's hands."""

from collections.abc import Callable, Mapping
from random import Random

from kprobes.arch.x86_64.arch import X86_64
from kprobes.codegen.upcall import compile_upcall
from kprobes.model.abi import GuestAbi
from kprobes.model.upcall import CONTEXTS, REQUEST_HEAD, MailboxLayout, SiteUpcalls, registers_of
from kprobes.units import Addr
from tests.build.kernel import TEXT
from tests.build.machine import ABI, CODE, MAILBOX, PERCPU, STACK, Machine, random_state

LAYOUT = MailboxLayout(cpus=len(PERCPU))
REGISTERS = registers_of(X86_64.upcall.saved)
SITE = TEXT + 0x3000
AFTER = SITE + X86_64.site.size
ELSEWHERE = TEXT + 0x3800
NUMBER = 7
FOREVER = 1 << 62
IN_THE_LOOP = 400
"""After so many instructions a CPU waits."""
_ENTRY_STUB, _DETOUR = CODE + 0x1_0000, CODE + 0x1_8000

Answer = Callable[[dict[str, int]], None]


class AskingGuest:
    """A site that asks with NUMBER, armed.

    Attributes:
        machine: the guest.
        stack_before: what was above the probed code's stack pointer at the last hit.
    """

    def __init__(self, abi: GuestAbi = ABI, *, seed: int = 0) -> None:
        self.machine = machine = Machine(abi, seed=seed, is_watched=True)
        self.random = Random(seed)
        cpu, info = machine.cpu, X86_64.upcall
        template = compile_upcall(X86_64, abi, Addr(MAILBOX), LAYOUT)
        function = Addr(_ENTRY_STUB + 0x100)
        cpu.write(_ENTRY_STUB, info.entry_stub(Addr(_ENTRY_STUB), function))
        cpu.write(function, template.link(function, {}))
        place, after = Addr(_DETOUR), Addr(AFTER)
        upcalls = SiteUpcalls(entry_stub=Addr(_ENTRY_STUB), before=NUMBER, after=None)
        cpu.write(_DETOUR, info.at_call(place, None, upcalls, after).code)
        cpu.write(SITE, X86_64.site.branch(Addr(SITE), place))
        cpu.add_exit(AFTER)
        cpu.add_exit(ELSEWHERE)
        self.set(LAYOUT.ticks + 8 * NUMBER, FOREVER)
        self.set(LAYOUT.present, 1)

    def get(self, offset: int) -> int:
        """Return a word of the mailbox."""
        return self.machine.cpu.number(MAILBOX + offset)

    def set(self, offset: int, value: int) -> None:
        self.machine.cpu.set_number(MAILBOX + offset, value)

    @property
    def missed(self) -> int:
        return self.get(LAYOUT.missed + 8 * NUMBER)

    def asked(self, slot: int) -> int:
        return self.get(LAYOUT.asked + 8 * slot)

    def request(self, slot: int) -> dict[str, int]:
        """Return what a slot asks, its registers among the rest."""
        at = LAYOUT.requests + LAYOUT.room * slot
        names = (*REQUEST_HEAD, *REGISTERS)
        return {name: self.get(at + 8 * n) for n, name in enumerate(names)}

    def answer(self, slot: int, change: Answer = lambda _: None) -> None:
        """Answer a slot with its own registers, changed."""
        registers = {name: self.request(slot)[name] for name in REGISTERS}
        change(registers)
        at = LAYOUT.answers + LAYOUT.room * slot
        for n, name in enumerate(REGISTERS):
            self.set(at + 8 * n, registers[name])
        self.set(LAYOUT.answered + 8 * slot, self.asked(slot))

    def slot(self, level: int = 0) -> int:
        """Return the slot of the CPU that runs, in a context from tasks to NMIs."""
        return self.machine.number * CONTEXTS + level

    def hit(
        self, state: Mapping[str, int] | None = None, *, then: Callable[[], None] | None = None
    ) -> tuple[int, dict[str, int]]:
        """Run the site; return where it went on, and the registers there.

        Args:
            state: registers at the site; random by default.
            then: what happens while the CPU waits, when it does.
        """
        cpu = self.machine.cpu
        cpu.writes, cpu.trace = [], []
        cpu.actions = {IN_THE_LOOP: then} if then else {}
        cpu.set_registers(state or random_state(self.random))
        self.stack_before = self._above(cpu.register("sp"))
        pc = cpu.run(SITE)
        assert not cpu.actions, "it did not wait"
        return pc, cpu.registers()

    def is_stack_untouched(self) -> bool:
        """Whether nothing of the probed code's stack changed at the last hit."""
        size = len(self.stack_before)
        return self._above(STACK + self.machine.abi.thread_size - size) == self.stack_before

    def in_interrupt(self, level: int, action: Callable[[], None]) -> None:
        """Do something in an interrupt of the code that runs now."""
        machine, cpu = self.machine, self.machine.cpu
        trace, actions = cpu.trace, cpu.actions
        machine.preempt_count += level
        cpu.aside(action)
        machine.preempt_count -= level
        cpu.trace, cpu.actions = trace, actions

    def below(self) -> dict[str, int]:
        """Return a state for an interrupt of what runs now: its stack is below."""
        stack = self.machine.cpu.register("sp") - 256 & -16
        return random_state(self.random, sp=stack)

    def _above(self, sp: int) -> bytes:
        return self.machine.cpu.read(sp, STACK + self.machine.abi.thread_size - sp)
