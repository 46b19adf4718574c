"""Batches of one layout put together."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kprobes.model.batch import Batch


def join(batches: Sequence[Batch]) -> Batch:
    """Return all rows of batches of one layout, in their order."""
    if len(batches) == 1:
        return batches[0]
    return Batch(
        layout=batches[0].layout,
        ts=np.concatenate([batch.ts for batch in batches]),
        cpu=np.concatenate([batch.cpu for batch in batches]),
        pid=np.concatenate([batch.pid for batch in batches]),
        context=np.concatenate([batch.context for batch in batches]),
        comm=np.concatenate([batch.comm for batch in batches]),
        values=tuple(
            np.concatenate(columns)
            for columns in zip(*(batch.values for batch in batches), strict=True)
        ),
        faulted=tuple(
            _join_masks(masks) for masks in zip(*(batch.faulted for batch in batches), strict=True)
        ),
        caller=_join_callers(batches),
    )


def _join_callers(batches: Sequence[Batch]) -> NDArray[np.uint64] | None:
    known = [batch.caller for batch in batches if batch.caller is not None]
    return np.concatenate(known) if known else None


def _join_masks(masks: tuple[NDArray[np.bool_] | None, ...]) -> NDArray[np.bool_] | None:
    known = [mask for mask in masks if mask is not None]
    return np.concatenate(known) if known else None
