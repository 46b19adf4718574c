"""Probes armed in a guest, and their owners."""

import numpy as np
import pytest

from kprobes.arch.x86_64.arch import X86_64
from kprobes.guest.journal import Entry
from kprobes.inspect.status import ArmedSite, Owner, Status, read_codes, read_status
from tests.build.armed_sites import DISABLED, ENABLED, NOP, OLD_NOP, make_sites
from tests.build.journals import make_entry, make_patch
from tests.build.kernel import TEXT, make_kernel

CALL = bytes.fromhex("e811223344")
SITE = TEXT + 0x40


def look_at(
    sites: dict[int, bytes], *entries: Entry, flags: dict[int, int] | None = None
) -> Status:
    memory, kernel = make_sites(sites, flags=flags)
    return read_status(memory, kernel, X86_64.site, entries)


def only(status: Status) -> ArmedSite:
    (site,) = status.armed
    return site


def test_nops_of_every_kernel_are_idle() -> None:
    status = look_at({SITE: NOP, SITE + 64: OLD_NOP})

    assert (status.sites, status.armed) == (2, ())


def test_a_call_that_a_journal_knows_is_its_tracers() -> None:
    undo = make_patch(0x40, old=NOP, new=CALL, what="open")
    entry = make_entry("localhost:1", undo)

    site = only(look_at({SITE: CALL, SITE + 64: NOP}, entry, flags={SITE: DISABLED}))

    assert (site.owner, site.event, site.where) == (Owner.JOURNAL, "open", "f0+0x0")
    assert site.entry is entry


def test_a_journal_with_other_bytes_for_the_site_says_nothing_of_it() -> None:
    entry = make_entry("localhost:1", make_patch(0x40, old=NOP, new=b"\xe8\0\0\0\0"))

    site = only(look_at({SITE: CALL}, entry, flags={SITE: DISABLED}))

    assert (site.owner, site.entry) == (Owner.TRACER, None)


def test_what_a_tracer_without_a_journal_noted_is_listed_at_sites_and_elsewhere() -> None:
    memory, kernel = make_sites({SITE: CALL, SITE + 64: NOP}, flags={SITE: ENABLED})
    memory.pieces[TEXT + 0x1000] = b"\xcc\x90"
    chained = make_patch(0x40, old=b"\xe8abcd", new=CALL, what="a probe")
    elsewhere = make_patch(0x1000, old=b"\x90", new=b"\xcc", what="a probe")
    gone = make_patch(0x1001, old=b"\x55", new=b"\xcc", what="a probe")

    status = read_status(memory, kernel, X86_64.site, (), [chained, elsewhere, gone])

    found = [(site.addr, site.owner, site.event) for site in status.armed]
    assert found == [
        (SITE, Owner.TRACER, "a probe"),
        (TEXT + 0x1000, Owner.TRACER, "a probe"),
    ]


@pytest.mark.parametrize(
    ("code", "flags", "owner"),
    [
        (CALL, ENABLED | 1, Owner.GUEST),
        (CALL, DISABLED, Owner.TRACER),
        (CALL, 0, Owner.TRACER),
        (b"\xcc\x1f\x44\0\0", 0, Owner.UNKNOWN),
        (b"\xcc\x1f\x44\0\0", ENABLED, Owner.UNKNOWN),
    ],
)
def test_bytes_and_flags_tell_whose_a_site_is(code: bytes, flags: int, owner: Owner) -> None:
    site = only(look_at({SITE: code}, flags={SITE: flags}))

    assert (site.owner, site.code) == (owner, code)


def test_a_site_in_no_symbol_is_named_by_its_address() -> None:
    memory, kernel = make_sites({SITE: CALL})
    memory.pieces[SITE] = CALL

    named = read_status(memory, kernel, X86_64.site, ())
    kernel = make_sites({TEXT: NOP})[1]
    bare = read_status(memory, kernel, X86_64.site, ())

    assert only(named).where == "f0+0x0"
    assert only(bare).where == f"{SITE:#x}"


def test_sites_far_apart_are_read_apart_and_absent_ones_left_out() -> None:
    memory, _ = make_sites({SITE: b"abcde", SITE + 9: b"fghij"})
    addrs = np.array([SITE, SITE + 9, SITE + (1 << 20)], np.uint64)

    found, codes = read_codes(memory, addrs, 5)

    assert found.tolist() == [SITE, SITE + 9]
    assert codes.tobytes() == b"abcdefghij"


def test_no_sites_are_no_trouble() -> None:
    found, codes = read_codes(make_sites({})[0], np.zeros(0, np.uint64), 5)

    assert (len(found), codes.shape) == (0, (0, 5))


def test_a_kernel_without_sites_has_none_armed() -> None:
    status = read_status(make_sites({})[0], make_kernel([]), X86_64.site, ())

    assert (status.sites, status.armed) == (0, ())
