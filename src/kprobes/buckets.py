"""Log-linear buckets: hits of a histogram's entries by the size of a number, for percentiles.

A power of two has 64 buckets, as HdrHistogram's of two digits have. Bucket 0 has 0, bucket 1 has 1;
those of negative numbers are negative.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from kprobes.model.hist import PARTS_BITS, PERCENT

# A float64's bits from the top: sign, 11 of the exponent, 52 of the mantissa. Without the lowest
# 46 they count the buckets.
_MANTISSA_BITS, _BIAS = 52, 1023
_SHIFT = _MANTISSA_BITS - PARTS_BITS
_OFFSET = (_BIAS << PARTS_BITS) - 1
_EXACT = 1 << _MANTISSA_BITS
_ROUNDED = np.uint64(0xFFF)
"""Bits of large numbers that a float64 might round, and that tell nothing."""


def bucket_of(numbers: NDArray[Any]) -> NDArray[np.int64]:
    """Return the bucket of each number, int64 or uint64, shape (n,), new."""
    if numbers.dtype.kind == "i":
        sizes = bucket_of(np.abs(numbers).view(np.uint64))
        return np.where(numbers < 0, -sizes, sizes)
    kept = np.where(numbers < _EXACT, numbers, numbers & ~_ROUNDED)
    buckets = (kept.astype(np.float64).view(np.int64) >> _SHIFT) - _OFFSET
    return np.maximum(buckets, 0)


class HitBuckets(Struct, frozen=True, kw_only=True, eq=False):
    """Hits of a histogram's entries by bucket, in the order of entries, then buckets; shape (m,).

    Attributes:
        entries: int64, the indices of entries; each has one at least.
        buckets: int64.
        hits: uint64.
        least, most: of the numbers of each, int64 or uint64.
    """

    entries: NDArray[np.int64]
    buckets: NDArray[np.int64]
    hits: NDArray[np.uint64]
    least: NDArray[Any]
    most: NDArray[Any]

    def take(self, rows: NDArray[np.int64]) -> "HitBuckets":
        """Return the buckets of some entries, shape (k,), each once, then 0, 1, ...; copies."""
        places = np.full(max(rows.max(initial=-1), self.entries.max(initial=-1)) + 1, -1)
        places[rows] = np.arange(len(rows))
        return self._moved(places[self.entries])

    def _moved(self, entries: NDArray[np.int64]) -> "HitBuckets":
        # To other entries; what has a negative one is left out.
        order = np.lexsort((self.buckets, entries))
        order = order[np.count_nonzero(entries < 0) :]
        return HitBuckets(
            entries=entries[order],
            buckets=self.buckets[order],
            hits=self.hits[order],
            least=self.least[order],
            most=self.most[order],
        )

    def without_empty(self) -> "HitBuckets":
        """Return it without buckets that have no hits."""
        return self._moved(np.where(self.hits == 0, -1, self.entries))

    def percentile(self, hundredths: int) -> NDArray[Any]:
        """Return a percentile of each of n entries, shape (n,), new, of the type of ``least``.

        It is numpy's ``inverted_cdf``, but for the middle of what its bucket has in place of one
        number: within 1/128 of it.

        Args:
            hundredths: of a percent.
        """
        if not len(self.entries):
            return self.least.copy()
        total = np.cumsum(self.hits)
        starts = np.flatnonzero(np.diff(self.entries, prepend=-1))
        before = total[starts] - self.hits[starts]
        counts = np.diff(np.append(before, total[-1]))
        whole = np.uint64(PERCENT * PERCENT)
        ranks = (counts * np.uint64(hundredths) + whole - np.uint64(1)) // whole
        at = np.searchsorted(total, before + ranks)
        return self.least[at] + (self.most[at] - self.least[at]) // 2


def summed(parts: Sequence[HitBuckets], entries: Sequence[NDArray[np.int64]]) -> HitBuckets:
    """Return several in one.

    Args:
        parts: of entries that may be the same; hits of one may be negative, modulo 2**64.
        entries: for each part the new indices of its buckets' entries, shape (m,).
    """
    which = np.concatenate(entries)
    buckets = np.concatenate([part.buckets for part in parts])
    order = np.lexsort((buckets, which))
    which, buckets = which[order], buckets[order]
    hits = np.concatenate([part.hits for part in parts])[order]
    least = np.concatenate([part.least for part in parts])[order]
    most = np.concatenate([part.most for part in parts])[order]
    is_new = (np.diff(which, prepend=-1) != 0) | (np.diff(buckets, prepend=0) != 0)
    starts = np.flatnonzero(is_new)
    return HitBuckets(
        entries=which[starts],
        buckets=buckets[starts],
        hits=np.add.reduceat(hits, starts),
        least=np.minimum.reduceat(least, starts),
        most=np.maximum.reduceat(most, starts),
    )
