"""Parts of the benchmarks that differ by the guests' architecture: assembly, names, goals."""

from collections.abc import Callable, Mapping

from msgspec import Struct

from kprobes.arch.arch import Arch
from kprobes.model.abi import GuestAbi, Template
from kprobes.model.plan import Strategy
from kprobes.units import Addr


class Many(Struct, frozen=True, kw_only=True):
    """A system call that has the kernel call one function for each element of an array.

    Attributes:
        setup: assembly that makes the array, with ``{array}`` and ``{count}``.
        step: assembly that makes the call, with these and ``{none}``, where there are zeroes.
    """

    setup: str
    step: str


class Programs(Struct, frozen=True, kw_only=True):
    """Assembly that a guest's programs consist of; bench/elf_program.py says what they do.

    Attributes:
        whole: a program, with ``{setup}``, ``{step}`` and the like.
        fork: with ``{mask}``, of the CPU that the child runs on.
        wait: for a child.
        getppid: a step that makes this call.
        poll: one eventfd, asked that often.
        writev: one string, written that often to ``file``.
    """

    whole: str
    fork: str
    wait: str
    getppid: str
    poll: Many
    writev: Many


class ByHand(Struct, frozen=True, kw_only=True):
    """The code of a probe as a person would write it; see bench/handwritten.py.

    Attributes:
        probe: with ``{fields}``, ``{migration}`` and constants.
        migration: what adds ``migration_disabled`` at ``{offset}``, a u16, to the context.
        field: (the argument's number from 0, offset in the record) to what stores it.
        registers: what the code calls them, to names in the kernel.
    """

    probe: str
    migration: str
    field: Callable[[int, int], str]
    registers: Mapping[str, str]


class Alone(Struct, frozen=True, kw_only=True):
    """How a probe's code runs in user space; see bench/in_user_space.py.

    Attributes:
        setup: with ``{data}``, ``{ring}`` and the bytes of the ring that it touches.
        drain: what the host does, with offsets ``{word}`` and ``{limit}``, and ``{ring_size}``.
        call: calls ``body``.
        abi: of a kernel to that of such a program, its ring aside.
        arch: of a kernel to one that only uses what a program may.
        registers: those of code written by hand, to names there.
    """

    setup: str
    drain: str
    call: str
    abi: Callable[[GuestAbi], GuestAbi]
    arch: Callable[[Arch], Arch]
    registers: Mapping[str, str]


class Middle(Struct, frozen=True, kw_only=True):
    """A way to probe the middle of a function, and the kernel's own that is beside it.

    Attributes:
        peer: what that is.
        is_optimised: whether the kernel's own is to be a jump; None where it never is.
    """

    strategy: Strategy
    peer: str
    goal: float
    is_optimised: bool | None


class Gdb(Struct, frozen=True, kw_only=True):
    """The gdb that knows an architecture: its program, and what it calls that and ``first``."""

    program: str
    architecture: str
    register: str


class Goals(Struct, frozen=True, kw_only=True):
    """How many times as much the kernel's own is to cost."""

    entry: float
    string: float
    rejected: float
    retinsn: float
    rethook: float
    pair: float


class Isa(Struct, frozen=True, kw_only=True):
    """One architecture of guests.

    Attributes:
        name: Debian's.
        elf: ELF's number for it.
        assemble: lines to code; names that are not labels are left to linking.
        syscall: what its kernel's functions of system calls begin with.
        first: the first argument's register, as probes name it.
        gdb: which one knows it.
        append: words for the kernel of its guests.
    """

    name: str
    elf: int
    assemble: Callable[[str], Template]
    syscall: str
    first: str
    gdb: Gdb
    programs: Programs
    by_hand: ByHand
    alone: Alone
    middles: tuple[Middle, ...]
    goals: Goals
    append: str = ""

    @property
    def getppid(self) -> str:
        """The function of the system call that programs make."""
        return f"{self.syscall}getppid"


TASK_AT = Addr(0x2000)
"""Of a program's zeroes: what takes the running task's place."""
