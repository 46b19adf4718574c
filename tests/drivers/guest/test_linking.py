"""Code that asks Python: every place by a number of its own, trampolines included."""

from dataclasses import replace

import pytest

from kprobes.arch.x86_64.facts import X86_64
from kprobes.drivers.guest.linking import Linker, frame_counts, frames_size
from kprobes.errors import RefusedError
from kprobes.model.exits import ReturnWay
from kprobes.model.plan import Plan
from kprobes.model.returns import Returning, Returns, Role
from kprobes.model.upcall import Upcall, Waiting
from kprobes.units import Addr
from tests.build.guest import make_arena, make_guest
from tests.build.machine import ABI


def _serve(waiting: Waiting) -> None:
    del waiting


def _upcall(number: int, addr: Addr, *, is_after: bool = False) -> Upcall:
    return Upcall(number=number, addr=addr, is_after=is_after, serve=_serve)


def _linker(plans: list[Plan]) -> Linker:
    return Linker(X86_64, ABI, replace(make_arena(), frames_size=frames_size(plans)))


def _hooked(plan: Plan, upcall: Upcall) -> Plan:
    returns = Returns(entry=plan.site.addr, way=ReturnWay.RETHOOK, probes=(), upcalls=(upcall,))
    return replace(plan, probes=(), returning=(Returning(role=Role.HOOK, returns=returns),))


def test_every_place_asks_by_a_number_of_its_own_whoever_is_asked() -> None:
    plans = make_guest(["p f"] * 2).plans
    shared = _upcall(9, plans[0].site.addr)
    behind = _upcall(9, plans[0].site.addr, is_after=True)
    asking = [replace(plan, upcalls=(shared, behind)) for plan in plans]

    questions = [each for p in _linker(asking).link(asking) for each in p.questions]

    assert [each.number for each in questions] == [0, 1, 2, 3]
    assert [each.upcalls for each in questions] == [(shared,), (behind,)] * 2


def test_a_trampoline_asks_what_its_returns_want() -> None:
    (plan,) = make_guest(["p f"]).plans
    upcall = _upcall(3, plan.site.addr)
    plans = [_hooked(plan, upcall)]
    linker = _linker(plans)

    (program,) = linker.link(plans)

    (question,), (frames,) = linker.landings, linker.frames
    assert (program.questions, question.upcalls) == ((), (upcall,))
    # It is shown at the trampoline, and goes on behind what that has called.
    assert list(question.copies) == [frames.trampoline]
    code = dict(linker.take_routines())
    (start,) = (addr for addr in code if addr < frames.trampoline < addr + len(code[addr]))
    at = question.copies[frames.trampoline] - start
    assert code[start][at : at + 1] == b"\xc3"


@pytest.mark.parametrize("side", [-1, 1])
def test_a_module_too_far_from_the_memory_for_code_is_told(side: int) -> None:
    (plan,) = make_guest(["p f"]).plans
    code = make_arena().code
    far = Addr((code.addr if side < 0 else code.stop) + side * X86_64.reach)

    with pytest.raises(RefusedError, match="its module is 2048 MiB away from the memory"):
        _linker([plan]).link([replace(plan, site=replace(plan.site, addr=far))])


def test_functions_that_only_python_looks_at_get_less_room() -> None:
    (plan,) = make_guest(["r f"]).plans
    hooked = _hooked(plan, _upcall(3, plan.site.addr))
    (here,) = hooked.returning
    recorded = replace(here.returns, probes=plan.probes)

    less, more = (
        {each.entry: n for each, n in frame_counts([replace(plan, returning=(some,))])}
        for some in (here, Returning(role=Role.HOOK, returns=recorded))
    )

    assert less[plan.site.addr] < more[plan.site.addr]
