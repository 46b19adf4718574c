"""A kernel file (vmlinux or boot image) to a Kernel at link addresses, and to readable memory.

Symbols of a kernel that carries none: of its System.map, or its vmlinux with a symbol table.
"""

import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from kprobes.arch.registry import machine, machine_of_elf
from kprobes.errors import FormatError, MemoryFault, TargetError
from kprobes.formats import bootimage, elf
from kprobes.formats.kallsyms import SymbolTable
from kprobes.formats.symtab import from_elf, from_text
from kprobes.image.build import Region, extract, kernel_of
from kprobes.image.data_symbols import with_data_symbols
from kprobes.image.debug_info import btf_of, untold
from kprobes.image.types import parse_types
from kprobes.model.kernel import Kernel
from kprobes.units import GIB, Addr

_MAX_SIZE = 4 * GIB


class KernelImage(Struct, frozen=True, kw_only=True):
    """What a kernel file loads; a Memory at link addresses.

    Attributes:
        path: the file.
        arch: the registry name of its architecture.
        build_id: b"" when it has none.
        regions: by address.
    """

    path: Path
    arch: str
    build_id: bytes
    regions: tuple[Region, ...]

    def read(self, addr: int, size: int) -> bytes:
        """Return exactly ``size`` bytes, or raise MemoryFault."""
        for region in self.regions:
            offset = addr - region.addr
            if offset >= 0 and offset + size <= len(region.data):
                return region.data[offset : offset + size]
        raise MemoryFault(addr, size, f"not in {self.path.name}")


def read_image(path: Path) -> KernelImage:
    """Read a vmlinux or a boot image.

    Raises:
        TargetError: the file cannot be read, or is of another architecture.
        FormatError: it is not a kernel, or damaged.
    """
    data = _read(path)
    try:
        image = _parse(bootimage.unpack(data))
    except FormatError as e:
        raise FormatError(f"{path}: {e}") from e
    try:
        found = machine_of_elf(image.machine)
    except TargetError as e:
        raise TargetError(f"{path}: {e}") from e
    return KernelImage(
        path=path,
        arch=found.name,
        build_id=image.build_id,
        regions=tuple(Region(addr=Addr(s.addr), data=s.data) for s in image.segments),
    )


def _read(path: Path) -> bytes:
    # A FIFO would be waited for, and a device has no end.
    try:
        found = path.stat()
        is_file = stat.S_ISREG(found.st_mode)
        if is_file and found.st_size <= _MAX_SIZE:
            return path.read_bytes()
    except OSError as e:
        raise TargetError(f"cannot read {path}: {e.strerror}") from e
    why = f"larger than {_MAX_SIZE // GIB} GiB" if is_file else "not a regular file"
    raise TargetError(f"cannot read {path}: {why}")


def _parse(data: bytes) -> elf.Image:
    return bootimage.parse_arm64(data) if bootimage.is_arm64(data) else elf.parse(data)


def kernel_from_image(image: KernelImage, tell: Callable[[str], None] = untold) -> Kernel:
    """Return a file's kernel, as linked: slide 0 and no modules.

    Types come from its BTF, or are made of its debug info; symbols, where it has none for kallsyms,
    from the ELF file's own table.

    Args:
        image: the file.
        tell: is given words for people when it will take long.

    Raises:
        TargetError: it has no intact symbols.
    """
    build = extract(
        image, image.regions, lambda _release, _build_id: symbols_of([image.path]), is_file=True
    )
    build = with_data_symbols(build, image, machine(image.arch).text, image.regions, is_file=True)
    types = build.types
    if not build.btf:
        made = btf_of(image.path, image.build_id, tell)
        types = parse_types(made) if made else None
    return kernel_of(build, types, arch=image.arch, slide=0)


def check_same_build(kernel: Kernel, image: KernelImage) -> None:
    """Check that a file is the one that a guest's running kernel was booted from.

    Raises:
        TargetError: it is not, or one of them has no build id to tell by.
    """
    _check_build(kernel, image.path, image.build_id, "the guest's")


def check_own_build(kernel: Kernel, path: Path) -> None:
    """Check that an ELF file is of this machine's kernel; only its headers and notes are read.

    Raises:
        TargetError: it is not, or one of them has no build id to tell by.
        OSError: it cannot be read.
    """
    _check_build(kernel, path, _read_build_id(path), "this machine's")


def _check_build(kernel: Kernel, path: Path | str, build_id: bytes, whose: str) -> None:
    if kernel.build_id and kernel.build_id == build_id:
        return
    running, given = (found.hex() or "unknown" for found in (kernel.build_id, build_id))
    raise TargetError(
        f"{path} is not {whose} kernel: its build id is {given}, "
        f"that of the running {kernel.release} is {running}"
    )


def _read_build_id(path: Path) -> bytes:
    with path.open("rb") as file:

        def read(at: int, size: int) -> bytes:
            file.seek(at)
            return file.read(size)

        return elf.noted_build_id(read)


def is_of_build(path: Path, build_id: bytes) -> bool:
    """Whether a file is an ELF one with this build id; only its headers and notes are read."""
    try:
        if not build_id or not stat.S_ISREG(path.stat().st_mode):
            return False
        return _read_build_id(path) == build_id
    except (OSError, OverflowError, ValueError):
        return False


def read_symbols(path: Path) -> SymbolTable:
    """Return the symbols of a System.map, or of a vmlinux, at the addresses of its link.

    Raises:
        TargetError: the file cannot be read.
        FormatError: it is neither, or damaged, or stripped.
    """
    data = _read(path)
    try:
        table = from_elf(data) if data.startswith(elf.MAGIC) else from_text(data)
    except FormatError as error:
        raise FormatError(f"{path}: neither a System.map nor a vmlinux: {error}") from error
    if table is None or not len(table.addrs):
        raise FormatError(f"{path} has no symbols")
    return table


def symbols_of(paths: Iterable[Path]) -> Iterator[SymbolTable]:
    """Yield the symbols of some files; what cannot be read is passed over."""
    for path in paths:
        with suppress(TargetError, FormatError):
            yield read_symbols(path)
