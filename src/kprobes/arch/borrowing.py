"""What an architecture is to whoever calls functions of a guest in a borrowed task."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from kprobes.arch.listed import Read
from kprobes.model.kernel import Kernel
from kprobes.ports import Translator
from kprobes.units import Addr

_EXECMEM_MODULE_TEXT = 0


class Looked(Protocol):
    """A guest's memory and what maps it."""

    @property
    def tables(self) -> Translator:
        """Its kernel's page tables."""
        ...

    def read(self, addr: int, size: int) -> bytes:
        """Return exactly ``size`` bytes, or raise MemoryFault."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """The kernel's own code that a borrowed task returns through when its call is done.

    Attributes:
        landing: where it can be stopped; nobody else comes there.
        then: what follows, one after the other; the last gives the task its registers back.
        register: by its stub's name, that leads from the landing to what follows, or "".
        size: bytes that the last takes off the stack, or 0 when it sets the stack pointer.
    """

    landing: Addr
    then: tuple[Addr, ...]
    register: str = ""
    size: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Entered:
    """How a function begins that returns to a landing.

    Attributes:
        registers: by their stub's names.
        words: from the frame on, in memory.
    """

    registers: Mapping[str, int]
    words: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Called:
    """A function of the guest and its numbers."""

    function: Addr
    args: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Executable memory that is to be allocated.

    Attributes:
        size: bytes.
        like: memory that was allocated before, writable and not executable.
        caller: whom the guest shall think that it is for.
    """

    size: int
    like: Addr
    caller: Addr


@dataclass(frozen=True, slots=True, kw_only=True)
class BorrowFacts:
    """How tasks are borrowed, and memory for code is allocated.

    A frame is an address on a borrowed task's stack, below all that it uses.

    Attributes:
        pc, result: what a stub calls the instruction pointer and a function's result.
        number: what it calls a register that functions leave as it was, and no way needs: it has
            the call's number.
        switch: function that all system calls go through, entered with no lock held.
        system_call: what the names of their functions begin with.
        idle: functions that a CPU sleeps in.
        may_leave_idle: (registers) to whether it can be sent elsewhere from there.
        way: how a task comes back; raises TargetError where there is none.
        keep: (way, a task's registers) to its frame, and what is written there.
        enter: (way, frame, function with its numbers) to how that begins.
        leave: (way, frame, function with its numbers) to the same without a landing.
        home: (registers at a landing) to the frame of the call that came back.
        send_on: (memory, registers at a landing) to those behind it.
        kick: what gives the CPU that calls it a timer interrupt at once, or None.
        code: what allocates memory within reach of the kernel's text.
        module_code: what allocates memory within reach of its modules, or None where the other is.
        page_size: (memory) to bytes of the smallest page that can be mapped.
        free_code: names of what takes it back.
    """

    pc: str
    result: str
    number: str
    switch: str
    system_call: str
    idle: tuple[str, ...]
    may_leave_idle: Callable[[Mapping[str, int]], bool]
    way: Callable[[Looked, Kernel], Way]
    keep: Callable[[Way, Mapping[str, int]], tuple[int, bytes]]
    enter: Callable[[Way, int, Called], Entered]
    leave: Callable[[Way, int, Called], Entered]
    home: Callable[[Mapping[str, int]], int]
    send_on: Callable[[Read, Mapping[str, int]], Mapping[str, int]]
    kick: Callable[[Looked, Kernel], Called | None]
    code: Callable[[Looked, Kernel, Wanted], Called]
    module_code: Callable[[Kernel, int], Called | None] | None
    page_size: Callable[[Looked], int]
    free_code: tuple[str, ...]


def alloc_like_module(kernel: Kernel, size: int) -> Called | None:
    """Return what allocates so many bytes where a module would be, None without modules."""
    execmem = address_of(kernel, "execmem_alloc")
    if execmem is not None:
        return Called(function=execmem, args=(_EXECMEM_MODULE_TEXT, size))
    function = address_of(kernel, "module_alloc")
    return None if function is None else Called(function=function, args=(size,))


def address_of(kernel: Kernel, *names: str) -> Addr | None:
    """Return the address of the first symbol that a kernel has, or None."""
    found = (kernel.symbols.find(name) for name in names)
    return next((symbol.addr for symbol in found if symbol is not None), None)
