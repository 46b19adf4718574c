"""Fields of return probes that no definition fetches: a call's duration, and where it was left."""

from kprobes.model.codes import Code
from kprobes.model.definition import Kind
from kprobes.model.extras import DURATION, EXIT
from kprobes.model.layout import Storage
from kprobes.model.resolved import EntryCounter, ExitAddress
from kprobes.resolve.argument import Fetched
from kprobes.resolve.scope import Scope

_DURATION = Fetched(
    name=DURATION, type="u64", storage=Storage.DURATION, size=8, operand=EntryCounter()
)
_EXIT = Fetched(name=EXIT, type="symbol", storage=Storage.NUMBER, size=8, operand=ExitAddress())


def extra_fields(scope: Scope) -> tuple[Fetched, ...]:
    """Return the extra fields of one probe: none where it is not at a function's return.

    Args:
        scope: of its definition, expanded.

    Raises:
        DefinitionError: it has an argument of such a name.
    """
    extras = scope.definition.extras
    if scope.definition.kind is not Kind.RETURN:
        return ()
    wanted = ((extras.duration, _DURATION), (extras.exit, _EXIT))
    found = tuple(field for is_wanted, field in wanted if is_wanted)
    names = {field.name for field in found}
    for arg in scope.definition.args:
        if arg.name in names:
            hint = f"the extra field that is asked for is called {arg.name}, too"
            raise scope.error(Code.USED_ARG_NAME, arg.span.start, hint)
    return found
