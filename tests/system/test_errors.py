"""The kernel's own judgement of definitions, and ours: accepted or not, text, column, listing."""

import os
import secrets
from collections.abc import Sequence

import pytest
from msgspec import Struct, field
from msgspec.structs import replace

import kprobes
from kprobes.arch.x86_64.registers import NAMES
from kprobes.errors import DefinitionError, NotLoadedError, RefusedError
from kprobes.guest.kernel_abi import possible_cpus
from kprobes.guest.places import Places, places_of
from kprobes.lang.append import apply
from kprobes.lang.lexer import lines_of
from kprobes.lang.listing import show
from kprobes.lang.parser import parse_statement
from kprobes.model.codes import Code
from kprobes.model.definition import Definition, Kind, Statement
from kprobes.model.resolved import Resolved
from kprobes.plan.strategy import Wish
from kprobes.resolve.resolve import check_alike
from kprobes.transport.qemu_command import MachineOptions
from tests.system.differences import DIFFERENCES, Ours, Release, reason_for
from tests.system.error_corpus import CORPUS, OLD_TEXTS, RELEASES, Case, new_cases
from tests.system.judge import Verdict, insn_verdict

pytestmark = [pytest.mark.guest, pytest.mark.arches("amd64", "arm64", matrix="arm64")]

_OURS = {
    "LINE_TOO_LONG",
    "NO_STATEMENT",
    "MANY_STATEMENTS",
    "IS_DELETION",
    "NOT_YET",
    "NOT_IN_RELEASE",
}
_NEW = 150
_CPUS = 6
"""More than five: the kernel lists a return probe's maxactive, which depends on them."""
_WITHOUT_A_CASE = _OURS | {
    *("TOO_MANY_EARGS", "BAD_BTF_TID", "ARGS_2LONG", "TYPECAST_NOT_ALIGNED"),
    *("BAD_VAR_ARGS", "ARGIDX_2BIG"),  # which no kernel ever gives
    *("BAD_TP_NAME", "NO_TRACEPOINT"),  # test_tracepoints.py has them
}


class Events(Struct):
    """What is defined so far.

    Attributes:
        cpus: that the kernel can have.
        listed: each definition's line, the kernel's expansions included.
    """

    places: Places
    cpus: int | None = None
    definitions: tuple[Definition, ...] = ()
    listed: dict[Definition, str] = field(default_factory=dict[Definition, str])
    first: dict[tuple[str, str], Resolved] = field(default_factory=dict[tuple[str, str], Resolved])

    def write(self, line: str) -> None:
        """Take one line; as ``inspect.check``, but what cannot be placed stays, too."""
        if not lines_of(line):
            return
        statement = self._parse(line)
        try:
            after = apply([statement], existing=self.definitions)
        except DefinitionError as error:
            raise self.places.first_kernel_error(error) from error
        names = {(each.group, each.event) for each in after}
        self.first = {name: probe for name, probe in self.first.items() if name in names}
        try:
            if isinstance(statement, Definition):
                self._define(statement)
        except NotLoadedError:
            # It waits.
            pass
        except RefusedError:
            self.definitions = after
            raise
        self.definitions = after

    def listing(self) -> str:
        return "\n".join(self.listed.get(each, show(each)) for each in self.definitions)

    def _parse(self, line: str) -> Statement:
        try:
            return parse_statement(line, registers=self.places.arch.registers)
        except DefinitionError as error:
            raise self.places.first_kernel_error(error) from error

    def _define(self, definition: Definition) -> None:
        for single in self.places.expand(definition):
            probe = self.places.resolve(single, event_id=1)
            name = probe.layout.group, probe.layout.event
            check_alike(self.first.setdefault(name, probe), probe)
            self.listed[definition] = show(probe.definition, cpus=self.cpus)
            if definition.kind is Kind.ENTRY:
                self.places.find_site(Wish())(probe.layout.ip, definition)


class Judged(Struct, frozen=True):
    """A kernel's verdicts and ours.

    Attributes:
        seed: of the cases that are new each time; KPROBES_SEED makes the same ones again.
    """

    release: Release
    seed: int
    pairs: Sequence[tuple[Case, Ours, Verdict]]

    def differing(self) -> list[tuple[Case, Ours, Verdict]]:
        """Return what differs, and what we would accept but cannot place."""
        return [
            (case, ours, theirs)
            for case, ours, theirs in self.pairs
            if ours.verdict != theirs or (ours.refusal and ours.verdict.is_accepted)
        ]


@pytest.fixture(scope="module", params=RELEASES)
def judged(request: pytest.FixtureRequest, arch: str) -> Judged:
    release = str(request.param)
    seed = int(os.environ.get("KPROBES_SEED") or secrets.randbits(32))
    every = dict.fromkeys(case.in_words_of(arch) for case in (*CORPUS, *new_cases(seed, _NEW)))
    cases = [case for case in every if case.is_known_to(release)]
    options = MachineOptions(suite=RELEASES[release], arch=arch, cpus=_CPUS)
    running, verdicts = insn_verdict([case.lines for case in cases], options)
    assert running.startswith(f"{release}.") or release == "7.2" < running
    theirs = [_in_new_words(verdict, release) for verdict in verdicts]
    with kprobes.boot(options) as session:
        guest = session.driver.guest
        places, cpus = places_of(guest), possible_cpus(guest.memory, guest.kernel)
        ours = [our_verdict(case, places, cpus) for case in cases]
    return Judged(Release(release, arch), seed, list(zip(cases, ours, theirs, strict=True)))


def test_the_corpus_is_large_and_has_no_case_twice() -> None:
    assert len(CORPUS) >= 1400
    assert len({case.text for case in CORPUS}) == len(CORPUS)


def test_the_kernel_and_we_agree(judged: Judged) -> None:
    wrong = [
        f"{case.text}\n   ours: {ours}\n   {judged.release.number}: {theirs}"
        for case, ours, theirs in judged.differing()
        if reason_for(case, ours, theirs, judged.release) is None
    ]

    assert not wrong, "\n".join([f"KPROBES_SEED={judged.seed}", *wrong])


def test_every_difference_is_still_there(judged: Judged) -> None:
    found = {reason_for(*each, judged.release) for each in judged.differing()}

    expected = {
        (difference, rule)
        for difference in DIFFERENCES
        for rule in difference.rules
        if rule.is_of(judged.release)
    }
    assert expected - found == set()


@pytest.mark.arches("amd64")
def test_every_error_has_a_case(judged: Judged) -> None:
    if judged.release.number == "7.2":
        seen = {ours.code for _, ours, _ in judged.pairs} | _newer_codes()
        assert [code.name for code in Code if code.name not in seen | _WITHOUT_A_CASE] == []


def _newer_codes() -> set[str]:
    # Of what no kernel of these knows, as far as text alone tells.
    found: set[str] = set()
    for case in CORPUS:
        if not case.is_known_to("7.2"):
            try:
                parse_statement(case.lines, registers=NAMES)
            except DefinitionError as error:
                found.add(error.code)
    return found


def our_verdict(case: Case, places: Places, cpus: int | None) -> Ours:
    """What we say to a case: of its last line, as the kernel."""
    events = Events(places, cpus)
    refusal, error = "", None
    for line in case.lines.split("\n"):
        error = None
        try:
            events.write(line)
        except DefinitionError as found:
            error = found
        except RefusedError as found:
            refusal = str(found)
    if error is not None:
        refused = Verdict(
            is_accepted=False, text=error.text, command=error.command, column=error.column
        )
        return Ours(error.code, refused, refusal)
    return Ours("", Verdict(is_accepted=True, listing=events.listing()), refusal)


def _in_new_words(verdict: Verdict, release: str) -> Verdict:
    return replace(verdict, text=OLD_TEXTS[release].get(verdict.text, verdict.text))
