"""Which of several errors of a definition the kernel tells: the first that it comes to."""

from kprobes.arch.facts import Arch
from kprobes.errors import DefinitionError, RefusedError
from kprobes.lang.parser import parse_prefix
from kprobes.model.kernel import Kernel
from kprobes.resolve.place import Locate, find_target
from kprobes.resolve.resolve import check_parameters, check_variables, resolve_arguments


def sooner(error: DefinitionError, kernel: Kernel, arch: Arch, locate: Locate) -> DefinitionError:
    """Return what a kernel finds first in a definition that has an error in its text.

    It looks up the place, then all words that stand for parameters, and then variables, types and
    members of what stands before the error, as it reads.
    """
    prefix = parse_prefix(error.command, registers=arch.registers)
    if prefix is None:
        return error
    try:
        target = find_target(prefix.read, kernel, locate)
        check_parameters(prefix.with_parameters, kernel, arch, target)
        resolve_arguments(prefix.read, kernel, arch, target)
        check_variables(prefix.with_variable, kernel, arch, target)
    except DefinitionError as first:
        for note in getattr(error, "__notes__", ()):
            first.add_note(note)
        return first
    except RefusedError:
        return error
    return error
