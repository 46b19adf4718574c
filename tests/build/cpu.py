"""A bare CPU for tests, x86-64 or arm64: Unicorn with typed doors, and every store noted."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from msgspec import Struct
from unicorn import arm64_const as arm64
from unicorn import unicorn_const as const
from unicorn import x86_const as x86
from unicorn.unicorn import Uc

from kprobes.units import U64

GPRS = (
    *("r15", "r14", "r13", "r12", "bp", "bx", "r11", "r10"),
    *("r9", "r8", "ax", "cx", "dx", "si", "di"),
)
_CONSTANTS: Mapping[str, int] = vars(x86)
_REGISTERS: dict[str, int] = {
    name: _CONSTANTS[f"UC_X86_REG_{name.upper() if name[0] == 'r' else f'R{name.upper()}'}"]
    for name in (*GPRS, "sp", "ip")
} | {"flags": x86.UC_X86_REG_EFLAGS}

ARM64_GPRS = tuple(f"x{n}" for n in range(31))
_ARM64_CONSTANTS: Mapping[str, int] = vars(arm64)
_ARM64_REGISTERS: dict[str, int] = {
    name: _ARM64_CONSTANTS[f"UC_ARM64_REG_{name.upper()}"]
    for name in (*ARM64_GPRS, "sp", "pc", "pstate", "sp_el0", "tpidr_el1", "ttbr0_el1")
}


class Write(Struct, frozen=True):
    """One store."""

    addr: int
    size: int
    value: int


class Kind(Struct, frozen=True):
    """One architecture's CPU, as Unicorn has it.

    Attributes:
        shown: what ``registers`` returns.
        pc: the instruction pointer.
    """

    numbers: tuple[int, int]
    model: int | None
    registers: Mapping[str, int]
    shown: tuple[str, ...]
    pc: str


X86 = Kind((const.UC_ARCH_X86, const.UC_MODE_64), None, _REGISTERS, (*GPRS, "sp", "flags"), "ip")
ARM64 = Kind(
    (const.UC_ARCH_ARM64, const.UC_MODE_ARM),
    arm64.UC_CPU_ARM64_MAX,
    _ARM64_REGISTERS,
    (*ARM64_GPRS, "sp", "pstate"),
    "pc",
)


class Cpu:
    """One CPU and its memory, which is mapped one to one.

    Attributes:
        writes: every store since the list was emptied, in order.
        trace: address of every instruction since the list was emptied, where it is watched.
        actions: what is to be done before the n-th instruction of the trace.
    """

    def __init__(
        self, regions: Iterable[tuple[int, int]], exits: Iterable[int], kind: Kind = X86
    ) -> None:
        """Map (address, size) pairs; running ends at any of the exits."""
        self.writes: list[Write] = []
        self.trace: list[int] = []
        self.actions: dict[int, Callable[[], None]] = {}
        self._due: Callable[[], None] | None = None
        self._kind = kind
        self._uc: Any = Uc(*kind.numbers)
        if kind.model is not None:
            self._uc.ctl_set_cpu_model(kind.model)
        self._uc.ctl_set_tlb_mode(const.UC_TLB_VIRTUAL)
        self._regions = tuple(regions)
        for addr, size in self._regions:
            self._uc.mem_map(addr, size)
        self._uc.hook_add(const.UC_HOOK_MEM_WRITE, self._note)
        self._exits = set(exits)
        self._uc.ctl_exits_enabled(True)

    def add_exit(self, addr: int) -> None:
        """End running there too; nothing may have run there yet."""
        self._exits.add(addr)
        self._uc.ctl_set_exits(sorted(self._exits))

    def watch(self, start: int, stop: int) -> None:
        """Trace the instructions in a range from now on, which costs time."""
        self._uc.hook_add(const.UC_HOOK_CODE, self._step, None, start, stop - 1)

    def run(self, pc: int) -> int:
        """Run from an address to an exit, and return which one it is."""
        self._uc.emu_start(pc, 0)
        while self._due is not None:
            action, self._due = self._due, None
            action()
            self._uc.emu_start(self.register(self._kind.pc), 0)
        return self.register(self._kind.pc)

    def aside(self, action: Callable[[], None]) -> None:
        """Do something else on this CPU and give every register back."""
        saved = self._uc.context_save()
        action()
        self._uc.context_restore(saved)

    def register(self, name: str) -> int:
        return self._uc.reg_read(self._kind.registers[name])

    def registers(self) -> dict[str, int]:
        return {name: self.register(name) for name in self._kind.shown}

    def set_registers(self, values: Mapping[str, int]) -> None:
        for name, value in values.items():
            self._uc.reg_write(self._kind.registers[name], value & U64)

    def read_system(self, place: tuple[int, int, int, int, int]) -> int:
        """Return an arm64 system register: CRn, CRm, op0, op1, op2."""
        return self._uc.reg_read(arm64.UC_ARM64_REG_CP_REG, place)

    def write_system(self, place: tuple[int, int, int, int, int], value: int) -> None:
        self._uc.reg_write(arm64.UC_ARM64_REG_CP_REG, (*place, value))

    def set_gs(self, base: int) -> None:
        self._uc.reg_write(x86.UC_X86_REG_GS_BASE, base)

    def read(self, addr: int, size: int) -> bytes:
        return bytes(self._uc.mem_read(addr & U64, size))

    def write(self, addr: int, data: bytes) -> None:
        """Write from outside."""
        self._uc.mem_write(addr & U64, data)

    def forget_code(self, addr: int, size: int) -> None:
        """Take what is there for new: it was translated before it was patched."""
        self._uc.ctl_remove_cache(addr & U64, (addr & U64) + size)

    def store(self, addr: int, data: bytes) -> None:
        """Write as code would: it is noted."""
        self.write(addr, data)
        self.writes.append(Write(addr, len(data), int.from_bytes(data, "little")))

    def extent(self, addr: int, size: int) -> int:
        """Return how many of these bytes can be read before the first that cannot."""
        for start, length in self._regions:
            if start <= addr < start + length:
                return min(size, start + length - addr)
        return 0

    def number(self, addr: int, size: int = 8) -> int:
        return int.from_bytes(self.read(addr, size), "little")

    def set_number(self, addr: int, value: int, size: int = 8) -> None:
        self.write(addr, value.to_bytes(size, "little"))

    def _step(self, _uc: object, addr: int, _size: int, _: object) -> None:
        self._due = self.actions.pop(len(self.trace), None)
        if self._due is None:
            self.trace.append(addr & U64)
        else:
            # Before this instruction, which is looked at again when it goes on.
            self._uc.emu_stop()

    def _note(self, _uc: object, _access: int, addr: int, size: int, value: int, _: object) -> None:
        self.writes.append(Write(addr & U64, size, value & (1 << 8 * size) - 1))
