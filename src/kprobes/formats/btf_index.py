"""BTF, the kernel's compact type information, as one column per fact of a type's header.

    struct btf_header { u16 magic; u8 version; u8 flags; u32 hdr_len;
                        u32 type_off; u32 type_len; u32 str_off; u32 str_len; };
    struct btf_type   { u32 name_off; u32 info; u32 size_or_type; };   // then words of the kind
                        // info: bits 0-15 vlen, 24-28 kind, 31 kind_flag

Offsets count from the header's end; type 1 is the first, 0 is void. Written down in
Documentation/bpf/btf.rst. Types have no index of their own, so the next type's place follows
only from this one's kind; a column of "where the next would begin" for every word, made at
once, leaves one list look-up per type to Python.
"""

import struct
from enum import IntEnum

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from kprobes.errors import FormatError
from kprobes.formats.strtab import Names

MAGIC = b"\x9f\xeb\x01"
"""Little endian 0xeb9f and the version."""

_HEADER = struct.Struct("<HBBIIIII")
_MAX_HEADER = 256
_MAX_BYTES = 1 << 28


class Kind(IntEnum):
    """What a type is."""

    VOID = 0
    INT = 1
    PTR = 2
    ARRAY = 3
    STRUCT = 4
    UNION = 5
    ENUM = 6
    FWD = 7
    TYPEDEF = 8
    VOLATILE = 9
    CONST = 10
    RESTRICT = 11
    FUNC = 12
    FUNC_PROTO = 13
    VAR = 14
    DATASEC = 15
    FLOAT = 16
    DECL_TAG = 17
    TYPE_TAG = 18
    ENUM64 = 19


_FIXED = {Kind.INT: 1, Kind.ARRAY: 3, Kind.VAR: 1, Kind.DECL_TAG: 1}
"""Words after the header."""
EACH = {
    Kind.STRUCT: 3,
    Kind.UNION: 3,
    Kind.ENUM: 2,
    Kind.FUNC_PROTO: 2,
    Kind.DATASEC: 3,
    Kind.ENUM64: 3,
}
"""Words after it per member, parameter, ..., of which there are vlen."""

_KINDS = 32
_fixed_words = np.zeros(_KINDS, np.int32)
_each_words = np.zeros(_KINDS, np.int32)
for _kind in Kind:
    _fixed_words[_kind] = 3 + _FIXED.get(_kind, 0)
    _each_words[_kind] = EACH.get(_kind, 0)


class BtfIndex(Struct, frozen=True, kw_only=True, eq=False):
    """All types' headers.

    Attributes:
        words: uint32, the type section.
        at: int64 (n,), where in ``words`` each type begins; type 0 is void, with at[0] = -1.
        names: the string section.
        name_at: uint32 (n,), each type's name as an offset into ``names.blob``; 0 is none.
        kinds: uint8 (n,).
        size: bytes of the whole BTF, header included.
    """

    words: NDArray[np.uint32]
    at: NDArray[np.int64]
    names: Names
    name_at: NDArray[np.uint32]
    kinds: NDArray[np.uint8]
    size: int

    def __len__(self) -> int:
        """Return the number of types, void included."""
        return len(self.at)

    def string(self, offset: int) -> str:
        """Return the string at an offset of the string section.

        Raises:
            FormatError: the offset is outside of it.
        """
        blob = self.names.blob
        if not 0 <= offset < len(blob):
            raise FormatError(f"BTF: string {offset} of {len(blob)}")
        return blob[offset : blob.index(0, offset)].decode(errors="backslashreplace")

    def strings_equal(self, name: str) -> list[int]:
        """Return the offsets of a string; more than one only in a BTF that was not deduplicated."""
        return [int(self.names.starts[i]) for i in self.names.numbers(name.encode())]


def size_at(data: bytes, start: int) -> int | None:
    """Return the size of the BTF whose header is at ``start``, or None when it cannot be one."""
    sections = _sections(data, start)
    if sections is None:
        return None
    _, _, string_at, string_size = sections
    return string_at + string_size - start


def _sections(data: bytes, start: int) -> tuple[int, int, int, int] | None:
    # (type section, its size, string section, its size), as positions in data.
    if start < 0 or start + _HEADER.size > len(data) or not data.startswith(MAGIC, start):
        return None
    _, _, _, header, type_off, type_size, string_off, string_size = _HEADER.unpack_from(data, start)
    is_sane = _HEADER.size <= header <= _MAX_HEADER and header % 4 == 0
    is_ordered = type_off % 4 == 0 and type_off + type_size <= string_off
    end = start + header + string_off + string_size
    if not is_sane or not is_ordered or not type_size or end > min(len(data), start + _MAX_BYTES):
        return None
    return start + header + type_off, type_size, start + header + string_off, string_size


def join(base: bytes, split: bytes) -> bytes:
    """Return one BTF of two, the second of which goes on where the first one ends.

    Its types are numbered, and its strings are counted, from the first one's end on.

    Raises:
        FormatError: a header is damaged.
    """
    types, strings = bytearray(), bytearray()
    for data in (base, split):
        type_at, type_size, string_at, string_size = _known_sections(data)
        types += data[type_at : type_at + type_size]
        strings += data[string_at : string_at + string_size]
    magic, size = int.from_bytes(MAGIC[:2], "little"), _HEADER.size
    sizes = (0, len(types), len(types), len(strings))
    return _HEADER.pack(magic, MAGIC[2], 0, size, *sizes) + types + strings


def parse(data: bytes, places: NDArray[np.uint32] | None = None) -> BtfIndex:
    """Index a BTF, as the ``.BTF`` section or /sys/kernel/btf/vmlinux has it.

    Args:
        data: the whole BTF.
        places: what ``places_of`` says of it, shape (types,); found when None.

    Raises:
        FormatError: no BTF, or one that is damaged: see ``places_of``.
    """
    type_at, type_size, string_at, string_size = _known_sections(data)
    blob = data[string_at : string_at + string_size]
    if blob[:1] != b"\0" or blob[-1:] != b"\0":
        raise FormatError("BTF: the string section is damaged")
    if places is None:
        places = places_of(data)
    words = np.frombuffer(data, "<u4", type_size // 4, type_at).astype(np.uint32, copy=False)
    at = np.empty(len(places) + 1, np.int64)
    at[0], at[1:] = -1, places
    return _columns(words, at, Names(blob), string_at + string_size)


def places_of(data: bytes) -> NDArray[np.uint32]:
    """Return where each type of a BTF begins, as an index of its words, shape (types,): a copy.

    Raises:
        FormatError: no BTF, one whose types do not add up, or a kind that is not known here,
            whose size therefore is not either.
    """
    type_at, type_size, _, _ = _known_sections(data)
    words = np.frombuffer(data, "<u4", type_size // 4, type_at).astype(np.uint32, copy=False)
    at = _walk(words)
    if at[-1] != len(words) or type_size % 4:
        raise FormatError(f"BTF: type {len(at) - 1} is of an unknown kind or reaches too far")
    return np.array(at[:-1], np.uint32)


def _known_sections(data: bytes) -> tuple[int, int, int, int]:
    sections = _sections(data, 0)
    if sections is None:
        raise FormatError("BTF: the header is damaged")
    return sections


def _walk(words: NDArray[np.uint32]) -> list[int]:
    # Where every type begins, and where the walk ended: len(words) when all is well.
    kinds = words.view(np.uint8)[7::4] & np.uint8(0x1F)
    vlen = words.view(np.uint16)[2::2]
    size = _fixed_words[kinds] + _each_words[kinds] * vlen
    # An unknown kind has no next: the step of 0 becomes one that leaves the section.
    size[size == 0] = len(words) + 1
    following = memoryview((np.arange(len(size), dtype=np.int32) + size).tobytes()).cast("i")
    at, last, places = 0, len(size), [0]
    while at < last:
        at = following[at]
        places.append(at)
    return places


def _columns(words: NDArray[np.uint32], at: NDArray[np.int64], names: Names, size: int) -> BtfIndex:
    name_at = words[at]
    info = words[at + 1]
    name_at[0] = info[0] = 0
    kinds = (info >> np.uint32(24) & np.uint32(0x1F)).astype(np.uint8)
    return BtfIndex(words=words, at=at, names=names, name_at=name_at, kinds=kinds, size=size)
