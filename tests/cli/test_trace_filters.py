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
    ("words", "definitions", "filters"),
    [
        (["p a"], ("p a",), {}),
        (["p a", "--filter", "x == 1"], ("p a",), {0: "x == 1"}),
        (["p a", "--filter=-1 == x"], ("p a",), {0: "-1 == x"}),
        (["p a", "p b", "--filter", "x", "p c"], ("p a", "p b", "p c"), {1: "x"}),
        (["p a", "--filter", "x", "p b", "--filter", "y"], ("p a", "p b"), {0: "x", 1: "y"}),
        (["--pid", "3", "p a", "--filter", "!x", "--comm", "ls"], ("p a",), {0: "!x"}),
        (["p a", "--exits", "--filter", "x"], ("p a",), {0: "x"}),
        (["-", "--filter", "x", "-:a", "@f", "-:g/b"], ("-", "-:a", "@f", "-:g/b"), {0: "x"}),
    ],
)
def test_a_filter_is_for_the_definition_before_it(
    words: list[str], definitions: tuple[str, ...], filters: dict[int, str]
) -> None:
    args = _parsed(*words)

    assert (args.definitions, args.filters) == (definitions, filters)


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
    "words",
    [
        ["--filter", "x", "p a"],
        ["p a", "--filter"],
        ["p a", "--filter", "x", "--filter", "y"],
    ],
)
def test_a_filter_without_a_definition_of_its_own_is_refused(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        _parsed(*words)

    assert "filter" in capsys.readouterr().err.splitlines()[-1]


def test_many_definitions_have_filters_of_their_own() -> None:
    words = [word for at in range(400) for word in (f"p f{at}", "--filter", f"x == {at}")]

    args = _parsed(*words)

    assert len(args.definitions) == 400
    assert args.filters == {at: f"x == {at}" for at in range(400)}


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

    assert [each for _, each in grouped(args.definitions, trace.filters_of(args))] == filters


@pytest.mark.parametrize("text", ["", "1,", "a", "3-1", "-1", "1--2", "0 1"])
def test_what_is_no_list_of_cpus_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="invalid list of CPUs"):
        cpus(text)


def test_one_parse_does_not_know_of_the_other() -> None:
    assert _parsed("p a", "--filter", "x").filters == {0: "x"}
    assert _parsed("p a").filters == {}


def test_definitions_with_the_same_filter_stay_together() -> None:
    found = grouped(["a", "b", "c", "d", "e"], {1: "x", 2: "x", 4: "y"})

    assert found == [(["a"], ""), (["b", "c"], "x"), (["d"], ""), (["e"], "y")]
