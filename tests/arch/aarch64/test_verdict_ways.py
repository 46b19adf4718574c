"""Patches of instructions: one branch, one instruction."""

from kprobes.arch.aarch64.verdict import NO_BREAKPOINT, analyse, examine, first
from kprobes.model.kernel import TextTables
from kprobes.model.plan import Displaced
from kprobes.units import Addr
from tests.build.a64 import BUG, NOP, PACIASP, RET, START, code_of, parts

TABLES = TextTables()


def test_a_branch_displaces_one_instruction_and_no_breakpoint_is_needed() -> None:
    return_methods = examine("f", parts(f"{NOP} {RET}"), TABLES)(Addr(START + 4))

    assert return_methods.jump == Displaced(
        addr=Addr(START + 4), code=code_of(RET), count=1, stop=Addr(START + 8)
    )
    assert return_methods.breakpoint == NO_BREAKPOINT
    assert return_methods.is_boundary


def test_what_is_refused_is_said_with_the_reason() -> None:
    return_methods = examine("f", parts(f"{BUG} {RET}"), TABLES)

    assert "on purpose" in str(return_methods(Addr(START)).jump)
    assert return_methods(Addr(START)).is_boundary
    assert not return_methods(Addr(START + 2)).is_boundary


def test_calls_through_pointers_land_before_the_first_probed_instruction() -> None:
    assert [first(code_of(word)) for word in ("d503245f", PACIASP, NOP)] == [4, 0, 0]


def test_a_study_leaves_constants_and_padding_out() -> None:
    # ldr x0, 1f; ret; 1: .quad, and a nop after it
    found = analyse("f", parts(f"58000040 {RET} aa0003e5 aa0003e5"), TABLES)

    assert dict(found.sizes) == {START: 4, START + 4: 4}
    assert found.insn_verdict(START).verdict == "emulate"
    assert found.start_of(START + 6) == START + 4
