"""An arm64 kernel's own kprobe events and ours record the same hits, line for line."""

import re
from dataclasses import dataclass

import pytest

import kprobes
from kprobes.drivers.guest.arena import ArenaSize
from kprobes.errors import UnreachableError
from kprobes.session import Trace
from kprobes.transport.qemu_command import MachineOptions
from kprobes.units import MIB
from tests.guest import oracle
from tests.guest.oracle import Comparison, Hit, Native, Tracefs

pytestmark = pytest.mark.guest

_DEFINITIONS = r"""
p:args do_sys_openat2 dfd=$arg1:s32 path=+0($arg2):ustring flags=+0($arg3):x64 mode=+8($arg3):u16
p:user do_sys_openat2 a=+0($arg2):string b=+u0($arg2):string c=+u0($arg2):u8 d=+u1($arg2):x16
p:regs do_sys_openat2 x0=%x0 x1=%x1 x2=%x2 x3=%x3 x4=%x4 x5=%x5 x6=%x6 x7=%x7 x8=%x8 x19=%x19
p:saved do_sys_openat2 x20=%x20 x21=%x21 x22=%x22 x25=%x25 x28=%x28 x29=%x29 lr=%lr sp=%sp
p:slots vfs_read sp=$stack s0=$stack0 s1=$stack1 s7=$stack7 s40=$stack40:x32
p:signed vfs_read a=$arg1:s8 b=$arg1:s16 c=$arg1:s32 d=$arg1:s64 e=$arg3:s8 f=$arg3:s16 g=$arg3:s32
p:hexes vfs_read a=$arg1:x8 b=$arg1:x16 c=$arg1:x32 d=$arg1:x64 e=$arg3 f=$arg1:u64 comm=$comm
p:nulls vfs_open a=+0(\0):u64 b=+0(\0):string c=+8(+0(\0)):x32 d=+u0(\0):string e=+u0(\0):s16
p:six do_mmap file=$arg1 addr=$arg2 len=$arg3:u64 prot=$arg4 flags=$arg5 six=$arg6:u64
p:forks kernel_clone flags=+0($arg1):x64 signal=+32($arg1):s32
p:exits do_exit code=$arg1:s64 comm=$comm
"""
_WORKLOAD = rb"""#!/bin/sh
find /bin /etc /proc/1 -name 'k*' >/dev/null 2>&1 &
for i in 1 2 3 4; do cat /proc/version /proc/self/status /missing >/dev/null 2>&1; done
true | cat | head -c 10 | wc -c >/dev/null
wait
"""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One workload, recorded twice.

    Attributes:
        compared: the kernel's hits come first in its pairs: its breakpoint stands before our call.
    """

    trace: Trace
    native: Native
    compared: Comparison
    dmesg: str

    @property
    def pairs(self) -> list[tuple[Hit, Hit]]:
        """The same hits as (ours, the kernel's)."""
        return [(ours, theirs) for theirs, ours in self.compared.pairs]


@pytest.fixture(scope="module")
def run() -> Run:
    options = MachineOptions(arch="arm64", files={"/workload.sh": _WORKLOAD})
    try:
        session = kprobes.boot(options, size=ArenaSize(ring=4 * MIB))
    except UnreachableError as error:
        pytest.skip(f"no guest: {error}")
    lines = _DEFINITIONS.strip().splitlines()
    with session:
        session.probe("\n".join(lines))
        tracefs = Tracefs(session)
        with session.record() as trace:
            # Only now: nothing of ours is armed where the guest already has a breakpoint.
            tracefs.arm(lines, buffer_kib=8192)
            assert session.run("sh /workload.sh", timeout_s=60).status == 0
            native = tracefs.read()
            tracefs.disarm()
        dmesg = session.run("dmesg").output.decode(errors="backslashreplace")
    theirs = oracle.native_hits(native, oracle.fields_of(trace))
    compared = oracle.compare(theirs, oracle.our_hits(trace))
    return Run(trace=trace, native=native, compared=compared, dmesg=dmesg)


def test_neither_records_a_hit_that_the_other_has_not(run: Run) -> None:
    counts = run.trace.counts
    assert counts is not None
    assert (counts.lost, counts.damaged, sum(counts.missed.values())) == (0, 0, 0)
    assert (run.native.overwritten, sum(run.native.misses.values())) == (0, 0)

    assert run.compared.ours_only == run.compared.native_only == []
    assert len(run.pairs) > 400
    assert {ours.event for ours, _ in run.pairs} == {
        oracle.event_of(line) for line in _DEFINITIONS.strip().splitlines()
    }


def test_every_fields_text_is_the_same(run: Run) -> None:
    assert [pair for pair in run.pairs if not oracle.agree(*pair)] == []
    assert run.compared.differing("where") == run.compared.differing("cpu") == []


def test_flags_are_the_same_but_for_the_exception_that_the_kernels_own_handler_is_in(
    run: Run,
) -> None:
    differing = [(a.flags, b.flags) for a, b in run.pairs if a.flags[1:] != b.flags[1:]]

    # Until our record comes an interrupt may ask for rescheduling.
    assert len(differing) < 0.02 * len(run.pairs)
    assert {ours.flags[0] for ours, _ in run.pairs} == {"."}


def test_the_guest_complains_of_nothing(run: Run) -> None:
    assert not re.search(r"BUG:|WARNING|Oops|Call trace|Unable to handle", run.dmesg)
