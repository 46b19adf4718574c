"""Fetches and output of return probes, beside the kernel's own on the same returns.

Ours and the kernel's own see a return at the same time but for two things that the other one's
taking over changes, the instruction pointer and the caller: these are compared in two runs of one
program.
"""

import re
from collections.abc import Iterator, Sequence

import pytest
from msgspec import Struct
from msgspec.structs import replace

import kprobes
from kprobes.guest.arena import ArenaSize
from kprobes.model.plan import ReturnMethod
from kprobes.open import GuestSession
from kprobes.transport.qemu_command import MachineOptions
from kprobes.units import MIB
from tests.build.defined import delete_all
from tests.build.dialect import dialect_of
from tests.build.returned import LOAD
from tests.system.oracle import INTERRUPT, RESCHED, Hit, Tracefs, event_of
from tests.system.return_oracle import Pair, Recorded

pytestmark = [pytest.mark.guest, pytest.mark.arches("amd64", "arm64", matrix="arm64")]

_SUITES = ("bullseye", "bookworm", "bookworm-backports", "sid")
_RETURN_METHODS = (None, ReturnMethod.RETHOOK)
_REGISTERS = {
    "amd64": (
        "bx=%bx bp=%bp r12=%r12 r13=%r13 r14=%r14 r15=%r15 ax=%ax sp=%sp",
        "flags=%flags cs=%cs:x16 ss=%ss orig=%orig_ax:s64",
    ),
    "arm64": (
        "x0=%x0 x19=%x19 x20=%x20 x21=%x21 x22=%x22 x23=%x23 x24=%x24 sp=%sp",
        "x25=%x25 x26=%x26 x27=%x27 x28=%x28 x29=%x29 pstate=%pstate",
    ),
}
"""What a return leaves, in two lines. arm64's lr is not among them: it is where the function has
returned to, which was taken over, and compared apart."""
_STACK = "stack=$stack s0=$stack0 s1=$stack1 s7=$stack7 there=+16(%sp):x64"
FORMS = (
    "r256:plain vfs_read",
    "r256:bare vfs_read $retval:x64",
    f"r256:stk do_sys_openat2 fd=$retval:s32 {_STACK}",
    "r256:names getname_flags text=+0(+0($retval)):string user=+0(+8($retval)):ustring c=$comm",
    "r256:opened path_openat ptr=$retval:x64 mode=+0($retval):x32 err=$retval:s32",
    "r256:fault path_openat wild=+0($retval):string far=+0(+0xffffff($retval)):string",
    "r256:sizes vfs_read a=$retval:u8 b=$retval:s16 c=$retval:x32 d=$retval:u64 e=$retval:b4@2/32",
    r"r256:consts vfs_read imm=\0x1234:x32 data=@schedule_timeout:x64",
    "r256:arrays path_openat words=+0($retval):x32[3]",
    "r256:pages filp_close ret=$retval:s32",
)
FROM_ENTRY = (
    "r256:args vfs_read file=$arg1 buf=$arg2:x64 count=$arg3:u64 ret=$retval:s64",
    "r256:path do_sys_openat2 path=+0($arg2):ustring fd=$retval:s32",
    "r256:deep vfs_write count=$arg3 mode=+0($arg1):x32 fd=$retval:s64",
)
"""From 6.9 on the kernel keeps them, too."""
_PLACES = (
    *("do_sys_openat2", "vfs_read", "vfs_write", "filp_close", "getname_flags", "path_openat"),
    *("vfs_open", "vfs_getattr", "dput", "security_file_permission"),
)


def forms(arch: str, version: tuple[int, int]) -> list[str]:
    """Return what is compared at the same returns, in words of one architecture and kernel."""
    rest, state = _REGISTERS[arch]
    if version == _OLD:
        state = state.replace(" ss=%ss", "")
    if _comes_by_trap(arch, version):
        state = state.replace(" pstate=%pstate", "")
    return [
        *FORMS,
        f"r256:regs vfs_read ret=$retval:s64 {rest}",
        f"r256:state vfs_write ret=$retval:s32 {state}",
        *(FROM_ENTRY if version >= (6, 9) else ()),
    ]


def of_callers(pc: str) -> list[str]:
    """Return what is compared of two runs; ``pc`` is empty where the kernel shows its own."""
    shown = f" ip=%{pc}:symbol" if pc else ""
    return [f"r256:c{n} {name}{shown} who=$comm" for n, name in enumerate(_PLACES)]


_PROGRAM = "sort /etc/passwd /proc/self/comm | tac"
_LINE = re.compile(r".*\] (?P<flags>\S+) +[\d.]+: (?P<text>\w+: .* who=\"sort\")")


def _comes_by_trap(arch: str, version: tuple[int, int]) -> bool:
    # The kernel's own has interrupts off then, from 7.x on preemption too, and the state that the
    # exception has saved.
    return arch == "arm64" and version >= (6, 12)


_OLD = (5, 10)
"""This kernel's return probes leave %ss as it was on the stack, show their own trampoline as %ip,
and run with interrupts off."""


class Run(Struct, frozen=True, kw_only=True):
    """What one kernel's probes and ours made of some forms, by each way of ours.

    Attributes:
        is_trap: whether the kernel's own come by an exception.
        callers: lines of one program, of the kernel's own and then of ours by each way.
    """

    is_old: bool
    is_trap: bool
    names: set[str]
    forms: Sequence[Recorded]
    callers: Sequence[Sequence[str]]


@pytest.fixture(scope="module", params=_SUITES)
def run(request: pytest.FixtureRequest, arch: str) -> Iterator[Run]:
    options = MachineOptions(arch=arch, suite=request.param, files={"/load.sh": LOAD})
    with kprobes.boot(options, size=ArenaSize(ring=16 * MIB)) as session:
        version = session.kernel.version
        lines = forms(arch, version)
        pair = Pair(session, lines)
        assert pair.refused == set()
        recorded = [
            pair.record("sh /load.sh", return_method=return_method)
            for return_method in _RETURN_METHODS
        ]
        pair.disarm()
        yield Run(
            is_old=version == _OLD,
            is_trap=_comes_by_trap(arch, version),
            names={event_of(line) for line in lines},
            forms=recorded,
            callers=callers(session),
        )


def callers(session: GuestSession) -> list[list[str]]:
    """Return the lines of one program: the kernel's own, and ours by each way.

    A path walk that another CPU's change disturbs begins anew, which one run may see and the next
    not: three times at most.
    """
    found = _callers(session)
    for _ in range(2):
        if any(each != found[0] for each in found):
            found = _callers(session)
    return found


def _callers(session: GuestSession) -> list[list[str]]:
    old = session.kernel.version == _OLD
    lines = of_callers("" if old else dialect_of(session).pc)
    files = Tracefs(session)
    files.arm(lines, buffer_kib=4096)
    session.run(_PROGRAM)
    found = [_lines(files.read().text)]
    files.disarm()
    for return_method in _RETURN_METHODS:
        session.options = replace(session.options, return_method=return_method)
        delete_all(session)
        session.probe("\n".join(lines))
        with session.record() as trace:
            session.run(_PROGRAM)
        found.append(_lines(trace.to_text()))
    return found


def _lines(text: str) -> list[str]:
    matches = (_LINE.fullmatch(line) for line in text.splitlines())
    # Interrupts come when they like.
    return [m["text"] for m in matches if m is not None and m["flags"][INTERRUPT] == "."]


def test_every_form_was_hit_by_each_way(run: Run) -> None:
    for each in run.forms:
        assert each.functions(run.names) == run.names
        assert (each.counts.lost, sum(each.counts.missed.values())) == (0, 0)
        assert sum(each.counts.nmissed.values()) == 0


def test_every_return_is_one_of_both(run: Run) -> None:
    for each in run.forms:
        assert each.begun_after() == []
        assert each.unexplained() == []


def test_every_fields_text_is_the_same(run: Run) -> None:
    assert [each.compared.wrong_values() for each in run.forms] == [[], []]


def test_flags_are_the_same_but_for_rescheduling(run: Run) -> None:
    for each in run.forms:
        pairs = each.compared.pairs
        differing = [(a, b) for a, b in pairs if _rest(run, a) != _rest(run, b)]
        assert len(differing) <= len(pairs) // 100, differing[:5]


def _rest(run: Run, hit: Hit) -> str:
    rest = hit.flags[RESCHED + 1 :]
    if run.is_trap:
        # Without the depth of preemption that is off.
        return rest[:1] + rest[2:]
    return rest if run.is_old else hit.flags[:1] + rest


def test_strings_were_read_and_faulted(run: Run) -> None:
    for each in run.forms:
        values = [value for ours, _ in each.compared.pairs for value in ours.values]
        assert "(fault)" in values
        # What returns names there is mostly inlined in 5.10.
        assert '"/etc/passwd"' in values or run.is_old


def test_callers_and_their_text_are_the_kernels(run: Run) -> None:
    native, *ours = run.callers

    assert len(native) > 20
    assert [line for line in native if "(ksys_read+0x" in line and "<- vfs_read)" in line]
    for each in ours:
        assert each == native
