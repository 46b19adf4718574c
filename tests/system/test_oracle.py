"""The kernel is the oracle: its own kprobe events and ours record the same hits, line for line.

The native probe is armed first and ours stands after its call, so every hit is seen by both; on
arm64 ours is armed first, and the native one's breakpoint stands in front of it.
What may differ, and why:

* The kernel misses a hit in an interrupt that comes while it handles another one, and drops an
  event that does not fit into a page of its buffer. We record both.
* A number that could not be read is whatever was in its buffer before; ours is 0.
* comm is resolved when the trace is printed: it is the last one that was noted for the pid.
* An interrupt between the two records may ask for rescheduling, may be recorded between them, and
  where the kernel preempts itself may move the task to another CPU.
* On arm64 the kernel's handler is in an exception, where interrupts are off; ``%x9`` and some
  bits of ``%pstate`` are not the same, and its ``$arg9`` is always 0.
* On amd64 ``%orig_ax`` and ``%r11``, which no function expects, are what they are after the
  kernel's call.
"""

import re
from collections import Counter, defaultdict
from contextlib import suppress
from functools import partial

import pytest
from msgspec import Struct

import kprobes
from kprobes.errors import GuestGoneError
from kprobes.guest.arena import ArenaSize
from kprobes.lang.parser import parse
from kprobes.lang.types import TYPES
from kprobes.model.definition import (
    Argument,
    Comm,
    Deref,
    Fetch,
    Immediate,
    MemoryAt,
    MemoryOf,
    Register,
    StackPointer,
    StackSlot,
)
from kprobes.open import GuestSession
from kprobes.trace import Trace
from kprobes.transport.qemu_command import MachineOptions
from kprobes.units import MIB
from tests.build.programs import BASE, Call, syscalls
from tests.build.words import WORDS
from tests.system import oracle
from tests.system.oracle import RESCHED, Comparison, Hit, Native, Tracefs
from tests.system.oracle_definitions import all_lines, definitions

pytestmark = [pytest.mark.guest, pytest.mark.arches("amd64", "arm64")]

_WORKLOAD = rb"""#!/bin/sh
cd /tmp
find /bin /etc /dev /proc/1 -name 'k*' >/dev/null 2>&1 &
(for i in 1 2 3 4 5 6 7 8; do cat /etc/passwd /proc/self/status >/dev/null; done) &
(for i in 1 2 3 4 5 6; do true | cat | head -c 10 | wc -c; done) >/dev/null &
dd if=/dev/zero of=/tmp/zeros bs=4k count=200 2>/dev/null &
dd if=/dev/zero bs=512 count=100 2>/dev/null | cat | gzip | gunzip | wc -c >/dev/null &
for cpu in 1 2; do taskset $cpu /bin/pointers >/dev/null & done
(touch "a b" 'q"q' "$(printf 'tab\there\200\377')"; ls; rm -f a* q* tab*) >/dev/null 2>&1 &
name=$(printf '%0199d' 1)
long=
for i in 1 2 3 4 5 6 7 8 9; do long=$long/$name; done
cat /$name $long $long$long $long$long$long 2>/dev/null
wait
"""
_SIZE = 8192
_AT_FDCWD = -100
_END = BASE + _SIZE
_POINTERS = (
    *(0, 1, 0x10000, BASE, _END - 4, _END - 1, _END, 0x7FFF_FFFF_E000, 0x7FFF_FFFF_EFFF),
    *(0xFFFF_FFFF_F000, 1 << 48, 0x5A << 56 | _END - 1),
    *(0x8000_0000_0000, 0xDEAD_0000_0000_0000, 0xFFFF_8880_0000_0000, 0xFFFF_FFFF_8100_0000),
    *(-4096, -1),
)
_GUESTS = 3
_ELSEWHERE = {"char", "symbol", "symstr", "%pd", "%pD"}
"""Types that test_events has."""
_ARGUMENTS = {"amd64": 9, "arm64": 8}
"""How many the kernel finds: on amd64 those on the stack, too."""
_STATE = "o_state"
_PSTATE = 0xF000_03DF
"""NZCV, DAIF and the mode."""
_ASKED = 1 / 10
"""The most hits with an interrupt between the records that asks for rescheduling: the more, the
busier this machine is; on arm64 those that came during the kernel's handlers come right after."""
_PAGE_TEXT = 3900
"""Strings of so many characters together may not fit into a page of the kernel's buffer."""


def pointers(arch: str = "amd64") -> bytes:
    """Return a program that gives the kernel NULL, unmapped, foreign and impossible pointers."""
    calls = [call for pointer in _POINTERS for call in _calls(pointer)]
    return syscalls(calls * 2, size=_SIZE, tail=b"tail", arch=arch)


def _calls(pointer: int) -> list[Call]:
    return [("openat", _AT_FDCWD, pointer, 0, 0), ("write", 1, pointer, 8), ("read", 0, pointer, 0)]


class Run(Struct, frozen=True, kw_only=True):
    """One workload, recorded twice."""

    arch: str
    version: tuple[int, int]
    definitions: list[str]
    trace: Trace
    native: Native
    ours: list[Hit]
    theirs: list[Hit]
    compared: Comparison
    dmesg: str


@pytest.fixture(scope="module", params=["bullseye", "bookworm", "bookworm-backports", "sid"])
def run(request: pytest.FixtureRequest, arch: str) -> Run:
    ready = booted if arch == "arm64" else natively_armed
    with ready(request.param, arch) as session:
        return recorded(session, arch)


def natively_armed(suite: str, arch: str) -> GuestSession:
    """Boot a guest, and arm its own kprobe events.

    QEMU before 8.1 may keep a translation of code that another vCPU was changing meanwhile
    (deba78709a, "accel/tcg: Always lock pages before translation"). A guest that arms a function
    of its timer interrupt then dies now and then, in an int3 that is there no more: with nothing
    of ours in it, after some thousand times. Another guest is as good.
    """
    for _ in range(_GUESTS):
        session = booted(suite, arch)
        try:
            _arm(session)
            Tracefs(session).stop()
        except GuestGoneError:
            with suppress(GuestGoneError):
                session.close()
        else:
            return session
    raise AssertionError(f"{_GUESTS} guests died while they armed their own probes")


def booted(suite: str, arch: str) -> GuestSession:
    """Boot a guest that has what it is to do."""
    files = {"/workload.sh": _WORKLOAD, "/bin/pointers": pointers(arch)}
    options = MachineOptions(suite=suite, arch=arch, files=files)
    return kprobes.boot(options, size=ArenaSize(ring=16 * MIB))


def _arm(session: GuestSession) -> None:
    Tracefs(session).arm(definitions(session.kernel), buffer_kib=16384)


def recorded(session: GuestSession, arch: str) -> Run:
    lines = definitions(session.kernel)
    session.probe("\n".join(lines))
    arm = partial(_arm, session) if arch == "arm64" else Tracefs(session).start
    trace, native = oracle.record_arming(session, arm)
    ours, theirs = oracle.our_hits(trace), oracle.native_hits(native, oracle.fields_of(trace))
    return Run(
        arch=arch,
        version=session.kernel.version,
        definitions=lines,
        trace=trace,
        native=native,
        ours=ours,
        theirs=theirs,
        compared=oracle.compare(ours, theirs, is_ours_first=False),
        dmesg=session.run("dmesg").output.decode(errors="backslashreplace"),
    )


def test_the_definitions_have_every_form_and_type(arch: str) -> None:
    names, lines = WORDS[arch].info.registers, list(all_lines(arch))
    args = [arg for line in lines for arg in parse(line, registers=names).args]
    nodes = [node for arg in args for node in _nodes(arg.fetch)]
    numbers = [node.number for node in nodes if isinstance(node, Argument)]
    derefs = {(n.is_user, n.offset > 0, n.offset < 0) for n in nodes if isinstance(n, Deref)}

    assert len(lines) >= 50
    assert {arg.type for arg in args} == {*TYPES, ""} - _ELSEWHERE
    assert {node.name for node in nodes if isinstance(node, Register)} == set(names)
    assert set(numbers) == set(range(1, 1 + _ARGUMENTS[arch]))
    assert {type(node) for node in nodes} >= {StackPointer, StackSlot, Comm, MemoryAt, MemoryOf}
    assert any(isinstance(node, Immediate) for node in nodes)
    assert derefs >= {(True, True, False), (False, True, False), (False, False, True)}
    assert any(_depth(arg.fetch) >= 4 for arg in args)


def _nodes(fetch: Fetch) -> list[Fetch]:
    return [fetch, *_nodes(fetch.base)] if isinstance(fetch, Deref) else [fetch]


def _depth(fetch: Fetch) -> int:
    return sum(isinstance(node, Deref) for node in _nodes(fetch))


def test_nothing_was_lost_or_missed_by_us(run: Run) -> None:
    counts = run.trace.counts
    assert counts is not None

    assert (counts.lost, counts.damaged, sum(counts.missed.values())) == (0, 0, 0)
    assert sum(counts.recorded.values()) == len(run.trace) == len(run.ours)
    assert run.native.overwritten == 0


def test_every_definition_was_hit_by_several_tasks_on_both_cpus(run: Run) -> None:
    registers = WORDS[run.arch].info.registers
    names = {parse(line, registers=registers).event for line in run.definitions}
    pairs = run.compared.pairs

    assert len(names) >= 48
    assert len(pairs) > 8000
    # 5.10 has getname_flags inlined where it opens files.
    assert names - {ours.event for ours, _ in pairs} <= (
        {"getnames"} if run.version == (5, 10) else set()
    )
    assert len({ours.pid for ours, _ in pairs}) > 30
    assert {ours.cpu for ours, _ in pairs} == {0, 1}


def test_every_hit_of_the_kernels_is_one_of_ours(run: Run) -> None:
    assert run.compared.native_only == []


def test_every_hit_of_ours_is_the_kernels_unless_it_missed_or_had_no_room(run: Run) -> None:
    large = [h for h in run.compared.ours_only if sum(map(len, h.values)) > _PAGE_TEXT]
    missed = [h for h in run.compared.ours_only if h not in large]
    counted = {h.event: run.native.misses[h.event] for h in missed}

    assert all(h.in_interrupt for h in missed), missed
    assert all(sum(h.event == event for h in missed) <= n for event, n in counted.items())


def test_cpu_and_function_are_the_same(run: Run) -> None:
    moved = run.compared.differing("cpu")

    assert run.compared.differing("where") == []
    # From 6.13 on Debian's kernels preempt everywhere, also between the two records.
    assert len(moved) < (len(run.compared.pairs) / 100 if run.version >= (6, 13) else 1)
    assert all(abs(native.ts_us - ours.ts_us) > 100 for ours, native in moved)


def test_every_fields_text_is_the_same(run: Run) -> None:
    wrong = run.compared.wrong_values()
    if run.arch == "amd64":
        assert oracle.unlike(wrong) - oracle.BEHIND_THE_CALL == set()
    else:
        assert [pair for pair in wrong if pair[0].event != _STATE] == []


@pytest.mark.arches("arm64")
def test_of_pstate_flags_masks_and_mode_are_shown_and_in_x9_is_the_return_address(run: Run) -> None:
    state = [pair for pair in run.compared.pairs if pair[0].event == _STATE]

    assert len(state) > 100
    for ours, native in state:
        *same, pstate, x9 = ours.values
        assert same == list(native.values[:3])
        assert int(pstate, 16) == int(native.values[3], 16) & _PSTATE
        # The tracer's first instruction moves it there; the kernel's breakpoint replaces that.
        assert x9 == same[1]


def test_numbers_that_could_not_be_read_are_zero(run: Run) -> None:
    faulted = [h.values[index] for h, _ in run.compared.pairs for index in h.faulted]

    assert len(faulted) > 500
    assert set(faulted) <= {"0", "0x0"}


def test_strings_were_read_and_faulted(run: Run) -> None:
    strings = [value for h, _ in run.compared.pairs for value in h.values if value[:1] in '("']

    assert strings.count("(fault)") > 500
    assert max(map(len, strings)) > 3600
    assert any('"q"q"' in value for value in strings)
    assert any("tab\there\\x80\\xff" in value for value in strings)


def test_flags_are_the_same_but_for_rescheduling(run: Run) -> None:
    shown = [(_shown(a, run.arch), _shown(b, run.arch)) for a, b in run.compared.pairs]
    others = [(a, b) for a, b in shown if _rest(a) != _rest(b)]

    assert others == []
    assert sum(a != b for a, b in shown) < len(shown) * _ASKED
    assert any(a == b and a[1] != "." for a, b in shown)
    assert {h.flags[oracle.INTERRUPT] for h, _ in run.compared.pairs} >= {".", "h", "s"}


def _shown(hit: Hit, arch: str) -> str:
    # Whether interrupts were off can be told of the exception that the kernel's handler is in.
    return "?" + hit.flags[1:] if arch == "arm64" else hit.flags


def _rest(flags: str) -> str:
    return flags[:RESCHED] + flags[RESCHED + 1 :]


def test_times_are_within_50_microseconds_and_in_order(run: Run) -> None:
    late = run.compared.late_us
    turned = [pair for pair in run.compared.turned() if not any(h.in_interrupt for h in pair)]

    assert late[0] >= -1
    assert late[len(late) // 2] < 50
    assert turned == []


def test_of_several_events_on_one_function_the_newest_comes_first_as_in_the_kernel(
    run: Run,
) -> None:
    ours, theirs = _followers(run.ours), _followers(run.theirs)

    assert ours == theirs
    # Defined in this order, all on do_sys_openat2.
    assert [ours[name] for name in ("o_words", "o_user")] == ["o_user", "o_args"]


def test_comm_is_one_of_the_pid_and_mostly_the_last(run: Run) -> None:
    last = {h.pid: h.comm for h in run.ours}
    names = {(h.pid, h.comm) for h in run.ours}
    # Others lived on when we recorded no more, and may have been renamed.
    survivors = {h.pid for h in run.theirs if h.ts_us > run.ours[-1].ts_us}
    native = {h.pid: h.comm for h in run.theirs if h.pid in last and h.pid not in survivors}
    # The kernel notes none while another CPU notes one (`trace_save_cmdline`).
    unnamed = {pid for pid, comm in native.items() if comm == "<...>"}
    native = {pid: comm for pid, comm in native.items() if pid not in unnamed}
    early = {pid for pid, comm in native.items() if comm != last[pid]}
    # It notes one at any switch after a hit of anybody, so also after an exec that no hit followed.
    late = {pid for pid, comm in native.items() if (pid, comm) not in names}

    assert len(native) > 30
    assert len(late) <= len(native) / 30
    assert {native[pid] for pid in late} <= {comm for _, comm in names}
    # The kernel notes it when a task is switched away from after a hit.
    assert len(early) < len(native) / 10
    assert len(unnamed) < len(native) / 10


def test_the_header_is_the_same(run: Run) -> None:
    ours = oracle.header_of(run.trace.to_text())

    assert ours == oracle.header_of(run.native.text)


def test_the_guest_has_nothing_to_complain_about(run: Run) -> None:
    complaints = re.findall("(?:WARNING:|BUG:|Oops|stalls? on|lockup).*(?:\n.*){0,40}", run.dmesg)

    # 5.10 warns once when its own probe reads an address that no CPU can have.
    if run.version == (5, 10):
        complaints = [text for text in complaints if "process_fetch_insn" not in text]
    assert complaints == []


def _followers(hits: list[Hit]) -> dict[str, str]:
    # By event: the one that mostly comes next on the same function in the same task.
    last: dict[tuple[int, str], str] = {}
    found: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for hit in hits:
        place = hit.pid, hit.where
        if place in last and not hit.in_interrupt:
            found[last[place]][hit.event] += 1
        last[place] = hit.event
    return {event: followers.most_common(1)[0][0] for event, followers in found.items()}
