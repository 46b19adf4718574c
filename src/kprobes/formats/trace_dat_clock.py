"""From what rings count to the times that trace-cmd prints: what options of its files tell.

    TIME_SHIFT    (time * scaling >> fraction) + offset, by CPU and by the samples around a time
    TSC2NSEC      count * factor >> shift; its offset is for whoever wants the host's own times
    DATE, OFFSET  + ns

lib/trace-cmd/trace-input.c of trace-cmd 3.4: timestamp_calc(), timestamp_correction_calc().
"""

import numpy as np
from numpy.typing import NDArray

from kprobes.errors import FormatError
from kprobes.formats.trace_dat_options import ClockSamples, TimeShift

_FACTOR_MAX = 1 << 32
_SHIFT_MAX = 32
_FRACTION_MAX = 63

Times = NDArray[np.uint64]


class TraceClock:
    """Times of one file. All is modulo 2**64, as there."""

    def __init__(
        self,
        tsc2nsec: tuple[int, int, int] | None,
        time_shift: TimeShift | None,
        offset_ns: int,
    ) -> None:
        """Take what the options tell.

        Args:
            tsc2nsec: factor, shift and offset, if rings have counts of the TSC.
            time_shift: to another machine's times.
            offset_ns: that is added to all.

        Raises:
            FormatError: numbers that no clock has.
        """
        factor, shift, _ = tsc2nsec or (1, 0, 0)
        if not (0 < factor < _FACTOR_MAX and 0 <= shift <= _SHIFT_MAX):
            raise FormatError(f"a clock whose counts are multiplied by {factor} >> {shift}")
        for samples in () if time_shift is None else time_shift.cpus:
            _check(samples)
        self._tsc2nsec = tsc2nsec
        self._shift = time_shift
        self._offset = np.uint64(offset_ns % (1 << 64))

    def apply(self, ts: Times, cpu: NDArray[np.uint16]) -> Times:
        """Return the times of events, shape (n,): a copy, or the same array if nothing is told.

        Args:
            ts: as the rings have them.
            cpu: that they are of.
        """
        if self._shift is not None:
            ts = self._shifted(ts, cpu, self._shift)
        if self._tsc2nsec is not None:
            factor, shift, _ = self._tsc2nsec
            ts = _scaled(ts, factor, shift)
        return ts + self._offset if self._offset else ts

    def _shifted(self, ts: Times, cpu: NDArray[np.uint16], shift: TimeShift) -> Times:
        found = ts.copy()
        for number, samples in enumerate(shift.cpus):
            own = np.flatnonzero(cpu == number)
            if len(own) and len(samples.times):
                found[own] = _corrected(ts[own], samples, is_interpolated=shift.is_interpolated)
        return found


def _check(samples: ClockSamples) -> None:
    if (samples.times[1:] <= samples.times[:-1]).any():
        raise FormatError("a relation of clocks whose samples are in no order")
    if samples.fractions is not None and (samples.fractions > _FRACTION_MAX).any():
        raise FormatError(f"a relation of clocks with fractions of more than {_FRACTION_MAX} bits")


def _scaled(ts: Times, factor: int, shift: int) -> Times:
    # 64 bits times 32: the high and the low half by themselves.
    low = np.uint64((1 << 32) - 1)
    high = (ts >> np.uint64(32)) * np.uint64(factor) << np.uint64(32 - shift)
    return high + ((ts & low) * np.uint64(factor) >> np.uint64(shift))


def _corrected(ts: Times, samples: ClockSamples, *, is_interpolated: bool) -> Times:
    offsets, times = samples.offsets, samples.times
    if len(times) == 1:
        return ts + offsets.astype(np.uint64)
    at = np.searchsorted(times, ts, side="right").clip(1, len(times) - 1) - 1
    added = offsets[at]
    if is_interpolated:
        delta = (times[at + 1] - times[at]).astype(np.int64)
        more = (ts - times[at]).astype(np.int64) * (offsets[at + 1] - added)
        added = added + _quotient(more + delta // 2, delta)
    scaled = ts * samples.scalings[at]
    if samples.fractions is not None:
        scaled >>= samples.fractions[at]
    return scaled + added.astype(np.uint64)


def _quotient(value: NDArray[np.int64], by: NDArray[np.int64]) -> NDArray[np.int64]:
    # Towards zero, as in C.
    return np.sign(value) * (np.abs(value) // by)
