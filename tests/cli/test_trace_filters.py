"""Filters on a command line."""

import argparse

import pytest

from kprobes.cli import trace
from kprobes.cli.options import cpus
from kprobes.cli.trace import grouped


def _parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    trace.add_arguments(parser)
    return parser.parse_args(words)


@pytest.mark.parametrize(
    ("words", "is_following"),
    [
        (["--", "ls"], True),
        (["--comm", "ls", "--comm", "cat", "--", "ls"], True),
        (["--all-tasks", "--", "ls"], False),
        (["--pid", "1", "--", "ls"], False),
        (["--tgid", "1", "--", "ls"], False),
        (["--boot", "--", "ls"], False),
        (["--pid", "1", "--follow", "--", "ls"], True),
        ([], False),
    ],
)
def test_a_command_is_followed_unless_other_tasks_are_named(
    words: list[str], is_following: bool
) -> None:
    words, command = (words[:-2], ["ls"]) if "--" in words else (words, [])
    args = _parsed("p a", *words)
    args.command = command

    assert trace.is_following(args) is is_following


@pytest.mark.parametrize(
    ("words", "filters"),
    [
        (["-C", "1", "p a"], ["CPU == 1"]),
        (["p a", "--filter", "x || y", "p b", "--cpu", "0-2,5"],
         ["(x || y) && (CPU >= 0 && CPU <= 2 || CPU == 5)", "CPU >= 0 && CPU <= 2 || CPU == 5"]),
    ],
)  # fmt: skip
def test_cpus_are_part_of_every_filter(words: list[str], filters: list[str]) -> None:
    args = _parsed(*words)

    found = grouped(args.definitions, trace.filters_of(args), {})
    assert [each.filter for each in found] == filters


@pytest.mark.parametrize("text", ["", "1,", "a", "3-1", "-1", "1--2", "0 1"])
def test_what_is_no_list_of_cpus_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="invalid list of CPUs"):
        cpus(text)


def test_definitions_with_the_same_filter_stay_together() -> None:
    found = grouped(["a", "b", "c", "d", "e"], {1: "x", 2: "x", 4: "y"}, {})

    assert [each[:2] for each in found] == [
        (["a"], ""),
        (["b", "c"], "x"),
        (["d"], ""),
        (["e"], "y"),
    ]
