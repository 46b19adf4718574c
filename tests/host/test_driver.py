"""Arming and taking away, with a kernel that refuses, fails and loses things."""

import errno
import itertools
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import pytest
from msgspec.structs import replace

from kprobes.errors import (
    DefinitionError,
    NotSupportedError,
    RefusedError,
    TargetError,
    TracefsError,
)
from kprobes.host import driver as host_driver
from kprobes.host.driver import HostDriver, HostOptions
from kprobes.host.owner import noted
from kprobes.model.definition import Definition
from kprobes.model.options import Limits, Options, Tasks, Wanted
from tests.build.host_machine import FakeReader, make_machine, open_fake, read_fake
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
    machine = make_machine(tracefs)
    driver = HostDriver(machine, options or HostOptions(), open_fake, read_fake)
    begin(driver, *map(read, texts), chosen=chosen)
    return driver


def begin(driver: HostDriver, *definitions: Definition, chosen: Options | None = None) -> None:
    wanted = Wanted(definitions=definitions, options=chosen or Options())
    driver.apply(lambda _: wanted, begins=True)


def change(driver: HostDriver, *definitions: Definition) -> None:
    driver.apply(lambda before: replace(before, definitions=definitions))


def is_clean(tracefs: FakeTracefs) -> bool:
    return tracefs.lines == [THEIRS] and set(tracefs.instances) == {"theirs"} and not list(noted())


def test_events_are_defined_filtered_and_enabled_in_an_instance_of_our_own(
    tracefs: FakeTracefs,
) -> None:
    driver = driver_of(tracefs, "p:a vfs_read count", "r3:b many $retval")

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


def test_events_at_tracepoints_are_defined_and_deleted_where_the_kernel_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    tracefs = FakeTracefs()
    machine = make_machine(tracefs, release="7.2.13-amd64")
    driver = HostDriver(machine, HostOptions(), open_fake, read_fake)
    probed, traced = map(read, ("p:a vfs_read", "t:b opened file"))
    begin(driver, probed, traced)

    assert [line.partition("/")[2] for line in tracefs.lines] == [
        "a vfs_read",
        "b opened file=$arg1",
    ]
    (number,) = driver.event_ids(traced)
    assert isinstance(driver.reader, FakeReader)
    driver.reader.recorded = {number: 5}
    # The kernel's profile has none of them.
    assert driver.loads().hits[number] == 5
    driver.close()
    assert tracefs.lines == []


def test_a_followed_command_is_named_before_anything_is_enabled(tracefs: FakeTracefs) -> None:
    machine = make_machine(tracefs)
    driver = HostDriver(machine, HostOptions(), open_fake, read_fake)
    driver.follow(5)
    begin(driver, read("p:a vfs_read"), chosen=Options(tasks=Tasks(follow=True)))
    armed = [name for name, _ in tracefs.written]
    driver.follow(77)

    assert not [name for name in armed if name.endswith(("enable", "set_event_pid"))]
    written = [(name.split("/", 2)[2], text) for name, text in tracefs.written[len(armed) :]]
    assert written[:2] == [("options/event-fork", "1"), ("set_event_pid", "77\n")]
    assert [(name.rpartition("/")[2], text) for name, text in written[2:]] == [("enable", "1")]
    driver.close()
    assert is_clean(tracefs)


def test_options_reach_the_instance(tracefs: FakeTracefs) -> None:
    driver_of(tracefs, "p vfs_read", options=HostOptions(ring=1 << 20, clock="mono"))

    (own,) = set(tracefs.instances) - {"theirs"}
    files = tracefs.instances[own].files
    assert (files["trace_clock"], files["buffer_size_kb"]) == ("mono", "1024")


def test_a_refusal_in_the_middle_takes_the_earlier_ones_back(tracefs: FakeTracefs) -> None:
    tracefs.refused["many"] = ("Failed to register probe event", 2)

    with pytest.raises(DefinitionError, match="Failed to register"):
        driver_of(tracefs, "p:a vfs_read", "p:b many", "p:c void_fn")

    assert is_clean(tracefs)


@pytest.mark.parametrize("name", ["buffer_size_kb", "trace_clock", "enable", "instances", "filter"])
def test_nothing_is_left_when_a_write_fails(tracefs: FakeTracefs, name: str) -> None:
    tracefs.failing[name] = errno.ENOMEM

    if name == "filter":
        driver_of(tracefs, "p:a vfs_read", "p:b many").close()
    else:
        with pytest.raises(TargetError):
            driver_of(tracefs, "p:a vfs_read", "p:b many")

    assert is_clean(tracefs)


def test_the_journal_knows_of_it_while_it_is_there(tracefs: FakeTracefs) -> None:
    driver = driver_of(tracefs, "p vfs_read")

    assert [owner.label for owner in noted()] == sorted(set(tracefs.instances) - {"theirs"})
    driver.close()
    assert list(noted()) == []


def test_what_was_counted_can_be_had_when_all_is_gone(tracefs: FakeTracefs) -> None:
    driver = driver_of(tracefs, "p:a vfs_read", "p:b many")
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
    driver.close()

    driver.prepare(Wanted(definitions=[read("p:b many")]))

    assert [(hits.event, hits.recorded) for hits in driver.hits()] == [("a", 5), ("b", 0)]


def test_misses_are_ours_though_others_have_events_of_the_same_name(tracefs: FakeTracefs) -> None:
    tracefs.lines.append("p:theirs/a many")
    driver = driver_of(tracefs, "p:a vfs_read")
    tracefs.lines.append("p:theirs/b many")
    tracefs.misses["b"] = 9

    driver.disarm()

    assert driver.counts().missed == {1: 0}


def test_events_that_somebody_took_away_are_told(tracefs: FakeTracefs) -> None:
    driver = driver_of(tracefs, "p:a vfs_read")
    tracefs.lines.remove(tracefs.lines[1])

    with pytest.raises(TargetError, match="somebody else took"):
        driver.disarm()
    driver.close()

    assert is_clean(tracefs)


@pytest.mark.parametrize("name", ["events/{}/enable", "events/{}/b/enable"])
def test_events_that_somebody_disables_are_told(tracefs: FakeTracefs, name: str) -> None:
    driver = driver_of(tracefs, "p:a vfs_read", "p:b many")
    driver.check()
    instance = next(name for name in tracefs.instances if name != "theirs")
    group = tracefs.lines[1].split("/")[0].partition(":")[2]

    tracefs.write(f"instances/{instance}/{name.format(group)}", "0")

    # Once a second; and when it ends.
    driver.check()
    with pytest.raises(TargetError, match="somebody else enabled or disabled"):
        driver.disarm()
    driver.close()
    assert is_clean(tracefs)


def test_what_is_disabled_by_us_and_enabled_by_somebody_is_told(
    tracefs: FakeTracefs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_driver, "_CHECK_S", 0.0)
    driver = driver_of(tracefs, "p:a vfs_read", "p:b many")
    first, _ = driver.wanted.definitions
    change(driver, first)
    driver.check()
    instance = next(name for name in tracefs.instances if name != "theirs")
    group = tracefs.lines[1].split("/")[0].partition(":")[2]

    tracefs.write(f"instances/{instance}/events/{group}/b/enable", "1")

    with pytest.raises(TargetError, match="somebody else enabled or disabled"):
        driver.check()
    driver.close()
    assert is_clean(tracefs)


def test_events_that_somebody_uses_stay_in_the_journal(tracefs: FakeTracefs) -> None:
    driver = driver_of(tracefs, "p:a vfs_read")
    tracefs.failing["kprobe_events"] = errno.EBUSY

    with pytest.raises(TracefsError):
        driver.close()

    assert len(list(noted())) == 1


def test_it_can_be_armed_again(tracefs: FakeTracefs) -> None:
    driver = driver_of(tracefs, "p:a vfs_read")

    for _ in range(2):
        driver.disarm()
        driver.close()
        begin(driver, read("p:a vfs_read"))
    driver.close()

    assert is_clean(tracefs)


def enabled(tracefs: FakeTracefs) -> dict[str, str]:
    """Return what was written last to the enable files of our events, by their names."""
    (own,) = set(tracefs.instances) - {"theirs"}
    group = own.replace("-", "_")
    files = tracefs.instances[own].files
    return {
        name.split("/")[2]: text
        for name, text in files.items()
        if name.startswith(f"events/{group}/") and name.count("/") == 3 and "enable" in name
    }


def names(tracefs: FakeTracefs) -> list[str]:
    return [line.split()[0].rpartition("/")[2] for line in tracefs.lines if line != THEIRS]


def test_a_change_enables_and_disables_what_differs_and_nothing_else(
    tracefs: FakeTracefs,
) -> None:
    a, b, c = map(read, ("p:a vfs_read", "p:b many", "p:c void_fn"))
    driver = driver_of(tracefs)
    begin(driver, a, b)
    written = len(tracefs.written)

    change(driver, b, c)
    assert enabled(tracefs) == {"a": "0", "b": "1", "c": "1"}
    change(driver, a, b)

    assert enabled(tracefs) == {"a": "1", "b": "1", "c": "0"}
    assert names(tracefs) == ["a", "b", "c"]
    assert not [name for name, _ in tracefs.written[written:] if name.endswith("/b/enable")]
    assert driver.reader is not None
    driver.close()
    assert is_clean(tracefs)


def test_a_definition_that_comes_while_it_records_is_known_to_the_reader_before_its_hits(
    tracefs: FakeTracefs,
) -> None:
    driver = driver_of(tracefs)
    begin(driver, a := read("p:a vfs_read"))

    change(driver, a, read("p:b many"))

    assert isinstance(driver.reader, FakeReader)
    assert driver.reader.added == ["b"]
    assert [hits.event for hits in driver.hits()] == ["a", "b"]


def test_another_filter_is_written_while_the_event_records(tracefs: FakeTracefs) -> None:
    driver = driver_of(tracefs)
    begin(driver, a := read("p:a vfs_read count"))
    new = replace(a, filter="count > 5")

    driver.replace_definition(a, new)
    change(driver, new)
    filters = [text for name, text in tracefs.written if name.endswith("/filter")]
    driver.replace_definition(new, a)
    change(driver, a)

    assert filters == ["count > 5"]
    assert tracefs.written[-1][1] == "0"
    assert names(tracefs) == ["a"]
    assert enabled(tracefs) == {"a": "1"}


@pytest.mark.parametrize("word", ["kprobe_events", "/b/filter", "/a/filter", "/a/enable", "/b/en"])
def test_a_change_that_the_kernel_refuses_leaves_all_as_before(
    tracefs: FakeTracefs, word: str
) -> None:
    driver = driver_of(tracefs)
    a, b, c = map(read, ("p:a vfs_read count", "p:b many x=p1", "p:c void_fn"))
    b = replace(b, filter="x > 1")
    begin(driver, a, c)
    (own,) = set(tracefs.instances) - {"theirs"}
    new = replace(a, filter="count > 5")
    driver.replace_definition(a, new)
    tracefs.failing[word] = errno.ENOMEM

    with pytest.raises((DefinitionError, TargetError, RefusedError)):
        change(driver, *((new, b) if "a/e" not in word else (b,)))

    tracefs.failing.clear()
    assert names(tracefs) == ["a", "c"]
    assert set(enabled(tracefs).items()) <= {("a", "1"), ("b", "0"), ("c", "1")}
    files = tracefs.instances[own].files
    assert {text for name, text in files.items() if name.endswith("/a/filter")} <= {"0"}
    assert driver.wanted.definitions == (a, c)
    change(driver, new, b, c)
    assert names(tracefs) == ["a", "c", "b"]
    driver.close()
    assert is_clean(tracefs)


def test_a_name_that_the_kernel_still_has_is_given_to_no_other_event(tracefs: FakeTracefs) -> None:
    driver = driver_of(tracefs)
    a, b = read("p:a vfs_read"), read("p:b many")
    begin(driver, a, b)
    change(driver, b)
    driver.forget(a)

    change(driver, b, again := read("p:a many"))

    assert names(tracefs) == ["a", "b", "a_2"]
    driver.close()
    begin(driver, again, read("p:c vfs_read"))
    assert names(tracefs) == ["a_2", "c"]


def test_when_it_ends_the_rings_are_drained_and_then_all_goes(
    tracefs: FakeTracefs,
) -> None:
    driver = driver_of(tracefs, "p:a vfs_read")

    driver.end()
    assert len(list(driver.rest())) == 1
    assert names(tracefs) == ["a"]
    driver.end()

    assert is_clean(tracefs)


def test_what_is_disabled_as_the_last_one_can_be_enabled_again(tracefs: FakeTracefs) -> None:
    driver = driver_of(tracefs)
    begin(driver, a := read("p:a vfs_read"))

    change(driver)
    assert enabled(tracefs) == {"a": "0"}
    change(driver, a)

    assert enabled(tracefs) == {"a": "1"}
    assert driver.reader is not None


def test_a_recording_may_begin_with_nothing_and_end_so(tracefs: FakeTracefs) -> None:
    driver = driver_of(tracefs)
    driver.end()
    driver.end()
    assert is_clean(tracefs)

    begin(driver)
    change(driver, read("p:a vfs_read"))

    assert enabled(tracefs) == {"a": "1"}


def test_hits_are_read_from_the_profile_and_what_is_over_a_limit_is_not_enabled(
    tracefs: FakeTracefs,
) -> None:
    driver = driver_of(tracefs, "p:a vfs_read", "p:b many")
    a, b = driver.wanted.definitions
    loads = driver.loads()
    (number,) = driver.event_ids(b)

    assert loads.code_s is None
    assert [loads.hits[n] for each in (a, b) for n in driver.event_ids(each)] == [7, 7]
    driver.apply(lambda before: replace(before, over_limit=frozenset({number})))

    assert tracefs.written[-1][0].endswith("/b/enable")
    assert tracefs.written[-1][1] == "0"
    assert {each.event: each.is_over_limit for each in driver.hits()} == {"a": False, "b": True}
    driver.apply(lambda before: replace(before, over_limit=frozenset()))
    assert tracefs.written[-1] == (tracefs.written[-1][0], "1")
    driver.close()
    assert is_clean(tracefs)


def test_what_hits_take_is_not_told_by_this_kernel(tracefs: FakeTracefs) -> None:
    driver = HostDriver(make_machine(tracefs), HostOptions(), open_fake, read_fake)
    driver.accept(Options(limits=Limits(max_rate=5)))

    with pytest.raises(NotSupportedError, match="does not tell what hits take"):
        driver.accept(Options(limits=Limits(max_overhead=0.1)))


def test_a_command_is_followed_when_a_change_is_whole(tracefs: FakeTracefs) -> None:
    machine = make_machine(tracefs)
    driver = HostDriver(machine, HostOptions(), open_fake, read_fake)
    options = Options(tasks=Tasks(follow=True))
    begin(driver, a := read("p:a vfs_read"), chosen=options)
    write, names = tracefs.write, iter(["kprobe_events"])

    following: list[Future[None]] = []
    with ThreadPoolExecutor() as threads:

        def follow_meanwhile(name: str, text: str) -> None:
            write(name, text)
            if name == next(names, None):
                following.append(threads.submit(driver.follow, 77))
                wait(following, timeout=0.2)

        tracefs.write = follow_meanwhile
        change(driver, a, read("p:b many"))
        tracefs.write = write

    (followed,) = following
    followed.result()
    assert enabled(tracefs) == {"a": "1", "b": "1"}
    driver.close()


@pytest.mark.parametrize("others", ["swapped", "commented"])
def test_hits_are_of_the_events_that_the_profile_names(tracefs: FakeTracefs, others: str) -> None:
    driver = driver_of(tracefs, "p:a vfs_read", "p:b many")
    read_file, times = tracefs.read, itertools.count()

    def changed(name: str) -> str:
        text = read_file(name)
        if others == "commented" and name.startswith("kprobe_"):
            return f"# a comment\n{text}"
        if name == "kprobe_profile" and next(times) == 0:
            # Somebody's event before ours went, and another one came behind them.
            tracefs.lines.append(tracefs.lines.pop(0))
            text = read_file(name).replace("   7 ", " 999 ", 1)
        return text

    tracefs.misses = {"a": 3, "one": 50}
    tracefs.read = changed
    driver.disarm()
    tracefs.read = read_file

    assert {hits.event: hits.missed for hits in driver.hits()} == {"a": 3, "b": 0}
    driver.close()


def test_tasks_are_not_chosen_by_numbers_that_the_kernel_has_not(tracefs: FakeTracefs) -> None:
    machine = make_machine(tracefs)
    machine.has_kernels_pids = False
    driver = HostDriver(machine, HostOptions(), open_fake, read_fake)

    for tasks in (Tasks(pids=(5,)), Tasks(follow=True)):
        with pytest.raises(NotSupportedError, match="--comm"):
            driver.accept(Options(tasks=tasks))
    driver.accept(Options(tasks=Tasks(comms=("sh",))))
