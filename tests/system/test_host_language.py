"""One language on both targets: ``kprobe trace --target host`` inside a guest, our engine outside.

Both record the same hits of the same definitions: inside they are spelled for the guest's release
and recorded by its own kernel, outside they are patched into its text. Every value must agree.
"""

import base64
from collections.abc import Iterator

import pytest
from msgspec import Struct

import kprobes
from kprobes.arch.x86_64.registers import NAMES
from kprobes.guest.arena import ArenaSize
from kprobes.lang.parser import parse
from kprobes.open import GuestSession
from kprobes.trace import Trace
from kprobes.transport.qemu import Machine
from kprobes.units import MIB
from tests.build.waiting import becomes_true
from tests.system import oracle
from tests.system.oracle import Comparison
from tests.system.oracle_definitions import definitions
from tests.system.test_oracle import pointers

pytestmark = pytest.mark.guest

_TYPED = r"""
p:h_all do_sys_openat2 $arg*
p:h_names vfs_read count file=file buf pos=pos
p:h_walk vfs_read mode=file->f_mode name=file->f_path.dentry->d_name.name:string
p:h_types vfs_write a=$arg3 b=$arg1 c=$arg3:x8 d=file->f_flags
p:h_bits vfs_open first=path->dentry->d_flags:b4@2/32 hash=path->dentry->d_name.hash
p:h_char wake_up_new_task one=p->comm:char all=p->comm:char[4] whole=p->comm:string
p:h_symbols vfs_write at=+0(+0(%sp)):x8 ret=$stack0:symbol
p:h_arrays vfs_write a=+0($arg1):x8[3] b=@linux_banner:u8[4] c=+0($arg1):x64[2]
p:h_chars do_sys_openat2 a=+u0($arg2):char b=+0($arg2):ustring
p:h_path vfs_open name=path->dentry:%pd
"""
"""What old releases do not know; functions and members that all have."""
_WORKLOAD = """#!/bin/sh
cd /tmp
(for i in 1 2 3; do cat /etc/passwd /proc/self/status >/dev/null; done) &
(for i in 1 2 3; do true | cat | head -c 10 | wc -c; done) >/dev/null &
dd if=/dev/zero of=/tmp/zeros bs=4k count=20 2>/dev/null &
for cpu in 1 2; do taskset $cpu /tmp/pointers >/dev/null & done
(touch "a b" 'q"q' "$(printf 'tab\\there\\200\\377')"; ls; rm -f a* q* tab*) >/dev/null 2>&1 &
name=$(printf '%0199d' 1)
cat /$name 2>/dev/null
wait
"""
_COMMS = ("sh", "cat", "dd", "head", "wc", "ls", "rm", "touch", "taskset", "point*")
"""Tasks of the workload: what records inside is a task there, too."""
_TRACE = (
    "kprobe trace -q --target host @/tmp/definitions -o /tmp/inside.txt --buffer-size 16M "
    f"--all-tasks {' '.join(f'--comm {comm!r}' for comm in _COMMS)} -- "
    "'touch /tmp/armed; until [ -e /tmp/end ]; do sleep 0.1; done'"
)
_SWITCH = f"echo {{}} > $(echo {oracle.TRACING}/instances/kprobes-*)/tracing_on"
_PATIENCE_S = 300
_PAGE_TEXT = 3900
"""Strings of so many characters together may not fit into a page of the kernel's buffer."""


class Both(Struct, frozen=True, kw_only=True):
    """One workload, recorded from inside and from outside."""

    names: set[str]
    trace: Trace
    inside: str
    compared: Comparison


@pytest.fixture(scope="module")
def both(any_host_guest: Machine) -> Iterator[Both]:
    size = ArenaSize(ring=16 * MIB)
    with kprobes.attach(str(any_host_guest.stub_address), size=size) as outside:
        yield _record(any_host_guest, outside)


def _record(guest: Machine, outside: GuestSession) -> Both:
    lines = [*definitions(outside.kernel), *_TYPED.strip().splitlines()]
    _put(guest, "/tmp/definitions", "\n".join(lines).encode())
    _put(guest, "/tmp/workload.sh", _WORKLOAD.encode())
    _put(guest, "/tmp/pointers", pointers())
    guest.run("chmod +x /tmp/pointers; rm -f /tmp/armed /tmp/end")
    running = guest.start(_TRACE)
    _await(guest, "/tmp/armed", running)
    outside.choose_tasks(comms=_COMMS)
    outside.probe("\n".join(lines))
    # Of one hit the kernel's record is made first: ours is after its call. So inside is recorded
    # for a shorter time.
    guest.run(_SWITCH.format(0))
    with outside.record() as trace:
        script = f"{_SWITCH.format(1)}; sh /tmp/workload.sh; {_SWITCH.format(0)}"
        assert guest.run(script, timeout_s=_PATIENCE_S).status == 0
    guest.run("touch /tmp/end")
    ended = running.wait(_PATIENCE_S)
    assert ended.status == 0, ended.output
    inside = guest.run("cat /tmp/inside.txt; rm /tmp/inside.txt", _PATIENCE_S).output.decode(
        errors="backslashreplace"
    )
    native = oracle.Native(text=inside, misses={})
    ours = oracle.our_hits(trace)
    began = min(hit.ts_us for hit in ours)
    theirs = oracle.native_hits(native, oracle.fields_of(trace))
    # What was recorded inside before it was switched off is not ours to see.
    theirs = [hit for hit in theirs if hit.ts_us >= began]
    compared = oracle.compare(ours, theirs, is_ours_first=False)
    names = {parse(line, registers=NAMES).event for line in lines}
    return Both(names=names, trace=trace, inside=inside, compared=compared)


def _put(guest: Machine, path: str, data: bytes) -> None:
    text = base64.b64encode(data).decode()
    assert guest.run(f"echo {text} | base64 -d > {path}").status == 0


def _await(guest: Machine, path: str, running: object) -> None:
    is_there = becomes_true(lambda: guest.run(f"[ -e {path} ]").status == 0, _PATIENCE_S)
    assert is_there, running


def test_every_value_is_the_same(both: Both) -> None:
    assert oracle.unlike(both.compared.wrong_values()) - oracle.BEHIND_THE_CALL == set()
    assert len(both.compared.pairs) > 1000


def test_every_definition_was_hit(both: Both) -> None:
    seen = {ours.event for ours, _ in both.compared.pairs}

    # Which functions these calls reach differs between releases.
    assert both.names - seen <= {
        "getnames",
        "soft",
        "execs",
        "renames",
        "statx",
        "unlinks",
        "waits",
    }
    assert seen >= {line.split()[0].partition(":")[2] for line in _TYPED.strip().splitlines()}


def test_places_and_cpus_are_the_same(both: Both) -> None:
    assert both.compared.differing("where") == []
    assert len(both.compared.differing("cpu")) < 20


def test_nothing_is_missing_inside_but_what_the_kernel_misses(both: Both) -> None:
    large = [h for h in both.compared.ours_only if sum(map(len, h.values)) > _PAGE_TEXT]
    missed = [h for h in both.compared.ours_only if h not in large]

    assert both.compared.native_only == []
    assert all(h.in_interrupt for h in missed), missed


def test_tasks_have_the_names_that_they_had(both: Both) -> None:
    renamed = both.compared.differing("comm")

    # The kernel tells of a new name before a task has it: an interrupt may come between.
    assert all(h.in_interrupt for h, _ in renamed)
    assert len(renamed) < 10


def test_the_header_is_the_same(both: Both) -> None:
    assert oracle.header_of(both.trace.to_text()) == oracle.header_of(both.inside)
