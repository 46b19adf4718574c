"""One instruction at its own place and in its slot, run on an emulated x86-64 CPU (Unicorn)."""

import random
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from iced_x86 import Mnemonic
from msgspec import Struct
from unicorn import UC_ARCH_X86, UC_HOOK_INTR, UC_MODE_64, x86_const
from unicorn.unicorn import Uc, UcError

SLOT = 0xFFFF_FFFF_C000_0000
POINTER = 0xFFFF_8880_0000_0000
"""What data addresses begin with; all of them lead to the same 64 KiB."""

_GENERAL = ("AX", "BX", "CX", "DX", "SI", "DI", "BP", "SP")
GENERAL = tuple(f"R{name}" for name in _GENERAL) + tuple(f"R{n}" for n in range(8, 16))
VECTORS = tuple(f"XMM{n}" for n in range(16))
_NUMBERS: Mapping[str, int] = {
    name: getattr(x86_const, f"UC_X86_REG_{name}")
    for name in (*GENERAL, *VECTORS, "RIP", "RFLAGS", "CR0", "CR3", "CR4", "FS_BASE", "GS_BASE")
}
_SCALARS = [_NUMBERS[name] for name in (*GENERAL, "RFLAGS", "FS_BASE", "GS_BASE")]
_VECTORS = [_NUMBERS[name] for name in VECTORS]
FLAGS = 0xCD5
"""CF, PF, AF, ZF, SF, DF, OF."""
_ALWAYS, _TF, _IF = 0x2, 0x100, 0x200

_PAGE, _PAGES, _WORDS = 4096, 16, 512
_POOL, _TEXT, _SLOTS, _TABLES, _END = 0, 0x10_0000, 0x11_0000, 0x18_0000, 0x20_0000
_RIGHTS = 7
_CR4 = 1 << 5 | 1 << 9 | 1 << 10 | 1 << 16 | 1 << 18
"""PAE, OSFXSR, OSXMMEXCPT, FSGSBASE, OSXSAVE."""
_CR0 = 0x8000_0033
_MAX_STEPS = 200
_STACK_TOP = 0xF000
_RET = b"\xc3"
REPEATS = frozenset(b"\xf2\xf3")
"""Among an instruction's first two bytes: it may repeat."""
DIFFERS_EACH_TIME = frozenset(
    (Mnemonic.RDTSC, Mnemonic.RDTSCP, Mnemonic.RDPMC, Mnemonic.RDRAND, Mnemonic.RDSEED)
)
"""Instructions that read a clock, or chance."""
_LARGE = 21
_TOP = 511


class State(Struct, frozen=True):
    """Registers by name before an instruction, and its data memory."""

    registers: Mapping[str, int]
    data: bytes


class Outcome(Struct, frozen=True):
    """What is left behind: registers, memory, and where the CPU goes on.

    Attributes:
        fault: what the CPU raised instead, or "".
    """

    registers: tuple[int, ...]
    data: bytes
    next: int
    fault: str


def random_state(rng: random.Random, *, is_short: bool) -> State:
    """Return registers that point to data, and data that points to data.

    Args:
        rng: of the test.
        is_short: whether RCX is a small count, for what repeats.
    """
    registers = {name: _value(rng) for name in GENERAL}
    registers["RSP"] = POINTER | rng.randrange(0x8000, 0xF000) & ~7
    if is_short:
        registers |= {"RCX": rng.randrange(40), "RDX": rng.randrange(40)}
    registers["RFLAGS"] = rng.getrandbits(12) & FLAGS | _ALWAYS | rng.choice((0, _IF))
    registers["GS_BASE"] = POINTER | rng.getrandbits(30) & ~7
    registers |= {name: rng.getrandbits(128) for name in VECTORS}
    return State(registers=registers, data=_data(rng))


def _data(rng: random.Random) -> bytes:
    count = _PAGES * _PAGE // 8
    words = [_value(rng) & ~_TF for _ in range(count)]
    return struct.pack(f"<{count}Q", *words)


def _value(rng: random.Random) -> int:
    kind = rng.random()
    if kind < 0.7:
        return POINTER | rng.getrandbits(46) & (~63 if kind < 0.35 else ~0)
    return rng.getrandbits(64) if kind < 0.8 else rng.choice((rng.getrandbits(8), 0, 2**64 - 1))


class Emulator:
    """A CPU with a kernel's text, a page of slots, and 64 KiB of memory everywhere else."""

    def __init__(self, start: int, stop: int, states: Sequence[State]) -> None:
        """Take the addresses of the text, and the states that instructions are to begin in."""
        self._uc: Any = Uc(UC_ARCH_X86, UC_MODE_64)
        self._uc.mem_map(0, _END)
        # A translation ends at a return; one that goes on to the page's end takes 0.5 ms.
        self._uc.mem_write(_TEXT, _RET * (_TABLES - _TEXT))
        self._faults: list[str] = []
        self._uc.hook_add(UC_HOOK_INTR, self._note)
        self._map(start, stop)
        self._states = [(self._context(state), state.data) for state in states]

    def run(
        self, place: tuple[int, bytes], slot: bytes, *, state: int, is_one: bool = True
    ) -> tuple[Outcome, Outcome]:
        """Run instructions in place and in their slot, both from the state of this number.

        Args:
            place: their address and bytes.
            slot: code for SLOT.
            state: where to begin.
            is_one: whether it is one instruction: several run until they leave their bytes.
        """
        addr, code = place
        self._place(_TEXT, addr, code)
        self._place(_SLOTS, SLOT, slot)
        # Both are there all the time: who reads text reads the same.
        steps = 1 if is_one and REPEATS.isdisjoint(code[:2]) else _MAX_STEPS
        here = self._run(addr, len(code), steps, state)
        there = self._run(SLOT, len(slot), _MAX_STEPS, state)
        self._place(_TEXT, addr, _RET * len(code))
        self._place(_SLOTS, SLOT, _RET * len(slot))
        return here, there

    def place(self, addr: int, code: bytes) -> None:
        """Put code of at most 64 KiB into the text, until something else is put there."""
        self._place(_TEXT, addr, code)

    def begin(self, state: int, stack: bytes) -> int:
        """Take up the state of this number, and return its stack pointer: to a stack of its own.

        Nothing but the stack pointer leads to that stack, the first bytes of which are given.
        """
        context, data = self._states[state]
        self._uc.context_restore(context)
        self._uc.mem_write(_POOL, data)
        self._uc.mem_write(_SLOTS + _STACK_TOP, stack)
        self.set("RSP", SLOT + _STACK_TOP)
        return SLOT + _STACK_TOP

    def step(self, at: int) -> tuple[int, str]:
        """Run one instruction; return where the CPU goes on, and what fault it raised, or ""."""
        self._faults.clear()
        return self._step(at), ", ".join(self._faults)

    def value(self, name: str) -> int:
        """Return what a register holds."""
        return self._uc.reg_read(_NUMBERS[name])

    def set(self, name: str, value: int) -> None:
        """Set a register."""
        self._uc.reg_write(_NUMBERS[name], value)

    def on_stack(self, addr: int) -> int:
        """Return the word at an address of the stack that ``begin`` has given."""
        word = self._uc.mem_read(_SLOTS + addr % (_PAGES * _PAGE), 8)
        return int.from_bytes(word, "little")

    def _run(self, addr: int, size: int, steps: int, state: int) -> Outcome:
        context, data = self._states[state]
        self._uc.context_restore(context)
        self._uc.mem_write(_POOL, data)
        self._faults.clear()
        at = addr
        for _ in range(steps):
            at = self._step(at)
            if self._faults or not addr <= at < addr + size:
                break
        left = bytes(self._uc.mem_read(_POOL, _PAGES * _PAGE))
        scalars, vectors = (self._uc.reg_read_batch(names) for names in (_SCALARS, _VECTORS))
        return Outcome((*scalars, *vectors), left, at, ", ".join(self._faults))

    def _context(self, state: State) -> Any:
        self._uc.reg_write_batch([(_NUMBERS[name], v) for name, v in state.registers.items()])
        return self._uc.context_save()

    def _step(self, at: int) -> int:
        try:
            self._uc.emu_start(at, 0, count=1)
        except UcError as e:
            self._faults.append(str(e))
        return self._uc.reg_read(_NUMBERS["RIP"])

    def _note(self, uc: object, number: int, data: object) -> None:
        del uc, data
        self._faults.append(f"exception {number}")

    def _place(self, phys: int, addr: int, code: bytes) -> None:
        # Neighbours need not lie together: after the last page comes the first one.
        at, stop = addr, addr + len(code)
        while at < stop:
            size = min(_PAGE - at % _PAGE, stop - at)
            piece = code[at - addr : at - addr + size]
            self._uc.mem_write(phys + at // _PAGE % _PAGES * _PAGE + at % _PAGE, piece)
            at += size
        self._uc.ctl_remove_cache(addr, addr + len(code))

    def _map(self, start: int, stop: int) -> None:
        places = (_TABLES + i * _PAGE for i in range(9))
        root, low3, low2, low1, top3, text2, text1, slot2, slot1 = places
        text = range(start >> _LARGE & _TOP, (stop - 1 >> _LARGE & _TOP) + 1)
        self._table(low1, [_POOL + i % _PAGES * _PAGE for i in range(_WORDS)])
        self._table(text1, [_TEXT + i % _PAGES * _PAGE for i in range(_WORDS)])
        self._table(slot1, [_SLOTS + i % _PAGES * _PAGE for i in range(_WORDS)])
        self._table(low2, [low1] * _WORDS)
        self._table(text2, [text1 if i in text else low1 for i in range(_WORDS)])
        self._table(slot2, [slot1, *[low1] * _TOP])
        self._table(low3, [low2] * _WORDS)
        self._table(top3, [*[low2] * (_TOP - 1), text2, slot2])
        self._table(root, [*[low3] * _TOP, top3])
        for name, value in (("CR3", root), ("CR4", _CR4), ("CR0", _CR0)):
            self._uc.reg_write(_NUMBERS[name], value)

    def _table(self, place: int, entries: Sequence[int]) -> None:
        words = [entry | _RIGHTS for entry in entries]
        self._uc.mem_write(place, struct.pack(f"<{_WORDS}Q", *words))
