"""Shared parts of tests of handlers: a guest that each leaves as it was, and programs."""

from collections.abc import Generator

from msgspec.structs import replace

from kprobes.handlers.registers import Registers
from kprobes.open import GuestSession
from tests.build.defined import delete_all
from tests.build.dialect import dialect_of
from tests.build.victim import is_complaint

PARENT = ("sh", "-c", "echo $PPID $$")
"""Tells its parent's number, by getppid(), and its own."""
READ = ("cat", "/proc/version", "/no/such/file", "/etc/passwd")


def emptied(session: GuestSession, told: list[str]) -> Generator[GuestSession]:
    """Lend a session, and check that its handlers are gone and its text is as before at the end."""
    session.handlers.report.warn = told.append
    delete_all(session)
    session.options = replace(session.options, return_method=None)
    before = text_of(session)
    yield session
    session.unregister_kprobes(session.handlers.probes)
    # 7.x turns jump labels of its own meanwhile; test_invariants.py knows which bytes are whose.
    if not session.kernel.release.startswith("7."):
        assert text_of(session) == before
    assert [line for line in output(session, "dmesg").splitlines() if is_complaint(line)] == []


def text_of(session: GuestSession) -> bytes:
    """Return the kernel's text as it is now."""
    start, stop = session.kernel.text
    return session.driver.guest.memory.read(start, stop - start)


def output(session: GuestSession, *command: str) -> str:
    """Return what a command prints in the guest."""
    return session.run(list(command), 180).output.decode(errors="replace")


def comm(regs: Registers) -> str:
    """Return the name of the task that was hit."""
    return str(regs.task.comm)


def getppid(session: GuestSession) -> str:
    """Return the function of a system call that PARENT makes."""
    return f"{dialect_of(session).syscall}getppid"


def leave(session: GuestSession, regs: Registers, value: int) -> None:
    """Return from the function that is entered, in its place."""
    dialect = dialect_of(session)
    regs[dialect.value] = value
    if dialect.link:
        regs[dialect.pc] = regs[dialect.link]
    else:
        regs[dialect.pc] = session.read_u64(regs.sp)
        regs.sp += dialect.pushed
