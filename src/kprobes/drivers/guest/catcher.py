"""Breakpoints of ours in a guest: its own exception chain is told whose they are."""

from kprobes.codegen.catcher import BLOCK_MASK, BLOCK_TABLE, EMPTY_TABLE, PRIORITY, compile_catcher
from kprobes.drivers.guest.arena import CATCHER_SIZE, Arena
from kprobes.drivers.guest.borrow import Borrower
from kprobes.drivers.guest.guest import Guest
from kprobes.drivers.guest.layout import first_of
from kprobes.drivers.guest.memory import write_code
from kprobes.drivers.loans import Kind, Ledger, Loan
from kprobes.errors import TargetError
from kprobes.units import Addr

_CALLBACK, _NEXT, _PRIORITY = 0, 8, 16
_INT = 0xFFFF_FFFF


class Catcher:
    """Our callback in a guest's exception chain: registered once, whatever is armed later.

    The guest must be stopped for all of it.
    """

    def __init__(self, guest: Guest, arena: Arena, ledger: Ledger) -> None:
        self._guest = guest
        self._arena = arena
        self._ledger = ledger

    @property
    def is_registered(self) -> bool:
        """Whether the guest calls us."""
        return any(loan.kind is Kind.CATCHER for loan in self._ledger.loans)

    def register(self) -> None:
        """Have the guest call us; it runs meanwhile.

        Raises:
            TargetError: it has no such chain, refuses, or no task could be borrowed.
        """
        guest, block = self._guest, self._arena.block
        register = first_of(guest.kernel, "register_die_notifier")
        self._load()
        guest.memory.set_u64(block + _CALLBACK, self._arena.catcher)
        guest.memory.set_u64(block + _NEXT, 0)
        guest.memory.set_u64(block + _PRIORITY, PRIORITY)
        loan = Loan(kind=Kind.CATCHER, addr=block, size=0)
        borrower = Borrower(guest.stub, guest.memory, guest.kernel, self._ledger)
        with borrower.task() as task:
            if task.call(register, block, lends=loan) & _INT:
                raise TargetError("the guest refused to tell us of breakpoints")

    def lead(self, table: Addr, mask: int) -> None:
        """Have breakpoints led by a table of detours."""
        memory, block = self._guest.memory, self._arena.block
        memory.set_u64(block + BLOCK_TABLE, table)
        memory.set_u64(block + BLOCK_MASK, mask)

    def _load(self) -> None:
        code = compile_catcher(self._guest.arch)
        room = CATCHER_SIZE - len(EMPTY_TABLE)
        if len(code) > room:
            raise ValueError(f"the callback has {len(code)} bytes, and room for {room}")
        place = self._arena.catcher
        write_code(self._guest.stub, self._guest.memory, place, code.ljust(room) + EMPTY_TABLE)
        self.lead(Addr(place + room), 0)
