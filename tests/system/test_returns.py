"""The kernel is the oracle of return probes: its own and ours record the same returns.

For functions from all over the kernel, by every way of ours: at return instructions, with the help
of returns that are taken over at tail jumps, and by the classic way, where ours and the kernel's
own take over the same return. What may differ, and why:

* The kernel misses a return whose entry was in an interrupt on top of another of its probes.
* A call that was in progress when ours was armed is not seen where returns are taken over: one that
  had left by a tail jump, and by the classic way every one.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping

import pytest
from msgspec import Struct

import kprobes
from kprobes.guest.arena import ArenaSize
from kprobes.model.plan import ReturnMethod
from kprobes.open import GuestSession
from kprobes.transport.qemu_command import MachineOptions
from kprobes.units import MIB
from tests.build.dialect import dialect_of
from tests.build.returned import LOAD, Ran, chosen, functions_that_return
from tests.system.oracle import Hit
from tests.system.return_oracle import Pair, Recorded, function_of, returned_values

pytestmark = [pytest.mark.guest, pytest.mark.arches("amd64", "arm64")]


class Scope(Struct, frozen=True, kw_only=True):
    """How much of a kernel is compared.

    Attributes:
        functions: so many at least.
        most: hits of each in one load.
        return_methods: so many returns of each at least.
        values: so many different ones at least.
    """

    functions: int
    most: int
    return_methods: Mapping[ReturnMethod, int]
    values: int


_SCOPES = {
    "amd64": Scope(
        functions=200,
        most=700,
        return_methods={ReturnMethod.RETINSN: 1000, ReturnMethod.TAIL: 1000},
        values=500,
    ),
    # Each hit of the kernel's own is two exceptions there, which take long to emulate; and hardly
    # a function of that kernel ends with a jump to another.
    "arm64": Scope(functions=60, most=300, return_methods={ReturnMethod.RETINSN: 1500}, values=100),
}
"""Of 6.1: elsewhere calls of ours that sleep in the kernel's own probes may keep the second load
from being recorded: test_returned_forms.py compares other kernels, function by function."""
_SPARE = 1.15
"""More are probed: some are not reached in every load."""


class Run(Struct, frozen=True, kw_only=True):
    """One guest's functions, recorded by each way.

    Attributes:
        scope: what must be seen.
        by_event: what is probed.
        proven: at return instructions, and where it is needed at tail jumps.
        hooked: by the classic way alone.
    """

    scope: Scope
    by_event: dict[str, Ran]
    proven: Recorded
    hooked: Recorded
    dmesg: str

    @property
    def both(self) -> tuple[Recorded, Recorded]:
        return self.proven, self.hooked

    def return_method(self, hit: Hit) -> ReturnMethod:
        return self.by_event[hit.event].return_method


@pytest.fixture(scope="module")
def run(arch: str) -> Iterator[Run]:
    options = MachineOptions(arch=arch, files={"/load.sh": LOAD})
    with kprobes.boot(options, size=ArenaSize(ring=16 * MIB, code=8 * MIB)) as session:
        yield recorded(session, _SCOPES[arch])


def recorded(session: GuestSession, scope: Scope) -> Run:
    ran = chosen(functions_that_return(session, scope.most), int(scope.functions * _SPARE))
    pair = Pair(session, returned_values(ran, dialect_of(session)))
    proven = pair.record("sh /load.sh")
    hooked = pair.record("sh /load.sh", return_method=ReturnMethod.RETHOOK)
    return Run(
        scope=scope,
        by_event={f"e{n}": each for n, each in enumerate(ran)},
        proven=proven,
        hooked=hooked,
        dmesg=session.run("dmesg").output.decode(errors="backslashreplace"),
    )


def test_enough_functions_returned_in_every_way(run: Run) -> None:
    return_methods = Counter(run.return_method(ours) for ours, _ in run.proven.compared.pairs)

    assert all(len(each.functions(run.by_event)) >= run.scope.functions for each in run.both)
    assert all(
        return_methods[return_method] > count
        for return_method, count in run.scope.return_methods.items()
    )
    assert all({ours.cpu for ours, _ in each.compared.pairs} == {0, 1} for each in run.both)


def test_nothing_was_lost_or_missed_by_us(run: Run) -> None:
    for each in run.both:
        assert (each.counts.lost, each.counts.damaged, each.native.overwritten) == (0, 0, 0)
        assert sum(each.counts.missed.values()) == 0
        assert sum(each.counts.nmissed.values()) == 0


def test_every_return_that_the_kernel_saw_is_one_of_ours(run: Run) -> None:
    unseen = run.proven.compared.native_only

    assert [hit for hit in unseen if run.return_method(hit) is ReturnMethod.RETINSN] == []
    assert [each.begun_after() for each in run.both] == [[], []]


def test_every_return_of_ours_is_the_kernels_unless_it_missed_it(run: Run) -> None:
    # Of schedule() the kernel sometimes has one return less, and does not count it.
    assert {function_of(hit) for hit in run.proven.unexplained()} <= {"schedule"}
    assert len(run.proven.unexplained()) < 10
    assert run.hooked.unexplained() == []


def test_values_are_the_same(run: Run) -> None:
    values = {ours.values for ours, _ in run.proven.compared.pairs}

    assert len(values) > run.scope.values
    assert [each.wrong_values() for each in run.both] == [[], []]


def test_the_function_is_named_as_the_kernel_names_it(run: Run) -> None:
    for each in run.both:
        pairs = each.compared.pairs
        assert [(a, b) for a, b in pairs if function_of(a) != function_of(b)] == []


def test_cpu_is_the_same(run: Run) -> None:
    # A task may be moved between the two records, where an interrupt ends there.
    moved = [len(each.compared.differing("cpu")) / len(each.compared.pairs) for each in run.both]

    assert max(moved) < 0.01


def test_the_guest_has_nothing_to_complain_about(run: Run) -> None:
    assert re.findall("(?:WARNING:|BUG:|Oops|stalls? on|lockup).*(?:\n.*){0,40}", run.dmesg) == []
