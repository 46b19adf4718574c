"""Every architecture by its name."""

from collections.abc import Sequence

from kprobes.arch.aarch64.arch import AARCH64
from kprobes.arch.arch import Arch
from kprobes.arch.machine import Machine
from kprobes.arch.x86_64.arch import X86_64
from kprobes.errors import TargetError

ARCHES = {arch.name: arch for arch in (X86_64, AARCH64)}
"""By the name that ``Kernel.arch`` has."""
MACHINES = tuple(arch.machine for arch in ARCHES.values())
"""Every machine that guests can be."""


def arch(name: str) -> Arch:
    """Return an architecture by name.

    Raises:
        TargetError: we do not know it.
    """
    if name not in ARCHES:
        raise TargetError(f"architecture {name!r} is not supported; known: {', '.join(ARCHES)}")
    return ARCHES[name]


def machine(name: str) -> Machine:
    """Return a machine by its architecture's name; errors as for ``arch``."""
    return _only([each for each in MACHINES if each.name == name], name)


def machine_of_stub(architecture: str) -> Machine:
    """Return the machine that a gdb stub serves, by its word; errors as for ``arch``."""
    return _only([each for each in MACHINES if each.gdb == architecture], architecture)


def machine_of_elf(number: int) -> Machine:
    """Return the machine that an ELF file is for; errors as for ``arch``."""
    return _only([each for each in MACHINES if each.elf == number], f"of ELF's number {number}")


def _only(found: Sequence[Machine], what: str) -> Machine:
    if not found:
        names = ", ".join(each.name for each in MACHINES)
        raise TargetError(f"architecture {what} is not supported; known: {names}")
    return found[0]
