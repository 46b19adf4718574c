"""One running kernel, as found in its memory or its image."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from kprobes.model.symbol import Symbols
from kprobes.model.types import Types
from kprobes.units import Addr

_VERSION = re.compile(r"(\d+)\.(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Kernel:
    """What planning and compiling know of the target's kernel.

    Attributes:
        release: ``uname -r``, such as ``6.1.0-56-cloud-amd64``.
        banner: the whole "Linux version" line.
        arch: the registry name of its architecture, ``x86_64`` or ``aarch64``.
        build_id: of its vmlinux, or b"" when the kernel does not carry one.
        slide: KASLR's shift of the kernel's text, bytes.
        text: addresses [start, stop) of ``_stext`` to ``_etext``.
        symbols: its names, at their running addresses.
        types: its BTF, or None when it has none.
        module_types: of each loaded module that brings types, together with the kernel's.
    """

    release: str
    banner: str
    arch: str
    build_id: bytes
    slide: int
    text: tuple[Addr, Addr]
    symbols: Symbols
    types: Types | None
    module_types: Mapping[str, Types] = field(default_factory=dict[str, Types])

    @property
    def version(self) -> tuple[int, int]:
        """Major and minor of the release."""
        return version_of(self.release)

    def types_for(self, module: str) -> Types | None:
        """Return the types that code of a module, or of the kernel itself (``""``), has."""
        return self.module_types.get(module, self.types)


def version_of(release: str) -> tuple[int, int]:
    """Return major and minor of a release."""
    found = _VERSION.match(release)
    return (int(found[1]), int(found[2])) if found else (0, 0)
