"""Backtraces of a guest's vCPUs and tasks, by words on their stacks: for one that hangs."""

import numpy as np

from kprobes.errors import KprobesError, MemoryFault
from kprobes.guest.guest import Guest, GuestMemory, remembering
from kprobes.guest.open import attached
from kprobes.guest.stacks import live_stacks
from kprobes.transport.qemu import Machine
from kprobes.units import Addr

_DEEPEST = 12
_STACK = 4096
_POINTERS = "rsp", "sp"


def backtraces(machine: Machine) -> str:
    """Return a line per vCPU, and one per task that differs from others; or why there is none."""
    try:
        with attached(str(machine.stub_address)) as guest, guest.stub.paused():
            memory = remembering(guest.memory)
            lines = [f"vCPU {cpu}: {_vcpu(guest, memory, cpu)}" for cpu in guest.stub.ids()]
            stacks = (_names(guest, memory, *stack) for stack in live_stacks(guest, memory))
            return "\n".join([*lines, *(f"task: {names}" for names in dict.fromkeys(stacks))])
    except KprobesError as error:
        return str(error)


def _vcpu(guest: Guest, memory: GuestMemory, cpu: int) -> str:
    found = guest.stub.registers(cpu)
    pointer = next(found[name] for name in _POINTERS if name in found)
    at = _name(guest, found[guest.arch.machine.task.pc])
    stop = pointer // _STACK * _STACK + _STACK
    return f"{at} <- {_names(guest, memory, Addr(pointer), Addr(stop))}"


def _names(guest: Guest, memory: GuestMemory, start: Addr, stop: Addr) -> str:
    first = (start + 7) // 8 * 8
    try:
        words = np.frombuffer(memory.read(first, (stop - first) // 8 * 8), np.uint64)
    except MemoryFault:
        return "user space"
    low, high = guest.kernel.text
    # arm64's return addresses are signed.
    words = words | np.uint64(guest.arch.machine.paging.signature(guest.tables))
    return " <- ".join(
        [_name(guest, word) for word in words.tolist() if low <= word < high][:_DEEPEST]
    )


def _name(guest: Guest, addr: int) -> str:
    symbol = guest.kernel.symbols.at(addr)
    return symbol.place(addr) if symbol is not None else f"{addr:#x}"
