"""A real arm64 kernel's text: in slots on an emulated CPU, and its functions' ways out.

No guest is booted, but the kernel comes from where guests' kernels come from. The same of amd64
kernels is in test_relocation (slots) and test_exits (ways out).
"""

import random
from collections import Counter
from collections.abc import Callable

import pytest

from kprobes.arch.aarch64.decode import Flow, Function, decode_function
from kprobes.arch.aarch64.insn import Kind
from kprobes.model.kernel import TextPart
from kprobes.model.plan import ReturnMethod
from kprobes.units import Addr
from tests.build.a64_emulator import Emulator, random_state
from tests.build.a64_kernel import SLOT, Compared, compare, exits_of, kernel

RELOCATED = frozenset(
    {
        Kind.B,
        Kind.BL,
        Kind.B_COND,
        Kind.CBZ,
        Kind.TBZ,
        Kind.BR,
        Kind.BLR,
        Kind.RET,
        Kind.ADR,
        Kind.ADRP,
        Kind.LDR_LITERAL,
    }
)
_STEPS = 300
_TRACES = 12


def check(compared: Compared, *, executed: int) -> None:
    assert not compared.differences
    assert compared.executed.total() >= executed
    assert compared.faulted.total() < executed * 0.02
    assert all(compared.executed[kind.name] for kind in RELOCATED)


@pytest.mark.guest
def test_a_sample_of_a_kernel_s_instructions_does_the_same_in_slots() -> None:
    check(compare(count=6_000, per_kind=100), executed=3_700)


@pytest.mark.storm
def test_two_hundred_thousand_instructions_of_a_kernel_do_the_same_in_slots(
    record_property: Callable[[str, object], None],
) -> None:
    compared = compare(count=240_000, per_kind=500, seed=2)

    for name in ("executed", "faulted", "refused"):
        record_property(name, getattr(compared, name).total())
    check(compared, executed=200_000)


@pytest.mark.guest
def test_ways_out_are_proven_of_nearly_all_functions() -> None:
    sample = random.Random(3).sample(kernel().functions, 2_000)

    return_methods = Counter(exits_of(*each).return_method for each in sample)

    refused = return_methods.pop(ReturnMethod.REFUSED)
    assert refused < 60
    assert return_methods[ReturnMethod.RETHOOK] < 0.03 * return_methods.total()


@pytest.mark.guest
def test_functions_that_run_leave_by_the_exits_that_are_listed() -> None:
    rng = random.Random(4)
    found = kernel()
    states = [random_state(rng) for _ in range(_TRACES)]
    emulator = Emulator((found.start, found.text), SLOT, states)
    left = 0

    for name, addr, size in rng.sample(found.functions, 400):
        exits = exits_of(name, addr, size)
        if exits.return_method not in (ReturnMethod.RETINSN, ReturnMethod.TAIL):
            continue
        function = decode_function(name, (TextPart(addr=Addr(addr), code=found.code(addr, size)),))
        for state in range(_TRACES):
            last = _run(emulator, function, state)
            if last is not None:
                assert last in {each.addr for each in exits.exits}, name
                left += 1

    assert left > 100


def _run(emulator: Emulator, function: Function, state: int) -> int | None:
    # The last instruction of a way through a function, calls being left out; None when it faults
    # or takes too long.
    emulator.begin(state)
    at: int = function.parts[0].addr
    for _ in range(_STEPS):
        instruction = function.at(at)
        assert instruction is not None, f"{function.name} went to {at:#x}"
        if instruction.flow in (Flow.CALL, Flow.INDIRECT_CALL):
            emulator.skip_call(at)
            at = instruction.next
            continue
        then, fault = emulator.step(at)
        if fault:
            return None
        if function.part_of(then) is None or (instruction.flow is Flow.RETURN):
            return at
        at = then
    return None
