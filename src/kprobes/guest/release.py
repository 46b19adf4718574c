"""Giving back what a guest has lent, by calling its own functions.

Memory of the guest for the probes' code: executable, and never writable at the same time.

What allocates it is the architecture's to know. Memory arrives writable and not executable; on x86
from a cache of large pages, 2e45474ab14f ("execmem: add support for cache of large ROX pages")
(v6.13), executable and read-only. Our code is written from outside, through physical memory.
"""

import threading
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import assert_never

from kprobes.arch.machine import Called, Wanted
from kprobes.errors import TargetError
from kprobes.guest.allocations import Kind, Ledger, Loan
from kprobes.guest.guest import Guest
from kprobes.guest.inject import Borrower, Task
from kprobes.guest.kernel_abi import first_of
from kprobes.guest.stacks import awaited, give_callers_back, stopped_outside
from kprobes.model.kernel import Kernel
from kprobes.model.plan import Frames
from kprobes.ports import Text
from kprobes.units import Addr

_INT = 0xFFFF_FFFF
_SEAL = ("set_memory_ro", "set_memory_x")
_UNSEAL = ("set_memory_nx", "set_memory_rw")


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeMemory:
    """Executable memory.

    Attributes:
        addr, size: where, in bytes.
    """

    addr: Addr
    size: int

    @property
    def stop(self) -> Addr:
        """The first address behind it."""
        return Addr(self.addr + self.size)


def allocate_code(task: Task, kernel: Kernel, size: int, *, like: Addr) -> CodeMemory:
    """Allocate executable memory within reach of the kernel's text.

    Args:
        task: that allocates it.
        kernel: that runs there.
        size: bytes.
        like: memory that it has allocated for data.

    Raises:
        TargetError: the guest has none left, or refuses; the ledger tells what it has lent.
    """
    wanted = Wanted(size=size, like=like, caller=task.landing.place)
    found = _allocate(task, kernel, size, task.landing.facts.code(task.memory, kernel, wanted))
    if found is None:
        raise TargetError("the guest has no memory left for the probes' code")
    return found


def allocate_module_code(task: Task, kernel: Kernel, size: int) -> CodeMemory | None:
    """Allocate executable memory within reach of modules.

    Returns:
        It, or None: where the other is in reach of them, without modules, and where none is left:
        most probes are not of modules.

    Raises:
        TargetError: the guest refuses to make it executable; the ledger tells what it has lent.
    """
    find = task.landing.facts.module_code
    called = find(kernel, size) if find is not None else None
    return None if called is None else _allocate(task, kernel, size, called)


def unseal(task: Task, kernel: Kernel, seal: Loan) -> None:
    """Make the pages of code writable again and nothing more, as they arrived.

    They have another mapping, which was made read-only too: whoever gets them next would fault.
    """
    pages = seal.size // _page_size(task)
    task.call(first_of(kernel, _UNSEAL[0]), seal.addr, pages)
    task.call(first_of(kernel, _UNSEAL[1]), seal.addr, pages, returns=seal)


def free_code(task: Task, kernel: Kernel, code: Loan) -> None:
    """Give unsealed code memory back. Nothing may run or return into it any more."""
    task.call(first_of(kernel, *task.landing.facts.free_code), code.addr, returns=code)


def _allocate(task: Task, kernel: Kernel, size: int, called: Called) -> CodeMemory | None:
    loan = Loan(kind=Kind.CODE, addr=0, size=size)
    addr = Addr(task.call(called.function, *called.args, lends=loan))
    if addr == 0:
        return None
    (first, *_) = task.memory.tables.mapped_runs(addr, addr + _page_size(task))
    if first.is_writable or not first.is_executable:
        _seal(task, kernel, Loan(kind=Kind.SEAL, addr=addr, size=size))
    return CodeMemory(addr=addr, size=size)


def _seal(task: Task, kernel: Kernel, seal: Loan) -> None:
    pages = seal.size // _page_size(task)
    # They return an int: the upper half of the register means nothing.
    read_only = task.call(first_of(kernel, _SEAL[0]), seal.addr, pages, lends=seal) & _INT
    if read_only or task.call(first_of(kernel, _SEAL[1]), seal.addr, pages) & _INT:
        raise TargetError("the guest refused to make the probes' code executable")


def _page_size(task: Task) -> int:
    return task.landing.facts.page_size(task.memory)


_PATIENCE_S = 2.0
_FOR_EXIT = "waiting until no task of the guest is inside the probes' code, which is freed then"
_FOR_TASK = (
    "the probes are gone; waiting for a task of the guest that can free their memory: does a CPU "
    "of the guest hang? A second Ctrl-C does not wait"
)


def _say_nothing(words: str) -> None:
    del words


def settle(guest: Guest, ledger: Ledger, tell: Callable[[str], None] = _say_nothing) -> None:
    """Give back all that a guest has lent, as soon as nothing runs in it.

    The guest may run, and runs on. No probe may be armed.

    Args:
        guest: that has lent it.
        ledger: what it has lent.
        tell: is told what is waited for, when it takes a while.

    Raises:
        TargetError: a task sleeps in the code, or none could be borrowed; the ledger tells what
            is still lent.
    """
    if ledger.is_settled:
        return
    otherwise = f"its memory ({ledger.memory // 1024:,} KiB) cannot be given back yet"
    if guest.stub.stands():
        help_ = "let it go on (`cont` in its monitor), then use `kprobe restore`"
        raise TargetError(f"the guest is paused: {otherwise}; {help_}")
    with telling(tell, _FOR_EXIT):
        await_exit(guest, ledger, otherwise=otherwise)
    ledger.keep_frames(())
    borrower = Borrower(guest.stub, guest.memory, guest.kernel, ledger)
    with telling(tell, _FOR_TASK), guest.stub.paused(), borrower.task() as task:
        give_back(task, guest.kernel)


@contextmanager
def telling(tell: Callable[[str], None], words: str) -> Generator[None]:
    """Tell somebody what is waited for inside, when it takes a while."""
    timer = threading.Timer(_PATIENCE_S, tell, [words])
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def await_exit(guest: Guest, ledger: Ledger, *, otherwise: str) -> None:
    """Return when nobody is inside the probes' code, or will be led there.

    Neither by a breakpoint that was there, nor by a return address on a stack.

    The guest may run, and runs on. No probe may be armed.

    Raises:
        TargetError: somebody stays for seconds; ``otherwise`` says what cannot be done then.
    """

    def nobody_comes() -> bool:
        ledger.check()
        # Who is in our code now may still lead a call to us: so each time anew.
        if guest.arch.returns.comes_back:
            give_callers_back(guest.memory, ledger.frames)
        return not awaited(guest, ledger.frames)

    in_use = list(code_in_use(guest, ledger))
    with stopped_outside(guest, in_use, otherwise=otherwise, also=nobody_comes):
        pass


def await_leaving(guest: Guest, ledger: Ledger, *, otherwise: str) -> list[Frames]:
    """Return the tables of calls that will still return to us, when nobody else is in our code.

    The guest may run, and runs on. No probe may be armed: from now on they only become fewer.

    Raises:
        TargetError: somebody stays for seconds; ``otherwise`` says what cannot be done then.
    """

    def give_back_what_can_be() -> bool:
        if guest.arch.returns.comes_back:
            give_callers_back(guest.memory, ledger.frames)
        return True

    in_use = list(code_in_use(guest, ledger))
    with stopped_outside(guest, in_use, otherwise=otherwise, also=give_back_what_can_be):
        return awaited(guest, ledger.frames)


def unused(ledger: Ledger, used: Collection[int]) -> list[Loan]:
    """Return the memory for code and data in which none of some addresses is."""
    pieces = (Kind.CODE, Kind.SEAL, Kind.DATA)
    return [
        loan
        for loan in ledger.loans
        if loan.kind in pieces and not any(0 <= addr - loan.addr < loan.size for addr in used)
    ]


def code_in_use(guest: Guest, ledger: Ledger) -> Iterator[Text]:
    """Yield the ranges of code that nobody may be inside when it is changed or given back."""
    # All at once: who is still on the way to our callback would be in the code a moment later.
    facts = guest.arch.patch.trap
    trap = None if facts is None else guest.kernel.symbols.find(facts.symbol)
    for loan in ledger.loans:
        if loan.kind is Kind.CODE:
            yield Addr(loan.addr), Addr(loan.addr + loan.size)
        if loan.kind is Kind.CATCHER and trap is not None:
            # Who ran into a breakpoint before it went must still find who takes it for theirs.
            yield trap.addr, Addr(trap.addr + trap.size)


def give_back(task: Task, kernel: Kernel, loans: Iterable[Loan] | None = None) -> None:
    """Give back some loans, or everything in a task's ledger.

    The last first, whatever fails on the way.
    """
    # Interrupted in the middle of a call: what it lends belongs to what is given back.
    _come_back(task)
    with ExitStack() as all_of_it:
        all_of_it.callback(_come_back, task)
        for loan in task.ledger.loans if loans is None else loans:
            all_of_it.callback(_give_back, task, kernel, loan)


def _come_back(task: Task) -> None:
    if task.is_away:
        task.finish(_PATIENCE_S)


def _give_back(task: Task, kernel: Kernel, loan: Loan) -> None:
    try:
        _give_back_once(task, kernel, loan)
    except KeyboardInterrupt:
        # The rest follows, and with it what proves that the guest still lends this.
        _come_back(task)
        if loan in task.ledger.loans:
            _give_back_once(task, kernel, loan)
        raise


def _give_back_once(task: Task, kernel: Kernel, loan: Loan) -> None:
    _come_back(task)
    match loan.kind:
        case Kind.SEAL:
            unseal(task, kernel, loan)
        case Kind.CODE:
            # Interrupted in the middle, it is still sealed; freed so, it would crash the guest.
            for seal in task.ledger.loans:
                if seal.kind is Kind.SEAL and seal.addr == loan.addr:
                    unseal(task, kernel, seal)
            free_code(task, kernel, loan)
        case Kind.DATA:
            task.call(first_of(kernel, "vfree"), loan.addr, returns=loan)
        case Kind.CATCHER:
            task.call(first_of(kernel, "unregister_die_notifier"), loan.addr, returns=loan)
        case Kind.PER_CPU:
            task.call(first_of(kernel, "free_percpu"), loan.addr, returns=loan)
        case _:
            assert_never(loan.kind)
