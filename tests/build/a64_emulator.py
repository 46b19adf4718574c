"""One instruction at its own place and in its slot, run on an emulated arm64 CPU (Unicorn)."""

import random
from collections.abc import Mapping, Sequence
from typing import Any, Self

from msgspec import Struct
from msgspec.structs import replace
from unicorn import (
    UC_ARCH_ARM64,
    UC_HOOK_INTR,
    UC_HOOK_MEM_WRITE,
    UC_MODE_ARM,
    UC_PROT_ALL,
    arm64_const,
)
from unicorn.unicorn import Uc, UcError

from kprobes.arch.aarch64.insn import Kind

POINTER = 0x4000_0000
"""The middle of the data."""

_DATA = 1 << 20
_SLOT_SIZE = 4096
_PAGE = 4096
_MAX_STEPS = 16
GENERAL = (*(f"X{n}" for n in range(31)), "SP")
VECTORS = tuple(f"Q{n}" for n in range(32))
_NUMBERS: Mapping[str, int] = {
    name: getattr(arm64_const, f"UC_ARM64_REG_{name}")
    for name in (*GENERAL, *VECTORS, "PC", "NZCV")
}
_SCALARS = [_NUMBERS[name] for name in (*GENERAL, "NZCV")]
_VECTORS = [_NUMBERS[name] for name in VECTORS]
_EL1_VECTORS = 3 << 20
"""CPACR_EL1.FPEN: vector instructions raise nothing."""


class Outcome(Struct, frozen=True):
    """What is left behind: registers, writes, and where the CPU goes on.

    Attributes:
        writes: (address, bytes, value) in order.
        fault: what the CPU raised instead, or "".
    """

    registers: tuple[int, ...]
    writes: tuple[tuple[int, int, int], ...]
    next: int
    fault: str

    def seen_after(self, kind: Kind) -> Self:
        """Return what the code that comes next may count on.

        Who is called by `blr` finds anything in x16 and x17: linkers may use them on the way.
        """
        if kind is not Kind.BLR:
            return self
        return replace(self, registers=(*self.registers[:16], 0, 0, *self.registers[18:]))


def random_state(rng: random.Random) -> dict[str, int]:
    """Return registers of which some point into data, some are small and some are anything."""
    registers = {name: _value(rng) for name in GENERAL}
    registers["SP"] = POINTER + rng.randrange(-0x1000, 0x1000) & ~15
    registers["NZCV"] = rng.getrandbits(4) << 28
    return registers | {name: rng.getrandbits(128) for name in VECTORS}


def _value(rng: random.Random) -> int:
    kind = rng.random()
    if kind < 0.6:
        return POINTER + rng.randrange(-0x8000, 0x8000) & (~15 if kind < 0.5 else ~0)
    return rng.randrange(256) if kind < 0.9 else rng.getrandbits(64)


class Emulator:
    """A CPU with a kernel's text, a page of slots, and some memory that registers point to."""

    def __init__(self, text: tuple[int, bytes], slots: int, states: Sequence[Mapping[str, int]]):
        """Take the text, its address, that of the slots, and the states to begin in."""
        self._uc: Any = Uc(UC_ARCH_ARM64, UC_MODE_ARM)
        self._uc.ctl_set_cpu_model(arm64_const.UC_CPU_ARM64_MAX)
        start, code = text
        first = start & -_PAGE
        self._uc.mem_map(first, (start + len(code) - first + _PAGE - 1) & -_PAGE, UC_PROT_ALL)
        self._uc.mem_write(start, code)
        self._uc.mem_map(slots, _SLOT_SIZE, UC_PROT_ALL)
        self._uc.mem_map(POINTER - _DATA // 2, _DATA, UC_PROT_ALL)
        self._uc.mem_write(POINTER - _DATA // 2, random.Random(3).randbytes(_DATA))
        self._slots = slots
        self._faults: list[str] = []
        self._writes: list[tuple[int, int, int]] = []
        self._undo: list[tuple[int, bytes]] = []
        self._uc.hook_add(UC_HOOK_INTR, self._note)
        self._uc.hook_add(UC_HOOK_MEM_WRITE, self._written)
        self._uc.reg_write(arm64_const.UC_ARM64_REG_CPACR_EL1, _EL1_VECTORS)
        self._states = [self._context(state) for state in states]

    def place(self, addr: int, code: bytes) -> None:
        """Put code into the text."""
        self._uc.mem_write(addr, code)
        self._uc.ctl_remove_cache(addr, addr + len(code))

    def run(self, addr: int, slot: bytes, *, state: int) -> tuple[Outcome, Outcome]:
        """Run the instruction at an address of the text, and code in the slot, from one state."""
        self.place(self._slots, slot)
        here = self._run(addr, 4, 1, state)
        there = self._run(self._slots, len(slot), _MAX_STEPS, state)
        return here, there

    def begin(self, state: int) -> None:
        """Take up the state of this number, for ``step``."""
        self._uc.context_restore(self._states[state])
        self._faults, self._writes, self._undo = [], [], []

    def step(self, at: int) -> tuple[int, str]:
        """Run one instruction; return where the CPU goes on, and what fault it raised, or ""."""
        return self._step(at), ", ".join(self._faults)

    def skip_call(self, at: int) -> None:
        """Change what a callee of the instruction there would have changed."""
        self._uc.reg_write(_NUMBERS["X30"], at + 4)
        self._uc.reg_write(_NUMBERS["X0"], at * 0x9E37_79B9 % (1 << 20))

    def _run(self, addr: int, size: int, steps: int, state: int) -> Outcome:
        self._uc.context_restore(self._states[state])
        self._faults, self._writes, self._undo = [], [], []
        at = addr
        for _ in range(steps):
            at = self._step(at)
            if self._faults or not addr <= at < addr + size:
                break
        scalars, vectors = (self._uc.reg_read_batch(names) for names in (_SCALARS, _VECTORS))
        for place, data in reversed(self._undo):
            self._uc.mem_write(place, data)
        fault = ", ".join(self._faults)
        return Outcome((*scalars, *vectors), tuple(self._writes), at, fault)

    def _context(self, state: Mapping[str, int]) -> Any:
        self._uc.reg_write_batch([(_NUMBERS[name], value) for name, value in state.items()])
        return self._uc.context_save()

    def _step(self, at: int) -> int:
        try:
            self._uc.emu_start(at, 0, count=1)
        except UcError as e:
            self._faults.append(str(e))
        return self._uc.reg_read(_NUMBERS["PC"])

    def _note(self, uc: object, number: int, data: object) -> None:
        del uc, data
        self._faults.append(f"exception {number}")

    def _written(self, *found: Any) -> None:
        _, _, addr, size, value, _ = found
        self._undo.append((addr, bytes(self._uc.mem_read(addr, size))))
        self._writes.append((addr, size, value))
