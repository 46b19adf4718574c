"""``--duration TIME`` ends a trace, ``--call-duration`` adds a field; what they were before."""

import argparse

import pytest

from kprobes.cli import trace
from kprobes.cli.main import main


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    trace.add_arguments(parser)
    return parser.parse_args(words)


@pytest.mark.parametrize(
    ("words", "definitions", "seconds", "has_field"),
    [
        (["r f", "--duration", "10s"], ("r f",), 10.0, False),
        (["--duration", "500ms", "r f", "p g"], ("r f", "p g"), 0.5, False),
        (["r f", "--call-duration"], ("r f",), None, True),
        (["--call-duration", "r f", "@more.txt"], ("r f", "@more.txt"), None, True),
        (["r f", "--call-duration", "p g", "--duration", "2m"], ("r f", "p g"), 120.0, True),
        ([], (), None, False),
    ],
)
def test_a_time_ends_the_trace_and_the_other_option_adds_the_field(
    words: list[str], definitions: tuple[str, ...], seconds: float | None, *, has_field: bool
) -> None:
    args = parsed(*words)

    assert args.definitions == definitions
    assert (args.duration, args.call_duration) == (seconds, has_field)


@pytest.mark.parametrize("word", ["soon", "0", "0ms", "-5", " -5s", "5 minutes", "1e3"])
def test_what_is_no_time_is_said_to_be_none(word: str) -> None:
    with pytest.raises(
        argparse.ArgumentError, match=f"invalid duration: '{word.strip()}' .use 10s"
    ):
        parsed("r f", "--duration", word)


@pytest.mark.parametrize(
    "words",
    [
        ["trace", "r f", "--duration"],
        ["trace", "r f", "--duration", "--exits"],
        ["trace", "--duration", "r f"],
        ["trace", "--duration", "@more.txt"],
        ["check", "r f", "--duration"],
        ["check", "--duration", "r f"],
    ],
)
def test_a_duration_without_a_time_leads_to_its_new_name(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words)

    message = capsys.readouterr().err.splitlines()[-1]
    assert message.endswith("; --call-duration records how long calls take")
