"""Probes on any instruction: beside the kernel's own, from the command line, and many together.

The guest refuses a kprobe where a patch of ours is, and we refuse one where its is. So its own
breakpoint is on one instruction and ours on the next, where the first changes at most one known
register: all that runs one runs the other, with the same registers.
"""

import itertools
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence, Set
from pathlib import Path

import iced_x86
import pytest
from msgspec import Struct
from msgspec.structs import replace

import kprobes
from kprobes.model.plan import Strategy
from kprobes.open import GuestSession
from kprobes.transport.qemu_command import MachineOptions
from kprobes.units import Addr
from tests.build.blocks import runs
from tests.build.defined import delete_all, plans_of
from tests.build.dialect import DIALECTS
from tests.build.sweep import Sweeper
from tests.build.victim import is_complaint
from tests.system import oracle
from tests.system.conftest import STRATEGIES, SUITES
from tests.system.oracle import Hit, Tracefs

_X86 = (
    *("ax", "bx", "cx", "dx", "si", "di", "bp", "sp"),
    *("r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15"),
)
_MOVES = frozenset(
    {
        iced_x86.Mnemonic.MOV,
        iced_x86.Mnemonic.LEA,
        iced_x86.Mnemonic.MOVZX,
        iced_x86.Mnemonic.MOVSXD,
    }
)
"""They change no flag."""
_NAMES = {
    getattr(iced_x86.Register, name.upper() if name[0] == "r" else f"R{name.upper()}"): name
    for name in _X86
}
_STORES = ((0xFFC00000, 0xF9000000), (0xFFC00000, 0xA9000000))
"""Mask and bits of str and stp of 64-bit registers with an offset."""
_LOADS = (
    (0x7FE0FFE0, 0x2A0003E0),
    (0x7F800000, 0x52800000),
    (0x7F800000, 0x11000000),
    (0xFFC00000, 0xF9400000),
)
"""mov of a register, movz, add of a number, ldr of 64 bits with an offset: they change Rd or Rt."""
_SP = 31

REGISTERS: Mapping[str, tuple[str, ...]] = {
    "amd64": (*_X86, "flags", "cs", "ss"),
    "arm64": (*(f"x{n}" for n in range(31)), "sp"),
}
"""By Debian's name of the architecture."""


def kept_by(arch: str, code: bytes) -> tuple[str, ...] | None:
    """Return the registers that an instruction leaves alone, or None if it is not a plain move."""
    changed = _CHANGED[arch](code)
    if changed is None:
        return None
    return tuple(name for name in REGISTERS[arch] if name != changed)


def _x86(code: bytes) -> str | None:
    decoded = next(iter(iced_x86.Decoder(64, code)))
    if decoded.mnemonic not in _MOVES:
        return None
    if decoded.op0_kind != iced_x86.OpKind.REGISTER:
        return ""
    return _NAMES.get(iced_x86.RegisterExt.full_register(decoded.op0_register))


def _a64(code: bytes) -> str | None:
    word = int.from_bytes(code, "little")
    if any(word & mask == bits for mask, bits in _STORES):
        return ""
    if all(word & mask != bits for mask, bits in _LOADS):
        return None
    return "sp" if word & 31 == _SP else f"x{word & 31}"


_CHANGED: Mapping[str, Callable[[bytes], str | None]] = {"amd64": _x86, "arm64": _a64}
"""The one register that a plain move changes, "" for none, None for what is no such."""


pytestmark = [pytest.mark.guest, pytest.mark.arches("amd64", "arm64")]

FUNCTIONS = (
    *("vfs_read", "ksys_read", "ksys_write", "vfs_write", "dput", "path_openat", "do_dentry_open"),
)
KPROBE = Path(sys.executable).with_name("kprobe")
ENTRY = 4
IN_FLIGHT = 4
"""Each of two vCPUs may be in the middle when probes are armed, and when they are disarmed."""
ROUNDS = 2
WORK = """
for n in 1 2 3 4 5; do ls -l / /sys/kernel; md5sum /bin/busybox /proc/version; done > /dev/null"""
PROGRAMS = {"ls", "md5sum"}
_TYPES = {"flags": "x16"}
"""The bit above is RF: where an interrupt has just returned to, a breakpoint's frame has it, and
pushf, by which a jump saves the flags, has it never."""
Hits = dict[tuple[str, int], list[tuple[object, ...]]]
"""CPU and registers of every hit, by event and pid, one after the other."""


class Pair(Struct, frozen=True, kw_only=True):
    """Two neighbours that are always run together.

    Attributes:
        native: where the guest's own kprobe is, as symbol and offset.
        ours: the address right after.
        registers: that the first does not change.
    """

    native: str
    ours: Addr
    registers: tuple[str, ...]


@pytest.fixture(scope="module", params=[SUITES["6.1"], SUITES["7.x"]], ids=["6.1", "7.x"])
def session(request: pytest.FixtureRequest, arch: str) -> Generator[GuestSession]:
    with kprobes.boot(MachineOptions(suite=request.param, arch=arch)) as booted:
        # Nothing but its breakpoint: an optimised kprobe looks at what is after it.
        booted.run("echo 0 > /proc/sys/debug/kprobes-optimization")
        yield booted
        said = booted.run("dmesg").output.decode().splitlines()
        assert [line for line in said if is_complaint(line)] == []


@pytest.fixture
def sweeper(session: GuestSession) -> Sweeper:
    delete_all(session)
    session.options = replace(session.options, strategy=None)
    return Sweeper(session)


@pytest.mark.parametrize("strategy", [Strategy.JUMP, Strategy.BREAKPOINT])
def test_hits_and_registers_are_those_of_the_kernel_s_own_breakpoint_before(
    sweeper: Sweeper, arch: str, strategy: Strategy
) -> None:
    found = [_both(sweeper, arch, strategy, number) for number in range(ROUNDS)]

    for ours, native, misses in found:
        assert ours.keys() == native.keys()
        more = Counter[str]()
        for (event, pid), hits in ours.items():
            theirs = native[event, pid]
            assert _is_within(theirs, hits), (event, pid)
            more[event] += len(hits) - len(theirs)
        # An interrupt that comes during a hit of the kernel's own: it counts what it does not show.
        assert {event: n for event, n in more.items() if n > misses.get(event, 0)} == {}
    counts = [len(hits) for ours, *_ in found for hits in ours.values()]
    assert len({event for ours, *_ in found for event, _ in ours}) >= 5
    assert sum(counts) > 500


def _is_within(some: Sequence[object], all_of_them: Sequence[object]) -> bool:
    # In the same order.
    rest = iter(all_of_them)
    return all(each in rest for each in some)


def _both(
    sweeper: Sweeper, arch: str, strategy: Strategy, number: int
) -> tuple[Hits, Hits, Mapping[str, int]]:
    session = sweeper.session
    tracefs = Tracefs(session)
    pairs = [_nth(_pairs(sweeper, arch, name, strategy), number) for name in FUNCTIONS]
    ours, native = zip(*(_definitions(n, p) for n, p in enumerate(pairs) if p), strict=True)
    session.options = replace(session.options, strategy=strategy)
    delete_all(session)
    session.probe("\n".join(ours))
    with session.record() as trace:
        # Ours come first: the guest's judgement ends before them, and ours would see its own.
        tracefs.arm(native, buffer_kib=8192)
        assert session.run(WORK, 180).status == 0
        read = tracefs.read()
        tracefs.disarm()
    assert {plan.site.strategy for plan in plans_of(session)} == {strategy}
    assert read.overwritten == 0
    hits = oracle.our_hits(trace)
    # They began and ended while both were armed.
    pids = {hit.pid for hit in hits if hit.comm in PROGRAMS}
    theirs = oracle.native_hits(read, oracle.fields_of(trace))
    return _by_stream(hits, pids), _by_stream(theirs, pids), read.misses


def _by_stream(hits: Iterable[Hit], pids: Set[int]) -> Hits:
    found: Hits = {}
    for hit in hits:
        if hit.pid in pids:
            found.setdefault((hit.event, hit.pid), []).append((hit.cpu, *hit.values))
    return found


def _nth(pairs: Sequence[Pair], number: int) -> Pair | None:
    return pairs[number * len(pairs) // ROUNDS] if pairs else None


def _definitions(number: int, pair: Pair) -> tuple[str, str]:
    types = {name: _TYPES.get(name, "x64") for name in pair.registers}
    fetches = " ".join(f"{name}=%{name}:{type}" for name, type in types.items())
    return f"p:n{number} {pair.ours:#x} {fetches}", f"p:n{number} {pair.native} {fetches}"


def _pairs(sweeper: Sweeper, arch: str, name: str, strategy: Strategy) -> list[Pair]:
    function = sweeper.function(name)
    neighbours = [each for run in runs(function) for each in itertools.pairwise(run)]
    return [
        Pair(native=function.place(before.addr), ours=after.addr, registers=kept)
        for before, after in neighbours
        if (kept := kept_by(arch, before.code)) and sweeper.can_carry(after.addr, strategy)
    ]


def _early(sweeper: Sweeper, strategy: Strategy) -> list[Addr]:
    """Return the instructions that every call of vfs_read comes by first."""
    function = sweeper.function("vfs_read")
    (first, *_) = (run for run in runs(function) if len(run) > 4)
    # After the ftrace site and, before it, endbr64: a probe on that goes to the site.
    places = [Addr(i.addr) for i in first if i.addr > function.addr + ENTRY]
    return [addr for addr in places if sweeper.can_carry(addr, strategy)]


def test_several_probes_on_one_instruction_share_a_patch_and_are_hit_alike(
    session: GuestSession, sweeper: Sweeper, arch: str
) -> None:
    place, *_ = _early(sweeper, STRATEGIES[arch][-1])
    first = f"%{DIALECTS[arch].value}"
    session.probe(f"p:a {place:#x} a={first}\np:b {place:#x} a={first} b=+0(%sp)\np:c {place:#x}")

    with session.record() as trace:
        assert session.run(WORK, 180).status == 0

    (plan,) = plans_of(session)
    assert [probe.layout.event for probe in plan.probes] == ["c", "b", "a"]
    a, b, c = (hits.recorded for hits in trace.hits)
    assert a == b == c >= 10


def test_all_strategies_side_by_side_are_hit_alike(
    session: GuestSession, sweeper: Sweeper, arch: str
) -> None:
    addrs = _early(sweeper, STRATEGIES[arch][-1])
    session.probe("\n".join(f"p:n{n} {addr:#x}" for n, addr in enumerate(addrs)))

    with session.record() as trace:
        assert session.run(WORK, 180).status == 0

    counts = [hits.recorded for hits in trace.hits]
    assert len(counts) == len(addrs) >= 3
    assert max(counts) - min(counts) <= IN_FLIGHT
    assert min(counts) >= 10
    assert STRATEGIES[arch][-1] in {plan.site.strategy for plan in plans_of(session)}


@pytest.mark.parametrize("strategy", ["jump", "breakpoint"])
@pytest.mark.arches("amd64", "arm64", matrix="arm64")
def test_the_command_line_forces_a_strategy(
    session: GuestSession,
    sweeper: Sweeper,
    arch: str,
    strategy: str,
    request: pytest.FixtureRequest,
) -> None:
    place, *_ = _early(sweeper, Strategy(strategy))
    offset = place - session.kernel.symbols.named("vfs_read").addr
    suite = request.node.callspec.params["session"]
    # busybox's cat sends files without vfs_read: others' hits are as good.
    words = ("trace", "--all-tasks", "--suite", suite, "--arch", arch, "--strategy", strategy)

    found = subprocess.run(
        [
            KPROBE,
            *words,
            f"p:mid vfs_read+{offset:#x} at=%{DIALECTS[arch].pc}",
            "--",
            "cat /proc/version",
        ],
        capture_output=True,
        timeout=120,
        check=False,
    )

    assert found.returncode == 0, found.stderr
    lines = [line for line in found.stdout.decode().splitlines() if " mid: " in line]
    assert lines
    assert all(f"(vfs_read+{offset:#x}/" in line for line in lines)
