"""Ways out of functions: what is proven, and the reason where it is not."""

import pytest

from kprobes.arch.aarch64.cfg import find_exits
from kprobes.model.kernel import TextTables
from kprobes.model.plan import ExitKind, Exits, ReturnMethod
from tests.build.a64 import (
    AUTIASP,
    BUG,
    COLD,
    NOP,
    PACIASP,
    POP,
    PUSH,
    RET,
    RETAA,
    START,
    b,
    bl,
    parts,
)

OUTSIDE = START + 0x10_0000
PANIC = START + 0x20_0000
CALL = bl(OUTSIDE)
TABLES = TextTables(no_return=frozenset({PANIC}))


def exits(words: str, *, cold: str = "", tables: TextTables = TABLES) -> Exits:
    return find_exits("f", parts(words, cold), tables)


def found(of: Exits) -> list[tuple[int, ExitKind]]:
    return [(each.addr - START, each.kind) for each in of.exits]


def why(of: Exits) -> str:
    assert of.why_not is not None
    return of.why_not.why


@pytest.mark.parametrize(
    ("words", "at"),
    [
        (RET, 0),
        # Signed, saved, restored, checked.
        (f"{NOP} {NOP} {PACIASP} {PUSH} {CALL} {POP} {AUTIASP} {RET}", 28),
        (f"{PACIASP} {PUSH} {CALL} {POP} {RETAA}", 16),
        # Not signed; the frame pointer gives the stack back: mov x29, sp; sub sp, sp, x0;
        # mov sp, x29.
        (f"{PUSH} 910003fd cb2063ff {CALL} 910003bf {POP} {RET}", 24),
        # A shadow call stack: str x30, [x18], #8 and ldr x30, [x18, #-8]!
        (f"f800865e {PUSH} {CALL} {POP} f85f8e5e {RET}", 20),
        # sub sp, sp, #0x40; stp x29, x30, [sp, #0x30]; ldp x29, x30, [sp, #0x30]; add sp, ...
        (f"d10103ff a9037bfd {CALL} a9437bfd 910103ff {RET}", 20),
        # str x30, [sp, #-16]!; ldr x30, [sp], #16
        (f"f81f0ffe {CALL} f84107fe {RET}", 12),
    ],
)
def test_returns_are_proven(words: str, at: int) -> None:
    result = exits(words)

    assert result.return_method is ReturnMethod.RETINSN
    assert found(result) == [(at, ExitKind.RETURN)]
    assert all(each.size == 4 and not each.why for each in result.exits)


def test_both_ways_of_a_condition_are_followed() -> None:
    # cbz x0, +8; ret; ret
    assert found(exits(f"b4000040 {RET} {RET}")) == [
        (4, ExitKind.RETURN),
        (8, ExitKind.RETURN),
    ]


def test_the_cold_part_belongs_to_the_function() -> None:
    result = exits(f"{b(COLD)} {RET}", cold=f"{BUG} {b(START + 4, at=COLD + 4)}")

    assert result.return_method is ReturnMethod.RETINSN
    assert found(result) == [(4, ExitKind.RETURN)]


@pytest.mark.parametrize(
    ("words", "kind", "target"),
    [
        (b(OUTSIDE), ExitKind.TAIL, OUTSIDE),
        (f"{PUSH} {CALL} {POP} {b(OUTSIDE, at=START + 12)}", ExitKind.TAIL, OUTSIDE),
        # b.eq, cbz and tbz out of the function.
        ("54000400 " + RET, ExitKind.BRANCH, START + 0x80),
        ("b4000400 " + RET, ExitKind.BRANCH, START + 0x80),
        ("36000400 " + RET, ExitKind.BRANCH, START + 0x80),
        # ldr x16, [x0]; br x16
        ("f9400010 d61f0200", ExitKind.INDIRECT, None),
        ("d61f0020", ExitKind.INDIRECT, None),
    ],
)
def test_jumps_out_are_tail_calls(words: str, kind: ExitKind, target: int | None) -> None:
    result = exits(words)

    assert result.return_method is ReturnMethod.TAIL
    (tail,) = result.tails
    assert (tail.kind, tail.target) == (kind, target)


def test_a_path_that_a_call_came_back_to_counts_where_it_joins_another() -> None:
    # cbz x0, 1f; push; call; cbz x1, 2f; 1: b OUTSIDE; 2: pop; ret
    tail = b(OUTSIDE, at=START + 16)
    result = exits(f"b4000080 {PUSH} {bl(OUTSIDE, at=START + 8)} b4000041 {tail} {POP} {RET}")

    assert why(result) == "it jumps out with a stack that is not known"


def test_a_table_s_cases_are_all_code_that_nothing_else_leads_to() -> None:
    # adr x1, 1f; add x0, x1, w0, sxth #2; br x0; 1: mov x0, x1; ret; mov x0, x2; ret
    table = exits(f"10000061 8b20a820 d61f0000 aa0103e0 {RET} aa0203e0 {RET}")

    assert table.return_method is ReturnMethod.RETINSN
    assert found(table) == [(16, ExitKind.RETURN), (24, ExitKind.RETURN)]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (f"{NOP} {CALL}", "calls what is not known never to return"),
        ("aa0103e0", "runs on into what is after"),
        (f"b4000060 58000041 {RET} aa0003e5 aa0003e5", "leads to where no instruction is"),
        ("d69f03e0", "by another way"),
        ("02000000", "not an instruction"),
        (f"{BUG} d4200080 {RET}", "hides another instruction"),
        ("d65f0120", "by another register"),
        (f"{PUSH} {RET}", "something of the function's own on the stack"),
        (f"{PUSH} {b(OUTSIDE, at=START + 4)}", "something of the function's own on the stack"),
        (f"cb2063ff {b(OUTSIDE, at=START + 4)}", "stack that is not known"),
        (f"{PACIASP} {b(OUTSIDE, at=START + 4)}", "not known to be the return address"),
        (f"{CALL} {RET}", "has made x30 point"),
        (f"{PACIASP} {RET}", "signed"),
        (RETAA, "signed"),
        # ldr x0, [x1, x0, lsl #3]; br x0: a table of addresses.
        ("f8607820 d61f0000", "table of the function's own"),
        # add x0, x1, w0, sxth #2; br x0: from who knows where.
        ("8b20a820 d61f0000", "table of the function's own"),
    ],
)
def test_what_is_missing_in_a_proof_is_said(words: str, reason: str) -> None:
    result = exits(words)

    assert result.return_method in (ReturnMethod.RETHOOK, ReturnMethod.REFUSED)
    assert reason in why(result)


def test_a_call_that_never_returns_ends_a_path() -> None:
    result = exits(f"b4000060 {bl(PANIC, at=START + 4)} {NOP} {RET}")

    assert result.return_method is ReturnMethod.RETINSN
    assert exits(f"{PUSH} {bl(PANIC, at=START + 4)}").is_endless


def test_a_last_call_names_what_would_close_the_gap() -> None:
    result = exits(f"{PUSH} {bl(OUTSIDE, at=START + 4)} {NOP}")

    assert result.why_not is not None
    assert result.why_not.callee == OUTSIDE


def test_after_a_bug_alternatives_of_the_kernel_may_lie() -> None:
    # cbz x0, 1f; ret; 1: brk; mrs x2, tpidr_el2; mrs x2, tpidr_el2
    result = exits(f"b4000040 {RET} {BUG} d53cd042 d53cd042")

    assert result.return_method is ReturnMethod.RETINSN
    assert [end - START for end in result.noreturn_sites] == [8]


def test_after_a_warning_the_function_goes_on() -> None:
    result = exits(f"{PACIASP} {PUSH} {BUG} {POP} {AUTIASP} {RET}")

    assert found(result) == [(20, ExitKind.RETURN)]


def test_the_guests_own_probe_before_the_tracers_call_hides_nothing_that_matters() -> None:
    tables = TextTables(ftrace=frozenset({START + 4}))

    # brk #4, where mov x9, x30 was.
    result = exits(f"d4200080 {NOP} {PACIASP} {PUSH} {CALL} {POP} {AUTIASP} {RET}", tables=tables)

    assert result.return_method is ReturnMethod.RETINSN
    assert found(result) == [(28, ExitKind.RETURN)]


def test_the_tracer_s_call_leaves_x30_as_it_was() -> None:
    # mov x9, x30; bl ftrace_caller, which gives x30 back from x9.
    tables = TextTables(ftrace=frozenset({START + 4}))

    result = exits(
        f"aa1e03e9 {bl(OUTSIDE, at=START + 4)} {b(OUTSIDE, at=START + 8)}", tables=tables
    )

    assert result.return_method is ReturnMethod.TAIL


def test_repairs_of_faults_and_jump_labels_are_followed() -> None:
    words = f"f9400020 {NOP} {RET} {RET} {RET}"
    tables = TextTables(exceptions={START: START + 12}, jump_labels={START + 4: START + 16})

    assert found(exits(words)) == [(8, ExitKind.RETURN)]
    assert [at for at, _ in found(exits(words, tables=tables))] == [8, 12, 16]
    outside = TextTables(exceptions={START: OUTSIDE})
    assert "leads out" in why(exits(words, tables=outside))


def test_a_loop_that_never_ends_never_returns() -> None:
    assert exits("14000000").is_endless


def test_padding_is_no_function() -> None:
    assert exits(f"{NOP} {NOP}").refusal == "it is not a function, only padding"


def test_a_return_that_may_not_be_patched_needs_another_way() -> None:
    tables = TextTables(jump_labels={START + 4: START + 8})

    assert "jump label" in why(exits(f"{NOP} {RET} {RET}", tables=tables))
