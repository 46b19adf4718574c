"""Limits of what probes may take: what passes one is disabled within a tenth of a second.

A thread of a recording samples every 50 ms what hits have taken. An event passes the limit of hits
when it was hit more often in the last second than a second's limit, or, if often enough to tell,
more often since the last sample than that time's share. All events together pass the limit of
overhead since the last sample, and the dearest go first.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kprobes.errors import KprobesError
from kprobes.model.events import Loads
from kprobes.model.options import Limits

SAMPLE_S = 0.05
"""Between samples."""
_WINDOW_S = 1.0
_LEAST_HITS = 100
"""Between two samples: of fewer, a rate cannot be told from chance."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Sample:
    at_s: float
    loads: Loads


class LoadWindow:
    """What hits took in the last second, sample by sample, and which events have passed a limit."""

    def __init__(self, limits: Limits, cpus: int) -> None:
        """Have no sample yet.

        Args:
            limits: that are kept.
            cpus: whose time is shared.
        """
        self._limits = limits
        self._cpus = cpus
        self._samples: deque[_Sample] = deque()

    def add(self, at_s: float, loads: Loads) -> dict[int, str]:
        """Add a sample, and return the events that have passed a limit, each with what it did.

        Args:
            at_s: when it was, by any clock.
            loads: that were found.
        """
        last = self._samples[-1] if self._samples else None
        self._samples.append(sample := _Sample(at_s=at_s, loads=loads))
        if last is None or at_s <= last.at_s:
            return {}
        while self._samples[1].at_s <= at_s - _WINDOW_S:
            self._samples.popleft()
        return self._too_dear(last, sample) | self._too_often(last, sample)

    def _too_often(self, last: _Sample, sample: _Sample) -> dict[int, str]:
        limit = self._limits.max_rate
        if limit == math.inf:
            return {}
        passed_s = sample.at_s - last.at_s
        now = _since(sample.loads.hits, last.loads.hits)
        second = _since(sample.loads.hits, self._samples[0].loads.hits)
        is_over = (second > limit) | ((now > limit * passed_s) & (now >= _LEAST_HITS))
        window_s = sample.at_s - self._samples[0].at_s
        rates = np.maximum(now / passed_s, second / max(window_s, _WINDOW_S))
        words = f"times a second, over the limit of {limit:,.0f}"
        return {int(n): f"is hit {rates[n]:,.0f} {words}" for n in np.flatnonzero(is_over)}

    def _too_dear(self, last: _Sample, sample: _Sample) -> dict[int, str]:
        if sample.loads.busy_s is None or last.loads.busy_s is None:
            return {}
        limit = self._limits.max_overhead
        time_s = (sample.at_s - last.at_s) * self._cpus
        shares = _since(sample.loads.busy_s, last.loads.busy_s) / time_s
        spent = total = float(shares.sum())
        found: dict[int, str] = {}
        for number in np.argsort(-shares, kind="stable") if total > limit else ():
            if total <= limit:
                break
            share = float(shares[number])
            found[int(number)] = (
                f"takes {share:.2%} of the CPUs' time, and all hits {spent:.2%}, over the limit of "
                f"{limit:.2%}"
            )
            total -= share
        return found


def _since(now: NDArray[Any], before: NDArray[Any]) -> NDArray[np.float64]:
    # Shape of ``now``: what came meanwhile has begun at nothing.
    found = now.copy()
    found[: len(before)] -= before
    return found.astype(np.float64)


class Limited(Protocol):
    """What is kept within limits: the events of a session."""

    def loads(self) -> Loads:
        """Return what hits have taken so far."""
        ...

    def stop_over_limit(self, events: Mapping[int, str]) -> Collection[str]:
        """Disable events by id, each with what it did, and return that in words."""
        ...


class LimitThread:
    """Keeps events within limits, in a thread of its own, until it is stopped."""

    def __init__(self, events: Limited, window: LoadWindow, warn: Callable[[str], None]) -> None:
        """Start.

        Args:
            events: that are disabled.
            window: what they have taken.
            warn: is given what was disabled and why, for people.
        """
        self._events = events
        self._window = window
        self._warn = warn
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kprobes-limits", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stopping.wait(SAMPLE_S):
                over = self._window.add(time.monotonic(), self._events.loads())
                for words in self._events.stop_over_limit(over) if over else ():
                    self._warn(words)
        except KprobesError as error:
            # A guest that is gone: whoever drains it says so. Else nothing watches any more.
            self._warn(f"limits are not kept any more: {error}")
