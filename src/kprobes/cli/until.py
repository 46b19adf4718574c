"""The end of a trace, as the user, its output, its command or a clock says."""

import math
import time
from collections.abc import Callable

from msgspec import Struct

from kprobes.cli.control import Control
from kprobes.cli.output import LimitSink, Output
from kprobes.cli.terminal import Progress, Stop
from kprobes.cli.workload import Workload


class Until(Struct, kw_only=True):
    """Says when a trace is over. It is first asked when everything is armed.

    Attributes:
        stop: the user's wish.
        output: ends the trace when nobody reads it any more.
        limit_sink: ends it when it is full.
        workload: ends it, and is started here, or None.
        progress: is done.
        duration_s: counts from here.
        announce: tells that everything is armed.
        control: may end it, or None.
        is_full: whether nothing more may be recorded.
        is_counting: whether the output shows counts from time to time.
    """

    stop: Stop
    output: Output
    limit_sink: LimitSink
    workload: Workload | None
    progress: Progress
    duration_s: float = math.inf
    announce: Callable[[], None] = lambda: None
    control: Control | None = None
    is_full: Callable[[], bool] = lambda: False
    is_counting: bool = False
    _deadline: float | None = None

    @property
    def has_begun(self) -> bool:
        """Whether everything was armed."""
        return self._deadline is not None

    def __call__(self) -> bool:
        """Whether it is over."""
        if self.stop.is_asked:
            return True
        if self._deadline is None:
            self._begin()
            self._deadline = time.monotonic() + self.duration_s
        if self.is_counting:
            self.output.refresh()
        return (
            self.limit_sink.is_full
            or self.is_full()
            or self.output.is_gone
            or (self.workload is not None and self.workload.is_over)
            or (self.control is not None and self.control.is_stopped)
            or time.monotonic() >= self._deadline
        )

    def _begin(self) -> None:
        self.progress.done()
        self.output.begin()
        self.announce()
        if self.workload is not None:
            self.workload.start()
