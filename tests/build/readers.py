"""The guest's functions that probes call, for the emulated CPU: readers as in mm/maccess.c."""

import struct
from collections.abc import Callable, Sequence
from random import Random

from msgspec import Struct

from kprobes.model.abi import GuestAbi
from kprobes.units import U64
from tests.build.cpu import Cpu

EFAULT, ERANGE = -14, -34


class Calls(Struct, frozen=True):
    """How functions are called.

    Attributes:
        arguments: where the first ones are.
        changed: registers that a function may change, that of the result last.
        flags: the flags register, and what of it.
        link: where the return address is; on the stack where there is no register.
        words: of pt_regs, and which of them is the instruction pointer.
    """

    arguments: tuple[str, ...]
    changed: tuple[str, ...]
    flags: tuple[str, int]
    link: str | None
    words: tuple[int, int]


X86 = Calls(
    ("di", "si", "dx", "cx"),
    ("cx", "dx", "si", "di", "r8", "r9", "r10", "r11", "ax"),
    ("flags", 0x8D5),
    None,
    (21, 16),
)
ARM64 = Calls(
    ("x0", "x1", "x2", "x3"),
    (*(f"x{n}" for n in range(1, 19)), "x0"),
    ("pstate", 0xF << 28),
    "x30",
    (34, 32),
)


class Readers:
    """The readers, the unwinder and the clock; they change every register that a C function may.

    Attributes:
        calls: (name, source, size) of every call.
        has_old_quirks: whether they are those of before v6.2: a string that faults puts a NUL in
            front of where it stopped, and an empty user string has length 0.
        inside: called in the middle of every call.
        stack: what the unwinder finds, after where the hit is.
        walks: of every call of it the words of pt_regs, how many addresses there is room for, and
            how many to skip.
        time: what the guest's clock said last.
    """

    def __init__(
        self,
        cpu: Cpu,
        abi: GuestAbi,
        inside: Callable[[], None],
        seed: int,
        how: Calls = X86,
    ) -> None:
        self._how = how
        self.calls: list[tuple[str, int, int]] = []
        self.has_old_quirks = False
        self.inside = inside
        self._cpu = cpu
        self._random = Random(seed)
        self._task_size = abi.task_size
        readers = abi.readers
        self._names = {
            int(readers.copy_kernel): "copy_kernel",
            int(readers.copy_user): "copy_user",
            int(readers.string_kernel): "string_kernel",
            int(readers.string_user): "string_user",
        }
        self._walker, self._user_walker = int(readers.walk_stack), int(readers.walk_user_stack)
        self.stack: Sequence[int] = range(0xFFFF_FFFF_8100_0000, 0xFFFF_FFFF_8100_0070, 16)
        self.walks: list[tuple[tuple[int, ...], int, int]] = []
        self.user_stack: Sequence[int] = range(0x40_1000, 0x40_1030, 16)
        self._clock = abi.clock
        self.time = 1000

    def __contains__(self, pc: int) -> bool:
        return pc in self._names or pc in (self._clock, self._walker, self._user_walker)

    def run(self, pc: int) -> int:
        """Do what the reader at an address does, and return where its caller goes on."""
        if pc == self._clock:
            self.time += 1
            return self._return(self.time)
        cpu = self._cpu
        assert cpu.register("sp") % (16 if self._how.link else 8) == 0
        given = [cpu.register(register) for register in self._how.arguments]
        if pc == self._walker:
            return self._walk(*given)
        if pc == self._user_walker:
            return self._walk_user(*given[:2])
        name, (target, source, size, _) = self._names[pc], given
        self.calls.append((name, source, size))
        cpu.aside(self.inside)
        return self._return(self._result(name, target, source, size))

    def _walk(self, regs: int, target: int, size: int, skipped: int) -> int:
        # stack_trace_save_regs: the upper half of what it returns is whatever it is.
        count, place = self._how.words
        words = struct.unpack(f"<{count}Q", self._cpu.read(regs, 8 * count))
        self.walks.append((words, size, skipped))
        self._cpu.aside(self.inside)
        found = [words[place], *self.stack][skipped : skipped + size]
        self._cpu.store(target, struct.pack(f"<{len(found)}Q", *found))
        return self._return(self._random.getrandbits(32) << 32 | len(found))

    def _walk_user(self, target: int, size: int) -> int:
        # stack_trace_save_user.
        self._cpu.aside(self.inside)
        found = self.user_stack[:size]
        self._cpu.store(target, struct.pack(f"<{len(found)}Q", *found))
        return self._return(self._random.getrandbits(32) << 32 | len(found))

    def _result(self, name: str, target: int, source: int, size: int) -> int:
        is_user = name.endswith("user")
        refused = self._refuse(source, is_user=is_user)
        if refused is not None:
            return refused
        if size == 0:
            return self._nothing(target, is_user=is_user)
        if name.startswith("copy"):
            return self._copy(target, source, size)
        result = self._string(target, source, size)
        return self._user_length(result, target, size) if is_user else result

    def _refuse(self, source: int, *, is_user: bool) -> int | None:
        # access_ok, or copy_from_kernel_nofault_allowed.
        if is_user:
            return None if source < self._task_size else EFAULT
        bits = (self._task_size - 1).bit_length()
        is_canonical = source >> bits in (0, (1 << 64 - bits) - 1)
        return None if source >= self._task_size + 4096 and is_canonical else ERANGE

    def _nothing(self, target: int, *, is_user: bool) -> int:
        if is_user:
            # strncpy_from_user_nofault ends even a string without room: dst[ret - 1].
            self._cpu.store(target - 1, b"\0")
        return 0

    def _copy(self, target: int, source: int, size: int) -> int:
        have = self._cpu.extent(source, size)
        self._cpu.store(target, self._cpu.read(source, have))
        return 0 if have == size else EFAULT

    def _string(self, target: int, source: int, size: int) -> int:
        have = self._cpu.extent(source, size)
        data = self._cpu.read(source, have)
        end = data.find(b"\0") + 1
        if end or have == size:
            self._cpu.store(target, data[:end] if end else data[:-1] + b"\0")
            return end or size
        self._cpu.store(target, data)
        # 8678ea06852c ("maccess: Fix writing offset in case of fault in
        # strncpy_from_kernel_nofault()") (v6.2): it was dst[-1] before.
        self._cpu.store(target + have - 1 if self.has_old_quirks else target, b"\0")
        return EFAULT

    def _user_length(self, result: int, target: int, size: int) -> int:
        if result == 1 and self.has_old_quirks:
            return 0
        # strncpy_from_user stores whole words: garbage after the NUL, but never after the room.
        if result > 0 and -result % 8 <= size - result:
            self._cpu.store(target + result, b"\xa5" * (-result % 8))
        return result

    def _return(self, result: int) -> int:
        cpu, random, how = self._cpu, self._random, self._how
        name, arithmetic = how.flags
        flags = cpu.register(name) ^ random.getrandbits(32) & arithmetic
        stack = cpu.register("sp")
        cpu.set_registers({name: random.getrandbits(64) for name in how.changed})
        cpu.set_registers({how.changed[-1]: result & U64, name: flags})
        if how.link is not None:
            return cpu.register(how.link)
        cpu.set_registers({"sp": stack + 8})
        return cpu.number(stack)
