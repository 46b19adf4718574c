"""Actions of options and arguments: definitions, and what is given for each of them."""

import argparse
from collections.abc import Sequence
from typing import Any

_TWICE = "given twice"


class Once(argparse.Action):
    """Stores an option's value, and refuses to do so twice: registered as argparse's ``store``."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        """Store the value."""
        del parser
        given = namespace.__dict__.setdefault("given", set())
        if option_string is not None and self.dest in given:
            raise argparse.ArgumentError(self, _TWICE)
        given.add(self.dest)
        setattr(namespace, self.dest, values)


class DefinitionAction(argparse.Action):
    """``DEFINITION...``, anywhere among the options; ``definitions`` has them in their order.

    argparse takes positional arguments in one run only. A subcommand's takes all that follows, and
    parses it: so does this one.
    """

    def __init__(self, option_strings: Sequence[str], dest: str, **names: Any) -> None:
        super().__init__(option_strings, dest, nargs=argparse.PARSER, default=(), **names)
        self.required = False

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[object] | None,
        option_string: str | None = None,
    ) -> None:
        """Take the definitions up to the next option, then what follows."""
        del option_string
        words = [str(word) for word in values or ()]
        options = (at for at, word in enumerate(words) if at and word[:1] == "-" != word)
        end = next(options, len(words))
        namespace.definitions = (*namespace.definitions, *words[:end])
        is_inner = hasattr(namespace, "rest")
        namespace.rest = words[end:]
        if is_inner:
            return
        # A loop, as hundreds of definitions would be too deep for calls in calls.
        while namespace.rest:
            words, namespace.rest = namespace.rest, ()
            parser.parse_args(words, namespace)
        del vars(namespace)["rest"]


class _Taking(argparse.Action):
    # Takes an option each time that it is given.
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        del parser, option_string
        self.take(namespace, str(values))

    def take(self, namespace: argparse.Namespace, text: str) -> None:
        """Take a value into what was parsed so far."""
        raise NotImplementedError


class DeletionAction(_Taking):
    """``-:EVENT``, a definition that is also an option with a value."""

    def take(self, namespace: argparse.Namespace, text: str) -> None:
        """Take the definition."""
        namespace.definitions = (*namespace.definitions, f"{self.option_strings[0]}{text}")


class FilterAction(_Taking):
    """``--filter EXPR``, for the definition before it; ``filters`` has it by that one's index."""

    def take(self, namespace: argparse.Namespace, text: str) -> None:
        """Take the filter."""
        last = _last(self, namespace)
        if last in namespace.filters:
            raise argparse.ArgumentError(self, "this definition has one already: use &&")
        namespace.filters = {**namespace.filters, last: text}


class TriggerAction(_Taking):
    """``--trigger TEXT``, for the definition before it, which may have several."""

    def take(self, namespace: argparse.Namespace, text: str) -> None:
        """Take the trigger."""
        last, given = _last(self, namespace), namespace.triggers
        namespace.triggers = {**given, last: (*given.get(last, ()), text)}


OF_RECORDS = ("stacktrace", "userstacktrace", "record-tgid")
"""Trace options of the kernel that say what records have."""


class TraceOptionAction(_Taking):
    """``-O NAME``, one of the kernel's trace options; a ``no`` in front turns it off.

    Those of records are attributes of their names, those of text are in ``text_options``.
    """

    def __init__(self, *args: Any, records: bool, prints: bool, **names: Any) -> None:
        super().__init__(*args, **names)
        self._records, self._prints = records, prints

    @property
    def names(self) -> tuple[str, ...]:
        """Those that there are."""
        of_records = OF_RECORDS if self._records else ()
        return tuple(dict.fromkeys((*of_records, *(_of_text() if self._prints else ()))))

    def take(self, namespace: argparse.Namespace, text: str) -> None:
        """Take it."""
        name = text.removeprefix("no")
        if name not in self.names:
            others = "" if self._prints else "; kprobe report has those of text"
            there = f"there are: {', '.join(self.names)}{others}"
            raise argparse.ArgumentError(self, f"no such trace option: {text!r}; {there}")
        if self._records and name in OF_RECORDS:
            setattr(namespace, name.replace("-", "_"), name == text)
        if self._prints and name in _of_text():
            namespace.text_options = (*namespace.text_options, text)


def _of_text() -> tuple[str, ...]:
    from kprobes.model.text_options import NAMES

    return NAMES


class DisabledAction(_Taking):
    """``--disabled``, for the definition before it."""

    def take(self, namespace: argparse.Namespace, text: str) -> None:
        """Note it."""
        del text
        namespace.disabled = namespace.disabled | {_last(self, namespace)}


def _last(action: argparse.Action, namespace: argparse.Namespace) -> int:
    if not namespace.definitions:
        raise argparse.ArgumentError(action, "must follow the definition that it is for")
    return len(namespace.definitions) - 1
