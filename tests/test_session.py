"""Text given to a session, on a guest that is never armed."""

from contextlib import ExitStack
from pathlib import Path

import pytest
from msgspec.structs import replace

from kprobes.errors import DefinitionError, RefusedError, TargetError, UsageError
from kprobes.guest.arena import ArenaSize
from kprobes.guest.driver import GuestDriver
from kprobes.guest.journal import Journal
from kprobes.model.plan import ReturnMethod, Strategy
from kprobes.open import GuestSession
from kprobes.session import Session
from kprobes.transport.agent import Command, Finished, Job
from tests.build.defined import plans_of
from tests.build.named_guest import make_named_guest


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GuestSession:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    guest = make_named_guest("vfs_read", "vfs_write").guest
    driver = GuestDriver(guest, Journal.create("fake"), ArenaSize())
    return Session(driver, ExitStack(), None)


def commands(session: GuestSession) -> list[str]:
    return [definition.command for definition in session.definitions]


def planned(session: GuestSession) -> list[str]:
    return [probe.layout.event for plan in plans_of(session) for probe in plan.probes]


def test_definitions_are_added_call_by_call(session: GuestSession) -> None:
    session.probe("p:a vfs_read")
    session.probe("p:b vfs_write\np:a vfs_write")

    assert commands(session) == ["p:a vfs_read", "p:b vfs_write", "p:a vfs_write"]
    assert sorted(planned(session)) == ["a", "a", "b"]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("p:a vfs_read", "SAME_PROBE"),
        ("r:a vfs_write", "DIFF_PROBE_TYPE"),
        ("p:a vfs_write %di", "DIFF_ARG_TYPE"),
        ("p:b vfs_write\n-:c", "NO_EVENT"),
        ("p:b nothing", "BAD_PROBE_ADDR"),
        ("r:a nothing", "BAD_PROBE_ADDR"),
        ("p:b nothing\np:c vfs_read %zz", "BAD_PROBE_ADDR"),
        ("p:b nothing\np:a vfs_read", "BAD_PROBE_ADDR"),
        ("p:a vfs_read\np:b nothing", "SAME_PROBE"),
    ],
)
def test_a_later_call_minds_what_is_there_and_changes_nothing_when_it_is_wrong(
    session: GuestSession, text: str, code: str
) -> None:
    session.probe("p:a vfs_read")

    with pytest.raises(DefinitionError) as caught:
        session.probe(text)

    assert caught.value.code == code
    assert (commands(session), planned(session)) == (["p:a vfs_read"], ["a"])


def test_a_deletion_takes_away_what_an_earlier_call_added(session: GuestSession) -> None:
    session.probe("p:a vfs_read\np:b vfs_write")

    session.probe("-:a")
    assert (commands(session), planned(session)) == (["p:b vfs_write"], ["b"])
    session.probe("-:b\np:a vfs_read %di")
    assert commands(session) == ["p:a vfs_read %di"]


def test_what_comes_in_a_deleted_event_s_place_may_be_another_one(session: GuestSession) -> None:
    session.probe("p:a vfs_read x=+0(%si):string\np:b vfs_read x=+0(%di):string")

    with pytest.raises(DefinitionError, match="Argument type or name is different"):
        session.probe("p:a vfs_write x=%di:u8")
    session.probe("-:a\np:a vfs_write x=%di:u8")
    session.probe("-:kprobes/\nr:b vfs_read")

    assert commands(session) == ["r:b vfs_read"]


def test_extra_fields_are_for_the_definitions_that_they_are_asked_for_with(
    session: GuestSession,
) -> None:
    session.probe("r:a vfs_read", duration=True, exits=True)
    session.probe("r:b vfs_write")

    fields = {
        probe.layout.event: [field.name for field in probe.layout.fields]
        for plan in plans_of(session)
        for probe in plan.recorded
    }
    assert fields == {"a": ["duration", "exit"], "b": []}


def test_a_closed_session_takes_no_probes_and_says_that_it_is_closed(session: GuestSession) -> None:
    assert "closed" not in repr(session)
    session.close()

    assert "Linux" in repr(session)
    assert "closed" in repr(session)
    with pytest.raises(UsageError, match="this session is closed"):
        session.probe("p:a vfs_read")
    with pytest.raises(UsageError, match="this session is closed"):
        session.kprobe("vfs_read")


def test_a_return_probe_is_counted_once_however_many_places_it_has(session: GuestSession) -> None:
    session.options = replace(session.options, return_method=ReturnMethod.RETHOOK)
    session.probe("r:a vfs_read\np:b vfs_read\nr:c vfs_read")

    assert sorted((hits.event, hits.function, hits.all_missed) for hits in session.hits()) == [
        ("a", "vfs_read", 0),
        ("b", "vfs_read", 0),
        ("c", "vfs_read", 0),
    ]


def test_nothing_is_armed_once_its_guardian_is_dead(session: GuestSession) -> None:
    session.probe("p:a vfs_read")
    session.driver.give_up(TargetError("the guardian was killed"))

    with pytest.raises(TargetError, match="the guardian was killed"), session.record():
        pass


def test_options_are_those_of_every_plan_until_others_are_set(session: GuestSession) -> None:
    session.probe("p:a vfs_read")

    def strategies() -> set[Strategy]:
        return {plan.site.strategy for plan in plans_of(session)}

    assert strategies() == {Strategy.FTRACE}
    session.options = replace(session.options, strategy=Strategy.BREAKPOINT)
    for _ in range(2):
        with pytest.raises(RefusedError, match="only the ftrace strategy"):
            strategies()
    session.options = replace(session.options, strategy=None)
    assert strategies() == {Strategy.FTRACE}


class Busy:
    """Runs no command: says how long it would be waited for."""

    def run(self, command: Command, timeout_s: float | None = None) -> Finished:
        raise TargetError(f"{command} did not end within {timeout_s}")

    def start(self, command: Command, *, is_held: bool = False) -> Job:
        raise AssertionError(f"nobody waits for {command}, held: {is_held}")


def test_a_command_in_a_guest_has_its_time_from_its_start_on(session: GuestSession) -> None:
    kernel = Session(session.driver, ExitStack(), Busy())

    with pytest.raises(TargetError, match="sleep did not end within 7"):
        kernel.run("sleep", timeout_s=7)
