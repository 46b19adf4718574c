"""Symbols of kernels seen before: XDG_CACHE_HOME/kprobes/kernels/BUILDID/DIGEST.

    kprobes-kernel-5 SHA256\n         of all that follows
    {"link": ..., ...}   \n         padded with blanks to a multiple of 8 bytes
    u64 addrs[n]; u32 starts[n]; u32 type_places[n_types]; u8 types[n]; u8 blob[];

Addresses are those of the boot that was stored; ``link`` tells by how much to move them. A file
is used only for a guest whose own tables are, byte for byte, those it was made of: a guest with
a forged build id can neither plant symbols for another kernel nor get them. The types are those
bytes themselves; only where each of them begins is kept.
"""

import contextlib
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from kprobes import directories
from kprobes.errors import MemoryFault, StateError
from kprobes.formats.kallsyms import SymbolTable
from kprobes.image.build import Build, Source, digest_of
from kprobes.ports import Memory

_MAGIC = "kprobes-kernel-5"
"""With a number that grows when more is found in a kernel: old files lack it."""
_FIRST_LINE = len(_MAGIC) + 1 + 64 + 1
_MAX_HEADER = 1 << 16
_MAX_FILES = 64
_MAX_SOURCE = 1 << 28
_UNREADABLE = (StateError, OSError, ValueError, KeyError, TypeError, RecursionError)
"""What a file may raise that we did not write, or that was damaged since."""


def default_root() -> Path:
    """Return where kernels are cached: ``$XDG_CACHE_HOME/kprobes/kernels``."""
    return directories.cache() / "kernels"


class _Header(Struct, frozen=True, kw_only=True):
    link: int
    build_id: str
    banner: str
    n: int
    n_types: int
    has_types: bool
    digest: str
    head: str
    sources: tuple[Source, ...]


class KernelCache:
    """Kernels seen before, one file each. Losing one costs a tenth of a second.

    Nothing is taken from a directory or a file that somebody else may have written.

    Args:
        root: the directory; made when the first kernel is stored. It and the one that it is in
            are ours.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def match(self, memory: Memory, text: int) -> Build | None:
        """Return the build that runs in a guest, at its running addresses, or None.

        Args:
            memory: the guest's.
            text: where its kernel's text begins.
        """
        for path in self._files():
            found = _match(path, memory, text)
            if found is not None:
                return found
        return None

    def newest(self) -> SymbolTable | None:
        """Return the symbols of the kernel that was stored last, or None; no guest is read."""
        builds = (_load(path, b"") for path in self._files())
        return next((build.table for build in builds if build is not None), None)

    def store(self, build: Build) -> None:
        """Keep a build; a cache that cannot be written is none."""
        link = build.text
        if link is None:
            return
        path = self.root / (build.build_id.hex() or "no-build-id") / build.digest.hex()
        with contextlib.suppress(OSError, StateError):
            directories.make(path.parent, top=self.root.parent)
            directories.replace_own(path, _packed(build, link))
            self._prune()

    def _files(self) -> list[Path]:
        # The newest first. A file may vanish at any moment: other sessions prune too.
        files: list[tuple[float, Path]] = []
        with contextlib.suppress(OSError, StateError):
            directories.check(self.root, top=self.root.parent)
            for path in self.root.glob("*/*"):
                with contextlib.suppress(OSError):
                    files.append((path.stat().st_mtime, path))
        return [path for _, path in sorted(files, reverse=True)]

    def _prune(self) -> None:
        for path in self._files()[_MAX_FILES:]:
            path.unlink(missing_ok=True)


def _match(path: Path, memory: Memory, text: int) -> Build | None:
    header = _peek(path)
    if header is None:
        return None
    slide = text - header.link
    pieces = list(_pieces(header, memory, slide))
    if len(pieces) != len(header.sources) or digest_of(pieces).hex() != header.digest:
        return None
    build = _load(path, pieces[-1] if header.has_types else b"")
    if build is None:
        # Not what was written: it goes, and is made again from the guest.
        path.unlink(missing_ok=True)
        return None
    return build.shifted(slide)


def _peek(path: Path) -> _Header | None:
    try:
        with directories.open_own(path) as file:
            return _parse_header(file.read(_MAX_HEADER))
    except _UNREADABLE:
        return None


def _parse_header(data: bytes) -> _Header:
    end = data.find(b"\n", _FIRST_LINE)
    if end < 0:
        raise ValueError("no header")
    fields: dict[str, Any] = json.loads(data[_FIRST_LINE:end])
    sources = tuple((addr, size) for addr, size in fields.pop("sources"))
    numbers = (
        fields["link"],
        fields["n"],
        fields["n_types"],
        *(number for pair in sources for number in pair),
    )
    words = (fields[name] for name in ("build_id", "banner", "digest", "head"))
    if not all(isinstance(number, int) for number in numbers):
        raise TypeError("not a number")
    if not all(isinstance(word, str) for word in words):
        raise TypeError("not a string")
    if not sources or any(not 0 < size <= _MAX_SOURCE for _, size in sources):
        raise ValueError("sources that cannot be")
    return _Header(**fields, sources=sources)


def _pieces(header: _Header, memory: Memory, slide: int) -> Iterator[bytes]:
    # The guest's own bytes; their beginning is compared before all of them are read.
    first = header.sources[0][0] + slide
    with contextlib.suppress(MemoryFault):
        if memory.read(first, len(header.head) // 2).hex() != header.head:
            return
        for addr, size in header.sources:
            yield memory.read(addr + slide, size)


def _load(path: Path, btf: bytes) -> Build | None:
    try:
        with directories.open_own(path) as file:
            data = file.read()
        if data[:_FIRST_LINE] != _first_line(memoryview(data)[_FIRST_LINE:]):
            return None
        header = _parse_header(data)
    except _UNREADABLE:
        return None
    return _unpacked(data, header, btf)


def _unpacked(data: bytes, header: _Header, btf: bytes) -> Build:
    # The sum was right, so this is what ``_packed`` wrote.
    at, n = data.index(b"\n", _FIRST_LINE) + 1, header.n
    starts_at, places_at = at + 8 * n, at + 12 * n
    types_at = places_at + 4 * header.n_types
    blob_at = types_at + n
    table = SymbolTable(
        addrs=np.frombuffer(data, "<u8", n, at).astype(np.uint64, copy=False),
        types=data[types_at:blob_at],
        blob=data[blob_at:],
        starts=_words(data, n, starts_at),
        sources=header.sources[: len(header.sources) - header.has_types],
    )
    return Build(
        banner=header.banner,
        build_id=bytes.fromhex(header.build_id),
        table=table,
        btf=btf,
        btf_at=header.sources[-1][0] if header.has_types else 0,
        type_places=_words(data, header.n_types, places_at),
        head=bytes.fromhex(header.head),
        digest=bytes.fromhex(header.digest),
    )


def _words(data: bytes, n: int, at: int) -> NDArray[np.uint32]:
    return np.frombuffer(data, "<u4", n, at).astype(np.uint32, copy=False)


def _packed(build: Build, link: int) -> bytes:
    fields = {
        "link": link,
        "build_id": build.build_id.hex(),
        "banner": build.banner,
        "n": len(build.table.addrs),
        "n_types": len(build.type_places),
        "has_types": bool(build.btf),
        "digest": build.digest.hex(),
        "head": build.head.hex(),
        "sources": build.sources,
    }
    header = json.dumps(fields).encode()
    header += b" " * (-(_FIRST_LINE + len(header) + 1) % 8) + b"\n"
    table = build.table
    addrs, starts = table.addrs.astype("<u8").tobytes(), table.starts.astype("<u4").tobytes()
    places = build.type_places.astype("<u4").tobytes()
    body = b"".join((header, addrs, starts, places, table.types, table.blob))
    return _first_line(memoryview(body)) + body


def _first_line(body: memoryview) -> bytes:
    return f"{_MAGIC} {hashlib.sha256(body).hexdigest()}\n".encode()
