"""Types that loaded modules add to a kernel's, from lists in its memory."""

import struct

import pytest

from kprobes.errors import FormatError
from kprobes.formats import btf_index
from kprobes.image.module_types import ModuleTypes, read_module_types
from kprobes.image.types import parse_types
from tests.build.btf import BtfBuilder
from tests.build.kernel import TEXT
from tests.build.pages import FakeRam

HEAD, LISTED, BTFS, DATA = TEXT + 0x100, TEXT + 0x1000, TEXT + 0x2000, TEXT + 0x4000
STEP, BTF_STEP = 0x100, 0x800


def kernel_builder() -> BtfBuilder:
    b = BtfBuilder()
    word, half, char = b.int_("unsigned long", 8), b.int_("unsigned int", 4), b.int_("char", 1)
    ring = b.struct("list_head", 16, [("next", word, 0), ("prev", word, 64)])
    b.struct("btf_module", 32, [("list", ring, 0), ("btf", word, 192)])
    b.struct(
        "btf", 96, [("data", word, 0), ("data_size", half, 64), ("name", b.array(char, 56), 128)]
    )
    b.func("vfs_read", half, [("count", word)])
    return b


class Split(BtfBuilder):
    """Goes on where a kernel's BTF ends."""

    def __init__(self, base: bytes) -> None:
        super().__init__()
        index = btf_index.parse(base)
        self.shift = len(index.names.blob)
        self._strings, self._offsets = bytearray(), {"": 0}
        self._count = len(index) - 1

    def string(self, text: str) -> int:
        if text not in self._offsets:
            self._offsets[text] = self.shift + len(self._strings)
            self._strings += text.encode() + b"\0"
        return self._offsets[text]


BASE = kernel_builder().build()
WORD = 1


def split(function: str) -> bytes:
    b = Split(BASE)
    thing = b.struct("thing", 16, [("first", WORD, 0), ("second", WORD, 64)])
    b.func(function, 0, [("one", b.ptr(thing)), ("two", WORD)])
    return b.build()


def make_memory(modules: dict[str, bytes], *, last: int = HEAD) -> FakeRam:
    memory = FakeRam(0x8000, start=TEXT)
    links = [HEAD, *(LISTED + STEP * n for n in range(len(modules)))]
    for here, there in zip(links, [*links[1:], last], strict=True):
        memory.write(here, struct.pack("<Q", there))
    for n, (name, data) in enumerate(modules.items()):
        btf, at = BTFS + STEP * n, DATA + BTF_STEP * n
        memory.write(LISTED + STEP * n + 24, struct.pack("<Q", btf))
        memory.write(btf, struct.pack("<QI4x", at, len(data)) + name.encode())
        memory.write(at, data)
    return memory


def read(memory: FakeRam) -> ModuleTypes:
    return read_module_types(memory, HEAD, BASE, parse_types(BASE))


def test_a_module_s_types_go_on_where_the_kernel_s_end() -> None:
    found = read(make_memory({"ext4": split("ext4_sync"), "fuse": split("fuse_open")}))

    types = found["ext4"]
    prototype, number = types.function("ext4_sync"), types.struct("thing")
    assert sorted(found) == ["ext4", "fuse"]
    assert prototype is not None
    assert number is not None
    assert [(p.name, p.type) for p in prototype.parameters] == [
        ("one", "struct thing *"),
        ("two", "unsigned long"),
    ]
    assert types.offset("thing", "second") == 8
    assert types.function("vfs_read") is not None
    assert types.function("fuse_open") is None


@pytest.mark.parametrize("last", [0, LISTED, TEXT - 8])
def test_a_ring_that_does_not_close_ends_somewhere(last: int) -> None:
    assert list(read(make_memory({"a": split("f")}, last=last))) == ["a"]


@pytest.mark.parametrize("data", [b"no BTF at all", split("f")[:-1]])
def test_damaged_types_are_none(data: bytes) -> None:
    found = read(make_memory({"bad": data, "good": split("f")}))

    assert found.get("bad") is None
    assert found.get("good") is not None
    assert list(found) == ["good"]


def test_types_that_reach_out_of_memory_are_left_out() -> None:
    memory = make_memory({"far": split("f"), "good": split("g")})
    memory.write(BTFS, struct.pack("<QI", 1 << 63, 64))
    huge = make_memory({"huge": split("f")})
    huge.write(BTFS + 8, struct.pack("<I", 1 << 31))

    found = read(memory)
    assert (found.get("far"), list(found)) == (None, ["good"])
    assert list(read(huge)) == []
    assert list(read(make_memory({"empty": b""}))) == []


def test_types_are_read_when_they_are_asked_for() -> None:
    memory = make_memory({"early": split("f"), "late": split("g")})

    found = read(memory)
    reads = memory.reads
    assert found.get("early") is not None
    memory.write(DATA + BTF_STEP, bytes(64))

    assert memory.reads == reads + 1
    assert found.get("late") is None


def test_a_kernel_that_does_not_tell_has_none() -> None:
    memory, other = make_memory({"a": split("f")}), parse_types(BtfBuilder().build())

    assert list(read_module_types(memory, None, BASE, parse_types(BASE))) == []
    assert list(read_module_types(memory, HEAD, BASE, None)) == []
    assert list(read_module_types(memory, HEAD, BASE, other)) == []


def test_what_is_no_btf_cannot_be_joined() -> None:
    with pytest.raises(FormatError, match="header"):
        btf_index.join(BASE, b"nothing")
