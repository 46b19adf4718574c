"""``--duration`` with a time and without one, before, between and after definitions."""

import argparse

import pytest

from kprobes.cli import trace


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    trace.add_arguments(parser)
    return parser.parse_args(words)


@pytest.mark.parametrize(
    ("words", "definitions", "seconds", "has_duration"),
    [
        (["r f", "--duration", "10s"], ["r f"], 10.0, False),
        (["--duration", "500ms", "r f", "p g"], ["r f", "p g"], 0.5, False),
        (["r f", "--duration"], ["r f"], None, True),
        (["--duration", "r f", "@more.txt"], ["r f", "@more.txt"], None, True),
        (["--duration", "@more.txt"], ["@more.txt"], None, True),
        (["--duration", "--exits", "r f"], ["r f"], None, True),
        (["--duration", "r f", "--exits", "p g"], ["r f", "p g"], None, True),
        (["r f", "--duration", "--duration", "2m"], ["r f"], 120.0, True),
        (["r f"], ["r f"], None, False),
        ([], [], None, False),
    ],
)
def test_a_time_ends_the_trace_and_none_adds_the_field(
    words: list[str], definitions: list[str], seconds: float | None, has_duration: bool
) -> None:
    args = parsed(*words)

    assert args.definitions == definitions
    assert (args.duration, args.has_duration) == (seconds, has_duration)


@pytest.mark.parametrize("word", ["soon", "0", "0ms", "-5", " -5s", "5 minutes", "1e3"])
def test_what_is_no_time_is_said_to_be_none(word: str) -> None:
    with pytest.raises(
        argparse.ArgumentError, match=f"invalid duration: '{word.strip()}' .use 10s"
    ):
        parsed("r f", "--duration", word)


def test_a_time_is_given_once() -> None:
    with pytest.raises(argparse.ArgumentError, match="given twice"):
        parsed("r f", "--duration", "5s", "--duration", "6s")


def test_a_filter_is_for_the_definition_before_it() -> None:
    args = parsed("--duration", "r f", "--filter", "exit != 0", "p g")

    assert (args.definitions, args.filters) == (["r f", "p g"], {0: "exit != 0"})
