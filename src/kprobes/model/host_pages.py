"""Pages as they were taken out of the rings of this machine's kernel."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pages:
    """Some pages of some CPUs' rings, each CPU's in the ring's order.

    Attributes:
        data: uint8 (n, page size).
        cpu: uint16 (n,), of each.
        skips: int64 (n,), how many bytes of each one's records were in an earlier page: they are
            here for the times of those behind them.
    """

    data: NDArray[np.uint8]
    cpu: NDArray[np.uint16]
    skips: NDArray[np.int64]
