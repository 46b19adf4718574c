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
from typing import Any, Protocol

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from kprobes.errors import GuestGoneError, KprobesError
from kprobes.model.events import Loads
from kprobes.model.options import Limits

SAMPLE_S = 0.05
"""Between samples."""
_WINDOW_S = 1.0
_LEAST_HITS = 100
"""Between two samples: of fewer, a rate cannot be told from chance."""


class _Sample(Struct, frozen=True, kw_only=True, eq=False):
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
        # By event id: how many hits an event had when it last passed a limit.
        self._disabled_at = np.zeros(0)

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
        new = max(len(loads.hits) - len(self._disabled_at), 0)
        self._disabled_at = np.pad(self._disabled_at, (0, new))
        found = self._too_dear(last, sample) | self._too_often(last, sample)
        for number in found:
            self._disabled_at[number] = loads.hits[number]
        return found

    def _too_often(self, last: _Sample, sample: _Sample) -> dict[int, str]:
        limit, hits = self._limits.max_rate, sample.loads.hits
        if limit == math.inf:
            return {}
        passed_s, first = sample.at_s - last.at_s, self._samples[0]
        window_s = max(sample.at_s - first.at_s, _WINDOW_S)
        now = _since(hits, last.loads.hits)
        since_disabled = hits - self._disabled_at[: len(hits)]
        rates = np.minimum(_since(hits, first.loads.hits), since_disabled) / window_s
        is_burst = (now > limit * passed_s) & (now >= _LEAST_HITS)
        words = f"times a second, over the limit of {limit:,.0f}"
        rates = np.where(is_burst, np.maximum(now / passed_s, rates), rates)
        return {int(n): f"is hit {rates[n]:,.0f} {words}" for n in np.flatnonzero(rates > limit)}

    def _too_dear(self, last: _Sample, sample: _Sample) -> dict[int, str]:
        limit, loads = self._limits.max_overhead, sample.loads
        if loads.code_s is None or loads.site_s is None or last.loads.code_s is None:
            return {}
        busy_s = _since(loads.code_s, last.loads.code_s)
        # By what a hit takes as the event is armed now: what it was before is not known any more.
        busy_s += _since(loads.hits, last.loads.hits) * loads.site_s
        shares = busy_s / ((sample.at_s - last.at_s) * self._cpus)
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
    found, both = now.copy(), min(len(now), len(before))
    found[:both] -= before[:both]
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
        is_warned = False
        while not self._stopping.wait(SAMPLE_S):
            try:
                self._sample()
            except GuestGoneError:
                # Whoever drains says so.
                return
            except KprobesError as error:
                # It may be better the next time: as where others change what the kernel lists.
                if not is_warned:
                    self._warn(f"limits are not kept as long as this lasts: {error}")
                is_warned = True

    def _sample(self) -> None:
        loads = self._events.loads()
        over = self._window.add(time.monotonic(), loads)
        for words in self._events.stop_over_limit(over) if over else ():
            self._warn(words)
