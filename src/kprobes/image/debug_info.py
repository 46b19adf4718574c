"""Files that may have the debug info of a kernel, or of a module, and BTF of a kernel's.

A kernel that carries no types gets them so.

pahole makes BTF of debug info (DWARF). debuginfod-find, elfutils' client, has such files from
servers, where the user's environment names some, and keeps them.

What it made is kept below XDG_CACHE_HOME/kprobes/types, by the file's build id, size and age: of a
distribution's kernel that takes a minute, of a small one a second.
"""

import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from kprobes import directories
from kprobes.errors import StateError

_NAME = "vmlinux"
_DEPTH = 3
_DEBUG = Path("/usr/lib/debug")
_PAHOLE = "pahole"
_CLIENT, _SERVERS = "debuginfod-find", "DEBUGINFOD_URLS"
_ELF = b"\x7fELF"
_MAX_FILES = 16
_TIMEOUT_S = 900


def debug_root(release: str) -> Path:
    """Return where a release's packages are unpacked: ``$XDG_CACHE_HOME/kprobes/debug/RELEASE``."""
    return directories.cache() / "debug" / release


def types_root() -> Path:
    """Return where they are kept: ``$XDG_CACHE_HOME/kprobes/types``."""
    return directories.cache() / "types"


def untold(words: str) -> None:
    """Tell nobody."""
    del words


def btf_of(path: Path, build_id: bytes, tell: Callable[[str], None] = untold) -> bytes:
    """Return a kernel file's types as BTF; b"" where it has no debug info, or pahole is not there.

    Args:
        path: of a vmlinux.
        build_id: its own.
        tell: is given words for people when it will take long.
    """
    try:
        with path.open("rb") as file:
            if file.read(len(_ELF)) != _ELF:
                return b""
        found = path.stat()
        root = types_root()
        directories.make(root, top=root.parent)
        kept = root / f"{build_id.hex()}-{found.st_size}-{found.st_mtime_ns}.btf"
        if not kept.exists():
            tell(f"making types of the debug info in {path}, once; that may take a minute")
            _make(path, kept)
        return kept.read_bytes()
    except (OSError, StateError, subprocess.SubprocessError):
        return b""


def is_own(path: Path) -> bool:
    """Whether a path is a file of this user or of root: others' are not read unasked."""
    try:
        found = path.stat()
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_uid in (0, os.geteuid())


def candidates(release: str, build_id: bytes, booted: Path | None) -> Iterator[Path]:
    """Yield files that may be a running kernel's with its debug info, the likeliest first.

    Args:
        release: of the kernel.
        build_id: its own.
        booted: what its QEMU was told to boot, or None: where a kernel is built its vmlinux lies
            beside that, or at the top of the tree that it is in (arch/x86/boot/bzImage).
    """
    if booted is not None:
        yield from (parent / _NAME for parent in booted.parents[: _DEPTH + 1])
    # Nothing but a plain name may come out of a guest's memory into a path.
    if not release or "/" in release:
        return
    name = build_id.hex()
    for top in _tops(release):
        if name:
            yield _by_build_id(top, name)
        yield top / "boot" / f"{_NAME}-{release}"
        yield top / "lib" / "modules" / release / _NAME
    yield Path("/lib/modules", release, "build", _NAME)


def module_name(path: Path) -> str:
    """Return the name that the kernel has for the module in a file: ``snd-hda.ko`` is snd_hda."""
    return path.name.partition(".ko")[0].replace("-", "_")


def installed_modules(top: Path) -> Mapping[str, Sequence[Path]]:
    """Return the files of modules below a directory, by the names that the kernel has for them."""
    found: dict[str, list[Path]] = {}
    for directory, _, files in os.walk(top):
        for path in (Path(directory, file) for file in files if ".ko" in file):
            found.setdefault(module_name(path), []).append(path)
    return found


def module_candidates(
    name: str,
    release: str,
    build_ids: Iterable[bytes],
    beside: Iterable[Path],
    installed: Callable[[Path], Mapping[str, Sequence[Path]]] = installed_modules,
) -> Iterator[Path]:
    """Yield files that may be a loaded module's with its debug info, the likeliest first.

    Args:
        name: as the kernel has it.
        release: of the kernel.
        build_ids: of which one may be the module's.
        beside: files of the kernel: in their directory, or above, it may have been built.
        installed: as ``installed_modules``; who asks for many modules looks once.
    """
    for file in beside:
        for parent in file.parents[: _DEPTH + 1]:
            yield from _built(parent, name)
    if not release or "/" in release:
        return
    yield from (_by_build_id(top, each.hex()) for top in _tops(release) for each in build_ids)
    modules = (top / "lib" / "modules" / release for top in _tops(release))
    for top in (*modules, Path("/lib/modules", release)):
        yield from installed(top).get(name, ())
    yield from _built(Path("/lib/modules", release, "build"), name)


def _built(top: Path, name: str) -> Iterator[Path]:
    # A kernel's tree has a list of its modules, each by its object: fs/ext4/ext4.o, or .ko.
    try:
        order = (top / "modules.order").read_text(errors="backslashreplace")
    except OSError:
        return
    listed = (top / line.removeprefix("kernel/") for line in order.split())
    files = (path.with_suffix(".ko") for path in listed)
    yield from (path for path in files if module_name(path) == name)


def _tops(release: str) -> tuple[Path, Path]:
    # Where packages are installed, and where they are unpacked.
    return _DEBUG, debug_root(release) / _DEBUG.relative_to("/")


def _by_build_id(top: Path, name: str) -> Path:
    return top / ".build-id" / name[:2] / f"{name[2:]}.debug"


def own_files(
    release: str, build_id: bytes, booted: Path | None, tell: Callable[[str], None] = untold
) -> Iterator[Path]:
    """Yield the files that ``candidates`` and ``fetched`` do, of this user's or root's.

    Args:
        release: of the kernel.
        build_id: its own.
        booted: as for ``candidates``.
        tell: as for ``fetched``.
    """
    yield from filter(is_own, candidates(release, build_id, booted))
    yield from filter(is_own, fetched(build_id, tell))


def fetched(build_id: bytes, tell: Callable[[str], None] = untold) -> Iterator[Path]:
    """Yield the file with a build's debug info that a server has, if any is named.

    Args:
        build_id: of the kernel, or of a module.
        tell: is given words for people, as it may take long.
    """
    program = shutil.which(_CLIENT)
    if program is None or not os.environ.get(_SERVERS) or not build_id:
        return
    tell(f"asking the servers of {_SERVERS} for debug info")
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            [program, "debuginfo", build_id.hex()],
            check=True,
            timeout=_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
            capture_output=True,
        )
        yield Path(os.fsdecode(done.stdout.rstrip(b"\n")))


def _make(path: Path, kept: Path) -> None:
    with tempfile.TemporaryDirectory(dir=kept.parent) as directory:
        made = Path(directory, "btf")
        subprocess.run(
            [_PAHOLE, "-j", f"--btf_encode_detached={made}", path],
            check=True,
            timeout=_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
            capture_output=True,
        )
        made.rename(kept)
    files = sorted(kept.parent.glob("*.btf"), key=lambda each: each.stat().st_mtime_ns)
    for old in files[:-_MAX_FILES]:
        with suppress(OSError):
            old.unlink()
