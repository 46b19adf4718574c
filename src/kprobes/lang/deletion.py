"""Deletions: ``-:[GRP/]EVENT [PLACE [ARGS]]``."""

from kprobes.lang.source import Line
from kprobes.model.codes import Code
from kprobes.model.definition import Deletion

_MARK = "-:"
_HINT = "such as: -:myopen or -:mygroup/"


def read_deletion(line: Line) -> Deletion:
    """Read a statement that starts with a hyphen.

    Raises:
        DefinitionError: it names no event.
    """
    head, *rest = line.words
    if line.is_indented:
        # As the kernel, which looks at the line's first character.
        raise head.error(Code.BAD_DELETION, hint="a deletion begins its line")
    if not head.text.startswith(_MARK):
        raise head.error(Code.BAD_DELETION, 1, hint=_HINT)
    label = head.text.removeprefix(_MARK)
    group, slash, event = label.partition("/") if "/" in label else ("", "", label)
    if not event and not group:
        raise head.error(Code.BAD_DELETION, len(head.text), hint=_HINT)
    return Deletion(
        command=line.command,
        group=group if slash else None,
        event=event,
        words=tuple(word.text for word in rest),
    )
