"""A Definition and a Kernel to a Resolved probe: names become addresses, registers, offsets."""

from kprobes.arch.facts import Arch
from kprobes.errors import DefinitionError
from kprobes.model.codes import Code
from kprobes.model.definition import Definition, Kind
from kprobes.model.kernel import Kernel
from kprobes.model.resolved import FieldFetch, Resolved
from kprobes.resolve import layout
from kprobes.resolve.argument import Fetched, fetch_argument
from kprobes.resolve.expand import check_meta, expand
from kprobes.resolve.expression import check_symbols
from kprobes.resolve.extras import extra_fields
from kprobes.resolve.place import Locate, Target, find_target, ip_of
from kprobes.resolve.scope import Scope

_RECORD_MAX = 3072
"""MAX_PROBE_EVENT_SIZE: bytes of all fields in the kernel's own record."""


def resolve(
    definition: Definition, kernel: Kernel, arch: Arch, *, event_id: int, locate: Locate
) -> Resolved:
    """Resolve one definition, whose place is one function.

    Args:
        definition: as parsed.
        kernel: of the target.
        arch: its architecture.
        event_id: the number of its records, 1 to 65535.
        locate: a function to the address that its probe will have; refuses with RefusedError.

    Raises:
        DefinitionError: a name is unknown or a type does not fit, with the caret.
        RefusedError: from ``locate``, or for a place where it has no probe.
    """
    target = find_target(definition, kernel, locate)
    expanded, own = resolve_arguments(definition, kernel, arch, target)
    scope = _scope(expanded, kernel, arch, target)
    for arg in expanded.args:
        check_symbols(scope, arg.fetch)
    fetched = (*own, *extra_fields(scope))
    ip = ip_of(target, locate)
    shape = layout.lay_out(fetched, has_caller=definition.kind is Kind.RETURN)
    symbol = kernel.symbols.at(ip) or target.function
    return Resolved(
        definition=expanded,
        function=target.function.addr,
        layout=layout.record_layout(expanded, shape, event_id=event_id, ip=ip, symbol=symbol),
        fetches=tuple(
            FieldFetch(
                field=field,
                operand=arg.operand,
                bit_offset=arg.bit_offset,
                bit_width=arg.bit_width,
            )
            for field, arg in zip(shape.fields, fetched, strict=True)
        ),
    )


def resolve_arguments(
    definition: Definition, kernel: Kernel, arch: Arch, target: Target
) -> tuple[Definition, tuple[Fetched, ...]]:
    """Resolve what a definition fetches, wherever its probe may be placed; as the kernel reads it.

    Symbols whose memory is read need not exist: these it looks up at registration.

    Returns:
        The definition with everything expanded, and its arguments.

    Raises:
        DefinitionError: a name is unknown or a type does not fit, with the caret.
    """
    scope = _scope(definition, kernel, arch, target)
    expanded = expand(scope)
    fetched: list[Fetched] = []
    room = _RECORD_MAX
    for arg in expanded.args:
        found = fetch_argument(scope, arg)
        room -= found.kernel_size
        if room < 0:
            hint = f"all fields together have at most {_RECORD_MAX} bytes"
            raise scope.error(Code.EVENT_TOO_BIG, arg.body.start, hint)
        fetched.append(found)
    return expanded, tuple(fetched)


def check_parameters(definition: Definition, kernel: Kernel, arch: Arch, target: Target) -> None:
    """Check the words that stand for a function's parameters, which the kernel replaces first.

    Raises:
        DefinitionError: the function has not so many, or they are not known.
    """
    check_meta(_scope(definition, kernel, arch, target))


def check_variables(definition: Definition, kernel: Kernel, arch: Arch, target: Target) -> None:
    """Check that there are the variables that a definition names, whatever their types.

    Raises:
        DefinitionError: one is not found.
    """
    try:
        resolve_arguments(definition, kernel, arch, target)
    except DefinitionError as error:
        if error.code == Code.NO_BTFARG.name:
            raise


def _scope(definition: Definition, kernel: Kernel, arch: Arch, target: Target) -> Scope:
    return Scope(
        definition=definition,
        kernel=kernel,
        arch=arch,
        module=target.function.module,
        is_entry=target.is_entry,
    )
