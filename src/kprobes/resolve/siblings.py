"""Several probes of one event: their records must agree in everything that is listed of them."""

from kprobes.errors import DefinitionError
from kprobes.model.codes import Code, rejection
from kprobes.model.resolved import Resolved


def check_alike(first: Resolved, other: Resolved) -> None:
    """Refuse a probe whose arguments differ from those of its event's first probe.

    What the text alone tells has been compared when it was parsed; here are types that only the
    kernel knows.

    Raises:
        DefinitionError: DIFF_ARG_TYPE, with the caret at the word that differs.
    """
    old, new = _columns(first), _columns(other)
    if old == new and first.definition.extras == other.definition.extras:
        return
    pairs = enumerate(zip(old, new, strict=False))
    at = next((n for n, (a, b) in pairs if a != b), None)
    # The kernel counts what the words have become, and stops behind the last one there is.
    differing = min(len(old), len(new)) if len(old) != len(new) or at is None else at
    raise _error(other, differing)


def _columns(probe: Resolved) -> list[tuple[str, str, int | None]]:
    # Its own: extra fields come behind them.
    own = probe.layout.fields[: len(probe.definition.args)]
    return [(field.name, field.type, field.count) for field in own]


def _error(probe: Resolved, argument: int) -> DefinitionError:
    command = probe.definition.command
    words = command.split(" ")
    # Behind the statement's letter and its place.
    before = words[: 2 + argument]
    column = sum(len(word) + 1 for word in before)
    return rejection(Code.DIFF_ARG_TYPE, command=command, column=column)
