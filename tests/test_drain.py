"""Counts of a recording, by probe."""

from kprobes.drain import hits_of
from kprobes.inspect.check import checker_of_guest
from kprobes.model.events import Counts
from kprobes.model.resolved import Resolved
from tests.build.named_guest import make_named_guest

COUNTS = Counts(recorded={1: 5, 2: 7}, missed={1: 1}, lost=0, damaged=0)


def probes(text: str) -> dict[int, Resolved]:
    checker = checker_of_guest(make_named_guest("vfs_read", "vfs_write", "do_exit").guest)
    found = (verdict.placed for verdict in checker.check(text))
    return {n: each.probe for n, each in enumerate((p for placed in found for p in placed), 1)}


def test_every_probe_has_its_numbers_in_the_order_of_definition() -> None:
    a, b = probes("p:a vfs_read")[1], probes("p:b vfs_write\np:c vfs_read")

    hits = hits_of({2: b[1], 1: a}, COUNTS, {2})

    assert [each.event for each in hits] == ["a", "b"]
    assert (hits[0].recorded, hits[0].missed) == (5, 1)
    assert [each.is_over_limit for each in hits] == [False, True]


def test_a_pattern_s_functions_and_what_is_named_have_the_names_that_were_given() -> None:
    hits = hits_of(probes("p vfs_*\np do_exit+0x0"), COUNTS, ())

    assert [each.function for each in hits] == ["vfs_read", "vfs_write", "do_exit+0x0"]
