"""Every form and type on functions that run: the kernel's own events and ours, field by field.

Both are armed on the same site, so they see the same hits. Left out of the comparison:

* numbers that could not be read, of which the kernel shows what was in its buffer before;
* strings of which a pointer on the way could not be read: the kernel then shows the bytes where
  its next string would begin;
* ``symstr``: the kernel's ends without a NUL, and it clears a byte 511 bytes further on, wherever
  that is. test_forms has it beside ``symbol``.

Memory may change between the two records of one hit, for other CPUs run: one value in fifty.
"""

from collections import Counter, defaultdict
from collections.abc import Generator, Iterable
from functools import partial

import pytest
from msgspec import Struct

import kprobes
from kprobes.guest.arena import ArenaSize
from kprobes.lang.listing import show
from kprobes.model.resolved import Field, Operand, Resolved, StackValue, can_fault
from kprobes.open import GuestSession
from kprobes.resolve.explain import format_text
from kprobes.transport.qemu_command import MachineOptions
from kprobes.units import MIB
from tests.build.defined import delete_all, plans_of
from tests.build.programs import BASE, syscalls
from tests.system import oracle
from tests.system.event_definitions import definitions, event_of, split
from tests.system.oracle import Comparison, Tracefs

pytestmark = [pytest.mark.guest, pytest.mark.arches("amd64", "arm64", matrix="arm64")]

_FILES = {
    "bookworm": ["events_6.1.txt"],
    "bookworm-backports": ["events_6.1.txt", "events_6.12.txt"],
}
_INLINED = {"k_sig", "y_sig", "z_enum"}
"""Events of do_send_sig_info, which its callers in the 6.12 arm64 kernel have inlined."""
_GROUP = 32
_SIZE = 8192
_AT_FDCWD = -100
_POINTERS = (
    *(0, 1, BASE + _SIZE - 1, BASE + _SIZE, 0x7FFF_FFFF_EFFF, 0xFFFF_FFFF_EFFF, 1 << 47, 1 << 48),
    *(0xDEAD << 48, -4096),
)
_WORKLOAD = rb"""#!/bin/sh
cd /tmp
name=$(printf '%0255d' 7)
cat "" a "$name" "b$name" "$name/$name/$name" /$name$name 2>/dev/null
/bin/pointers &
(mkdir -p d/e; echo text >d/f; chmod 640 d/f; ln -s f d/l; readlink d/l; mv d/f d/g; ls -l d
 rm d/g d/l; rmdir d/e; cat /proc/self/status /proc/mounts; : >trunc; rm trunc) >/dev/null 2>&1
(true | cat | head -c 10 | wc -c; find /dev /etc -name 'c*') >/dev/null 2>&1
(sleep 0.2 & kill $!; wait $!; usleep 1000; sh -c 'exit 3'; sh -c 'kill -9 $$') 2>/dev/null
ip link set lo up
nc -l -p 7001 127.0.0.1 >/dev/null &
for i in $(seq 100); do sleep 0.1; echo hello | nc -w 1 127.0.0.1 7001 && break; done
ping -c 1 -s 40 127.0.0.1 >/dev/null
rm -f /dev/log; syslogd -n -O /tmp/log & syslog=$!
for i in $(seq 100); do sleep 0.1; [ -S /dev/log ] && logger hello && break; done
kill $syslog
wait
ping -c 1 127.0.0.1 >/dev/null
"""


def pointers(arch: str) -> bytes:
    """Return a program that gives the kernel NULL, unmapped and impossible pointers."""
    calls = [
        call
        for pointer in _POINTERS
        for call in (
            ("openat", _AT_FDCWD, pointer, 0, 0),
            ("write", 1, pointer, 8),
            ("read", 0, pointer, 0),
        )
    ]
    return syscalls(calls, size=_SIZE, tail=b"tail", arch=arch)


class Run(Struct, frozen=True, kw_only=True):
    """One group of definitions, recorded twice."""

    is_arm64: bool
    is_newer_arm64: bool
    lines: list[str]
    probes: list[Resolved]
    listing: list[str]
    formats: dict[str, str]
    fields: dict[str, tuple[Field, ...]]
    compared: Comparison

    def operand(self, event: str, index: int) -> Operand:
        """Return what a field of an event fetches."""
        probe = next(probe for probe in self.probes if probe.layout.event == event)
        return probe.fetches[index].operand


@pytest.fixture(scope="module", params=list(_FILES))
def runs(request: pytest.FixtureRequest, arch: str) -> Generator[list[Run]]:
    files = {"/workload.sh": _WORKLOAD, "/bin/pointers": pointers(arch)}
    options = MachineOptions(suite=request.param, arch=arch, files=files)
    with kprobes.boot(options, size=ArenaSize(ring=16 * MIB)) as session:
        lines = [
            line for name in _FILES[request.param] for line in definitions(name, session.kernel)
        ]
        yield [_recorded(session, group, arch) for group in split(lines, _GROUP)]


def _recorded(session: GuestSession, lines: list[str], arch: str) -> Run:
    delete_all(session)
    session.probe("\n".join(lines))
    probes = [p for plan in plans_of(session) for p in plan.probes]
    tracefs = Tracefs(session)
    arm = partial(tracefs.arm, lines, buffer_kib=16384)
    trace, native = oracle.record_both(session, arm, arch=arch)
    listing, formats = _described(tracefs)
    tracefs.disarm()
    assert native.overwritten == 0
    fields = oracle.fields_of(trace)
    ours, theirs = oracle.our_hits(trace), oracle.native_hits(native, fields)
    layouts = {b.layout.event: b.layout for events in trace.events for b in events.batches}
    kernel = session.kernel
    return Run(
        is_arm64=kernel.arch == "aarch64",
        is_newer_arm64=kernel.arch == "aarch64" and kernel.version >= (6, 12),
        lines=lines,
        probes=probes,
        listing=listing,
        formats=formats,
        fields={event: layout.fields for event, layout in layouts.items()},
        compared=oracle.compare(ours, theirs, is_ours_first=False),
    )


def _described(tracefs: Tracefs) -> tuple[list[str], dict[str, str]]:
    script = "for f in events/kprobes/*/format; do echo @@; cat $f; done"
    files = tracefs.run(script).split("@@\n")[1:]
    formats = {text.partition("\n")[0].removeprefix("name: "): text for text in files}
    return tracefs.run("cat kprobe_events").splitlines(), formats


def _differing(runs: Iterable[Run]) -> Generator[tuple[str, Field, list[tuple[str, str]]]]:
    for run in runs:
        found: defaultdict[tuple[str, int], list[tuple[str, str]]] = defaultdict(list)
        hits = Counter(ours.event for ours, _ in run.compared.pairs)
        for ours, native in run.compared.pairs:
            for index, (mine, theirs) in enumerate(zip(ours.values, native.values, strict=True)):
                is_fault = index in ours.faulted or "(fault)" in mine
                if not is_fault and mine != theirs:
                    found[ours.event, index].append((mine, theirs))
        for (event, index), values in found.items():
            operand = run.operand(event, index)
            is_zero = {theirs for _, theirs in values} == {"0x0"}
            if run.is_arm64 and isinstance(operand, StackValue) and is_zero:
                # What its regs_get_kernel_argument() says of arguments on the stack.
                continue
            is_memory = can_fault(operand)
            if not is_memory or len(values) > max(hits[event] // 50, 1):
                yield event, run.fields[event][index], values[:5]


def test_every_definition_was_hit(runs: list[Run]) -> None:
    lines = [line for run in runs for line in run.lines]
    hit = {ours.event for run in runs for ours, _ in run.compared.pairs}

    unhit = {event_of(line) for line in lines} - hit
    assert unhit <= (_INLINED if runs[0].is_newer_arm64 else set())
    assert len(lines) >= 95


def test_every_field_s_text_is_the_kernel_s(runs: list[Run]) -> None:
    assert list(_differing(runs)) == []


def test_every_hit_of_the_kernels_is_one_of_ours(runs: list[Run]) -> None:
    assert [hit for run in runs for hit in run.compared.native_only] == []


def test_listings_are_the_kernel_s(runs: list[Run]) -> None:
    for run in runs:
        ours = {probe.layout.event: show(probe.definition) for probe in run.probes}
        assert [ours[event_of(line)] for line in run.lines] == run.listing


def test_format_files_are_the_kernel_s(runs: list[Run]) -> None:
    for run in runs:
        for probe in run.probes:
            theirs = run.formats[probe.layout.event]
            number = int(theirs.split("\n")[1].removeprefix("ID: "))
            assert format_text(probe.layout, number=number) == theirs


def test_strings_of_all_lengths_were_compared(runs: list[Run]) -> None:
    lengths = {
        len(value) - 2
        for run in runs
        for ours, _ in run.compared.pairs
        for value in ours.values
        if value.startswith('"')
    }

    assert lengths >= {0, 1, 254, 255, 256}
    assert max(lengths) > 700
