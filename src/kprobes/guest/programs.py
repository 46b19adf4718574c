"""Files that programs of the guest have mapped, by its kernel's lists: where an address lies.

Functions of these files, where they can be read here.

As the kernel's trace option ``sym-userobj`` shows them (seq_print_user_ip() in
kernel/trace/trace_output.c): the file's path as d_path() has it, and how far the address is behind
the beginning of the mapping. A task's mappings are a list (``mm->mmap``), since 6.1 a maple tree
(include/linux/maple_tree.h, lib/maple_tree.c):

    ma_root:          0, a single entry, or a node with 0b10 in its lowest bits
    a node:           its address, 256 bytes aligned; bits 3 to 6 what it is
    maple_leaf_64 1, maple_range_64 2:  pivot[15], slot[16]
    maple_arange_64 3:                  pivot[9], slot[10]
    slot[i] is of what follows pivot[i - 1], up to pivot[i]; the last one up to the node's own end

The guest runs meanwhile, and may be hostile: what does not add up is as if it were not there.
"""

import os
import time
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

from msgspec import Struct

from kprobes.arch.registry import machine
from kprobes.errors import FormatError, MemoryFault, TargetError
from kprobes.formats.elf import load_places, noted_build_id
from kprobes.formats.symtab import ProgramFunctions, functions
from kprobes.guest.guest import Guest
from kprobes.guest.stacks import each_task
from kprobes.model.hist import PROGRAM_SHIFT
from kprobes.units import U64

_FRESH_S = 0.1
"""For so long nobody looks again: a program is replaced, or maps something else."""
_MAX_TASKS, _MAX_MAPPINGS, _MAX_NODES, _MAX_NAMES = 4096, 1 << 14, 1 << 12, 256
_NODE, _IS_NODE, _LOWEST = 256, 0b10, 4096
_HEIGHT = 31
"""MAPLE_HEIGHT_MAX."""
_LEAF, _RANGE, _ARANGE = 1, 2, 3
_SLOTS = {_LEAF: 16, _RANGE: 16, _ARANGE: 10}
_NEWLINE = (b"\n", rb"\012")
_LARGEST = 1 << 29
"""Bytes of a file that is looked at for its functions."""


def _unknown(_path: bytes, _offset: int) -> bytes | None:
    return None


class _Mapping(Struct, frozen=True):
    # Of what is at an offset in a file.
    start: int
    stop: int
    path: bytes
    offset: int


class _Found(Struct, frozen=True):
    # Those of one task, by their addresses.
    at: float
    mappings: Sequence[_Mapping]


class Programs:
    """The programs of one guest; what a task has mapped is known after its end, too.

    Attributes:
        find_function: (path, offset in the file) to the function there, where its files are known.
    """

    def __init__(self, find_guest: Callable[[], Guest]) -> None:
        """Look up nothing yet, in a guest of which more may be known later."""
        self.find_function: Callable[[bytes, int], bytes | None] = _unknown
        self._find_guest = find_guest
        self._found: dict[int, _Found] = {}

    def __call__(self, pid: int, addr: int) -> bytes | None:
        """Return what is shown of an address of a task's program: ``/bin/sh[+0x1234]``.

        Where the function is known it is ``main+0x12/0x40 [/bin/sh]``; None where no file is
        mapped, or the task is not known.
        """
        mappings = self._mappings(pid)
        index = bisect_right(mappings, addr, key=lambda each: each.start) - 1
        if index < 0 or addr >= mappings[index].stop or not mappings[index].path:
            return None
        found, path = mappings[index], mappings[index].path
        function = self.find_function(path, found.offset + addr - found.start)
        if function is not None:
            return b"%b [%b]" % (function, path)
        return b"%b[+0x%x]" % (path, addr - found.start)

    def note(self, pids: Collection[int], mm: int) -> None:
        """Look at what a program has mapped, before it is gone.

        Args:
            pids: that it is asked for by.
            mm: its ``struct mm_struct``.
        """
        mappings = self._read(lambda: mm)
        if mappings is not None:
            for pid in pids:
                self._keep(pid, mappings)

    @property
    def _guest(self) -> Guest:
        return self._find_guest()

    def _mappings(self, pid: int) -> Sequence[_Mapping]:
        now, known = time.monotonic(), self._found.get(pid)
        if known is not None and now < known.at + _FRESH_S:
            return known.mappings
        mappings = self._read(lambda: self._mm(pid))
        if mappings is None:
            # As it was before its end. Nor is one that was never known looked for at each address.
            mappings = known.mappings if known is not None else ()
        self._keep(pid, mappings)
        return mappings

    def _keep(self, pid: int, mappings: Sequence[_Mapping]) -> None:
        # The oldest goes: a number is used again, by a task that is looked at itself.
        self._found.pop(pid, None)
        while len(self._found) >= _MAX_TASKS:
            self._found.pop(next(iter(self._found)), None)
        self._found[pid] = _Found(time.monotonic(), mappings)

    def _read(self, find_mm: Callable[[], int]) -> Sequence[_Mapping] | None:
        # None when there is no such task, or it has no memory of its own, or none any more.
        try:
            with self._guest.readable():
                mm = find_mm()
                return sorted(self._each(mm), key=lambda each: each.start) if mm else None
        except (MemoryFault, TargetError):
            return None

    def _mm(self, program: int) -> int:
        # Of a task, or of a program as histograms have it.
        memory, kernel = self._guest.memory, self._guest.kernel
        number, mm, exec_id = (
            kernel.offset("task_struct", name) for name in ("pid", "mm", "self_exec_id")
        )
        executed, pid = program >> PROGRAM_SHIFT, program % (1 << PROGRAM_SHIFT)
        for task in each_task(memory, kernel):
            if int.from_bytes(memory.read(task + number, 4), "little") == pid:
                now = executed and memory.u64(task + exec_id) % (1 << PROGRAM_SHIFT)
                return memory.u64(task + mm) if now == executed else 0
        return 0

    def _each(self, mm: int) -> Iterator[_Mapping]:
        memory, kernel = self._guest.memory, self._guest.kernel
        names = "vm_start", "vm_end", "vm_file", "vm_pgoff"
        start, stop, file, page = (kernel.offset("vm_area_struct", name) for name in names)
        size = machine(kernel.arch).inject_ops.page_size(memory)
        paths: dict[int, bytes] = {0: b""}
        for count, area in enumerate(self._areas(mm)):
            if count == _MAX_MAPPINGS:
                raise TargetError("a task of the guest has more mappings than can be true")
            mapped = memory.u64(area + file)
            if mapped not in paths:
                paths[mapped] = self._path(mapped)
            span, path = (memory.u64(area + start), memory.u64(area + stop)), paths[mapped]
            yield _Mapping(*span, path, memory.u64(area + page) * size if path else 0)

    def _areas(self, mm: int) -> Iterator[int]:
        memory, kernel = self._guest.memory, self._guest.kernel
        if kernel.version >= (6, 1):
            root = memory.u64(mm + kernel.offset("mm_struct", "mm_mt.ma_root"))
            yield from _Tree(self._guest).entries(root)
            return
        following = kernel.offset("vm_area_struct", "vm_next")
        area = memory.u64(mm + kernel.offset("mm_struct", "mmap"))
        while area:
            yield area
            area = memory.u64(area + following)

    def _path(self, file: int) -> bytes:
        # prepend_path() in fs/d_path.c, from the root of all.
        memory, offset = self._guest.memory, self._guest.kernel.offset
        inner, up, point = (offset("mount", m) for m in ("mnt", "mnt_parent", "mnt_mountpoint"))
        root, parent = offset("vfsmount", "mnt_root"), offset("dentry", "d_parent")
        dentry = memory.u64(file + offset("file", "f_path.dentry"))
        mount = memory.u64(file + offset("file", "f_path.mnt")) - inner
        is_deleted = not memory.u64(dentry + offset("dentry", "d_hash.pprev"))
        names = list[bytes]()
        for _ in range(_MAX_NAMES):
            above = memory.u64(dentry + parent)
            if dentry == memory.u64(mount + inner + root):
                outer = memory.u64(mount + up)
                if outer == mount:
                    break
                dentry, mount = memory.u64(mount + point), outer
                continue
            names.append(self._name(dentry))
            if above == dentry:
                # Of a file system that is mounted nowhere.
                break
            dentry = above
        path = b"/" + b"/".join(reversed(names))
        return path.replace(*_NEWLINE) + b" (deleted)" * is_deleted

    def _name(self, dentry: int) -> bytes:
        memory, offset = self._guest.memory, self._guest.kernel.offset
        text = memory.u64(dentry + offset("dentry", "d_name.name"))
        size = memory.read(dentry + offset("dentry", "d_name.len"), 4)
        return memory.read(text, min(int.from_bytes(size, "little"), _MAX_NAMES))


class _Tree:
    # A maple tree, of which not more is read than can be there.
    def __init__(self, guest: Guest) -> None:
        self._memory, self._left = guest.memory, _MAX_NODES
        offset = guest.kernel.offset
        self._places = {
            kind: (offset(struct, "pivot"), offset(struct, "slot"))
            for kind, struct in (
                (_LEAF, "maple_range_64"),
                (_RANGE, "maple_range_64"),
                (_ARANGE, "maple_arange_64"),
            )
        }

    def entries(self, root: int) -> Iterator[int]:
        """Yield what is in the tree that has this as ``ma_root``."""
        if root & 0b11 == _IS_NODE and root > _LOWEST:
            yield from self._below(root, U64, _HEIGHT)
        elif root:
            yield root

    def _below(self, entry: int, stop: int, height: int) -> Iterator[int]:
        # What is below a node whose last index is ``stop``.
        kind = entry >> 3 & 0xF
        self._left -= 1
        if self._left < 0 or not height or kind not in _SLOTS:
            raise TargetError("the mappings of a task of the guest do not add up")
        node, count = self._memory.read(entry & -_NODE, _NODE), _SLOTS[kind]
        pivots, slots = (_words(node, at, count) for at in self._places[kind])
        for index in range(count):
            # One without a pivot of its own is the node's last.
            has_pivot = index < count - 1 and (pivots[index] or not index)
            last = min(pivots[index], stop) if has_pivot else stop
            if slots[index]:
                is_leaf, entry = kind == _LEAF, slots[index]
                yield from [entry] if is_leaf else self._below(entry, last, height - 1)
            if last == stop:
                return


def _words(node: bytes, at: int, count: int) -> Sequence[int]:
    return memoryview(node[at : at + 8 * count]).cast("Q")


class _File(Struct, frozen=True):
    # Where pieces of a file are loaded: offset, bytes, address as linked; and its functions.
    places: Sequence[tuple[int, int, int]]
    functions: ProgramFunctions


class ProgramFiles:
    """Functions of programs, by their files in a directory that is as the guest's root.

    That is perf's ``--symfs``: a root file system that is mounted here, or this machine's own,
    which virtme-ng's guests have. A file that is stripped may have its symbols in ``usr/lib/debug``
    there, by its build id; else those for dynamic linking tell. Each is read once.
    """

    def __init__(self, root: Path) -> None:
        """Read none yet.

        Args:
            root: the directory.
        """
        self._root = root.resolve()
        self._files: dict[bytes, _File | None] = {}

    def __call__(self, path: bytes, offset: int) -> bytes | None:
        """Return what is shown of a place in a file: ``main+0x12/0x40``.

        None where there is no such file here, or no function that is known.

        Args:
            path: of the file, in the guest.
            offset: in it.
        """
        if path not in self._files:
            self._files[path] = self._read(path)
        file = self._files[path]
        if file is None:
            return None
        for start, size, addr in file.places:
            if start <= offset < start + size:
                return _place(file.functions, addr + offset - start)
        return None

    def _read(self, path: bytes) -> _File | None:
        data = self._bytes(os.fsdecode(path).lstrip("/"))
        if data is None:
            return None
        read = _reader(data)
        found = (
            _functions(data)
            or self._debug_functions(noted_build_id(read).hex())
            or _functions(data, is_dynamic=True)
        )
        return None if found is None else _File(load_places(read), found)

    def _debug_functions(self, build_id: str) -> ProgramFunctions | None:
        name = f"usr/lib/debug/.build-id/{build_id[:2]}/{build_id[2:]}.debug"
        data = self._bytes(name) if build_id else None
        return None if data is None else _functions(data)

    def _bytes(self, name: str) -> bytes | None:
        # What the guest says where its files are must not lead anywhere else.
        try:
            file = (self._root / name).resolve()
            if not (file.is_relative_to(self._root) and file.is_file()):
                return None
            return file.read_bytes() if file.stat().st_size < _LARGEST else None
        except (OSError, ValueError):
            return None


def _reader(data: bytes) -> Callable[[int, int], bytes]:
    return lambda at, size: data[at : at + size]


def _functions(data: bytes, *, is_dynamic: bool = False) -> ProgramFunctions | None:
    try:
        return functions(data, is_dynamic=is_dynamic)
    except FormatError:
        return None


def _place(found: ProgramFunctions, addr: int) -> bytes | None:
    index = bisect_right(found.starts, addr) - 1
    if index < 0:
        return None
    start, size = int(found.starts[index]), int(found.sizes[index])
    if size and addr >= start + size:
        return None
    shown = b"%b+0x%x" % (found.names[index], addr - start)
    return shown + b"/0x%x" % size if size else shown
