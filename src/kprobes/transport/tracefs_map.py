"""One CPU's ring mapped into memory: Documentation/trace/ring-buffer-map.rst, Linux 6.10.

    struct trace_buffer_meta {          // include/uapi/linux/trace_mmap.h; the first page
        u32 meta_page_size, meta_struct_len;
        u32 subbuf_size, nr_subbufs;    // the pages of the ring, which are mapped after it
        struct {
            u64 lost_events;
            u32 id;                     // the page that the writer has left to its reader
            u32 read;                   // bytes of its records that the reader was told of
        } reader;
        ...
    };

TRACE_MMAP_IOCTL_GET_READER takes all that is written of the reader's page as read, and only when
nothing new was there exchanges it for the next one, which the writer may overwrite from then on.
So every page is copied before the next call; of a page that was read in part before, the whole is
copied again, for the times of its later records count from its earlier ones.
"""

import ctypes
import errno
import mmap
import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from kprobes.errors import TargetError
from kprobes.formats.ftrace import PageFormat, set_sizes

_GET_READER = ord("R") << 8 | 0x20
"""_IO('R', 0x20)"""
_META_SIZE, _SUBBUF_SIZE, _SUBBUFS, _ID, _READ = 0, 2, 3, 6, 7
"""Words of ``struct trace_buffer_meta``."""
_STAMP_SIZE = 8
_MAP_FAILED = ctypes.c_void_p(-1).value


class RingMap(Struct, frozen=True, kw_only=True, eq=False):
    """A ring's memory and what changes it.

    Attributes:
        meta: words of ``struct trace_buffer_meta``.
        subbufs: the ring's pages, bytes.
        advance: asks for what is new.
    """

    meta: memoryview
    subbufs: memoryview
    advance: Callable[[], None]


class MappedRing:
    """Takes pages out of a ring that is mapped.

    Args:
        ring: that is mapped.
        form: of its pages.
        closing: what unmaps it.
    """

    def __init__(self, ring: RingMap, form: PageFormat, closing: ExitStack) -> None:
        self._ring = ring
        self._form = form
        self._closing = closing
        self._stamps = ring.subbufs.cast("Q")
        # What was read before it was mapped is not ours.
        self._page, self._end = self._now(), ring.meta[_READ]

    def take(self, pages: NDArray[np.uint8], skips: NDArray[np.int64]) -> int:
        """Put the oldest pages to the front of some room, and return how many.

        Args:
            pages: the room, uint8 (n, bytes of a page); changed in place.
            skips: int64 (n,), for each page how many bytes of its records were taken before.

        Raises:
            TargetError: the ring is gone.
        """
        room, size = pages.reshape(-1).data, self._form.size
        ends: list[int] = []
        for index in range(len(pages)):
            self._ring.advance()
            page, end = self._now(), self._ring.meta[_READ]
            skip = self._end if page == self._page else 0
            if end <= skip:
                break
            start = page[0] * size
            room[index * size : (index + 1) * size] = self._ring.subbufs[start : start + size]
            skips[index] = skip
            self._page, self._end = page, end
            ends.append(end)
        # After what was taken the writer goes on meanwhile.
        set_sizes(pages[: len(ends)], self._form, np.array(ends, np.int64))
        return len(ends)

    def close(self) -> None:
        """Unmap it."""
        for view in (self._stamps, self._ring.subbufs, self._ring.meta):
            # Whoever looks at it later gets an exception, not a fault.
            view.release()
        self._closing.close()

    def _now(self) -> tuple[int, int]:
        # The reader's page by its number, and by its stamp: after a reset it begins anew.
        number = self._ring.meta[_ID]
        return number, self._stamps[number * self._form.size // _STAMP_SIZE]


def map_ring(file: int, form: PageFormat) -> MappedRing | None:
    """Map a ring, or return None where that cannot be.

    Args:
        file: its ``trace_pipe_raw``, open and not blocking; remains the caller's.
        form: of its pages.
    """
    # Python's lock is kept over calls that take a microsecond: it could be gone for milliseconds.
    libc = ctypes.PyDLL(None, use_errno=True)
    if libc.ioctl(file, _GET_READER) != -1 or ctypes.get_errno() != errno.ENODEV:
        # Only a kernel that can map rings says that this one is not mapped.
        return None

    def advance() -> None:
        if libc.ioctl(file, _GET_READER):
            raise TargetError(f"cannot read a ring: {os.strerror(ctypes.get_errno())}")

    with ExitStack() as undo:
        try:
            meta = _map(undo, file, mmap.PAGESIZE, offset=0).cast("I")
            size, count = meta[_SUBBUF_SIZE], meta[_SUBBUFS]
            subbufs = _map(undo, file, size * count, offset=meta[_META_SIZE])
        except OSError:
            # Its memory may be somebody's snapshot.
            return None
        if size != form.size:
            return None
        ring = RingMap(meta=meta, subbufs=subbufs, advance=advance)
        return MappedRing(ring, form, undo.pop_all())


def _map(undo: ExitStack, file: int, size: int, *, offset: int) -> memoryview:
    # Python's own mmap looks at a file's size, which these have not.
    libc: Any = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    where = (ctypes.c_int(it) for it in (mmap.PROT_READ, mmap.MAP_SHARED, file))
    addr = libc.mmap(None, ctypes.c_size_t(size), *where, ctypes.c_long(offset))
    if addr == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), "mmap")
    undo.callback(libc.munmap, ctypes.c_void_p(addr), ctypes.c_size_t(size))
    return memoryview((ctypes.c_uint8 * size).from_address(addr)).cast("B")
