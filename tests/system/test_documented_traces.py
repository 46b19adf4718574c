"""Every `kprobe trace ... -- COMMAND` of README, docs and --help records what its text promises.

Other tests have those without a command, and those for this machine's own kernel, for a running
guest, or with files of the reader's own.
"""

import argparse
import re
import shlex
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from msgspec import Struct
from msgspec.structs import replace

import kprobes
from kprobes.cli import main, trace
from kprobes.cli.options import limits, return_method, strategy
from kprobes.cli.trace import grouped
from kprobes.cli.tracing import define
from kprobes.model.definition import STACKTRACE, USER_STACKTRACE
from kprobes.model.events import Event, each_event
from kprobes.open import GuestSession
from kprobes.transport.qemu import Machine
from tests.build.defined import delete_all

pytestmark = pytest.mark.guest

_ROOT = Path(__file__).parent.parent.parent
_PAGES = (_ROOT / "README.md", *sorted((_ROOT / "docs").rglob("*.md")))
_NEXT = re.compile(r"^(?:[$] |```)", re.MULTILINE)
_COMMAND = re.compile(r"^(?:[$] |  )kprobe trace ((?:.*\\\n)*.*)\n", re.MULTILINE)
_LINE = re.compile(r"^ *\S+-\d+ +\[\d+\] .*?: (\w+): \(.*?\)(.*)$", re.MULTILINE)
_FIELD = re.compile(r'(\w+)=("[^"]*")?')
_ELSEWHERE = ("-t", "--target", "--python", "--kernel", "--vmlinux")


class Example(Struct, frozen=True, kw_only=True):
    """A command, and the events that are shown below it."""

    words: list[str]
    command: list[str]
    shown: list[tuple[str, dict[str, str]]]


def examples() -> Iterator[tuple[str, Example]]:
    """Return the name of the page and the example, of all."""
    texts = [(page.name, page.read_text()) for page in _PAGES]
    for name, text in [*texts, ("trace --help", trace.EPILOG), ("--help", main.EPILOG)]:
        for found in _COMMAND.finditer(text):
            words = shlex.split(found[1].replace("\\\n", " "), comments=True)
            if "--" in words and not {*_ELSEWHERE} & {*words}:
                at = words.index("--")
                below = _NEXT.split(text[found.end() :])[0]
                shown = [(line[1], dict(_FIELD.findall(line[2]))) for line in _LINE.finditer(below)]
                yield name, Example(words=words[:at], command=words[at + 1 :], shown=shown)


_EXAMPLES = list(examples())


@pytest.fixture(scope="module")
def session(guest: Machine) -> Generator[GuestSession]:
    with kprobes.attach(str(guest.stub_address)) as kernel:
        kernel.machine = guest
        yield kernel


def test_there_are_examples_with_and_without_output() -> None:
    assert len(_EXAMPLES) >= 10
    assert sum(bool(example.shown) for _, example in _EXAMPLES) >= 3


@pytest.mark.parametrize(
    "example", [example for _, example in _EXAMPLES], ids=[name for name, _ in _EXAMPLES]
)
def test_an_example_records_what_it_promises(session: GuestSession, example: Example) -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    trace.add_arguments(parser)
    args = parser.parse_args(example.words)
    args.command = example.command
    if args.boot:
        with kprobes.boot(is_early=True) as booting:
            _check(booting, args, example)
    else:
        _check(session, args, example)


def _check(session: GuestSession, args: argparse.Namespace, example: Example) -> None:
    found, status = _recorded(session, args)

    assert status == 0
    for definition in session.definitions:
        names = {event.name for event in found}
        assert definition.event in names or definition.place.is_glob, names
    assert found
    for name, fields in example.shown:
        assert any(name == event.name and _has(event, fields) for event in found), (name, fields)


def _recorded(kernel: GuestSession, args: argparse.Namespace) -> tuple[list[Event], int]:
    delete_all(kernel)
    kernel.options = replace(
        kernel.options,
        strategy=strategy(args),
        return_method=return_method(args),
        limits=limits(args),
        tracing_on=not args.tracing_off,
    )
    kernel.choose_tasks(comms=args.comm or (), follow=trace.is_following(args))
    given = grouped(args.definitions, trace.filters_of(args), args.triggers, args.disabled)
    define(args, kernel, [each._replace(text="\n".join(each.words)) for each in given])
    command = args.command[0] if len(args.command) == 1 else args.command
    with kernel.record() as brought:
        status = kernel.run(command, 500).status
    return [event for events in brought.events for event in each_event(events)], status


def _has(event: Event, fields: dict[str, str]) -> bool:
    texts = {name: text.strip('"') for name, text in fields.items() if text}
    names = {*event.args} - {STACKTRACE, USER_STACKTRACE}
    return names == {*fields} and all(event.args[name] == texts[name] for name in texts)
