"""Strings of many records cut out of the bytes that hold them."""

import numpy as np
from numpy.typing import NDArray

from kprobes.model.batch import Column


def cut(blob: bytes, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> Column:
    """Return what stands from each start to its stop, or to a NUL before it.

    Args:
        blob: the bytes of all records.
        starts: of any shape, which is the answer's: an array of ``bytes`` objects.
        stops: behind the last byte of each.
    """
    pairs = zip(starts.ravel().tolist(), stops.ravel().tolist(), strict=True)
    found = [blob[start:stop] for start, stop in pairs]
    if b"\0" in b"".join(found):
        found = [value.partition(b"\0")[0] for value in found]
    values = np.empty(len(found), object)
    values[:] = found
    return values.reshape(starts.shape)
