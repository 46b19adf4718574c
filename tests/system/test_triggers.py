"""Triggers in guests: what is recorded, and left of counts, beside the kernel's own."""

import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path

import pytest
from msgspec import Struct
from msgspec.structs import replace

import kprobes
from kprobes.cli.output import NoEvents
from kprobes.errors import DefinitionError
from kprobes.event_table import TraceProbe
from kprobes.open import GuestSession
from kprobes.recording_files import SnapshotWriter
from kprobes.transport.qemu_command import MachineOptions
from tests.build.waiting import wait_until
from tests.system.conftest import SUITES
from tests.system.oracle import Tracefs

pytestmark = [
    pytest.mark.guest,
    pytest.mark.arches("amd64", "arm64"),
    pytest.mark.kernels("7.x"),
]

# Nobody but the workload reads the one device and writes the other.
_FUNCTIONS = {"a": "read_zero", "b": "write_null"}
_WORKLOAD = """
for size in 50 100 150 200 250 300 350 400 450 500; do
    taskset 1 dd if=/dev/zero of=/dev/null bs=$size count=2 2>/dev/null
done
"""
_HITS = 10 * 5
"""Of ten sizes two blocks are read and written; what dd says at its end is written there, too."""
_HIT = re.compile(
    r"(?m)^.{16}-\d+ +\[\d+\] \S+ +[\d.]+: (?:(\w+): \(.* count=(\d+)$|(<stack trace>))"
)

Hit = tuple[str, int, bool]
"""An event's name, its argument, and whether its stack follows."""


class Case(Struct, frozen=True, kw_only=True):
    """Events with triggers.

    Attributes:
        triggers: by event; GROUP stands for that of all.
        filters: likewise, of events that have one.
        disabled: events that are.
        tracing: whether it is on at first.
    """

    triggers: Mapping[str, Sequence[str]]
    filters: Mapping[str, str] = {}
    disabled: str = ""
    tracing: bool = True


_CASES = {
    "traceoff": Case(triggers={"a": ["traceoff if count > 150"]}),
    "traceoff-of-rejected": Case(
        triggers={"a": ["traceoff if count > 150"]}, filters={"a": "count < 100"}
    ),
    "traceoff-of-disabled": Case(triggers={"a": ["traceoff:1 if count == 300"]}, disabled="a"),
    "traceon": Case(triggers={"b": ["traceon"]}, tracing=False),
    "traceon-if": Case(triggers={"a": ["traceon:1 if count >= 200"]}, tracing=False),
    "on-and-off": Case(
        triggers={"a": ["traceon:3"], "b": ["traceoff:7 if count & 64"]}, tracing=False
    ),
    "counts-of-changes": Case(triggers={"a": ["traceoff:5"], "b": ["traceon:2"]}),
    "none-left": Case(triggers={"a": ["traceoff:0"]}, filters={"a": "count < 100"}),
    "enable-and-disable": Case(
        triggers={
            "a": ["enable_event:GROUP:b if count == 100", "traceoff if count == 450"],
            "b": ["disable_event:GROUP:b:1 if count == 200"],
        },
        disabled="b",
    ),
    "disable-itself": Case(triggers={"b": ["disable_event:GROUP:b"]}),
    "disable-itself-if": Case(triggers={"b": ["disable_event:GROUP:b if count > 100"]}),
    "enable-each-other": Case(
        triggers={"a": ["enable_event:GROUP:b:2"], "b": ["disable_event:GROUP:a:1"]}, disabled="b"
    ),
    "stacks": Case(triggers={"a": ["stacktrace:3 if count > 100"], "b": ["stacktrace:1"]}),
    "hists": Case(
        triggers={
            "a": [
                "hist:keys=count:sort=count",
                "hist:keys=common_pid,common_cpu:vals=count:sort=common_pid",
                "hist:keys=count:vals=count:sort=count.descending:size=128 if count > 300",
            ]
        },
        filters={"a": "count < 100"},
    ),
    "hists-while-off": Case(
        triggers={
            "a": ["hist:keys=count:sort=count", "traceoff"],
            "b": ["hist:keys=count.log2:sort=count"],
        },
        disabled="b",
    ),
    "hists-paused": Case(
        triggers={
            "a": [
                "hist:keys=count:sort=count",
                "hist:keys=count:sort=count:pause",
                "hist:keys=count.log2:sort=count:pause",
                "hist:key=count.log2:sort=count:cont",
                "hist:keys=count.hex:sort=count:pause",
            ]
        },
        disabled="b",
    ),
    "hists-of-others": Case(
        triggers={
            "a": [
                "enable_hist:GROUP:b if count == 200",
                "disable_event:GROUP:b",
            ],
            "b": [
                "hist:keys=count:sort=count:pause",
                "disable_hist:GROUP:b:30 if count > 350",
                "hist:keys=common_cpu:vals=count:pause",
            ],
        },
    ),
    "hists-shared": Case(
        triggers={
            "a": ["hist:name=shared:keys=count:sort=count if count > 100"],
            "b": [
                "hist:keys=count:name=shared:sort=count:size=131072 if count < 400",
                "hist:keys=common_cpu",
            ],
        },
        disabled="a",
    ),
    "many": Case(
        triggers={
            "a": [
                "traceoff:1 if count > 400",
                "disable_event:GROUP:b:1 if count > 250",
                "stacktrace",
            ],
            "b": ["traceon", "enable_event:GROUP:a"],
        },
        filters={"b": "count != 150"},
    ),
}


@pytest.fixture(scope="module", params=["6.1", "7.x"])
def guest(request: pytest.FixtureRequest, arch: str) -> Generator[GuestSession]:
    with kprobes.boot(MachineOptions(suite=SUITES[request.param], arch=arch)) as session:
        yield session


def hits_of(text: str) -> list[Hit]:
    """Return the events of a trace's text in their order."""
    found: list[Hit] = []
    for event, argument, stack in _HIT.findall(text):
        found.append((*found.pop()[:2], True) if stack else (event, int(argument), False))
    return found


def in_group(texts: Sequence[str], group: str) -> list[str]:
    return [each.replace("GROUP", group) for each in texts]


@contextmanager
def ours(session: GuestSession, case: Case) -> Generator[dict[str, TraceProbe]]:
    """Have the events of a case."""
    probes: dict[str, TraceProbe] = {}
    before = session.options
    session.options = replace(before, tracing_on=case.tracing)
    try:
        for name, function in _FUNCTIONS.items():
            asked = "stacktrace" if any("stack" in t for t in case.triggers.get(name, ())) else ""
            probes[name] = session.probe(
                f"p:ours/{name} {function} count=$arg3:u64",
                filter=case.filters.get(name),
                triggers=[asked] if asked else [],
                enabled=name not in case.disabled,
            )
            probes[name].trigger("!stacktrace")
        for name, texts in case.triggers.items():
            for each in in_group(texts, "ours"):
                probes[name].trigger(each)
        yield probes
    finally:
        session.options = before
        for name, probe in probes.items():
            for each in in_group(case.triggers.get(name, ()), "ours"):
                probe.trigger(f"!{each}")
        for probe in probes.values():
            probe.delete()


_GROUPS = map("theirs{}".format, count())


@contextmanager
def theirs(session: GuestSession, case: Case) -> Generator[str]:
    """Have them in the kernel, in the group that is yielded; it stays until the guest ends."""
    group, lines, undo = next(_GROUPS), list[str](), list[str]()
    for name, function in _FUNCTIONS.items():
        lines.append(f"echo 'p:{group}/{name} {function} count=$arg3:u64' >> kprobe_events")
        if name in case.filters:
            lines.append(f"echo '{case.filters[name]}' > events/{group}/{name}/filter")
    for name, texts in case.triggers.items():
        for text in in_group(texts, group):
            # Without O_TRUNC, which takes the hist triggers away.
            lines.append(f"echo '{text}' >> events/{group}/{name}/trigger")
            undo.append(f"echo '!{text}' >> events/{group}/{name}/trigger")
    on = (name for name in _FUNCTIONS if name not in case.disabled)
    lines += [f"echo 1 > events/{group}/{name}/enable" for name in on]
    tracefs = Tracefs(session)
    tracefs.run("\n".join([*lines, f": > trace; echo {int(case.tracing)} > tracing_on"]))
    try:
        yield group
    finally:
        tracefs.run("\n".join([*undo, f"echo 0 > events/{group}/enable; echo 1 > tracing_on"]))


def natively(tracefs: Tracefs, file: str) -> str:
    """Return what a file of the kernel's has."""
    # Some print it twice: hist_field_print() of 7.2.
    return tracefs.run(f"cat {file}").replace("common_cpu" * 2, "common_cpu")


@pytest.mark.parametrize("name", _CASES)
def test_what_is_recorded_is_what_the_kernel_records(
    guest: GuestSession, name: str, arch: str
) -> None:
    case = _CASES[name]
    with ours(guest, case) as probes, ExitStack() as undo:
        # As of all probes: the kernel's is in front of ours on arm64, which must be there first.
        group = "" if arch == "arm64" else undo.enter_context(theirs(guest, case))
        trace = undo.enter_context(guest.record())
        group = group or undo.enter_context(theirs(guest, case))
        assert guest.run(_WORKLOAD).status == 0
        tracefs = Tracefs(guest)
        listed = {each: [*probes[each].triggers] for each in case.triggers}
        files = {each: natively(tracefs, f"events/{group}/{each}/trigger") for each in listed}
        text = tracefs.run("cat trace")
        hists = {each: "\n\n".join(map(str, probes[each].histograms)) for each in listed}
        counted = {each: natively(tracefs, f"events/{group}/{each}/hist") for each in listed}

    found = hits_of(trace.to_text())
    assert found == hits_of(text)
    assert found
    # Of each case something is not recorded, or has a stack.
    assert len(found) < _HITS or any(has_stack for _, _, has_stack in found)
    for each, text in files.items():
        assert listed[each] == text.replace(f":{group}:", ":ours:").splitlines()
    assert hists == counted
    assert [*hists.values()] != [""] or "hist" not in name


def test_some_of_it_was_recorded(guest: GuestSession) -> None:
    with ours(guest, _CASES["enable-and-disable"]) as probes:
        with guest.record() as trace:
            assert guest.run(_WORKLOAD).status == 0
        a, b = (probe.hits for probe in probes.values())

    assert (a, b) == (17, 6)
    assert sorted({event.name for event in trace}) == ["a", "b"]


_LINES = [
    "traceoff", "traceon", "!traceoff", "traceoff:5", "traceoff:5", "!traceoff:1", "traceoff:",
    "!traceon", "traceoff 3", "!traceoff", "traceoff:x", "traceoff:5x", "traceoff if",
    "traceoff:if",
    "traceoff if ", "traceoff  if count > 1", "!traceoff if nothing", "traceoff:0x10 if count>1",
    "!traceoff", "traceoff:5 count > 1", "traceof", "!traceof", "", "!", "stacktrace:0",
    "stacktrace",
    "!stacktrace:7", "enable_event", "enable_event:", "enable_event:GROUP",
    "enable_event:GROUP:",
    "enable_event:GROUP:nothing", "enable_event:nothing:b", "enable_event:GROUP:b",
    "disable_event:GROUP:b", "enable_event:GROUP:b:3", "!disable_event:GROUP:b",
    "enable_event:GROUP:b:3 if count > 1", "!enable_event:GROUP:b", "enable_event:GROUP:b:x",
    "enable_event:GROUP:b:", "disable_event:GROUP:a", "!disable_event:GROUP:a",
    "!enable_event:GROUP:nothing", "traceoff if nothing > 1", "traceoff if count >",
    "traceoff if (",
    "traceoff:5:6", "!traceoff", "traceoff:-1", "traceoff:99999999999999999999",
    "traceoff:18446744073709551615", "!traceoff", "TRACEOFF", "trace off",
    "hist", "hist:", "!hist", "hist:keys=count", "hist:keys=count", "hist:keys=count:pause",
    "hist:keys=count:cont", "hist:keys=count:clear", "hist:keys=count:vals=count",
    "hist:keys=count if count > 3", "hist:keys=count if count > 3", "hist:keys=count if count > 4",
    "!hist:keys=count", "!hist:keys=count", "hist:keys=count:clear", "hist:keys=count:continue",
    "hist:keys=count:cont if count > 3", "hist:keys=count:clear if count > 5",
    "hist:keys=nothing", "!hist:keys=nothing", "hist:keys=count if nothing > 1",
    "hist:keys=count:5", "hist:name=x:keys=count", "hist:name=x:keys=count",
    "hist:name=x:keys=count if count > 3", "hist:name=x:keys=count:vals=count",
    "hist:name=y:keys=count", "hist:name=x:keys=count:clear", "!hist:name=x:keys=count",
    "!hist:name=x:keys=count if count > 3", "!hist:name=y:keys=count", "hist:keys=count.log2",
    "!hist:keys=count.hex", "!hist:keys=count.log2", "enable_hist:GROUP:b", "enable_hist:GROUP:b",
    "disable_hist:GROUP:b", "!disable_hist:GROUP:b:7", "disable_hist:GROUP:a:3 if count > 1",
    "enable_hist:GROUP:nothing", "enable_hist:GROUP", "!disable_hist:GROUP:a",
    "!hist:keys=count:vals=count", "!hist:keys=count if count > 3",
    "!hist:keys=count if count > 4",
]  # fmt: skip
"""Written to one event's file, one after the other."""


def test_the_kernel_takes_what_we_take(guest: GuestSession) -> None:
    none = Case(triggers={})
    with ours(guest, _CASES["stacks"]) as probes, theirs(guest, none) as group:
        probe, file, tracefs = probes["a"], f"events/{group}/a/trigger", Tracefs(guest)
        probe.trigger("!stacktrace")
        lines = in_group(_LINES, group)
        script = (f"echo '{each}' >> {file} 2>/dev/null && echo yes || echo no" for each in lines)
        verdicts = tracefs.run("\n".join(script)).split()
        told = [_verdict(probe, each) for each in in_group(_LINES, "ours")]
        left = tracefs.run(f"cat {file}")

    pairs = zip(_LINES, told, verdicts, strict=True)
    assert [each for each in pairs if each[1] != each[2]] == []
    assert left.startswith("# Available triggers:")
    assert told.count("yes") > 20


def _verdict(probe: TraceProbe, text: str) -> str:
    try:
        probe.trigger(text)
    except DefinitionError:
        return "no"
    return "yes"


def test_a_stop_ends_the_recording(guest: GuestSession) -> None:
    probe = guest.probe("p:ours/a read_zero count=$arg3:u64", triggers=["stop:1 if count >= 200"])
    try:
        with guest.record(timeout_s=300) as trace:
            job = guest.start(f"while :; do {_WORKLOAD} done")
            # It is over by itself, long before its time.
            for _ in trace:
                pass
            job.kill()
        assert [event["count"] for event in trace] == [50, 50, 100, 100, 150, 150, 200]
        with guest.record(timeout_s=1) as trace:
            # The next one begins anew.
            assert guest.run(_WORKLOAD).status == 0
        assert len(trace) == 7
    finally:
        probe.delete()


def test_what_is_armed_minds_a_trigger_that_comes_later(guest: GuestSession) -> None:
    first = guest.probe("p:ours/a read_zero count=$arg3:u64")
    later = guest.probe("p:ours/b write_null count=$arg3:u64", enabled=False)
    with guest.record() as trace:

        def hit(a: int, b: int) -> None:
            assert guest.run(_WORKLOAD).status == 0
            wait_until(lambda: (first.hits, later.hits) == (a, b))

        hit(20, 0)
        # The first write is after the first read.
        later.trigger("traceoff:1")
        hit(21, 0)
        later.trigger("!traceoff")
        hit(41, 0)
        later.enable()
        later.trigger("traceoff:1 if count > 10000")
        hit(61, 30)
        first.trigger("disable_event:ours:b:1 if count == 300")
        hit(81, 30 + 15)
        # What is armed besides does not switch it on again, but whoever enables it does.
        other = guest.probe("p:ours/c vfs_fsync")
        hit(101, 30 + 15)
        later.enable()
        hit(121, 30 + 15 + 30)
        later.disable()
        hit(141, 75)
        assert first.triggers == ("disable_event:ours:b:count=0 if count == 300",)
        first.trigger("!disable_event:ours:b")
        assert later.triggers == ("traceoff:count=1 if count > 10000",)
    assert len(trace) == 141 + 75 + other.hits
    guest.select("*").delete()


def test_a_snapshot_is_written_when_it_is_asked_for(guest: GuestSession, tmp_path: Path) -> None:
    path = tmp_path / "x.rec"
    before = guest.options
    guest.options = replace(before, keeps_end=True)
    written: list[int] = []
    probe = guest.probe(
        "p:ours/a read_zero count=$arg3:u64", triggers=["snapshot:2 if count == 300"]
    )
    try:
        early: list[int] = []

        def is_done() -> bool:
            assert guest.run(_WORKLOAD).status == 0
            wait_until(lambda: bool(written))
            early.append(len(kprobes.load(path)))
            return True

        with SnapshotWriter(path, most=1 << 20, report=written.append) as writer:
            guest.stream(NoEvents(), is_done=is_done, keep=lambda: writer)
        assert 11 <= early[0] <= 20
        assert len(kprobes.load(path)) == 20
    finally:
        guest.options = before
        probe.delete()
