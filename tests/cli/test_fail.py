"""The rules of ``kprobe fail``: what each says, and what is refused before a guest is touched."""

import argparse
import errno
import sys

import pytest

from kprobes.cli.fail import rule
from kprobes.cli.main import main


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("f returns -12", ("f", -12, "")),
        ("f returns -ENOMEM if count > 3", ("f", -errno.ENOMEM, "count > 3")),
        (" mod:f  returns 0x10 ", ("mod:f", 16, "")),
        ('f returns 0 if comm == "a if b"', ("f", 0, 'comm == "a if b"')),
    ],
)
def test_a_rule_names_a_function_a_value_and_a_filter(
    text: str, expected: tuple[str, int, str]
) -> None:
    found = rule(text)

    assert (found.function, found.value, found.filter) == expected


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("f", "invalid rule: 'f'"),
        ("f return -12", "invalid rule"),
        ("f returns -12 when x", "invalid rule"),
        ("f returns many", "invalid value: 'many'"),
        ("f returns ENOMEM", "invalid value: 'ENOMEM'"),
        ("f returns -ENOSUCH", "invalid value"),
    ],
)
def test_a_rule_that_says_something_else_is_refused(text: str, why: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=why):
        rule(text)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["-t", "host"], "not for this machine's own kernel"),
        (
            ["-t", "qemu:localhost:1", "--", "ls"],
            "guest that kprobe boots (-t guest), not in qemu:localhost:1",
        ),
        (["--probability", "2"], "probability"),
        (["--times", "0"], "must be a positive integer"),
    ],
)
def test_what_cannot_be_is_refused_before_any_guest_is_looked_at(
    words: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options, _, command = " ".join(words).partition(" -- ")
    tail = ["--", *command.split()] if command else []

    with pytest.raises(SystemExit) as caught:
        sys.exit(main(["fail", "f returns -12", *options.split(), *tail]))

    assert caught.value.code == 2
    assert why in capsys.readouterr().err
