"""Code that asks Python: every place by a number of its own, trampolines included."""

import pytest
from iced_x86 import Decoder, Mnemonic
from msgspec.structs import replace

from kprobes.arch.x86_64.arch import X86_64
from kprobes.errors import NoRoomError, RefusedError
from kprobes.guest.link import Linker, Program, instance_counts, instances_size
from kprobes.guest.release import CodeMemory
from kprobes.model.abi import Readers
from kprobes.model.plan import Plan, Returning, ReturnMethod, Returns, Role
from kprobes.model.upcall import Upcall, WaitingVcpu
from kprobes.units import MIB, Addr
from tests.build.guest import CODE, make_arena, make_guest
from tests.build.machine import ABI


def taken(linker: Linker) -> list[tuple[Addr, bytes]]:
    """Return the routines of a linker, which has none afterwards."""
    found = linker.routines
    linker.forget_routines()
    return found


def _serve(waiting: WaitingVcpu) -> None:
    del waiting


def _upcall(number: int, addr: Addr, *, is_after: bool = False) -> Upcall:
    return Upcall(number=number, addr=addr, is_after=is_after, serve=_serve)


def _linker(plans: list[Plan]) -> Linker:
    return Linker(X86_64, ABI, replace(make_arena(), instances_size=instances_size(plans)))


def _hooked(plan: Plan, upcall: Upcall) -> Plan:
    returns = Returns(
        entry=plan.site.addr, return_method=ReturnMethod.RETHOOK, probes=(), upcalls=(upcall,)
    )
    return replace(plan, probes=(), returning=(Returning(role=Role.HOOK, returns=returns),))


def test_every_place_asks_by_a_number_of_its_own_whoever_is_asked() -> None:
    plans = make_guest(["p f"] * 2).plans
    shared = _upcall(9, plans[0].site.addr)
    after = _upcall(9, plans[0].site.addr, is_after=True)
    asking = [replace(plan, upcalls=(shared, after)) for plan in plans]

    programs, groups = _linker(asking).link(asking)

    assert [each for program in programs for each in program.groups] == groups

    assert [each.number for each in groups] == [0, 1, 2, 3]
    assert [each.upcalls for each in groups] == [(shared,), (after,)] * 2


def test_a_trampoline_asks_what_its_returns_want() -> None:
    (plan,) = make_guest(["p f"]).plans
    upcall = _upcall(3, plan.site.addr)
    plans = [_hooked(plan, upcall)]
    linker = _linker(plans)

    (program,), (group,) = linker.link(plans)

    (instances,) = linker.instances
    assert (program.groups, group.upcalls) == ((), (upcall,))
    # It is shown at the trampoline, and goes on after what that has called.
    assert list(group.copies) == [instances.trampoline]
    code = dict(taken(linker))
    (start,) = (addr for addr in code if addr < instances.trampoline < addr + len(code[addr]))
    at = group.copies[instances.trampoline] - start
    assert code[start][at : at + 1] == b"\xc3"


def _far_linker(plans: list[Plan]) -> tuple[Linker, CodeMemory, CodeMemory]:
    # Of an architecture whose branches go less far than modules are away.
    arena = replace(make_arena(), instances_size=instances_size(plans))
    near, far = arena.code, CodeMemory(addr=Addr(CODE + 64 * MIB), size=1 * MIB)
    arch = replace(X86_64, reach=32 * MIB, code=replace(X86_64.code, veneer=_veneer))
    functions = ("copy_kernel", "copy_user", "string_kernel", "string_user")
    readers = Readers(**dict.fromkeys(functions, near.addr))
    arena = replace(arena, module_code=far)
    return Linker(arch, replace(ABI, readers=readers), arena), near, far


def _veneer(target: Addr) -> bytes:
    # movabs target, %r11; jmp *%r11
    return b"\x49\xbb" + target.to_bytes(8, "little") + b"\x41\xff\xe3"


def _moved(plan: Plan, memory: CodeMemory) -> Plan:
    return replace(plan, site=replace(plan.site, addr=memory.stop))


def _calls(program: Program) -> set[int]:
    decoded = Decoder(64, program.code, ip=program.entry)
    return {each.near_branch_target for each in decoded if each.mnemonic == Mnemonic.CALL}


def _returning(plan: Plan) -> Plan:
    returns = Returns(entry=plan.site.addr, return_method=ReturnMethod.RETINSN, probes=plan.probes)
    return replace(plan, probes=(), returning=(Returning(role=Role.RETURN, returns=returns),))


def test_code_is_where_branches_of_its_site_reach_it_and_shares_nothing_with_far_code() -> None:
    plans = [_returning(plan) for plan in make_guest(["p f"] * 2).plans]
    linker, near, far = _far_linker(plans)

    (here, there), _ = linker.link([_moved(plans[0], near), _moved(plans[1], far)])

    assert near.addr <= here.entry < near.stop
    assert far.addr <= there.entry < far.stop
    (body,), (other,) = _calls(here), _calls(there)
    assert near.addr <= body < near.stop
    assert far.addr <= other < far.stop


def test_far_code_calls_functions_of_the_kernel_by_veneers_of_its_own() -> None:
    plans = list(make_guest(["p f +0(%di):ustring"] * 2).plans)
    linker, near, far = _far_linker(plans)

    (here, there), _ = linker.link([_moved(plans[0], near), _moved(plans[1], far)])

    veneers = dict(taken(linker))
    assert set(veneers.values()) == {_veneer(near.addr)}
    assert all(far.addr <= place < there.entry for place in veneers)
    assert near.addr in _calls(here)
    assert near.addr not in _calls(there)
    assert _calls(there) & set(veneers)


def test_every_piece_of_code_memory_has_an_entry_stub_and_trampolines_are_in_the_first() -> None:
    (plan,) = make_guest(["p f"]).plans
    linker, _, far = _far_linker([_hooked(plan, _upcall(2, plan.site.addr))])
    plan = _moved(plan, far)
    asking = replace(plan, upcalls=(_upcall(1, plan.site.addr),))
    taking = _hooked(plan, _upcall(2, plan.site.addr))

    (here, there), _ = linker.link([asking, taking])

    assert far.addr <= here.entry < there.entry < far.stop
    (instances,) = linker.instances
    assert instances.trampoline < far.addr
    # An entry stub is the first code besides veneers, and the same everywhere but for what it
    # calls.
    routines = [(at, len(code)) for at, code in taken(linker) if len(code) > 13]
    (first, size), *_ = routines
    assert (far.addr, size) in [(at & -4096, length) for at, length in routines]
    assert first < far.addr


@pytest.mark.parametrize("side", [-1, 1])
def test_a_module_too_far_from_the_memory_for_code_is_told(side: int) -> None:
    (plan,) = make_guest(["p f"]).plans
    code = make_arena().code
    far = Addr((code.addr if side < 0 else code.stop) + side * X86_64.reach)

    with pytest.raises(RefusedError, match="it is 2048 MiB away from the memory"):
        _linker([plan]).link([replace(plan, site=replace(plan.site, addr=far))])


def test_functions_that_only_python_looks_at_get_less_room() -> None:
    (plan,) = make_guest(["r f"]).plans
    hooked = _hooked(plan, _upcall(3, plan.site.addr))
    (here,) = hooked.returning
    recorded = replace(here.returns, probes=plan.probes)

    less, more = (
        {each.entry: n for each, n in instance_counts([replace(plan, returning=(some,))])}
        for some in (here, Returning(role=Role.HOOK, returns=recorded))
    )

    assert less[plan.site.addr] < more[plan.site.addr]


def test_linking_ends_where_its_checkpoint_raises() -> None:
    def checkpoint() -> None:
        raise KeyboardInterrupt

    plans = make_guest(["p f"] * 2).plans
    with pytest.raises(KeyboardInterrupt):
        _linker(plans).link(plans, checkpoint)


def _keeping(plan: Plan, *, generation: int = 0, stride: int = 0) -> Plan:
    """Return a plan whose returns are taken over, in one version of its function."""
    returns = Returns(
        entry=plan.site.addr,
        return_method=ReturnMethod.RETHOOK,
        probes=plan.probes,
        is_timed=True,
        generation=generation,
        room=stride,
    )
    return replace(plan, probes=(), returning=(Returning(role=Role.HOOK, returns=returns),))


def _returns(plan: Plan) -> Returns:
    return plan.returning[0].returns


def test_a_function_that_changes_keeps_its_table_and_has_another_trampoline() -> None:
    (plan,) = make_guest(["r f"]).plans
    older, newer = _keeping(plan), _keeping(plan, generation=1)
    linker = _linker([older])

    linker.link([older])
    taken(linker)
    programs, _ = linker.link([newer])

    first, second = linker.live
    assert replace(first, trampoline=second.trampoline) == second
    assert first.trampoline != second.trampoline
    code = dict(taken(linker))
    (trampoline,) = (c for at, c in code.items() if at < second.trampoline < at + len(c))
    assert trampoline[8:16] == first.addr.to_bytes(8, "little")
    assert [each.trampoline % 16 for each in (first, second)] == [8, 8]
    assert linker.tables_of([plan.site.addr]) == [first, second]
    linker.retire((), [_returns(older)])
    assert linker.live == [second]
    assert linker.instances == [second, first]
    # Calls in progress are in the table still.
    assert linker.free_retired([False] * len(linker.pool.retired), ()) == []
    linker.retire(programs, [_returns(newer)])
    assert linker.free_retired([False] * len(linker.pool.retired), ()) == [second]


def test_a_function_that_keeps_more_gets_another_table() -> None:
    (plan,) = make_guest(["r f"]).plans
    plans = [_keeping(plan), _keeping(plan, generation=1, stride=2)]
    size = sum(instances_size([each]) for each in plans)
    linker = Linker(X86_64, ABI, replace(make_arena(), instances_size=size))

    for each in plans:
        linker.link([each])

    first, second = linker.live
    assert first.addr + first.size <= second.addr
    assert (first.stride, second.stride) == tuple(_returns(each).stride for each in plans)


def test_what_one_version_of_a_function_has_is_made_once() -> None:
    first, second = map(_keeping, make_guest(["r f"] * 2).plans)
    again = replace(second, returning=first.returning)
    linker = _linker([first, second])

    linker.link([first])
    assert taken(linker)
    linker.link([again])

    assert taken(linker) == []
    assert len(linker.live) == 1


def test_of_a_link_that_fails_nothing_is_left() -> None:
    plans = make_guest(["r f"] * 4).plans
    hooked = [_hooked(plan, _upcall(3, plan.site.addr)) for plan in plans]
    arena = replace(make_arena(), instances_size=instances_size(hooked))
    linker = Linker(X86_64, ABI, replace(arena, code=CodeMemory(addr=arena.code.addr, size=0x1400)))

    with pytest.raises(NoRoomError):
        linker.link(hooked)

    assert (linker.live, linker.instances, linker.pool.retired) == ([], [], [])
    assert taken(linker) == []
    fresh = _linker(hooked)
    assert linker.link(hooked[:1]) == fresh.link(hooked[:1])
    assert taken(linker) == taken(fresh)


def test_numbers_that_are_let_go_of_are_told_and_free_when_nobody_is_in_their_code() -> None:
    plans = make_guest(["p f"] * 3).plans
    first, second, third = (replace(p, upcalls=(_upcall(9, p.site.addr),)) for p in plans)
    linker = _linker([])

    programs, _ = linker.link([first, second])
    assert linker.retire(programs[:1]) == [0]
    (program,), (group,) = linker.link([third])
    assert group.number == 2
    linker.retire([program])
    linker.free_retired([False, True], ())
    _, (group,) = linker.link([third])

    assert group.number == 0


def test_code_for_what_is_known_anew_is_compiled_anew() -> None:
    (plan,) = make_guest(["p f"]).plans
    linker = _linker([plan])
    ((before,), _), same = linker.link([plan]), replace(ABI)

    linker.set_abi(same)
    ((after,), _) = linker.link([plan])
    assert len(after.code) == len(before.code)
    linker.set_abi(replace(ABI, is_guarded=not ABI.is_guarded))
    ((guarded,), _) = linker.link([plan])

    assert guarded.code != after.code
