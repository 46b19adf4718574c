"""Debian's arm64 kernels after 6.1: what is most likely to break, in one guest of each.

All that other tests show of 6.1 is shown of these in ``make matrix``: emulating them takes long.
"""

import re
from collections import Counter
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

import kprobes
from kprobes.arch.aarch64.arch import AARCH64
from kprobes.arch.aarch64.machine import pointer
from kprobes.errors import RefusedError
from kprobes.guest.places import FindSite, Places
from kprobes.guest.text import text_of_image
from kprobes.image.file import read_image
from kprobes.model.plan import ReturnMethod
from kprobes.open import GuestSession
from kprobes.plan.ftrace import sites_in_image
from kprobes.plan.strategy import Wish
from kprobes.transport.qemu_command import MachineOptions
from kprobes.units import Addr
from tests.build.defined import delete_all
from tests.system import oracle
from tests.system.conftest import SUITES
from tests.system.event_definitions import definitions, event_of
from tests.system.handling import output, text_of
from tests.system.oracle import Tracefs
from tests.system.return_oracle import Pair

pytestmark = [pytest.mark.guest, pytest.mark.kernels("7.x")]

_WORKLOAD = b"""#!/bin/sh
for i in 1 2 3 4 5; do cat /proc/version /etc/passwd /no/such/file; ls /; done >/dev/null 2>&1
"""
_EACH = 61
"""Which of the tracer's sites are looked at."""
_RETURNS = ["r:got vfs_read got=$retval:s64", "r:put vfs_write put=$retval:s64"]


@pytest.fixture(scope="module", params=["6.12", "7.x"], name="session")
def _session(request: pytest.FixtureRequest) -> Iterator[GuestSession]:
    files = {"/workload.sh": _WORKLOAD}
    options = MachineOptions(suite=SUITES[request.param], arch="arm64", files=files)
    with kprobes.boot(options) as session:
        yield session


@pytest.fixture(autouse=True)
def well(session: GuestSession) -> Iterator[None]:
    """The kernel's text is afterwards what it was, and it has nothing to complain of."""
    delete_all(session)
    session.options = replace(session.options, return_method=None)
    before = text_of(session)
    yield
    assert text_of(session) == before
    dmesg = output(session, "dmesg")
    assert re.findall("(?:WARNING:|BUG:|Oops|stalls? on|lockup).*", dmesg) == []


def test_entries_have_the_values_that_the_kernel_s_own_probes_record(session: GuestSession) -> None:
    lines = definitions("newer_arm64.txt", session.kernel)
    session.probe("\n".join(lines))
    tracefs = Tracefs(session)

    def arm() -> None:
        tracefs.arm(lines, buffer_kib=4096)

    trace, native = oracle.record_both(session, arm, arch="arm64")
    tracefs.disarm()

    ours, theirs = oracle.our_hits(trace), oracle.native_hits(native, oracle.fields_of(trace))
    compared = oracle.compare(ours, theirs, is_ours_first=False)
    hits = Counter(mine.event for mine, _ in compared.pairs)
    assert all(hits[event_of(line)] > 10 for line in lines), hits
    assert compared.native_only == compared.wrong_values() == []
    assert not any(mine.faulted for mine in ours)


@pytest.mark.parametrize("return_method", [ReturnMethod.RETINSN, ReturnMethod.RETHOOK])
def test_returns_have_the_values_that_the_kernel_s_own_probes_record(
    session: GuestSession, return_method: ReturnMethod
) -> None:
    pair = Pair(session, _RETURNS)

    found = pair.record("sh /workload.sh", return_method=return_method)
    pair.disarm()

    hits = Counter(mine.event for mine, _ in found.compared.pairs)
    assert set(hits) == {"got", "put"}
    assert hits.total() > 100
    assert found.wrong_values() == found.unexplained() == found.begun_after() == []


def test_instructions_inside_a_function_are_hit_as_its_entry_is(session: GuestSession) -> None:
    """They come before anything that could lead around them, and change no argument yet."""
    session.probe("p:entry vfs_read at=%x0\np:inside vfs_read+12 at=%x0\np:on vfs_read+16 at=%x0")

    with session.record() as trace:
        session.run("sh /workload.sh", timeout_s=300)

    hits = [(hit.event, hit.pid, hit.values) for hit in oracle.our_hits(trace)]
    by_event = [
        [rest for event, *rest in hits if event == name] for name in ("entry", "inside", "on")
    ]
    assert by_event[0] == by_event[1] == by_event[2]
    assert len(by_event[0]) > 30


def test_pointers_in_front_of_functions_are_never_taken_for_code(session: GuestSession) -> None:
    """They belong to the function before by its symbol's size, and their bytes are KASLR's."""
    places = session.driver.places
    find_site, sites = places.find_site(Wish()), places.sites.addrs.tolist()
    words = [pointer(site) + at for site in sites[::_EACH] for at in (0, 4)]

    accepted = [hex(addr) for addr in words if _is_accepted(find_site, addr)]

    assert len(words) > 1000
    assert accepted == []
    # The same of its file, where they are nops yet.
    assert session.machine is not None
    image = read_image(session.machine.kernel)
    text = text_of_image(image)
    found = Places(text, AARCH64, sites_in_image(image, text.kernel))
    find_site = found.find_site(Wish())
    assert [hex(a) for a in words if _is_accepted(find_site, a - session.kernel.slide)] == []


def _is_accepted(find_site: FindSite, addr: int) -> bool:
    try:
        find_site(Addr(addr))
    except RefusedError:
        return False
    return True
