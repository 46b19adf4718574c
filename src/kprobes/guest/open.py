"""A driver from the first connection on, with what must happen when it is let go of, in order.

Looking at a guest without arming anything, so that it runs on whatever becomes of us.
"""

import threading
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import TracebackType

from kprobes.codegen.compile import load_compiler
from kprobes.errors import GuestGoneError, GuestMigratedError, GuestReplacedError
from kprobes.guest.arena import ArenaSize
from kprobes.guest.attach import Access, attach, publish_ram_map
from kprobes.guest.clock import check_clock
from kprobes.guest.driver import GuestDriver
from kprobes.guest.guardian import Guardian
from kprobes.guest.guest import Guest
from kprobes.guest.identity import IdentityCheck, read_boot
from kprobes.guest.journal import Journal
from kprobes.guest.obstacles import check_possible
from kprobes.transport.connect import parse_target
from kprobes.transport.stub import Stub


def open_driver(
    undo: ExitStack,
    target: str,
    size: ArenaSize | None,
    *,
    is_ours: bool,
    access: Access | None = None,
) -> GuestDriver:
    """Attach to a guest and return what probes it.

    Args:
        undo: takes what lets go of the guest again.
        target: address of its stub.
        size: of the memory that is taken from it.
        is_ours: whether the guest ends with us.
        access: how it is looked at.

    Raises:
        UnreachableError: nothing answers there, or somebody else uses the stub.
        TargetError: no Linux that we understand runs there.
        UsageError: its kernel has no such clock.
    """
    target, access = parse_target(target), access or Access()
    journal = Journal.create(target)
    # Last: the guardian needs it if the guest could not be put right.
    undo.callback(journal.close)
    # A guest of our own ends with us; anybody else's must live on if we are killed.
    guardian = None if is_ours else _guarded(undo, target, journal)
    # LLVM's library loads while the guest is looked at: that needs no Python.
    threading.Thread(target=load_compiler, name="kprobes-llvm", daemon=True).start()
    guest = attach(target, access=access)
    undo.push(partial(_detach, guest.stub))
    _identify(journal, guest, access)
    driver = GuestDriver(guest, journal, size or ArenaSize(), check_possible, access.clock)
    undo.callback(_leave if is_ours else _close, driver, journal)
    if guardian is not None:
        guardian.watch(driver.give_up)
        journal.watch(_after(guardian.await_ready, journal.allocations.check))
    return driver


def _guarded(undo: ExitStack, target: str, journal: Journal) -> Guardian:
    guardian = undo.enter_context(Guardian(target, journal))
    journal.note_guardian(guardian.pid)
    return guardian


def _after(first: Callable[[], None], then: Callable[[], None]) -> Callable[[], None]:
    def both() -> None:
        first()
        then()

    return both


def _identify(journal: Journal, guest: Guest, access: Access) -> None:
    if access.clock is not None:
        check_clock(guest.kernel, access.clock)
    journal.identify(
        build_id=guest.kernel.build_id,
        release=guest.kernel.release,
        image=access.image,
        symbols=access.symbols,
    )
    journal.note_boot(read_boot(guest))
    if guest.init_text is not None:
        journal.note_init_text(guest.init_text)
    journal.watch(IdentityCheck(journal, guest).check)
    publish_ram_map(guest, journal)


def _detach(
    stub: Stub,
    kind: type[BaseException] | None,
    error: BaseException | None,
    trace: TracebackType | None,
) -> None:
    del kind, trace
    try:
        stub.detach()
    except GuestGoneError:
        # What went wrong first is what the user must hear of.
        if error is None:
            raise


def _leave(driver: GuestDriver, journal: Journal) -> None:
    # What is allocated ends with it. A call that a probe of the guest's own keeps for us may last
    # longer than anybody would wait.
    try:
        driver.disarm()
    except GuestGoneError:
        pass
    finally:
        journal.remove()


def _close(driver: GuestDriver, journal: Journal) -> None:
    try:
        driver.close()
        if driver.has_crashed:
            # Text is as it was; memory ends with the kernel that had lent it, which cannot free it.
            journal.remove()
    except (GuestReplacedError, GuestMigratedError):
        # Nothing is left to put right, and nothing may be.
        journal.remove()
        raise
    except GuestGoneError:
        if driver.guest.stub.has_ended:
            # Nothing is left to put right. A stub that fell silent is the guardian's.
            journal.remove()


@contextmanager
def attached(target: str, access: Access | None = None) -> Generator[Guest]:
    """Connect to a guest; it runs but while it is looked at through ``stub.paused``.

    Raises:
        UnreachableError: nothing answers there, or somebody else uses the stub.
        TargetError: no Linux that we understand runs there.
    """
    target = parse_target(target)
    journal = Journal.create(target)
    try:
        # Connecting stops the guest: if we are killed right then, somebody must let it go on.
        with Guardian(target, journal) as guardian:
            journal.note_guardian(guardian.pid)
            guest = attach(target, access=access)
            try:
                yield guest
            finally:
                guest.stub.detach()
    finally:
        journal.remove()
