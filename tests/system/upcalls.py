"""Guests whose functions wait for Python, one upcall at a time."""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager

from kprobes.arch.aarch64 import decode
from kprobes.arch.aarch64.decode import Instruction as Word
from kprobes.arch.x86_64 import decode as x86_64
from kprobes.arch.x86_64.insn import Instruction as Bytes
from kprobes.guest.places import places_of
from kprobes.image.tables import read_function
from kprobes.model.kernel import TextPart
from kprobes.model.upcall import Upcall, WaitingVcpu
from kprobes.open import GuestSession
from kprobes.units import Addr
from tests.build.defined import ask
from tests.build.dialect import dialect_of
from tests.build.programs import counting_loop
from tests.build.victim import LOAD_FILES, is_complaint

PATIENT = "nosoftlockup rcupdate.rcu_cpu_stall_suppress=1"
"""A guest that measured its TSC on a busy machine has seconds that are much shorter than ours."""
PARENT = ("sh", "-c", "echo $PPID $$")
STEPS = 1000

_ON_BOTH = b"""#!/bin/sh
taskset 1 /one & taskset 2 /one
wait
"""
Serve = Callable[[WaitingVcpu], None]
Instruction = Bytes | Word


def files(arch: str) -> dict[str, bytes]:
    """Return programs that call getppid(): ``/one``, and ``/two`` on both CPUs at once."""
    return {**LOAD_FILES, "/one": counting_loop("getppid", STEPS, arch=arch), "/two": _ON_BOTH}


class Kernel:
    """A guest whose functions can be given to Python.

    Attributes:
        session: that reaches it.
        dialect: its words.
        asked_name: the function that is given to Python most.
    """

    def __init__(self, session: GuestSession) -> None:
        self.session = session
        self.dialect = dialect_of(session)
        self.asked_name = f"{self.dialect.syscall}getppid"
        self._places = places_of(session.driver.guest)
        self._next = 0

    def site(self, name: str) -> Addr:
        return self._places.locate(self.session.kernel.symbols.named(name))

    def upcall(self, name: str, serve: Serve, timeout_s: float = 5.0) -> Upcall:
        """Return an upcall at a function's entry, with a number of its own."""
        return self.upcall_at(self.site(name), serve, timeout_s=timeout_s)

    def upcall_at(
        self, addr: Addr, serve: Serve, *, is_after: bool = False, timeout_s: float = 5.0
    ) -> Upcall:
        """Return an upcall at any instruction."""
        self._next += 1
        return Upcall(
            number=self._next, addr=addr, is_after=is_after, timeout_s=timeout_s, serve=serve
        )

    def instructions(self, name: str) -> Mapping[Addr, Instruction]:
        """Decode a function as it is now."""
        kernel, memory = self.session.kernel, self.session.driver.guest.memory
        found = read_function(memory, kernel, kernel.symbols.named(name).addr)
        return _DECODERS[kernel.arch](*found)

    @contextmanager
    def asked(self, *upcalls: Upcall) -> Generator[None]:
        """Have upcalls armed, and nothing else."""
        driver = self.session.driver
        ask(driver, *upcalls)
        try:
            yield
        finally:
            ask(driver)

    def missed(self, upcall: Upcall) -> int:
        return self.session.driver.missed_upcall(upcall.number)

    def run(self, *command: str) -> str:
        """Return what a command prints; it must succeed."""
        done = self.session.run(list(command), 180)
        assert done.status == 0, done.output
        return done.output.decode(errors="replace").strip()

    def complaints(self) -> list[str]:
        return [line for line in self.run("dmesg").splitlines() if is_complaint(line)]

    def leave(self, waiting: WaitingVcpu, value: int) -> None:
        """Return from the function that is entered, in its place."""
        registers, dialect = waiting.registers, self.dialect
        memory = self.session.driver.guest.memory
        link = dialect.link
        registers["ip"] = registers[link] if link else memory.u64(registers["sp"])
        registers["sp"] += dialect.pushed
        registers[dialect.value] = value


def _x86_64(name: str, parts: Sequence[TextPart]) -> Mapping[Addr, Instruction]:
    return {each.addr: each for each in x86_64.decode_function(name, parts).instructions.values()}


def _aarch64(name: str, parts: Sequence[TextPart]) -> Mapping[Addr, Instruction]:
    found = decode.decode_function(name, parts)
    all_of_it = (found.instruction(row) for row in range(len(found.addrs)))
    return {each.addr: each for each in all_of_it}


_DECODERS = {"x86_64": _x86_64, "aarch64": _aarch64}
