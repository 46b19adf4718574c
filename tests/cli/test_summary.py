"""The words at the end of a trace."""

from typing import Any

import pytest
from msgspec.structs import replace

from kprobes.cli.summary import Calls, Summary
from kprobes.model.events import Hits
from tests.build.json_lines import objects
from tests.test_column_hist import counted


def hits(event: str, recorded: int, missed: int = 0, nmissed: int = 0) -> Hits:
    function = f"do_{event}"
    return Hits(event=event, function=function, recorded=recorded, missed=missed, nmissed=nmissed)


def make_summary(*probes: Hits, **numbers: Any) -> Summary:
    usual = Summary(
        written=sum(probe.recorded for probe in probes),
        faulted=0,
        probes=probes,
        lost=0,
        damaged=0,
        pauses=(0.0123, 3),
    )
    return replace(usual, **numbers)


def test_all_is_said() -> None:
    summary = make_summary(
        hits("open", 8),
        hits("read", 1234, 5),
        hits("close", 2, 1, 3),
        lost=1,
        damaged=2,
        faulted=3,
        command="ls: done",
    )

    assert summary.text() == (
        "\n"
        "1,244 events, 9 missed, 1 lost; guest paused for 12.3 ms in 3 stops\n"
        "  read       1,234  do_read   5 missed (5 another hit in progress)\n"
        "  open           8  do_open\n"
        "  close          2  do_close  4 missed (1 another hit in progress, 3 no room)\n"
        "  6 hits missed: another was in progress there\n"
        "  3 returns missed: more calls were in progress than there was room for; "
        "rN makes room for N\n"
        "  1 event lost: a larger --buffer-size keeps more\n"
        "  2 damaged places in the rings\n"
        "  3 values could not be read (fault)\n"
        "  ls: done\n"
    )


def test_what_did_not_happen_is_not_said() -> None:
    assert make_summary(hits("open", 1)).text().splitlines()[1:] == [
        "1 event, 0 missed, 0 lost; guest paused for 12.3 ms in 3 stops",
        "  open          1  do_open",
    ]


def test_fewer_events_than_hits_are_told_apart() -> None:
    assert "2 of 9 events, 0 missed" in make_summary(hits("open", 9), written=2).text()


def test_many_probes_are_cut_short_and_idle_ones_only_counted() -> None:
    probes = [hits(f"e{n}", 100 - n) for n in range(25)] + [hits("idle", 0), hits("idle", 0)]

    lines = make_summary(*probes).text().splitlines()

    assert lines[2].split() == ["e0", "100", "do_e0"]
    assert lines[-2:] == ["  ... and 5 probes more with 390 hits", "  2 probes without a hit"]


@pytest.mark.parametrize("loss", [{"lost": 1}, {"damaged": 1}])
def test_a_trace_with_a_loss_is_not_complete(loss: dict[str, int]) -> None:
    assert make_summary(hits("open", 1)).is_complete
    assert not make_summary(hits("open", 1), **loss).is_complete


def test_a_missed_hit_is_a_loss_a_fault_is_none() -> None:
    assert not make_summary(hits("open", 1, missed=1)).is_complete
    assert make_summary(hits("open", 1), faulted=1).is_complete


def test_handlers_are_listed_with_what_went_wrong() -> None:
    handlers = (
        Calls(name="opened", place="do_sys_openat2", calls=1234, missed=0, errors=0),
        Calls(name="before", place="vfs_read+0x10", calls=5, missed=2, errors=1),
    )
    summary = make_summary(hits("open", 8), handlers=handlers)

    assert summary.text().splitlines()[3:] == [
        "  opened      1,234  do_sys_openat2",
        "  before          5  vfs_read+0x10   2 missed  1 error",
        "  2 hits went on without a handler: one was slow",
    ]
    assert not summary.is_complete


def test_json_has_every_figure() -> None:
    summary = make_summary(
        hits("open", 8, 1, 2),
        lost=3,
        damaged=4,
        faulted=5,
        unwritten=6,
        command="ls: exit status 7",
        status=7,
        handlers=(Calls(name="h", place="vfs_read", calls=9, missed=10, errors=11),),
    )

    (found,) = objects("summary", summary.json())

    numbers = ("written", "recorded", "missed", "unkept", "lost", "damaged", "faulted", "unwritten")
    assert [found[name] for name in numbers] == [8, 8, 1, 2, 3, 4, 5, 6]
    assert (found["unserved"], found["is_complete"], found["status"]) == (10, False, 7)
    assert found["pauses"] == {"s": 0.0123, "stops": 3}
    assert found["probes"] == [
        {
            "event": "open",
            "function": "do_open",
            "recorded": 8,
            "missed": 1,
            "unkept": 2,
            "is_over_limit": False,
        }
    ]
    assert found["handlers"] == [
        {"name": "h", "place": "vfs_read", "calls": 9, "missed": 10, "errors": 11}
    ]
    assert summary.json().count("\n") == 1


def test_an_event_over_a_limit_is_told_first_and_makes_a_trace_incomplete() -> None:
    hot = replace(hits("hot", 5), is_over_limit=True, event_id=7)
    summary = make_summary(hits("calm", 9), hot)

    assert summary.text().splitlines()[2:] == [
        "  hot           5  do_hot   disabled: over a limit",
        "  calm          9  do_calm",
        "  1 event disabled: over a limit",
    ]
    assert (summary.is_complete, make_summary(hits("calm", 9)).is_complete) == (False, True)
    (found,) = objects("summary", summary.json())
    assert found["over_limit"] == 1
    assert "event_id" not in found["probes"][0]


def test_a_profile_is_as_the_kernel_prints_it() -> None:
    # cat kprobe_profile, Debian's 6.1.0-56-cloud-amd64
    summary = make_summary(hits("read", 1234, 5, 2), hits("open", 0))

    assert summary.kprobe_profile() == (
        "  read                                                    1234               7\n"
        "  open                                                       0               0\n"
    )


@pytest.mark.parametrize("form", ["text", "json", "kprobe_profile"])
def test_a_summary_has_several_forms(form: str) -> None:
    summary = make_summary(hits("read", 1, 1))

    assert {
        "text": summary.text(),
        "json": summary.json(),
        "kprobe_profile": summary.kprobe_profile(),
    }[form] == summary.shown(form, is_short=False, is_counting=False)
    assert (summary.shown(form, is_short=True, is_counting=False) == summary.losses()) is (
        form == "text"
    )


@pytest.mark.parametrize("is_short", [False, True])
def test_tables_of_hist_triggers_are_shown_however_short_it_is(*, is_short: bool) -> None:
    tables = (counted("keys=comm"), counted("keys=got:vals=count"))
    summary = make_summary(hits("read", 4), histograms=tables)

    text = summary.shown("text", is_short=is_short, is_counting=False)

    assert text.endswith("".join(f"\n{each}" for each in tables))
    (line,) = objects("summary", summary.json())
    assert [each["trigger"] for each in line["histograms"]] == [t.trigger.text for t in tables]
