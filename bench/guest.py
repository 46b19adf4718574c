"""A guest to measure in: programs to run, the kernel's own probes and ours to arm."""

import base64
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

from msgspec.structs import replace

import kprobes
from bench.elf_program import Loop
from bench.isa import Isa
from kprobes.guest.allocate import Allocator
from kprobes.guest.arena import ArenaSize
from kprobes.guest.arm import TextPatcher
from kprobes.guest.driver import GuestDriver
from kprobes.guest.guest import Guest
from kprobes.guest.journal import Journal
from kprobes.guest.link import Program
from kprobes.lang.parser import parse_source
from kprobes.model.abi import GuestAbi, Template
from kprobes.model.definition import NO_SYNTHETIC_FIELDS, SyntheticFields
from kprobes.model.plan import Plan
from kprobes.model.upcall import UpcallGroup
from kprobes.open import GuestSession
from kprobes.transport.qemu import Machine
from kprobes.transport.qemu_command import MachineOptions

TRACING = "/sys/kernel/tracing"
_FOLDER = "/bench"

HandWritten = Callable[[GuestAbi], Template]


class _Allocator(Allocator):
    """Gives sites code that was not compiled, while there is any."""

    written: HandWritten | None = None

    def link(
        self,
        guest: Guest,
        patcher: TextPatcher,
        plans: Sequence[Plan],
        checkpoint: Callable[[], None],
    ) -> tuple[list[Program], list[UpcallGroup]]:
        if self.written is None:
            return super().link(guest, patcher, plans, checkpoint)
        template = self.written(patcher.linker.abi)
        return [_placed(patcher, template, plan) for plan in plans], []


class ByHand(GuestDriver):
    """The engine with code that it did not compile, while there is any."""

    def __init__(self, guest: Guest, journal: Journal, size: ArenaSize) -> None:
        super().__init__(guest, journal, size)
        self._allocator = self._linking = _Allocator(journal, size, None, self._warn)

    @property
    def written(self) -> HandWritten | None:
        """Makes the code of all sites, or None for what the engine compiles."""
        return self._linking.written

    @written.setter
    def written(self, written: HandWritten | None) -> None:
        self._linking.written = written

    def abi(self) -> GuestAbi:
        """Return the constants that code for this guest has."""
        self._allocator.allocate(self.guest, (), ())
        return self._allocator.abi(self.guest)


def _placed(patcher: TextPatcher, template: Template, plan: Plan) -> Program:
    entry, _ = patcher.linker.place(len(template.code))
    code = template.link(entry, {"event0": plan.probes[0].layout.event_id})
    return Program(plan=plan, entry=entry, code=code)


class Rig:
    """A booted guest with its programs."""

    def __init__(
        self, machine: Machine, session: GuestSession, by_hand: ByHand, loops: Mapping[str, Loop]
    ) -> None:
        self.machine = machine
        self.session = session
        self.guest: Guest = session.driver.guest
        self.loops = dict(loops)
        self.by_hand = by_hand

    def add(self, name: str, loop: Loop) -> None:
        """Put another program into the running guest."""
        text = base64.b64encode(loop.program()).decode()
        path = f"{_FOLDER}/{name}"
        self.shell(f"echo {text} | base64 -d > {path} && chmod +x {path}")
        self.loops[name] = loop

    def run(self, name: str) -> list[float]:
        """Run a program and return ns per hit of each of its repeats."""
        finished = self.machine.run(f"{_FOLDER}/{name}", timeout_s=120)
        return self.loops[name].ns_per_hit(finished.output)

    def shell(self, command: str, timeout_s: float = 120) -> str:
        """Run a command that must succeed, and return what it prints."""
        finished = self.machine.run(command, timeout_s)
        text = finished.output.decode(errors="replace")
        if finished.status:
            raise RuntimeError(f"{command}: status {finished.status}: {text}")
        return text

    def define_native(self, definitions: Sequence[str]) -> None:
        """Define probes of the guest's own kernel; none is enabled yet."""
        for definition in definitions:
            self.shell(f"echo '{definition}' >> {TRACING}/kprobe_events")

    def filter_native(self, event: str, text: str) -> None:
        """Give a probe of the guest's own kernel a filter; "0" for none."""
        self.shell(f"echo '{text}' > {TRACING}/events/kprobes/{event}/filter")

    @contextmanager
    def native(self, event: str) -> Generator[None]:
        """Have a probe of the guest's own kernel enabled."""
        switch = f"{TRACING}/events/kprobes/{event}/enable"
        self.shell(f"echo 1 > {switch}")
        try:
            yield
        finally:
            self.shell(f"echo 0 > {switch}")

    @contextmanager
    def ours(
        self,
        text: str,
        written: HandWritten | None = None,
        *,
        filter: str = "",
        synthetic_fields: SyntheticFields = NO_SYNTHETIC_FIELDS,
    ) -> Generator[GuestDriver]:
        """Have probes of ours armed: compiled, or with code written by hand."""
        self.by_hand.written = written
        driver = self.by_hand if written else self.session.driver
        parsed = parse_source(text, registers=self.guest.arch.registers)
        definitions = [
            replace(each, filter=filter, synthetic_fields=synthetic_fields) for each in parsed
        ]
        options = self.session.options
        driver.apply(
            lambda wanted: replace(wanted, definitions=definitions, options=options), begins=True
        )
        try:
            yield driver
        finally:
            driver.disarm()
            deque(driver.rest(), maxlen=0)
            for definition in definitions:
                driver.forget(definition)
        if lost := driver.counts().lost:
            raise RuntimeError(f"{lost} hits found no room, which costs something else")


@contextmanager
def machine(isa: Isa, loops: Mapping[str, Loop]) -> Generator[Machine]:
    """Boot a guest with programs in it; nobody is attached to it."""
    files = {f"{_FOLDER}/{name}": loop.program() for name, loop in loops.items()}
    options = MachineOptions(arch=isa.name, append=isa.append, files=files)
    with Machine.boot(options) as booted:
        yield booted


@contextmanager
def attached(
    booted: Machine, loops: Mapping[str, Loop], size: ArenaSize | None = None
) -> Generator[Rig]:
    """Attach to a booted guest."""
    with ExitStack() as undo:
        session = undo.enter_context(kprobes.attach(str(booted.stub_address), size=size))
        guest = session.driver.guest
        journal = Journal.create(guest.address)
        undo.callback(journal.close)
        by_hand = ByHand(guest, journal, size or ArenaSize())
        undo.callback(by_hand.close)
        yield Rig(booted, session, by_hand, loops)


@contextmanager
def boot(isa: Isa, loops: Mapping[str, Loop]) -> Generator[Rig]:
    """Boot a guest with programs in it and attach to it."""
    with machine(isa, loops) as booted, attached(booted, loops) as rig:
        yield rig
