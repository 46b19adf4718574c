"""A guest as it would be if nothing of ours were in it: for whoever looks beside us.

Its text is as it was compiled. Calls that a return probe has taken over return to their callers.
A vCPU is where it would be: one in code of ours is led to its end before anybody looks.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np

from kprobes.arch.registry import machine
from kprobes.errors import MemoryFault
from kprobes.guest.allocations import AllocationLog
from kprobes.guest.arm import TextPatcher
from kprobes.guest.guest import Guest
from kprobes.guest.stacks import caller_at, find_caller
from kprobes.guest.text import CleanText
from kprobes.model.plan import LONGEST_PATCH, InstanceTable, Patch
from kprobes.transport.stub import Stub
from kprobes.units import Addr

_WORD = 8
_MOST_STEPS = 20_000
"""Of one vCPU, to the end of a hit: some 2 s. One whose handler waits for Python may need more."""
_NEAR = 2 * _WORD
"""By how much an instruction may change the stack pointer that is run in the place of its own."""


class _VcpuMemory:
    # Virtual memory as one vCPU sees it. Implements ``ports.Memory``.

    def __init__(self, stub: Stub) -> None:
        self.cpu: int | None = None
        self._stub = stub

    def read(self, addr: int, size: int) -> bytes:
        return self._stub.read(addr, size, cpu=self.cpu)


class GuestView:
    """What a debugger beside us sees of a guest that stands still."""

    def __init__(
        self,
        guest: Callable[[], Guest],
        allocations: AllocationLog,
        patcher: Callable[[], TextPatcher | None],
    ) -> None:
        """Look at nothing yet.

        Args:
            guest: returns what is probed, as it is known now.
            allocations: of ours in it.
            patcher: returns what patches its text, if anything does.
        """
        self._read_guest, self._allocations, self._patcher = guest, allocations, patcher
        self._vcpu = _VcpuMemory(self._guest.stub)
        self._text = CleanText(self._vcpu, self._patches)
        arch = machine(self._guest.kernel.arch)
        self._pc, self._sp = arch.inject_ops.pc, arch.task.sp
        self._link = self._guest.arch.code.call.link
        # Of each vCPU: what was shown in its link register, and what is there.
        self._shown: dict[int, tuple[int, int]] = {}

    @property
    def trampolines(self) -> set[Addr]:
        """Where calls return to that are taken over."""
        return {each.trampoline for each in self._instances if each.trampoline}

    def read(self, addr: int, size: int, *, cpu: int | None) -> bytes:
        """Return what a vCPU would see, or raise MemoryFault.

        Args:
            addr: virtual.
            size: bytes.
            cpu: the vCPU; None for the one that stopped, or was used last.
        """
        self._vcpu.cpu = cpu
        data = self._text.read(addr, size)
        return self._with_callers(addr, data) if self._instances else data

    def write(self, addr: int, data: bytes, *, cpu: int | None) -> None:
        """Write to memory as a vCPU sees it; a return address that was shown stays what it is.

        Args:
            addr: virtual.
            data: what is written.
            cpu: the vCPU, as for ``read``.
        """
        written = data
        if self._instances:
            self._vcpu.cpu = cpu
            held = self._vcpu.read(addr, len(data))
            written = _unshown(addr, data, held, self._with_callers(addr, held))
        self._guest.stub.write(addr, written, cpu=cpu)

    def is_ours(self, addr: int, size: int) -> bool:
        """Whether bytes at an address are replaced by ours."""
        return any(addr < patch.addr + len(patch.new) for patch in self._before(addr + size))

    def is_inside_patch(self, addr: int) -> bool:
        """Whether an address is in the middle of bytes that are replaced by ours."""
        return any(addr < patch.addr + len(patch.new) for patch in self._before(addr))

    def link_of(self, cpu: int) -> tuple[str, int] | None:
        """Return the link register and what it would hold, where that is not what it holds."""
        if self._link is None or not self._instances:
            return None
        registers = self._guest.stub.registers(cpu)
        held = registers[self._link]
        shown = self._caller(registers[self._sp], held)
        self._shown[cpu] = shown, held
        return (self._link, shown) if shown != held else None

    def held_link(self, cpu: int, value: int) -> int:
        """Return what to write to a vCPU's link register when that is to be as it was shown."""
        shown, held = self._shown.get(cpu, (value, value))
        return held if value == shown else value

    def leave_own_code(self) -> None:
        """Have every vCPU run on that is in code of ours, until it is not."""
        self._shown.clear()
        stub = self._guest.stub
        for cpu in stub.ids():
            for _ in range(_MOST_STEPS):
                if not self._is_own_code(stub.registers(cpu)[self._pc]):
                    break
                stub.step(cpu)

    def step(self, cpu: int) -> bool:
        """Make a step where a vCPU stands at bytes that are replaced by ours; return whether.

        It is behind those then: what they stand for was done, and so was what is done at a hit.
        """
        stub = self._guest.stub
        before = stub.registers(cpu)
        if not self.is_ours(before[self._pc], 1):
            return False
        function = self._guest.kernel.symbols.at(before[self._pc])
        for _ in range(_MOST_STEPS):
            stub.step(cpu)
            now = stub.registers(cpu)
            # Another vCPU's stop at a breakpoint that was there may come instead.
            if now[self._pc] == before[self._pc] or self._is_own_code(now[self._pc]):
                continue
            if function is not None and self._guest.kernel.symbols.at(now[self._pc]) == function:
                break
            # A breakpoint's exception is entered with the stack as it was.
            is_near = abs(now[self._sp] - before[self._sp]) <= _NEAR
            if is_near and not self._is_exceptions(now[self._pc]):
                break
        return True

    def caller_of(self, slot: Addr, held: Addr) -> Addr:
        """Return where a call came from, by its slot and what its return address is now."""
        return find_caller(self._guest.memory, self._instances, slot, held)

    @property
    def _guest(self) -> Guest:
        return self._read_guest()

    @property
    def _instances(self) -> Sequence[InstanceTable]:
        patcher = self._patcher()
        return () if patcher is None else patcher.linker.instances

    def _patches(self) -> tuple[Patch, ...]:
        patcher = self._patcher()
        return () if patcher is None else patcher.patches

    def _before(self, addr: int) -> Sequence[Patch]:
        # Those that begin before an address, and may reach it.
        patches, begin = self._patches(), addr - LONGEST_PATCH
        low, high = (bisect_left(patches, each, key=lambda p: p.addr) for each in (begin, addr))
        return patches[low:high]

    def _is_own_code(self, addr: int) -> bool:
        return any(start <= addr < stop for start, stop in self._allocations.code)

    def _is_exceptions(self, addr: int) -> bool:
        find = self._guest.kernel.symbols.find
        first, last = find("__entry_text_start"), find("__entry_text_end")
        return first is not None and last is not None and first.addr <= addr < last.addr

    def _caller(self, place: int, held: int) -> int:
        # Return addresses may be signed.
        plain = self._guest.arch.returns.stripped(held)
        with suppress(MemoryFault):
            found = caller_at(self._guest.memory, self._instances, Addr(place), Addr(plain))
            return held if found == plain else found
        return held

    def _with_callers(self, addr: int, data: bytes) -> bytes:
        skipped = -addr % _WORD
        whole = data[skipped : len(data) - (addr + len(data)) % _WORD]
        words = np.frombuffer(whole, np.uint64)
        plain = words | np.uint64(self._guest.arch.returns.stripped(0))
        is_own = np.zeros(len(words), np.bool_)
        for start, stop in self._allocations.code:
            is_own |= (plain >= start) & (plain < stop)
        found = bytearray(data)
        for index in np.flatnonzero(is_own).tolist():
            at = skipped + _WORD * index
            caller = self._caller(addr + at, int(words[index]))
            found[at : at + _WORD] = caller.to_bytes(_WORD, "little")
        return bytes(found)


def _unshown(addr: int, data: bytes, held: bytes, shown: bytes) -> bytes:
    # What is to be written where something else is shown than is held, and that comes back.
    written = bytearray(data)
    for at in range(-addr % _WORD, len(data) - _WORD + 1, _WORD):
        word = slice(at, at + _WORD)
        if held[word] != shown[word] == data[word]:
            written[word] = held[word]
    return bytes(written)
