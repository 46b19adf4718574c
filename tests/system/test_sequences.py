"""Random operations on events: the kernel's own files and a session of ours, step by step.

Each sequence of writes goes to the tracing files of a guest, by one script, and then to a session
with the same guest, while it records. What is said to each, and how things are then, must be the
same:

* A text for ``kprobe_events`` is given to ``probe`` with ``enabled=False``, as the kernel enables
  nothing that is defined. ``enable`` files are ``enable`` and ``disable`` of what ``select``
  returns, ``filter`` files its ``set_filter``. Ours are made while a recording runs: only then is
  what is enabled armed, and busy.
* Of a text that is wrong the kernel keeps the lines before the wrong one, of a deletion what comes
  before an event that is busy. It takes a group's filter to the events that it fits, and takes
  the filters of the others away. With us all of it stays as it was, which is asserted; then it is
  made line by line, probe by probe, event by event, as far as the kernel came.
* In the kernel a filter that is wrong takes the place of the one before, and lets everything pass.
  With us the one before stays, which is asserted, and then is taken away.

The longer version has KPROBES_SEQUENCES sequences, and begins with KPROBES_SEED.
"""

import os
import random
import sys
from collections import Counter
from collections.abc import Callable, Collection, Generator, Sequence

import pytest
from msgspec import Struct

import kprobes
from kprobes.errors import DefinitionError, KprobesError, RefusedError, UsageError
from kprobes.guest.kernel_abi import possible_cpus
from kprobes.lang.append import Definitions
from kprobes.lang.listing import show
from kprobes.lang.parser import parse_statement
from kprobes.model.definition import Definition, Deletion
from kprobes.open import GuestSession
from kprobes.transport.qemu_command import MachineOptions
from tests.build.defined import delete_all
from tests.system import sequences
from tests.system.error_corpus import OLD_TEXTS, RELEASES
from tests.system.sequences import ALWAYS, KPROBE_EVENTS, Answer, Draw, EventStates, FileWrite, Step

pytestmark = [pytest.mark.guest, pytest.mark.arches("amd64", "arm64", matrix="arm64")]

SEQUENCES = int(os.environ.get("KPROBES_SEQUENCES", "20"))
SEED = int(os.environ.get("KPROBES_SEED", "0")) or random.randrange(1, 1 << 30)
_BATCH = 20
_BUSY = "Device or resource busy"
_NOT_THERE = "No such file or directory"
_THERE = "File exists"
_INVALID = "Invalid argument"
_SILENT = {
    "NO_EVENT": _NOT_THERE,
    "BAD_DELETION": _INVALID,
    "BAD_STATEMENT": _INVALID,
    "NO_PLACE": _INVALID,
    "NOT_KPROBE": _INVALID,
}
"""What we have a text for, and the kernel an errno only."""
_MISFIT = "Couldn't find or set field in one of a subsystem's events"
_WRONG = ("\nparse_error: ", "\nError: (0)")


class SessionFiles:
    """A session of ours, written to as the kernel's files are; what is refused changes nothing."""

    def __init__(self, session: GuestSession) -> None:
        self.session = session
        guest = session.driver.guest
        self._cpus = possible_cpus(guest.memory, guest.kernel)

    def state(self) -> EventStates:
        """Return what is defined, enabled and filtered."""
        listing = tuple(map(self._listed, self.session.definitions))
        names = {f"{each.group}/{each.event}" for each in self.session.definitions}
        filters = {name: set[str]() for name in names}
        for each in self.session.definitions:
            filters[f"{each.group}/{each.event}"].add(each.filter or "none")
        flags = {name: str(int(self.session.select(name).is_enabled)) for name in names}
        groups = {name.partition("/")[0]: set[str]() for name in names}
        for name, flag in flags.items():
            groups[name.partition("/")[0]].add(flag)
        return EventStates(
            listing=listing,
            enabled=flags | {name: "X" if len(f) > 1 else min(f) for name, f in groups.items()},
            filters={name: " and ".join(sorted(found)) for name, found in filters.items()},
        )

    def _listed(self, definition: Definition) -> str:
        # What waits for its module has not got its maxactive yet.
        return show(definition, cpus=None if definition.place.module else self._cpus)

    def armed(self) -> tuple[list[str], list[str]]:
        """Return what is armed, and what is enabled, as listed."""
        enabled = [each for each in self.session.definitions if self._is_enabled(each)]
        armed = self.session.driver.wanted.definitions
        return sorted(map(show, armed)), sorted(map(show, enabled))

    def _is_enabled(self, definition: Definition) -> bool:
        return self.session.select(f"{definition.group}/{definition.event}").is_enabled

    def write(self, write: FileWrite) -> list[KprobesError]:
        """Make a write, as far as the kernel makes it; return what is wrong."""
        directory, _, name = write.file.removeprefix("events/").rpartition("/")
        pattern = directory if "/" in directory else f"{directory}/*"
        if write.file == KPROBE_EVENTS:
            return self._define(write.text)
        if name == "enable":
            return self._try(lambda: self._enable(pattern, write.text == "1"))
        if "*" in pattern:
            return self._filter_group(pattern, write.text)
        errors = self._try(lambda: self.session.select(pattern).set_filter(write.text))
        if errors and isinstance(errors[0], DefinitionError):
            self.session.select(pattern).set_filter("")
        return errors

    def _try(self, operation: Callable[[], object]) -> list[KprobesError]:
        before = self.state()
        try:
            operation()
        except KprobesError as error:
            assert self.state() == before
            return [error]
        return []

    def _enable(self, pattern: str, is_on: bool) -> None:
        events = self.session.select(pattern)
        (events.enable if is_on else events.disable)()

    def _define(self, text: str) -> list[KprobesError]:
        errors = self._try(lambda: self.session.probe(text, enabled=False))
        if errors:
            again = self._define_lines(text)
            assert list(map(str, again)) == list(map(str, errors))
        return errors

    def _define_lines(self, text: str) -> list[KprobesError]:
        for line in text.split("\n"):
            errors = self._try(lambda line=line: self.session.probe(line, enabled=False))
            if errors:
                if is_busy(errors[0]):
                    self._delete_up_to_busy(line)
                return errors
        return []

    def _delete_up_to_busy(self, line: str) -> None:
        deletion = parse_statement(line, registers=())
        assert isinstance(deletion, Deletion)
        for each in Definitions(self.session.definitions).delete(deletion).values():
            words = show(each).partition(":")[2]
            errors = self._try(lambda words=words: self.session.probe(f"-:{words}"))
            if errors:
                assert is_busy(errors[0])
                return

    def _filter_group(self, pattern: str, text: str) -> list[KprobesError]:
        whole = self._try(lambda: self.session.select(pattern).set_filter(text))
        if not whole or isinstance(whole[0], UsageError):
            return whole
        names = dict.fromkeys(f"{e.group}/{e.event}" for e in self.session.definitions)
        errors: list[KprobesError] = []
        for name in names:
            if name.startswith(pattern.removesuffix("*")):
                errors += self.write(FileWrite(f"events/{name}/filter", text))
        assert str(whole[0]) in map(str, errors)
        return errors


def is_busy(error: KprobesError) -> bool:
    return isinstance(error, RefusedError) and _BUSY in str(error)


class Drawn(Struct, frozen=True):
    """A guest of ours, and the sequences whose scripts it has."""

    session: GuestSession
    release: str
    batches: dict[str, list[list[FileWrite]]]


@pytest.fixture(scope="module", params=RELEASES)
def drawn(request: pytest.FixtureRequest, arch: str) -> Generator[Drawn]:
    release, draw = str(request.param), Draw(SEED, arch)
    found = [draw.sequence() for _ in range(SEQUENCES)]
    batches = {f"/{at}.sh": found[at : at + _BATCH] for at in range(0, SEQUENCES, _BATCH)}
    files = {path: sequences.script(batch) for path, batch in batches.items()}
    options = MachineOptions(suite=RELEASES[release], arch=arch, files=files)
    with kprobes.boot(options) as session:
        yield Drawn(session, release, batches)


def test_a_session_s_events_are_what_the_kernel_s_are(drawn: Drawn) -> None:
    sys.stdout.write(f"KPROBES_SEED={SEED}\n")
    session, release = drawn.session, drawn.release
    wrong: list[str] = []
    answers: Counter[str] = Counter()
    for path, batch in drawn.batches.items():
        for steps in sequences.run(session, path, batch):
            answers.update(answer.why for _, answer, _ in steps)
            wrong += repeated(session, steps, release)

    sys.stdout.write(f"{SEQUENCES} sequences: {dict(answers.most_common())}\n")
    assert not wrong, "\n\n".join([f"{len(wrong)} of {SEQUENCES} sequences:", *wrong])
    assert answers.keys() >= {"", _BUSY, _NOT_THERE, _INVALID, _THERE}


def repeated(session: GuestSession, steps: list[Step], release: str) -> list[str]:
    """Make a sequence's writes; return what differs from the kernel's answers first, if any.

    A filter for an event whose first definition has gone may end it: docs/kernel-facts.md.
    """
    files, listing, headless = SessionFiles(session), tuple[str, ...](), set[str]()
    session.probe(ALWAYS)
    try:
        with session.record():
            for number, (write, answer, state) in enumerate(steps):
                headless |= _changed_heads(listing, state.listing)
                listing = state.listing
                try:
                    found = differences(files.write(write), answer, release)
                except AssertionError as error:
                    found = [str(error)]
                found += of_states(files.state(), state)
                armed, enabled = files.armed()
                if armed != enabled:
                    found.append(f"armed: {armed}\nenabled: {enabled}")
                if found and answer.errors and _is_filter_of(write, headless):
                    return []
                if found:
                    before = [f"{each.file}: {each.text}" for each, *_ in steps[: number + 1]]
                    return ["\n".join([*before, *found])]
    finally:
        delete_all(session)
    return []


def _changed_heads(before: Sequence[str], now: Sequence[str]) -> set[str]:
    # Events that are still there, and whose first definition is not.
    first, later = _heads(before), _heads(now)
    return {name for name, line in first.items() if later.get(name, line) != line}


def _heads(listing: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for line in listing:
        found.setdefault(line.partition(":")[2].partition(" ")[0], line)
    return found


def _is_filter_of(write: FileWrite, names: Collection[str]) -> bool:
    directory, _, file = write.file.removeprefix("events/").rpartition("/")
    return file == "filter" and any(f"{name}/".startswith(f"{directory}/") for name in names)


def differences(ours: list[KprobesError], theirs: Answer, release: str) -> list[str]:
    """Return what is said otherwise."""
    if theirs.errors and theirs.errors[0][0] == _MISFIT and not theirs.why:
        # Of each event that a group's filter does not fit.
        is_same = len(ours) == len(theirs.errors)
    elif not ours:
        is_same = not theirs.why
    else:
        is_same = len(ours) == 1 and is_alike(ours[0], theirs, release)
    return [] if is_same else [f"ours: {[repr(e) for e in ours]}", f"the kernel's: {theirs}"]


def is_alike(ours: KprobesError, theirs: Answer, release: str) -> bool:
    """Return whether an error is the kernel's."""
    if not theirs.errors:
        return theirs.why == _why(ours)
    texts = OLD_TEXTS[release]
    told = [(texts.get(text, text), *where) for text, *where in theirs.errors]
    is_told = isinstance(ours, DefinitionError)
    return is_told and told == [(ours.text, ours.command, ours.column)]


def _why(error: KprobesError) -> str:
    match error:
        case DefinitionError(code=code):
            return _SILENT.get(code, code)
        case UsageError():
            return _NOT_THERE if str(error).startswith("no such event") else str(error)
        case _:
            return _BUSY if is_busy(error) else str(error)


def of_states(ours: EventStates, theirs: EventStates) -> list[str]:
    """Return what is another way."""
    filters = {
        name: "none" if any(word in text for word in _WRONG) else text
        for name, text in theirs.filters.items()
    }
    pairs = {
        "listing": (ours.listing, theirs.listing),
        "enabled": (dict(ours.enabled), dict(theirs.enabled)),
        "filters": (dict(ours.filters), filters),
    }
    return [
        f"{what} of ours: {mine}\n{what} of the kernel: {other}"
        for what, (mine, other) in pairs.items()
        if mine != other
    ]
