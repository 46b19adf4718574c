"""Hits that a hist trigger counts while a block of a program runs: in a guest, or from events."""

from collections.abc import Iterable

from msgspec.structs import replace

from kprobes.column_hist import ColumnHist, can_count, check_hist
from kprobes.drain import Drain
from kprobes.driver import CountingDriver
from kprobes.errors import UsageError
from kprobes.histogram import Histogram
from kprobes.model.events import Events
from kprobes.model.options import Options
from kprobes.model.resolved import RecordLayout


def with_trigger(
    options: Options, trigger: str, driver: CountingDriver, layouts: Iterable[RecordLayout]
) -> Options:
    """Return options by which a guest is asked a trigger where hits happen, if that can be.

    Args:
        options: of recordings.
        trigger: the hist trigger's text.
        driver: of the kernel; this machine's own takes no triggers of ours.
        layouts: of all events that are to be counted.

    Raises:
        DefinitionError: it is wrong for events, too.
    """
    known = list(layouts)
    if driver.target != "host" and can_count(trigger, known):
        return replace(options, trigger=trigger)
    check_hist(trigger, known, driver.source)
    return options


class LiveHistogram:
    """What a hist trigger counts: so far while the block runs, afterwards in all.

    It is a sink, for what is recorded where the kernel does not count itself.
    """

    def __init__(self, driver: CountingDriver, trigger: str, drain: Drain) -> None:
        """Have counted nothing yet of what is armed."""
        self._driver = driver
        self._trigger = trigger
        self._columns = ColumnHist(trigger, driver.source)
        self._drain: Drain | None = drain
        self._last: Histogram | None = None
        self._cleared: Histogram | None = None

    def read(self) -> Histogram:
        """Return what was counted by now, since ``clear``: no hit is lost by it, or counted twice.

        Raises:
            UsageError: there was no event; or it was cleared, and a value is a least or greatest
                number, which is known of all hits only.
        """
        return self._since_cleared(self._all())

    def clear(self) -> Histogram:
        """Return what ``read`` does, and begin anew: no hit is in two such, or in none.

        The guest's table goes on, also with the room that it has left.

        Raises:
            UsageError: as of ``read``.
        """
        found = self._all()
        shown = self._since_cleared(found)
        self._cleared = found
        return shown

    def _since_cleared(self, found: Histogram) -> Histogram:
        return found if self._cleared is None else found - self._cleared

    def _all(self) -> Histogram:
        if self._drain is not None:
            self._last = self._driver.histogram()
            while (events := self._drain.take(0)) is not None:
                self.write(events)
        # One without entries is as good.
        found = self._columns.histogram() if self._last is None else self._last
        if found is None:
            raise UsageError(f"there was no event that {self._trigger} could count")
        return found

    def stop(self) -> None:
        """Read for the last time what the kernel has counted: nothing more is drained here."""
        self._last, self._drain = self._driver.histogram(), None

    def write(self, events: Events) -> None:
        """Count events."""
        self._columns.take(events)

    def close(self) -> None:
        """Do nothing: it may be read at any time."""
