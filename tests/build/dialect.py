"""Names and places of the same things in the kernels of each architecture."""

from msgspec import Struct

from kprobes.open import GuestSession


class Dialect(Struct, frozen=True, kw_only=True):
    """Words of one architecture, and habits of its kernel.

    Attributes:
        syscall: what the functions of system calls begin with.
        pc: the instruction pointer.
        value: the register that has what a function returns.
        arguments: those that have a function's arguments.
        link: the one that has the return address when a function is entered, or "".
        pushed: bytes of stack that a call takes.
        site: bytes from a function's entry to what is after an ftrace site there.
        before: what is added to the instruction pointer that is shown before an instruction.
        are_addresses_signed: whether return addresses on stacks are. Then nobody can give them back
            from outside: who disarms waits for the calls that were taken over.
    """

    syscall: str
    pc: str
    value: str
    arguments: tuple[str, ...]
    link: str
    pushed: int
    site: int
    before: int
    are_addresses_signed: bool


DIALECTS = {
    "amd64": Dialect(
        syscall="__x64_sys_",
        pc="ip",
        value="ax",
        arguments=("di", "si", "dx", "cx", "r8", "r9"),
        link="",
        pushed=8,
        site=5,
        # As after the kernel's int3.
        before=1,
        are_addresses_signed=False,
    ),
    "arm64": Dialect(
        syscall="__arm64_sys_",
        pc="pc",
        value="x0",
        arguments=("x0", "x1", "x2", "x3", "x4", "x5", "x6", "x7"),
        link="x30",
        pushed=0,
        site=4,
        before=0,
        are_addresses_signed=True,
    ),
}
"""By Debian's name."""


def dialect_of(session: GuestSession) -> Dialect:
    """Return that of a guest that the session booted."""
    assert session.machine is not None
    return DIALECTS[session.machine.options.arch]
