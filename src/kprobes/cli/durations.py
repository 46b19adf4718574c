"""``--duration``: with a time, how long to trace; without one, tell how long calls take."""

import argparse
import re
from collections.abc import Sequence

from kprobes.cli import options

_NUMBER = re.compile(r"\s*[-+]?[.\d]")


class DurationAction(argparse.Action):
    """``--duration [TIME] [DEFINITION...]``.

    ``duration`` becomes the TIME in seconds; without one, ``has_duration`` becomes true.
    ``definitions`` grows by those behind it.
    """

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[object] | None,
        option_string: str | None = None,
    ) -> None:
        """Take one option's words."""
        del parser, option_string
        words = [str(word) for word in values or ()]
        if not words or _is_definition(words[0]):
            namespace.has_duration = True
        elif namespace.duration is not None:
            raise argparse.ArgumentError(self, options.TWICE)
        else:
            namespace.duration = self._seconds(words.pop(0))
        namespace.definitions = [*(namespace.definitions or ()), *words]

    def _seconds(self, word: str) -> float:
        try:
            return options.duration(word)
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentError(self, str(error)) from error


def _is_definition(word: str) -> bool:
    # A statement has a blank, as "5 minutes" has; a file's name follows an @.
    return word == "-" or word.startswith("@") or (" " in word and _NUMBER.match(word) is None)
