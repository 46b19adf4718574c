"""System calls as places, ``sys_openat``: the function that serves one, and its arguments.

That function, ``__x64_sys_openat``, gets a pointer to the caller's registers alone. Its arguments
have the names and types of its definition in the kernel's source, SYSCALL_DEFINE4(openat, ...).
"""

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from kprobes.model.codes import Code, rejection
from kprobes.model.definition import (
    AddressOf,
    AllMembers,
    AllParameters,
    Argument,
    Cast,
    Definition,
    Deref,
    Fetch,
    FetchArg,
    Member,
    Parameter,
    PerCpu,
    TypeWord,
    leaf_of,
)
from kprobes.model.kernel import SYSTEM_CALLS, Kernel, Symbol

NAMED = "sys_"
_STRING = "char *"
_TYPES: Mapping[str, TypeWord] = {
    name: TypeWord(base=base, size=size)
    for base, size, names in (
        ("s32", 4, "int pid_t clockid_t timer_t key_t key_serial_t mqd_t rwf_t qid_t"),
        ("u32", 4, "unsigned u32 __u32 uid_t gid_t"),
        ("s64", 8, "long loff_t off_t ssize_t"),
        ("u64", 8, "size_t u64 __u64 aio_context_t"),
        ("u16", 2, "umode_t"),
    )
    for name in names.split()
} | {
    "unsigned int": TypeWord(base="u32", size=4),
    "unsigned long": TypeWord(base="u64", size=8),
}
"""Of arguments that are numbers; all others are pointers."""

Parameters = Sequence[tuple[str, str]]
"""Names and C types, in order."""


def find_system_call(definition: Definition, kernel: Kernel) -> Symbol | None:
    """Return the function of the system call that a definition names as ``sys_NAME``, or None.

    Where a function has that very name it is meant, and no system call.
    """
    name = definition.function
    if not name.startswith(NAMED) or kernel.symbols.find(name) is not None:
        return None
    own = name.removeprefix(NAMED)
    found = (kernel.symbols.find(f"{start}{own}") for start in SYSTEM_CALLS)
    return next((each for each in found if each is not None), None)


def number_parameters(definition: Definition, parameters: Parameters) -> Definition:
    """Return a definition with numbers for the names of a system call's arguments.

    Args:
        definition: of a probe of it.
        parameters: of the call; without any, names stay what they are.

    Raises:
        DefinitionError: it has no such argument.
    """
    if parameters:
        _check(definition, [name for name, _ in parameters])
    args: list[FetchArg] = []
    for arg in definition.args:
        each = [arg]
        if isinstance(arg.fetch, AllParameters):
            each = [
                replace(arg, name=name, text=name, fetch=Parameter(name=name, span=arg.span))
                for name, _ in parameters
            ] or each
        args += [_numbered(one, parameters) for one in each]
    return replace(definition, args=tuple(args))


def _check(definition: Definition, names: Sequence[str]) -> None:
    for arg in definition.args:
        fetch = leaf_of(arg.fetch)
        if isinstance(fetch, Parameter) and fetch.name not in names:
            column, hint = fetch.span.start, f"its arguments: {' '.join(names)}"
            raise rejection(Code.NO_BTFARG, command=definition.command, column=column, hint=hint)


def _numbered(arg: FetchArg, parameters: Parameters) -> FetchArg:
    numbers = {name: number for number, (name, _) in enumerate(parameters, start=1)}
    fetch, spec = _with_number(arg.fetch, numbers), arg.spec
    if isinstance(arg.fetch, Parameter) and arg.fetch.name in numbers:
        type_ = dict(parameters)[arg.fetch.name]
        if spec is None:
            spec = _TYPES.get(type_.removeprefix("const "))
        elif spec.is_string and type_.endswith(_STRING):
            # As the kernel follows a parameter of this type; a program's, not its own.
            fetch = Deref(base=fetch, offset=0, is_user=True, span=arg.body)
    return replace(arg, fetch=fetch, spec=spec)


def _with_number(fetch: Fetch, numbers: Mapping[str, int]) -> Fetch:
    match fetch:
        case Parameter(name=name, span=span) if name in numbers:
            return Argument(number=numbers[name], span=span)
        case Deref() | Member() | Cast() | PerCpu() | AddressOf() | AllMembers():
            return replace(fetch, base=_with_number(fetch.base, numbers))
        case _:
            return fetch
