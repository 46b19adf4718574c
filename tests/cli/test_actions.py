"""Options of single definitions on a command line."""

import argparse
import io
from types import ModuleType

import pytest

from kprobes.cli import check, record, report, trace
from kprobes.cli.trace import grouped
from kprobes.errors import UsageError


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


def test_one_parse_does_not_know_of_the_other() -> None:
    assert _parsed("p a", "--filter", "x").filters == {0: "x"}
    assert _parsed("p a").filters == {}


def test_triggers_are_for_the_definition_before_them_alone() -> None:
    args = _parsed(
        "p a", "p b", "--trigger", "t", "--trigger", "u if x", "p c", "--trigger=t", "p d"
    )

    assert args.triggers == {1: ("t", "u if x"), 2: ("t",)}
    assert [each[:3] for each in grouped(args.definitions, args.filters, args.triggers)] == [
        (["p a"], "", ()),
        (["p b"], "", ("t", "u if x")),
        (["p c"], "", ("t",)),
        (["p d"], "", ()),
    ]
    disabled = _parsed("p a", "p b", "--disabled", "p c", "--disabled", "p d").disabled
    assert [each[0] for each in grouped("abcd", {}, {}, disabled)] == [["a"], ["b", "c"], ["d"]]
    with pytest.raises(SystemExit):
        _parsed("--trigger", "t", "p a")


@pytest.mark.parametrize("words", [["p a"], ["p a", "--trigger", "traceoff"]])
def test_tracing_that_nothing_turns_on_is_refused(words: list[str]) -> None:
    args = _parsed("--tracing-off", *words)

    with pytest.raises(UsageError, match="nothing turns tracing on"):
        trace.prepared(args, io.BytesIO())


@pytest.mark.parametrize("words", [["--trigger", "traceon if x"], ["--control", "fifo:a"]])
def test_tracing_may_be_turned_on_later(words: list[str]) -> None:
    trace.prepared(_parsed("--tracing-off", "p a", *words), io.BytesIO())


def test_trace_options_are_of_records_of_text_or_of_both() -> None:
    args = _parsed("-O", "stacktrace", "p a", "-O", "noirq-info", "--option", "record-tgid")

    assert (args.stacktrace, args.record_tgid) == (True, True)
    assert args.text_options == ("noirq-info", "record-tgid")
    assert not _parsed("-O", "stacktrace", "-O", "nostacktrace", "p a").stacktrace
    assert _parsed("p a").text_options == ()


@pytest.mark.parametrize(
    ("command", "word", "said"),
    [
        (
            trace,
            "sym_addr",
            "'sym_addr'; there are: stacktrace, userstacktrace, record-tgid, print-parent, sym-",
        ),
        (trace, "nono", "no such trace option: 'nono'"),
        (report, "stacktrace", "no such trace option: 'stacktrace'"),
        (
            record,
            "sym-addr",
            "there are: stacktrace, userstacktrace, record-tgid; kprobe report has those of text",
        ),
        (
            check,
            "noraw",
            "no such trace option: 'noraw'; there are: stacktrace, userstacktrace, record-tgid;",
        ),
    ],
)
def test_other_words_are_refused_with_those_that_there_are(
    command: ModuleType, word: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)

    with pytest.raises(SystemExit, match="2"):
        parser.parse_args(["-O", word])

    assert said in capsys.readouterr().err


def test_a_report_has_the_options_of_text_alone() -> None:
    parser = argparse.ArgumentParser()
    report.add_arguments(parser)

    args = parser.parse_args(["-O", "record-tgid", "-O", "raw", "x.rec"])

    assert (args.text_options, args.record_tgid) == (("record-tgid", "raw"), False)


def test_what_changes_the_text_is_not_for_json() -> None:
    args = _parsed("-O", "record-tgid", "-O", "nosym-addr", "--format", "json", "p a")

    with pytest.raises(UsageError, match="-O nosym-addr is for text, not for --format json"):
        trace.prepared(args, io.BytesIO())
    trace.prepared(_parsed("-O", "record-tgid", "--format", "json", "p a"), io.BytesIO())
