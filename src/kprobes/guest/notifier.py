"""Breakpoints of ours in a guest: its own exception chain is told whose they are."""

from kprobes.arch.arch import PREAMBLE_SIZE
from kprobes.codegen.breakpoint import (
    BLOCK_MASK,
    BLOCK_TABLE,
    EMPTY_TABLE,
    PRIORITY,
    compile_notifier,
)
from kprobes.errors import TargetError
from kprobes.guest.allocations import Allocation, AllocationLog, Kind
from kprobes.guest.arena import NOTIFIER_SIZE, Arena
from kprobes.guest.guest import Guest, remembering, write_code
from kprobes.guest.inject import CallInjector
from kprobes.guest.kernel_abi import first_of
from kprobes.image.tables import read_function
from kprobes.units import Addr

_CALLBACK, _NEXT, _PRIORITY = 0, 8, 16
_INT = 0xFFFF_FFFF


class BreakpointNotifier:
    """Our callback in a guest's exception chain: registered once, whatever is armed later.

    The guest must be stopped for all of it.
    """

    def __init__(self, guest: Guest, arena: Arena, allocations: AllocationLog) -> None:
        self._guest = guest
        self._arena = arena
        self._allocations = allocations

    @property
    def is_registered(self) -> bool:
        """Whether the guest calls us."""
        return self._allocations.has_notifier

    def register(self) -> None:
        """Have the guest call us; it runs meanwhile.

        Raises:
            TargetError: it has no such chain, refuses, or no task could make the call.
        """
        guest, block = self._guest, self._arena.block
        register = first_of(guest.kernel, "register_die_notifier")
        self._load()
        guest.memory.set_u64(block + _CALLBACK, self._arena.notifier)
        guest.memory.set_u64(block + _NEXT, 0)
        guest.memory.set_u64(block + _PRIORITY, PRIORITY)
        allocation = Allocation(kind=Kind.NOTIFIER, addr=block, size=0)
        injector = CallInjector(guest.stub, guest.memory, guest.kernel, self._allocations)
        with injector.task() as task:
            if task.call(register, block, allocates=allocation) & _INT:
                raise TargetError("the guest refused to tell us of breakpoints")

    def set_table(self, table: Addr, mask: int) -> None:
        """Have breakpoints led by a table of detours."""
        memory, block = self._guest.memory, self._arena.block
        memory.set_u64(block + BLOCK_TABLE, table)
        memory.set_u64(block + BLOCK_MASK, mask)

    def _load(self) -> None:
        guest = self._guest
        code = compile_notifier(guest.arch)
        room = NOTIFIER_SIZE - PREAMBLE_SIZE - len(EMPTY_TABLE)
        if len(code) > room:
            raise ValueError(f"the callback has {len(code)} bytes, and room for {room}")
        place = self._arena.notifier
        whole = self._preamble() + code.ljust(room) + EMPTY_TABLE
        write_code(guest.stub, remembering(guest.memory), [(Addr(place - PREAMBLE_SIZE), whole)])
        self.set_table(Addr(place + room), 0)

    def _preamble(self) -> bytes:
        # A kernel that checks whom it calls through a pointer tells what it looks for.
        guest, trap = self._guest, self._guest.arch.patch.trap
        if trap is not None:
            for symbol in filter(None, map(guest.kernel.symbols.find, trap.callers)):
                found = trap.preamble(*read_function(guest.memory, guest.kernel, symbol.addr))
                if found is not None:
                    return found
        return bytes(PREAMBLE_SIZE)
