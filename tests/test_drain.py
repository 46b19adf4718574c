"""Counts of a recording, by probe."""

from kprobes.drain import hits_of
from kprobes.inspect.check import checker_of_guest
from kprobes.model.events import Counts
from kprobes.model.resolved import Resolved
from tests.build.named_guest import make_named_guest

COUNTS = Counts(recorded={1: 5, 2: 7}, missed={1: 1}, lost=0, damaged=0)


def probes(text: str) -> list[Resolved]:
    checker = checker_of_guest(make_named_guest("vfs_read", "vfs_write", "do_exit").guest)
    found = (verdict.placed for verdict in checker.check(text))
    return [each.probe for placed in found for each in placed]


def test_a_newer_probe_has_no_hits_of_the_one_that_had_its_number() -> None:
    hits = hits_of(probes("p:a vfs_read"), probes("p:b vfs_write"), COUNTS)

    assert [(each.event, each.recorded, each.missed) for each in hits] == [("a", 5, 1), ("b", 0, 0)]


def test_a_probe_of_the_recording_is_counted_once_though_it_is_at_many_places() -> None:
    again = probes("p:a vfs_read")

    assert [each.recorded for each in hits_of(again * 3, again, COUNTS)] == [5]


def test_a_probe_whose_module_is_gone_is_counted() -> None:
    assert [each.recorded for each in hits_of(probes("p:a vfs_read"), [], COUNTS)] == [5]


def test_a_pattern_s_functions_and_what_is_named_have_the_names_that_were_given() -> None:
    hits = hits_of(probes("p vfs_*\np do_exit+0x0"), [], COUNTS)

    assert [each.function for each in hits] == ["vfs_read", "vfs_write", "do_exit+0x0"]
