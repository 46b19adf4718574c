"""Arming and taking away, with a kernel that refuses, fails and loses things."""

import errno
from pathlib import Path

import pytest

from kprobes.errors import DefinitionError, TargetError, TracefsError
from kprobes.host.driver import HostDriver, HostOptions
from kprobes.host.owner import noted
from kprobes.model.options import Options, Tasks
from tests.build.host_machine import make_machine, open_fake
from tests.build.kernel import read
from tests.build.tracefs import FakeTracefs

THEIRS = "p:theirs/one vfs_read"


@pytest.fixture
def tracefs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeTracefs:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    found = FakeTracefs()
    found.lines.append(THEIRS)
    found.make("instances/theirs")
    return found


def driver_of(
    tracefs: FakeTracefs,
    *texts: str,
    options: HostOptions | None = None,
    chosen: Options | None = None,
) -> HostDriver:
    driver = HostDriver(make_machine(tracefs), options or HostOptions(), open_fake)
    driver.accept(chosen or Options())
    driver.prepare([read(text) for text in texts])
    return driver


def is_clean(tracefs: FakeTracefs) -> bool:
    return tracefs.lines == [THEIRS] and set(tracefs.instances) == {"theirs"} and not list(noted())


def test_events_are_defined_filtered_and_enabled_in_an_instance_of_our_own(
    tracefs: FakeTracefs,
) -> None:
    driver = driver_of(tracefs, "p:a vfs_read count", "r3:b many $retval")
    driver.arm()

    (own,) = set(tracefs.instances) - {"theirs"}
    group = own.replace("-", "_")
    files = tracefs.instances[own].files
    assert tracefs.lines[1:] == [
        f"p:{group}/a vfs_read count=%dx:u64",
        f"r3:{group}/b many arg1=$retval",
    ]
    assert files[f"events/{group}/enable"] == "1"
    assert (files["trace_clock"], files["buffer_size_kb"]) == ("local", "4096")
    assert tracefs.instances["theirs"].files == {}
    driver.close()
    assert is_clean(tracefs)


def test_a_followed_command_is_named_before_anything_is_enabled(tracefs: FakeTracefs) -> None:
    driver = driver_of(tracefs, "p:a vfs_read", chosen=Options(tasks=Tasks(follow=True)))
    driver.follow(5)
    driver.arm()
    armed = [name for name, _ in tracefs.written]
    driver.follow(77)

    assert not [name for name in armed if name.endswith(("enable", "set_event_pid"))]
    written = [(name.split("/", 2)[2], text) for name, text in tracefs.written[len(armed) :]]
    assert written[:2] == [("options/event-fork", "1"), ("set_event_pid", "77\n")]
    assert [(name.rpartition("/")[2], text) for name, text in written[2:]] == [("enable", "1")]
    driver.close()
    assert is_clean(tracefs)


def test_options_reach_the_instance(tracefs: FakeTracefs) -> None:
    driver_of(tracefs, "p vfs_read", options=HostOptions(ring=1 << 20, clock="mono")).arm()

    (own,) = set(tracefs.instances) - {"theirs"}
    files = tracefs.instances[own].files
    assert (files["trace_clock"], files["buffer_size_kb"]) == ("mono", "1024")


def test_a_refusal_in_the_middle_takes_the_earlier_ones_back(tracefs: FakeTracefs) -> None:
    tracefs.refused["many"] = ("Failed to register probe event", 2)
    driver = driver_of(tracefs, "p:a vfs_read", "p:b many", "p:c void_fn")

    with pytest.raises(DefinitionError, match="Failed to register"):
        driver.arm()

    assert is_clean(tracefs)


@pytest.mark.parametrize("name", ["buffer_size_kb", "trace_clock", "enable", "instances", "filter"])
def test_nothing_is_left_when_a_write_fails(tracefs: FakeTracefs, name: str) -> None:
    tracefs.failing[name] = errno.ENOMEM
    driver = driver_of(tracefs, "p:a vfs_read", "p:b many")

    if name == "filter":
        driver.arm()
        driver.close()
    else:
        with pytest.raises(TargetError):
            driver.arm()

    assert is_clean(tracefs)


def test_the_journal_knows_of_it_while_it_is_there(tracefs: FakeTracefs) -> None:
    driver = driver_of(tracefs, "p vfs_read")
    driver.arm()

    assert [owner.label for owner in noted()] == sorted(set(tracefs.instances) - {"theirs"})
    driver.close()
    assert list(noted()) == []


def test_what_was_counted_can_be_had_when_all_is_gone(tracefs: FakeTracefs) -> None:
    driver = driver_of(tracefs, "p:a vfs_read", "p:b many")
    driver.arm()
    tracefs.misses["a"] = 3

    driver.disarm()
    driver.close()

    counts = driver.counts()
    assert (counts.recorded, counts.missed, counts.lost) == ({1: 5}, {1: 3, 2: 0}, 2)
    assert [(hits.event, hits.recorded, hits.missed) for hits in driver.hits()] == [
        ("a", 5, 3),
        ("b", 0, 0),
    ]


def test_a_newer_probe_has_no_hits_of_the_one_before_it(tracefs: FakeTracefs) -> None:
    driver = driver_of(tracefs, "p:a vfs_read")
    driver.arm()
    driver.close()

    driver.prepare([read("p:b many")])

    assert [(hits.event, hits.recorded) for hits in driver.hits()] == [("a", 5), ("b", 0)]


def test_misses_are_ours_though_others_have_events_of_the_same_name(tracefs: FakeTracefs) -> None:
    tracefs.lines.append("p:theirs/a many")
    driver = driver_of(tracefs, "p:a vfs_read")
    driver.arm()
    tracefs.lines.append("p:theirs/b many")
    tracefs.misses["b"] = 9

    driver.disarm()

    assert driver.counts().missed == {1: 0}


def test_events_that_somebody_took_away_are_told(tracefs: FakeTracefs) -> None:
    driver = driver_of(tracefs, "p:a vfs_read")
    driver.arm()
    tracefs.lines.remove(tracefs.lines[1])

    with pytest.raises(TargetError, match="somebody else took"):
        driver.disarm()
    driver.close()

    assert is_clean(tracefs)


def test_events_that_somebody_uses_stay_in_the_journal(tracefs: FakeTracefs) -> None:
    driver = driver_of(tracefs, "p:a vfs_read")
    driver.arm()
    tracefs.failing["kprobe_events"] = errno.EBUSY

    with pytest.raises(TracefsError):
        driver.close()

    assert len(list(noted())) == 1


def test_it_can_be_armed_again(tracefs: FakeTracefs) -> None:
    driver = driver_of(tracefs, "p:a vfs_read")

    for _ in range(2):
        driver.arm()
        driver.disarm()
        driver.close()

    assert is_clean(tracefs)
