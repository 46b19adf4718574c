"""Every architecture by its name."""

from kprobes.arch.facts import Arch
from kprobes.arch.x86_64.facts import X86_64
from kprobes.errors import TargetError

_ARCHES = {arch.name: arch for arch in (X86_64,)}


def arch(name: str) -> Arch:
    """Return an architecture by name.

    Raises:
        TargetError: we do not know it.
    """
    if name not in _ARCHES:
        raise TargetError(f"architecture {name!r} is not supported; known: {', '.join(_ARCHES)}")
    return _ARCHES[name]
