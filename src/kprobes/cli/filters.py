"""Filters on a command line: each stands behind the definition that it is for."""

import argparse
from collections.abc import Mapping, Sequence


class FilterAction(argparse.Action):
    """``--filter EXPRESSION [DEFINITION...]``: a filter for the definition before it.

    ``definitions`` grows by those behind it, and ``filters`` has the expressions by the index of
    their definition: argparse takes definitions in one run, and the option's words are more.
    """

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[object] | None,
        option_string: str | None = None,
    ) -> None:
        """Take one option's words."""
        del option_string
        words = [str(word) for word in values or ()]
        definitions: list[str] = namespace.definitions or []
        filters: dict[int, str] = dict(namespace.filters)
        if not definitions:
            parser.error("--filter stands behind the definition that it is for")
        if len(definitions) - 1 in filters:
            parser.error("this definition has a filter already: join them with &&")
        filters[len(definitions) - 1] = words[0]
        namespace.definitions = [*definitions, *words[1:]]
        namespace.filters = filters


def grouped(words: Sequence[str], filters: Mapping[int, str]) -> list[tuple[list[str], str]]:
    """Return definitions with their filter, those in a row with the same one together."""
    found: list[tuple[list[str], str]] = []
    for index, word in enumerate(words):
        chosen = filters.get(index, "")
        if found and found[-1][1] == chosen:
            found[-1][0].append(word)
        else:
            found.append(([word], chosen))
    return found
