"""The garbage collector, held off while many objects are made that are no garbage."""

import gc
from collections.abc import Generator
from contextlib import contextmanager

_MANY_OBJECTS = 100_000


@contextmanager
def without_collector() -> Generator[None]:
    """Have no garbage looked for: a pattern makes a million objects, and looking takes a sixth."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if gc.get_count()[0] > _MANY_OBJECTS and not gc.get_freeze_count():
            # They are old at once, and not looked at when the next object is made. Not after small
            # changes: counting begins anew, so that after many of them none would be looked at.
            gc.freeze()
            gc.unfreeze()
        if was_enabled:
            gc.enable()
