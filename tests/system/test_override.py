"""Overrides in guests: calls are skipped inside them, counted exactly, and refused where unsafe."""

import struct
from collections.abc import Generator

import pytest
from msgspec.structs import replace

import kprobes
from kprobes.errors import DefinitionError, RefusedError, UsageError
from kprobes.model.override import OverrideCounts
from kprobes.model.plan import ReturnMethod
from kprobes.open import GuestSession
from kprobes.transport.qemu import Machine
from tests.build.programs import counted_zeroes, counting_loop
from tests.build.victim import is_complaint
from tests.system.conftest import Boot

pytestmark = [pytest.mark.guest, pytest.mark.arches("amd64", "arm64")]

CALLS = 20_000
_PREFIX = {"amd64": "__x64_sys_", "arm64": "__arm64_sys_"}


def system_call(arch: str, name: str) -> str:
    return _PREFIX[arch] + name


def files(arch: str) -> dict[str, bytes]:
    program = counted_zeroes("getppid", CALLS, arch=arch)
    few = counting_loop("sched_get_priority_min", 10, arch=arch)
    return {"/asks": program, "/also": program, "/few": few}


@pytest.fixture
def session(guest: Machine) -> Generator[GuestSession]:
    with kprobes.attach(str(guest.stub_address)) as session:
        session.machine = guest
        yield session
    said = guest.run("dmesg", 180).output.decode().splitlines()
    assert [line for line in said if is_complaint(line)] == []


@pytest.mark.kernels("5.10", "7.x")
@pytest.mark.parametrize("suite", ["bullseye", "bookworm", "sid"], ids=["5.10", "6.1", "7.x"])
def test_a_thousand_failures_on_two_cpus_are_counted_exactly(
    boot: Boot, arch: str, suite: str
) -> None:
    machine = boot(suite=suite, files=files(arch))
    function = system_call(arch, "getppid")
    with kprobes.attach(str(machine.stub_address)) as session:
        override = session.override(
            function, returns=0, filter='comm == "asks" || comm == "also"', times=1000, force=True
        )
        made = machine.run("/also > /tmp/a & /asks > /tmp/b; wait; cat /tmp/a /tmp/b", 180)
        zeroes = struct.unpack("<2Q", made.output)
        counts = override.counts

        # The programs are the judge. Others, and they after a thousand, run the function.
        assert sum(zeroes) == counts.skipped == 1000
        assert counts.hits >= 2 * CALLS
        override.delete()
        assert struct.unpack("<Q", machine.run("/asks", 180).output) == (0,)
    assert override.counts == counts


def test_every_so_manieth_call_fails_and_the_rest_runs(boot: Boot, arch: str) -> None:
    machine = boot(files=files(arch))
    with kprobes.attach(str(machine.stub_address)) as session:
        every = session.override(
            system_call(arch, "getppid"), returns=0, filter='comm == "asks"', every=100, force=True
        )
        assert struct.unpack("<Q", machine.run("/asks", 180).output) == (CALLS // 100,)
        every.delete()
        half = session.override(
            system_call(arch, "getppid"),
            returns=0,
            filter='comm == "asks"',
            probability=0.5,
            force=True,
        )
        (zeroes,) = struct.unpack("<Q", machine.run("/asks", 180).output)

    assert every.skipped == CALLS // 100
    assert half.skipped == zeroes
    assert abs(zeroes - CALLS // 2) < 500


def test_a_filter_tells_calls_by_the_function_s_own_parameters(session: GuestSession) -> None:
    override = session.fail(
        "vfs_read", errno=5, filter="count == 4567 && $arg3 == 4567", comm="d[d]", force=True
    )

    failed = session.run("dd if=/dev/zero of=/dev/null bs=4567 count=3")
    other = session.run("dd if=/dev/zero of=/dev/null bs=4566 count=3")

    assert b"Input/output error" in failed.output
    assert b"3+0 records in" in other.output
    assert override.skipped == 1
    assert override.hits > 4


def test_probes_at_entry_and_return_record_skipped_calls(session: GuestSession) -> None:
    override = session.fail("vfs_read", errno=5, filter="count == 4567", comm="dd", force=True)
    session.probe(
        "p:in vfs_read count=$arg3\nr:out vfs_read ret=$retval:s64", filter='comm == "dd"'
    )

    with session.record() as trace:
        session.run("dd if=/dev/zero of=/dev/null bs=4567 count=1")

    entered = [event for event in trace if event.name == "in" and event["count"] == 4567]
    left = [event for event in trace if event.name == "out" and event["ret"] == -5]
    assert (len(entered), len(left), override.skipped) == (1, 1, 1)


def test_an_override_lives_beside_handlers_and_other_overrides(session: GuestSession) -> None:
    seen: list[int] = []

    @session.entry("vfs_read")
    def opened(count: int) -> None:
        seen.append(int(count))

    older = session.fail("vfs_read", errno=5, filter="count > 4000", comm="dd", force=True)
    newer = session.fail("vfs_read", errno=1, filter="count == 4567", comm="dd", force=True)
    first = session.run("dd if=/dev/zero of=/dev/null bs=4567 count=1")
    newer.delete()
    second = session.run("dd if=/dev/zero of=/dev/null bs=4567 count=1")
    session.run("dd if=/dev/zero of=/dev/null bs=321 count=1")
    session.unregister_kprobe(opened)

    # The newest is asked first, and Python sees what none has skipped.
    assert b"not permitted" in first.output
    assert b"Input/output error" in second.output
    assert (newer.skipped, older.skipped) == (1, 1)
    assert 321 in seen
    assert 4567 not in seen


def test_system_calls_need_no_force(session: GuestSession, arch: str) -> None:
    override = session.override(system_call(arch, "getppid"), returns=42, filter='comm == "sh"')

    printed = session.run(["sh", "-c", "echo $PPID"]).output
    override.delete()

    assert printed == b"42\n"
    assert override.skipped


def test_what_is_not_safe_is_refused_and_nothing_is_armed(session: GuestSession) -> None:
    # Debian's kernels are built without the list.
    with pytest.raises(RefusedError, match="CONFIG_FUNCTION_ERROR_INJECTION=y"):
        session.fail("vfs_read", errno=12)
    refused = [
        ("vfs_read", 1 << 63, "from -"),
        ("vfs_read", -(1 << 63) - 1, "from -"),
        ("schedule", 1, "void"),
        ("panic", 0, "never returns"),
        (hex(session.address("vfs_read") + 16), 0, "begins"),
    ]
    for place, value, why in refused:
        with pytest.raises(RefusedError, match=why):
            session.override(place, returns=value, force=True)
    for place, filter_text in [("nothing_of_this_name", ""), ("vfs_read", "nothing == 1")]:
        with pytest.raises(DefinitionError):
            session.override(place, returns=0, filter=filter_text, force=True)
    with pytest.raises(UsageError, match="not a function"):
        session.override("vfs_read+0x10", returns=0, force=True)
    for options in ({"every": 0}, {"times": -1}, {"probability": 1.5}):
        with pytest.raises(UsageError):
            session.override("vfs_read", returns=0, force=True, **options)  # pyright: ignore[reportArgumentType] - wrong on purpose
    with pytest.raises(UsageError, match="not an errno"):
        session.fail("vfs_read", errno=0, force=True)

    assert not session.driver.plans
    session.options = replace(session.options, return_method=ReturnMethod.RETINSN)
    override = session.override("vfs_read", returns=0, filter="count == 4567", force=True)
    session.probe("r vfs_read")
    with pytest.raises(RefusedError, match="no return instruction"), session.record():
        pass
    assert override.counts == OverrideCounts(hits=override.hits)
