"""BTF, type by type, as pahole writes it."""

import struct
from collections.abc import Sequence

from kprobes.formats.btf_index import Kind

Members = Sequence[tuple[str, int, int]]
"""(name, type id, offset in bits)."""


class BtfBuilder:
    """Types get ids from 1 on, in the order they are added."""

    def __init__(self) -> None:
        self._strings = bytearray(b"\0")
        self._offsets: dict[str, int] = {"": 0}
        self._types = bytearray()
        self._count = 0

    def string(self, text: str) -> int:
        if text not in self._offsets:
            self._offsets[text] = len(self._strings)
            self._strings += text.encode() + b"\0"
        return self._offsets[text]

    def add(
        self, kind: int, name: str = "", value: int = 0, *, words: Sequence[int] = (), info: int = 0
    ) -> int:
        """Add any type: ``info`` is vlen and kind_flag, ``words`` what follows the header."""
        header = (self.string(name), info | kind << 24, value)
        self._types += struct.pack(f"<{3 + len(words)}I", *header, *words)
        self._count += 1
        return self._count

    def int_(self, name: str, size: int, *, bits: int | None = None) -> int:
        return self.add(Kind.INT, name, size, words=[8 * size if bits is None else bits])

    def ptr(self, to: int) -> int:
        return self.add(Kind.PTR, value=to)

    def const(self, of: int) -> int:
        return self.add(Kind.CONST, value=of)

    def typedef(self, name: str, of: int) -> int:
        return self.add(Kind.TYPEDEF, name, of)

    def array(self, of: int, n: int) -> int:
        return self.add(Kind.ARRAY, words=[of, of, n])

    def struct(self, name: str, size: int, members: Members, *, flag: bool = False) -> int:
        return self._aggregate(Kind.STRUCT, name, size, members, flag=flag)

    def union(self, name: str, size: int, members: Members) -> int:
        return self._aggregate(Kind.UNION, name, size, members, flag=False)

    def _aggregate(self, kind: Kind, name: str, size: int, members: Members, *, flag: bool) -> int:
        words = [word for m in members for word in (self.string(m[0]), m[1], m[2])]
        return self.add(kind, name, size, words=words, info=len(members) | flag << 31)

    def enum(self, name: str, values: dict[str, int], *, flag: bool = False) -> int:
        words = [w for n, v in values.items() for w in (self.string(n), v & 0xFFFFFFFF)]
        return self.add(Kind.ENUM, name, 4, words=words, info=len(values) | flag << 31)

    def enum64(self, name: str, values: dict[str, int], *, flag: bool = False) -> int:
        words = [
            word
            for n, v in values.items()
            for word in (self.string(n), v & 0xFFFFFFFF, v >> 32 & 0xFFFFFFFF)
        ]
        return self.add(Kind.ENUM64, name, 8, words=words, info=len(values) | flag << 31)

    def proto(self, returns: int, parameters: Sequence[tuple[str, int]]) -> int:
        words = [word for n, t in parameters for word in (self.string(n), t)]
        return self.add(Kind.FUNC_PROTO, value=returns, words=words, info=len(parameters))

    def func(self, name: str, returns: int, parameters: Sequence[tuple[str, int]]) -> int:
        return self.add(Kind.FUNC, name, self.proto(returns, parameters), info=1)

    def build(self) -> bytes:
        """Return the whole section."""
        types, strings = bytes(self._types), bytes(self._strings)
        header = struct.pack("<HBBIIIII", 0xEB9F, 1, 0, 24, 0, len(types), len(types), len(strings))
        return header + types + strings


def kernel_types() -> BtfBuilder:
    """A little of everything that a kernel's BTF has."""
    b = BtfBuilder()
    char, int_ = b.int_("char", 1), b.int_("int", 4)
    ulong = b.int_("long unsigned int", 8)
    void_ptr = b.ptr(0)
    b.typedef("size_t", ulong)
    const_char_ptr = b.ptr(b.const(char))
    list_head = b.add(Kind.STRUCT, "list_head", 16, info=2, words=[
        b.string("next"), void_ptr, 0, b.string("prev"), void_ptr, 64,
    ])  # fmt: skip
    inner = b.struct("", 8, [("low", int_, 0), ("high", int_, 32)])
    either = b.union("", 8, [("whole", ulong, 0), ("", inner, 0)])
    b.struct("thing", 64, [
        ("id", int_, 0), ("", either, 64), ("list", list_head, 128),
        ("name", b.array(char, 16), 256),
    ])  # fmt: skip
    b.typedef("thing_t", b.struct("", 12, [("x", int_, 64)]))
    b.struct(
        "packed", 4, [("a", int_, 3 << 24), ("b", int_, 5 << 24 | 3), ("c", char, 8)], flag=True
    )
    b.struct("old_bits", 4, [("bit", b.int_("unsigned int", 4, bits=1), 0)])
    b.enum("state", {"LIVE": 0, "GONE": 2})
    b.enum("small", {"MINUS": -1}, flag=True)
    b.enum64("wide", {"HUGE": 1 << 40})
    callback = b.ptr(b.proto(int_, [("", void_ptr), ("", b.ptr(b.proto(0, [])))]))
    b.func("openat", int_, [("dfd", int_), ("filename", const_char_ptr), ("fn", callback)])
    b.func("printk", int_, [("fmt", const_char_ptr), ("", 0)])
    b.func("nothing", 0, [])
    b.add(Kind.VAR, "jiffies", ulong, words=[1])
    b.add(Kind.DATASEC, ".data", 8, words=[1, 0, 8], info=1)
    b.add(Kind.DECL_TAG, "tag", 1, words=[0xFFFFFFFF])
    b.add(Kind.FLOAT, "double", 8)
    b.add(Kind.FWD, "hidden")
    return b
