"""arm64's flat kernel file to what it loads where, as an ELF file would say it.

    u32 code0, code1; u64 text_offset, image_size, flags, res2, res3, res4; u32 magic, res5;

Documentation/arch/arm64/booting.rst. The file has no addresses but in its relocations and in what
they relocate. Those of the plain kind fill in what is zero in the file (--no-apply-dynamic-relocs
in arch/arm64/Makefile):

    Elf64_Rela: u64 offset, u64 info, s64 addend                  // elf.h

The lowest that one of them computes is ``_text``, from which the kernel's symbols count. Where the
linker packs them (CONFIG_RELR), the places hold their addresses already, and the list is of words
that are even, the address of a place, or odd, a map of the 63 places behind the last one that was
named (arch/arm64/kernel/pi/relocate.c). Then ``_text`` is where all those places hold addresses
of the image.
"""

import struct
from collections.abc import Iterator
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from kprobes.errors import FormatError
from kprobes.formats import elf
from kprobes.units import U64

_MAGIC, _MAGIC_AT = b"ARM\x64", 56
_SIZE_AT, _FLAGS_AT = 16, 24
_BIG_ENDIAN = 1
_MAX_SIZE = 1 << 30
_RELATIVE = 1027
_ENTRY = 3
"""Words of an Elf64_Rela."""
_LEAST = 64
"""Entries of the shortest list that is believed."""
_MOST_LISTS = 16
"""Of the longest that may be packed: one is far longer than other tables are."""
_SAMPLES = 4096
_KERNEL = 1 << 63
"""Where the kernel's half of the addresses begins."""
_ALIGNMENT = 1 << 16

_Words = NDArray[np.uint64]


def is_image(data: bytes) -> bool:
    """Whether a file begins as an arm64 kernel does."""
    return data[_MAGIC_AT:].startswith(_MAGIC)


def parse(data: bytes) -> elf.Image:
    """Return what a file loads, its relocations done.

    Raises:
        FormatError: it is cut off, is big-endian, or does not say where it was linked.
    """
    size, flags = struct.unpack_from("<QQ", data, _SIZE_AT) if is_image(data) else (0, 0)
    if not 0 < len(data) <= _MAX_SIZE or (size and len(data) > size):
        raise FormatError("arm64 Image: it is longer than it says")
    if flags & _BIG_ENDIAN:
        raise FormatError("arm64 Image: big-endian kernels are not supported")
    start, words = _linked(np.frombuffer(data, "<u8", len(data) // 8).astype(np.uint64), size)
    done = words.tobytes() + data[len(words) * 8 :]
    # The vDSO's notes come before the kernel's own.
    ids = [value for _, value in elf.build_id_notes(done)]
    return elf.Image(
        machine=elf.EM_AARCH64,
        segments=(elf.Segment(addr=start, data=done),),
        build_id=ids[-1] if ids else b"",
    )


def _linked(words: _Words, size: int) -> tuple[int, _Words]:
    # Where the image was linked, and its words as they are there.
    # First: what cannot be packed is plain beside them, and says less.
    for places in islice(_packed(words), _MOST_LISTS):
        some = places[:: len(places) // _SAMPLES + 1]
        for start in _starts(places, 8 * len(words)):
            if _are_addresses(words[(some - np.uint64(start)) // np.uint64(8)], start, size):
                return start, words
    relocations = _relocations(words)
    if len(relocations):
        start = _lowest(relocations[:, 2])
        return start, _relocated(words, relocations, start)
    raise FormatError(
        "arm64 Image: no relocations (Elf64_Rela, Elf64_Relr) say where it was linked; "
        "give the vmlinux instead"
    )


def _relocations(words: _Words) -> _Words:
    # Shape (n, 3): the longest run of entries, which nothing names.
    found = np.flatnonzero(words == np.uint64(_RELATIVE))
    found = found[(found > 0) & (found < len(words) - 1)]
    ends = np.append(np.flatnonzero(np.diff(found) != _ENTRY), len(found) - 1)
    counts = np.diff(np.concatenate([[-1], ends]))
    if not len(found) or int(counts.max()) < _LEAST:
        return np.zeros((0, _ENTRY), np.uint64)
    longest = int(counts.argmax())
    first, count = int(found[ends[longest] - counts[longest] + 1]) - 1, int(counts[longest])
    return words[first : first + _ENTRY * count].reshape(-1, _ENTRY)


def _lowest(addends: _Words) -> int:
    kernel = addends[addends >= np.uint64(_KERNEL)]
    if not len(kernel):
        raise FormatError("arm64 Image: its relocations compute no address of a kernel")
    return int(kernel.min()) & -_ALIGNMENT & U64


def _packed(words: _Words) -> Iterator[_Words]:
    # The places that each list which may be packed names itself, the longest first: other tables
    # of addresses look like one.
    is_map = words & np.uint64(1) == np.uint64(1)
    is_place = (words >= np.uint64(_KERNEL)) & (words & np.uint64(7) == np.uint64(0))
    ends = np.flatnonzero(~np.concatenate([[False], is_map | is_place, [False]]))
    longest = np.argsort(np.diff(ends))[::-1]
    for first, stop in zip(ends[longest], ends[longest + 1] - 1, strict=True):
        if stop - first < _LEAST:
            return
        places = _rising(words[first:stop][is_place[first:stop]])
        if len(places) >= _LEAST:
            yield places


def _rising(places: _Words) -> _Words:
    # The addend of a plain relocation before the list may look as if it belonged to it.
    falls = np.flatnonzero(places[1:] <= places[:-1]) + 1
    edges = np.concatenate([[0], falls, [len(places)]])
    longest = int(np.diff(edges).argmax())
    return places[edges[longest] : edges[longest + 1]]


def _starts(places: _Words, size: int) -> range:
    # Where an image of this size may begin that has all these places.
    least = int(places[-1]) + 8 - size
    return range(least + -least % _ALIGNMENT, int(places[0]) + 1, _ALIGNMENT)


def _are_addresses(words: _Words, start: int, size: int) -> bool:
    # All are but what _rising() may have left of others.
    are_inside = (words >= np.uint64(start)) & (words - np.uint64(start) <= np.uint64(size))
    return int(np.count_nonzero(are_inside)) > 0.9 * len(words)


def _relocated(words: _Words, relocations: _Words, start: int) -> _Words:
    places = relocations[:, 0] - np.uint64(start)
    if np.any(places >= np.uint64(8 * len(words))) or np.any(places % np.uint64(8)):
        raise FormatError("arm64 Image: a relocation is outside of it")
    words[(places // np.uint64(8)).astype(np.intp)] = relocations[:, 2]
    return words
