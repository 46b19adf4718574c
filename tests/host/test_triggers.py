"""Triggers of this machine's events: what is written for them, and what the kernel says is left."""

import errno
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import pytest

from kprobes.errors import (
    DefinitionError,
    NotSupportedError,
    RefusedError,
    TargetError,
    TracefsError,
)
from kprobes.event_table import EventTable, TraceProbe
from kprobes.event_triggers import with_synthetic_fields
from kprobes.host import driver as host_driver
from kprobes.host import triggers
from kprobes.host.driver import HostDriver, HostOptions
from kprobes.model.definition import SyntheticFields
from kprobes.model.options import Options, Tasks
from tests.build.host_machine import make_machine, open_fake, read_fake
from tests.build.tracefs import FakeTracefs, Instance


class Host:
    """Events of this machine, with a tracefs that is not there."""

    def __init__(self, *, release: str = "6.1.0-56-cloud-amd64") -> None:
        self.tracefs = FakeTracefs()
        machine = make_machine(self.tracefs, release=release)
        self.driver = HostDriver(machine, HostOptions(), open_fake, read_fake)
        self.table = EventTable(self.driver)

    def define(self, text: str, *triggers: str, is_enabled: bool = True) -> TraceProbe:
        statements = with_synthetic_fields(self.driver.parse(text), SyntheticFields(), triggers)
        return self.table.define(statements, is_enabled=is_enabled, triggers=triggers)

    def file(self, name: str) -> str:
        """Return what a file of our events has, ``EVENT/NAME``, or "" before it was written."""
        return self._instance.files.get(f"events/{self.group}/{name}", "")

    def set_file(self, name: str, text: str) -> None:
        self._instance.files[f"events/{self.group}/{name}"] = text

    @property
    def group(self) -> str:
        (name,) = self.tracefs.instances
        return name.replace("-", "_")

    @property
    def tracing_on(self) -> str:
        return self._instance.files["tracing_on"]

    @tracing_on.setter
    def tracing_on(self, text: str) -> None:
        self._instance.files["tracing_on"] = text

    @property
    def _instance(self) -> Instance:
        (instance,) = self.tracefs.instances.values()
        return instance


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    found = Host()
    yield found
    found.tracefs.failing.clear()
    found.table.end()
    found.table.end()
    assert found.tracefs.instances == {}


def test_they_are_written_to_our_events_of_our_instance(host: Host) -> None:
    host.define("p:read vfs_read count", "traceoff:3 if count > 4096")
    host.define("p:many many", "traceon")

    host.table.begin()

    assert host.file("read/trigger") == "traceoff:count=3 if count > 4096\n"
    assert host.file("many/trigger") == "traceon:unlimited\n"
    assert (host.file("read/enable"), host.tracing_on) == ("1", "1")


def test_what_is_about_an_event_is_about_each_of_its_probes(host: Host) -> None:
    host.define("p:reads vfs_read\np:reads many", is_enabled=False)
    host.define("p:stat void_fn").trigger('enable_event:kprobes:reads:2 if COMM != "dd"')

    host.table.begin()

    lines = host.file("stat/trigger").splitlines()
    assert sorted(lines) == [
        f'enable_event:{host.group}:reads:count=2 if COMM != "dd"',
        f'enable_event:{host.group}:reads_2:count=2 if COMM != "dd"',
    ]
    assert [host.file(f"{name}/enable") for name in ("reads", "reads_2", "stat")] == ["", "", "1"]


def test_they_mind_the_tasks_that_are_chosen(host: Host) -> None:
    host.table.options = Options(tasks=Tasks(pids=(5, 6)))
    host.define("p:a vfs_read count", "traceoff if count > 4096")
    host.define("p:b many", "traceon")

    host.table.begin()

    pids = "common_pid == 5 || common_pid == 6"
    assert host.file("a/trigger") == f"traceoff:unlimited if ({pids}) && (count > 4096)\n"
    assert host.file("b/trigger") == f"traceon:unlimited if {pids}\n"


def test_they_come_and_go_while_it_records_and_tracing_is_on_again_without_the_last(
    host: Host,
) -> None:
    reads = host.define("p:read vfs_read count", "traceoff:1")
    others = host.define("p:many many", is_enabled=False)
    host.table.begin()

    reads.trigger("enable_event:kprobes:many")
    others.enable()
    others.disable()
    armed = host.file("read/trigger").splitlines()
    host.tracing_on = "0"
    reads.trigger("!traceoff")
    reads.trigger("!enable_event:kprobes:many")

    assert armed == [f"enable_event:{host.group}:many:unlimited", "traceoff:count=1"]
    assert host.file("read/trigger") == ""
    assert (host.tracing_on, host.file("many/enable")) == ("1", "0")


def test_what_is_left_is_what_the_kernel_says_also_when_it_has_ended(host: Host) -> None:
    reads = host.define("p:reads vfs_read\np:reads many", 'traceoff:3 if COMM == "dd"')
    host.table.begin()
    before = reads.triggers

    host.set_file("reads_2/trigger", 'traceoff:count=1 if COMM == "dd"\n')
    now = reads.triggers
    host.table.end()

    assert before == ('traceoff:count=3 if COMM == "dd"',)
    assert now == reads.triggers == ('traceoff:count=1 if COMM == "dd"',)


@pytest.mark.parametrize(("text", "left"), [("stop", "unlimited"), ("stop:4", "count=3")])
def test_a_stop_is_a_traceoff_that_was_there(
    host: Host, text: str, left: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triggers, "_STOP_S", 0)
    reads = host.define("p:read vfs_read count", f"{text} if count > 5")
    host.table.begin()
    written = host.file("read/trigger")
    before = host.driver.is_stopped

    host.set_file("read/trigger", "traceoff:count=0 if count > 5\n")

    assert written == "traceoff:count=1 if count > 5\n"
    assert (before, host.driver.is_stopped) == (False, True)
    assert reads.triggers == (f"stop:{left} if count > 5",)


def test_a_stop_that_may_not_do_it_once_never_does(host: Host) -> None:
    host.define("p:read vfs_read", "stop:0")
    host.table.begin()

    assert host.file("read/trigger") == "traceoff:count=0\n"
    assert not host.driver.is_stopped


def test_a_recording_begins_with_tracing_off(host: Host) -> None:
    host.table.options = Options(tracing_on=False)
    host.define("p:read vfs_read", "traceon")

    host.table.begin()

    assert host.tracing_on == "0"


def test_events_that_triggers_may_switch_are_as_they_are_and_the_others_are_looked_at(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_driver, "_CHECK_S", 0)
    host.define("p:read vfs_read", is_enabled=False)
    host.define("p:stat void_fn").trigger("enable_event:kprobes:read")
    host.define("p:many many")
    host.table.begin()

    host.set_file("read/enable", "1*")
    host.set_file("stat/enable", "0*")
    host.driver.check()
    host.set_file("many/enable", "0")

    with pytest.raises(TargetError, match="somebody else enabled or disabled"):
        host.driver.check()
    host.set_file("many/enable", "1")


@pytest.mark.parametrize("trigger", ["snapshot", "stacktrace", "hist:keys=count"])
def test_those_of_guests_are_refused(host: Host, trigger: str) -> None:
    host.table.options = Options(keeps_end=True)

    with pytest.raises(NotSupportedError, match=r"for guests|of guests"):
        host.define("p:read vfs_read count", trigger)

    assert len(host.table) == 0


def test_what_would_see_the_hits_of_everybody_is_refused(host: Host) -> None:
    host.table.options = Options(tasks=Tasks(follow=True))

    with pytest.raises(NotSupportedError, match="--all-tasks"):
        host.define("p:read vfs_read", "traceoff")


def test_an_old_kernels_that_are_everybodys_are_refused(host: Host) -> None:
    old = Host(release="5.17.0")

    with pytest.raises(NotSupportedError, match=r"before Linux 5\.18"):
        old.define("p:read vfs_read", "traceoff")

    old.define("p:read vfs_read", is_enabled=False)
    old.define("p:stat void_fn").trigger("enable_event:kprobes:read")
    assert host.tracefs.instances == {}


def test_a_filter_that_is_wrong_is_told_with_its_place(host: Host) -> None:
    with pytest.raises(DefinitionError) as caught:
        host.define("p:read vfs_read count", "traceoff if size > 5")

    assert (caught.value.code, caught.value.command) == ("FIELD_NOT_FOUND", "size > 5")


def test_what_the_kernel_refuses_leaves_all_as_before(host: Host) -> None:
    reads = host.define("p:read vfs_read count", "traceoff:1")
    host.define("p:many many")
    host.table.begin()

    host.tracefs.failing["many/trigger"] = errno.EINVAL
    with pytest.raises(RefusedError, match="its trigger 'traceon' "):
        host.define("p:many vfs_read", "traceon")
    host.tracefs.failing.clear()

    assert reads.triggers == ("traceoff:count=1",)
    assert host.file("read/trigger") == "traceoff:count=1\n"
    assert (host.file("many/trigger"), host.file("many/enable")) == ("", "1")
    assert host.table.select("many").triggers == ()


def test_what_a_trigger_enabled_goes_off_when_nothing_wants_it_any_more(host: Host) -> None:
    host.define("p:wide many", is_enabled=False)
    reads = host.define("p:read vfs_read", "enable_event:kprobes:wide")
    host.table.begin()

    # A hit has enabled it; nobody said so.
    host.set_file("wide/enable", "1*")
    reads.trigger("!enable_event:kprobes:wide")

    assert host.file("wide/enable") == "0"


def test_what_passes_a_limit_is_disabled_though_a_trigger_has_enabled_it(host: Host) -> None:
    wide = host.define("p:wide many", is_enabled=False)
    host.define("p:read vfs_read", "enable_event:kprobes:wide:2")
    host.table.begin()
    host.set_file("wide/enable", "1*")
    (number,) = host.table.ids_of([wide])

    told = host.table.stop_over_limit({number: "was hit too often"})

    assert len(told) == 1
    assert host.file("wide/enable") == "0"
    assert host.table.select("read").triggers == ("enable_event:kprobes:wide:count=2",)


def test_a_count_that_is_not_listed_is_whole(host: Host) -> None:
    host.define("p:wide many", is_enabled=False)
    reads = host.define("p:read vfs_read", "enable_event:kprobes:wide:2")

    # What it is about is not recorded.
    host.table.begin([reads])

    assert reads.triggers == ("enable_event:kprobes:wide:count=2",)


@pytest.mark.parametrize("listed", ["traceoff:unlimited", "traceoff:count=-1"])
def test_a_count_that_two_cpus_took_below_0_is_used_up(
    host: Host, listed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triggers, "_STOP_S", 0)
    reads = host.define("p:read vfs_read", "stop:1")
    host.table.begin()

    host.set_file("read/trigger", f"{listed}\n")

    assert host.driver.is_stopped
    assert reads.triggers == ("stop:count=0",)


def test_a_stop_is_known_when_the_recording_has_ended_and_not_in_the_next(host: Host) -> None:
    host.define("p:read vfs_read", "stop")
    host.table.begin()

    host.set_file("read/trigger", "traceoff:count=0\n")
    host.table.end()
    first = host.driver.is_stopped
    host.table.begin()

    assert (first, host.driver.is_stopped) == (True, False)


def test_a_look_finds_its_own_probes_while_others_are_defined(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triggers, "_STOP_S", 0)
    host.define("p:read vfs_read", "stop")
    host.define("p:wide many")
    host.table.begin()
    read, defining = host.tracefs.read, list[Future[TraceProbe]]()

    with ThreadPoolExecutor() as threads:

        def define_meanwhile(name: str) -> str:
            if not defining:
                # Whoever looks has the lock, or does not look.
                defining.append(threads.submit(host.define, "p:more void_fn"))
                wait(defining, timeout=0.2)
            return read(name)

        monkeypatch.setattr(host.tracefs, "read", define_meanwhile)
        has_stopped = host.driver.is_stopped

    assert not has_stopped
    assert len(defining[0].result()) == 1


def test_a_stop_beside_a_traceon_is_refused_with_words(host: Host) -> None:
    with pytest.raises(NotSupportedError, match="of which an event has one"):
        host.define("p:read vfs_read count", "traceon if count == 1", "stop if count == 2")


def test_a_count_goes_on_when_other_tasks_are_chosen(host: Host) -> None:
    reads = host.define("p:read vfs_read", "traceoff:3")
    many = host.define("p:many many")
    host.table.begin()

    host.set_file("read/trigger", "traceoff:count=1\n")
    host.table.options = Options(tasks=Tasks(pids=(5,)))
    many.disable()

    assert host.file("read/trigger") == "traceoff:count=1 if common_pid == 5\n"
    assert reads.triggers == ("traceoff:count=1",)


def test_a_change_that_is_refused_leaves_what_was_left(host: Host) -> None:
    reads = host.define("p:read vfs_read", "traceoff:3")
    many = host.define("p:many many")
    host.table.begin()

    host.set_file("read/trigger", "traceoff:count=1\n")
    host.tracefs.failing["many/enable"] = errno.ENOMEM
    host.table.options = Options(tasks=Tasks(pids=(5,)))
    with pytest.raises(TracefsError):
        many.disable()

    assert host.file("read/trigger") == "traceoff:count=1\n"
    host.tracefs.failing.clear()
    assert reads.triggers == ("traceoff:count=1",)


def test_another_trigger_has_nothing_of_one_that_went(host: Host) -> None:
    reads = host.define("p:read vfs_read", "traceoff:3")
    host.table.begin()
    host.set_file("read/trigger", "traceoff:count=1\n")
    host.table.end()

    reads.trigger("!traceoff")
    reads.trigger("traceoff:5")

    assert reads.triggers == ("traceoff:count=5",)


def test_nothing_is_recorded_any_more_when_it_is_asked_what_is_left(host: Host) -> None:
    host.define("p:read vfs_read", "traceoff:3")
    host.table.begin()
    read, asked = host.tracefs.read, list[str]()

    def noted(name: str) -> str:
        if name.endswith("/trigger"):
            asked.append(host.tracing_on)
        return read(name)

    host.tracefs.read = noted
    host.table.end()

    assert asked == ["0"]
