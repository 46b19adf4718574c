"""Mappings of tasks in memory that is damaged, or hostile; functions in files of programs."""

import os
import struct
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kprobes.errors import MemoryFault
from kprobes.guest import programs
from kprobes.guest.guest import Guest
from kprobes.guest.programs import ProgramFiles, Programs
from tests.build import elf
from tests.build.programs import (
    BASE,
    DYNSYM,
    SYMTAB,
    framed,
    framed_functions,
    with_functions,
)

TASK, MM, AREA, FILE, MOUNT, DENTRY, ROOT = (0x1000 * n for n in range(1, 8))
NODE, NAME = 0x10000, 0x20000
_OFFSETS = {
    name: 8 * n
    for n, name in enumerate(
        (
            *("pid", "mm", "mm_mt.ma_root", "mmap", "vm_start", "vm_end", "vm_file", "vm_next"),
            *("vm_pgoff", "self_exec_id"),
            *("mnt", "mnt_parent", "mnt_mountpoint", "d_parent", "d_hash.pprev", "d_name.name"),
            *("d_name.len", "f_path.dentry", "f_path.mnt"),
        )
    )
}
"""Of members, whose names no two structs share; those of nodes are the kernel's."""
_NODES = {
    ("maple_range_64", "pivot"): 8,
    ("maple_range_64", "slot"): 128,
    ("maple_arange_64", "pivot"): 8,
    ("maple_arange_64", "slot"): 80,
    ("vfsmount", "mnt_root"): 0,
}
LEAF, RANGE, ARANGE = (kind << 3 | 0b100 for kind in (1, 2, 3))
AS_ROOT = 0b10


class _Memory:
    def __init__(self) -> None:
        self.words: dict[int, int] = {}

    def put(self, addr: int, member: str, value: int) -> None:
        self.words[addr + _OFFSETS[member]] = value

    def read(self, addr: int, size: int) -> bytes:
        first, last = addr & -8, addr + size
        if first not in self.words and size != 256:
            raise MemoryFault(addr, size)
        found = b"".join(struct.pack("<Q", self.words.get(a, 0)) for a in range(first, last, 8))
        return found[addr - first :][:size]

    def u64(self, addr: int) -> int:
        return int.from_bytes(self.read(addr, 8), "little")

    def node(self, at: int, entries: Mapping[int, int], kind: int) -> int:
        """Put a node with the last index of each slot, and return what points to it."""
        slots = _NODES["maple_arange_64" if kind == ARANGE else "maple_range_64", "slot"]
        for n, (last, entry) in enumerate(entries.items()):
            self.words[at + 8 + 8 * n] = last
            self.words[at + slots + 8 * n] = entry
        return at | kind

    def area(self, at: int, start: int, stop: int) -> int:
        values = {"vm_start": start, "vm_end": stop, "vm_file": FILE, "vm_pgoff": 0}
        for member, value in values.items():
            self.put(at, member, value)
        return at


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> _Memory:
    def each_task(*_: object) -> tuple[int, ...]:
        return (TASK,)

    monkeypatch.setattr(programs, "each_task", each_task)
    made = _Memory()
    for addr, member, value in (
        *((TASK, "pid", 7), (TASK, "mm", MM)),
        *((FILE, "f_path.dentry", DENTRY), (FILE, "f_path.mnt", MOUNT + _OFFSETS["mnt"])),
        *((MOUNT, "mnt", ROOT), (MOUNT, "mnt_parent", MOUNT), (MOUNT, "mnt_mountpoint", ROOT)),
        *((DENTRY, "d_parent", ROOT), (DENTRY, "d_hash.pprev", 1), (ROOT, "d_parent", ROOT)),
        *((DENTRY, "d_name.name", NAME), (DENTRY, "d_name.len", 3)),
    ):
        made.put(addr, member, value)
    made.words[NAME] = int.from_bytes(b"a\nb\0", "little")
    return made


def programs_of(memory: _Memory, *, version: tuple[int, int] = (6, 1)) -> Programs:
    def offset(struct_: str, member: str) -> int:
        return _NODES.get((struct_, member), _OFFSETS.get(member, 0))

    kernel = SimpleNamespace(version=version, offset=offset, arch="x86_64")
    guest: Any = SimpleNamespace(memory=memory, kernel=kernel, readable=nullcontext)
    return Programs(lambda: cast("Guest", guest))


def test_an_area_alone_needs_no_tree(memory: _Memory) -> None:
    memory.put(MM, "mm_mt.ma_root", memory.area(AREA, 0x400000, 0x401000))
    found = programs_of(memory)

    assert found(7, 0x400000) == rb"/a\012b[+0x0]"
    assert found(7, 0x400FFF) == rb"/a\012b[+0xfff]"
    assert found(7, 0x401000) is None
    assert found(7, 0x3FFFFF) is None
    assert found(8, 0x400000) is None


def test_trees_of_several_levels_are_followed_to_each_nodes_own_end(memory: _Memory) -> None:
    areas = [memory.area(AREA + 0x100 * n, n << 20, (n << 20) + 0x1000) for n in range(4)]
    first = memory.node(NODE, {0xFFF: areas[0], 0xFFFFF: 0, 0x100FFF: areas[1]}, LEAF)
    # Without a last index: to the end of all. What is behind it was another's.
    second = memory.node(NODE + 0x100, {0x200FFF: areas[2], 0: areas[3]}, LEAF)
    memory.words[NODE + 0x100 + 128 + 16] = 0xDEAD
    top = memory.node(NODE + 0x200, {0x100FFF: first, (1 << 64) - 1: second}, ARANGE)
    memory.put(MM, "mm_mt.ma_root", top | AS_ROOT)
    found = programs_of(memory)

    assert [found(7, (n << 20) + 4) for n in range(4)] == [rb"/a\012b[+0x4]"] * 4
    assert found(7, 0x1000) is None


@pytest.mark.parametrize("kind", [RANGE, ARANGE])
def test_a_tree_that_leads_back_to_itself_is_none(memory: _Memory, kind: int) -> None:
    last = (1 << 64) - 2
    top = memory.node(NODE, {last - 1: NODE | kind, last: NODE | kind}, kind)
    memory.put(MM, "mm_mt.ma_root", top | AS_ROOT)

    assert programs_of(memory)(7, 0x400000) is None


def test_a_node_of_another_kind_is_none(memory: _Memory) -> None:
    memory.put(MM, "mm_mt.ma_root", NODE | 9 << 3 | AS_ROOT)

    assert programs_of(memory)(7, 0x400000) is None


def test_before_6_1_they_are_a_list_which_may_have_no_end(memory: _Memory) -> None:
    memory.put(MM, "mmap", memory.area(AREA, 0x400000, 0x401000))
    memory.put(AREA, "vm_next", 0)
    assert programs_of(memory, version=(5, 10))(7, 0x400000) == rb"/a\012b[+0x0]"

    memory.put(AREA, "vm_next", AREA)
    assert programs_of(memory, version=(5, 10))(7, 0x400000) is None


def test_a_path_that_leads_back_to_itself_ends(memory: _Memory) -> None:
    memory.put(MM, "mm_mt.ma_root", memory.area(AREA, 0x400000, 0x401000))
    other = MOUNT + 0x100
    memory.put(other, "mnt", DENTRY)
    for mount, above, point in ((MOUNT, other, DENTRY), (other, MOUNT, ROOT)):
        memory.put(mount, "mnt_parent", above)
        memory.put(mount, "mnt_mountpoint", point)

    assert programs_of(memory)(7, 0x400000) is not None


def test_what_was_mapped_is_known_after_the_end(memory: _Memory) -> None:
    memory.put(MM, "mm_mt.ma_root", memory.area(AREA, 0x400000, 0x401000))
    found = programs_of(memory)
    found.note([9], MM)
    found.note([10], 0)

    assert found(9, 0x400000) == rb"/a\012b[+0x0]"
    assert found(10, 0x400000) is None


def test_the_oldest_are_forgotten(memory: _Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "_MAX_TASKS", 2)
    memory.put(MM, "mm_mt.ma_root", memory.area(AREA, 0x400000, 0x401000))
    found = programs_of(memory)
    for pid in (20, 21, 20, 22):
        found.note([pid], MM)

    assert [found(pid, 0x400000) is not None for pid in (20, 21, 22)] == [True, False, True]


def test_a_task_that_is_not_there_is_not_looked_for_at_each_address(
    memory: _Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[object] = []

    def each_task(*of: object) -> tuple[int, ...]:
        looked.append(of)
        return (TASK,)

    monkeypatch.setattr(programs, "each_task", each_task)
    monkeypatch.setattr(programs, "_FRESH_S", 3600)
    found = programs_of(memory)

    assert [found(8, addr) for addr in (0x400000, 0x400001, 0x400002)] == [None] * 3
    assert len(looked) == 1


_FUNCTIONS = framed_functions("getppid", 3)
_CODE = framed("getppid", 3)


def _place(name: str, at: int = 0) -> int:
    # The offset in the file of a place in a function.
    return _FUNCTIONS[name][0] + at - BASE


@pytest.mark.parametrize("kind", [SYMTAB, DYNSYM], ids=["symtab", "dynsym"])
def test_functions_are_those_of_the_file_at_the_guests_path(tmp_path: Path, kind: int) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "deep").write_bytes(with_functions(_CODE, _FUNCTIONS, kind=kind))
    files = ProgramFiles(tmp_path)

    for name, (_, size) in _FUNCTIONS.items():
        shown = f"{name}+0x%x/{size:#x}"
        assert files(b"/bin/deep", _place(name)) == (shown % 0).encode()
        assert files(b"/bin/deep", _place(name, size - 1)) == (shown % (size - 1)).encode()
    last = _place("inner", _FUNCTIONS["inner"][1])
    assert files(b"/bin/deep", last) is None
    assert files(b"/bin/deep", 1) is None
    assert files(b"/bin/deep", 1 << 40) is None


def test_a_stripped_file_has_its_functions_by_its_build_id(tmp_path: Path) -> None:
    code = elf.vmlinux([(BASE, bytes(64))], notes=elf.build_id_note(bytes(range(20))))
    (tmp_path / "prog").write_bytes(code)
    folder = tmp_path / "usr/lib/debug/.build-id/00"
    folder.mkdir(parents=True)
    debug = with_functions(_CODE, {"main": (BASE, 32)})
    (folder / "0102030405060708090a0b0c0d0e0f10111213.debug").write_bytes(debug)
    # The first piece that is loaded begins behind the headers.
    start = 64 + 2 * 56

    assert ProgramFiles(tmp_path)(b"/prog", start + 5) == b"main+0x5/0x20"
    assert ProgramFiles(tmp_path)(b"/prog", start + 40) is None


def test_debug_symbols_go_before_what_is_left_for_dynamic_linking(tmp_path: Path) -> None:
    # A library is stripped, but for the functions that others call.
    code = elf.vmlinux([(BASE, bytes(64))], notes=elf.build_id_note(bytes(range(20))))
    library = with_functions(code, {"exported": (BASE, 64)}, kind=DYNSYM)
    (tmp_path / "library.so").write_bytes(library)
    start = 64 + 2 * 56
    assert ProgramFiles(tmp_path)(b"/library.so", start + 40) == b"exported+0x28/0x40"

    folder = tmp_path / "usr/lib/debug/.build-id/00"
    folder.mkdir(parents=True)
    debug = with_functions(_CODE, {"exported": (BASE, 32), "static": (BASE + 32, 32)})
    (folder / "0102030405060708090a0b0c0d0e0f10111213.debug").write_bytes(debug)

    assert ProgramFiles(tmp_path)(b"/library.so", start + 40) == b"static+0x8/0x20"


@pytest.mark.parametrize(
    "path", [b"/../secret", b"/link", b"/folder", b"/none", b"/a\0b", b"/fifo"]
)
def test_nothing_but_files_below_the_directory_is_looked_at(tmp_path: Path, path: bytes) -> None:
    root = tmp_path / "root"
    (root / "folder").mkdir(parents=True)
    (tmp_path / "secret").write_bytes(with_functions(_CODE, _FUNCTIONS))
    (root / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(root / "fifo")

    assert ProgramFiles(root)(path, _place("inner")) is None


def test_damaged_files_have_no_functions(tmp_path: Path) -> None:
    data = with_functions(_CODE, _FUNCTIONS)
    random = Random(3)
    for number in range(300):
        broken = bytearray(data[: random.randrange(len(data))] if number % 2 else data)
        for _ in range(8 * (number % 3)):
            broken[random.randrange(len(broken))] ^= 1 << random.randrange(8)
        (tmp_path / str(number)).write_bytes(broken)
        found = ProgramFiles(tmp_path)(b"/%d" % number, _place("inner"))
        assert found is None or b"+0x" in found
