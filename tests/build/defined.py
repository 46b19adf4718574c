"""Definitions of a guest's session in tests: deleted, planned, counted by event."""

from collections.abc import Collection

from msgspec.structs import replace

from kprobes.guest.driver import GuestDriver
from kprobes.model.options import Wanted
from kprobes.model.plan import Plan
from kprobes.model.upcall import Upcall
from kprobes.open import GuestSession


def delete_all(session: GuestSession) -> None:
    """Delete all that is defined; nothing is recorded."""
    if session.definitions:
        session.select().delete()


def plans_of(session: GuestSession) -> Collection[Plan]:
    """Return how all that is defined is probed, whether it is armed or not."""
    wanted = Wanted(definitions=session.definitions, options=session.options)
    return session.driver.prepare(wanted).plans


def recorded_by_event(session: GuestSession) -> dict[str, int]:
    """Return how many hits of each event the last recording has, by its name."""
    return {each.event: each.recorded for each in session.hits()}


def ask(driver: GuestDriver, *upcalls: Upcall, at_returns: Collection[Upcall] = ()) -> None:
    """Arm upcalls, in the place of all others and beside what is recorded."""
    driver.apply(lambda wanted: replace(wanted, upcalls=upcalls, return_upcalls=tuple(at_returns)))
