"""arm64's flat kernel file to what it loads where, as an ELF file would say it.

    u32 code0, code1; u64 text_offset, image_size, flags, res2, res3, res4; u32 magic, res5;

Documentation/arch/arm64/booting.rst. The file has no addresses but in its relocations, and what
they fill in is zero there (--no-apply-dynamic-relocs in arch/arm64/Makefile):

    Elf64_Rela: u64 offset, u64 info, s64 addend                  // elf.h

The lowest that one of them computes is ``_text``, from which the kernel's symbols count.
"""

import struct

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
    words = np.frombuffer(data, "<u8", len(data) // 8).astype(np.uint64)
    relocations = _relocations(words)
    start = _lowest(relocations[:, 2])
    done = _relocated(words, relocations, start).tobytes() + data[len(words) * 8 :]
    # The vDSO's notes come before the kernel's own.
    ids = [value for _, value in elf.build_id_notes(done)]
    return elf.Image(
        machine=elf.EM_AARCH64,
        segments=(elf.Segment(addr=start, data=done),),
        build_id=ids[-1] if ids else b"",
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
    kernel = addends[addends >= np.uint64(1 << 63)]
    if not len(kernel):
        raise FormatError(
            "arm64 Image: no relocations of the plain kind (Elf64_Rela) say where it was linked; "
            "give the vmlinux instead"
        )
    return int(kernel.min()) & -_ALIGNMENT & U64


def _relocated(words: _Words, relocations: _Words, start: int) -> _Words:
    places = relocations[:, 0] - np.uint64(start)
    if np.any(places >= np.uint64(8 * len(words))) or np.any(places % np.uint64(8)):
        raise FormatError("arm64 Image: a relocation is outside of it")
    words[(places // np.uint64(8)).astype(np.intp)] = relocations[:, 2]
    return words
