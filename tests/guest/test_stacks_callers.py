"""Return addresses that are ours are put back from outside: chains, doubles, dead stacks."""

import struct

from msgspec.structs import replace

from kprobes.guest.guest import GuestMemory
from kprobes.guest.stacks import awaited, find_caller, home, restore_callers, returned_to
from kprobes.model.plan import INSTANCE_VALUES, InstanceTable
from kprobes.units import Addr
from tests.build.guest import DATA, make_guest, make_memory
from tests.build.kernel import TEXT, make_kernel, symbol

CALLER = 0xFFFF_FFFF_8100_1234
STACK = Addr(DATA + 0x3000)
NOWHERE = Addr(0xFFFF_C9FF_0000_0000)
F = InstanceTable(
    addr=Addr(DATA), count=5, stride=INSTANCE_VALUES, trampoline=Addr(0xFFFF_FFFF_C000_0110)
)
G = InstanceTable(
    addr=Addr(DATA + 0x1000),
    count=7,
    stride=INSTANCE_VALUES + 16,
    trampoline=Addr(0xFFFF_FFFF_C000_0910),
)


def enter(
    memory: GuestMemory, instances: InstanceTable, slot: Addr, *callers: int, further: int = 0
) -> None:
    """Put an instance where the guest's code finds it, or so many instances after that.

    Args:
        memory: of the guest.
        instances: of the function.
        slot: of the call.
        callers: the return address, and what it stands for where that is a trampoline.
        further: than the home of the slot.
    """
    at = (home(instances.count, slot) + further) % instances.count
    words = struct.pack("<QQQ", slot, callers[0], callers[-1])
    memory.write(Addr(instances.addr + at * instances.stride), words)


def test_a_call_that_returns_to_us_returns_to_its_caller_again() -> None:
    memory = make_memory()
    enter(memory, F, STACK, CALLER)
    memory.set_u64(STACK, F.trampoline)

    assert restore_callers(memory, [F, G]) == 1

    assert memory.u64(STACK) == CALLER


def test_an_instance_that_is_found_later_than_its_home_counts_too() -> None:
    memory = make_memory()
    enter(memory, F, STACK, CALLER, further=F.count - 1)
    memory.set_u64(STACK, F.trampoline)

    restore_callers(memory, [F])

    assert memory.u64(STACK) == CALLER


def test_what_several_functions_have_taken_over_leads_to_the_first_caller() -> None:
    memory = make_memory()
    enter(memory, F, STACK, CALLER)
    enter(memory, G, STACK, F.trampoline, CALLER)
    memory.set_u64(STACK, G.trampoline)

    restore_callers(memory, [F, G])

    assert memory.u64(STACK) == CALLER


def test_of_two_instances_of_one_slot_the_first_is_the_innermost() -> None:
    memory = make_memory()
    enter(memory, F, STACK, G.trampoline, CALLER)
    enter(memory, F, STACK, CALLER + 8, further=2)
    memory.set_u64(STACK, F.trampoline)

    restore_callers(memory, [F, G])

    assert memory.u64(STACK) == CALLER


def test_a_call_that_is_only_kept_and_not_taken_over_says_nothing_of_its_slot() -> None:
    memory = make_memory()
    enter(memory, F, STACK, 0)
    enter(memory, F, STACK, CALLER, further=1)
    memory.set_u64(STACK, F.trampoline)

    restore_callers(memory, [F])

    assert memory.u64(STACK) == CALLER


def test_only_what_is_probed_no_more_is_given_back() -> None:
    memory = make_memory()
    enter(memory, F, STACK, CALLER)
    enter(memory, G, STACK, F.trampoline, CALLER)
    memory.set_u64(STACK, G.trampoline)

    # F took it over before G did, and goes on.
    assert restore_callers(memory, [G], kept={F.trampoline}) == 1

    assert memory.u64(STACK) == F.trampoline


def test_a_slot_that_holds_something_else_is_left_alone() -> None:
    memory = make_memory()
    enter(memory, F, STACK, CALLER)
    memory.set_u64(STACK, 42)

    assert restore_callers(memory, [F]) == 0

    assert memory.u64(STACK) == 42


def test_a_stack_that_is_gone_is_no_error_and_no_instance_is_freed() -> None:
    memory = make_memory()
    enter(memory, F, NOWHERE, CALLER)
    enter(memory, F, STACK, CALLER, further=1)
    memory.set_u64(STACK, F.trampoline)
    before = memory.read(F.addr, F.size)

    assert restore_callers(memory, [F]) == 1

    assert memory.read(F.addr, F.size) == before


def test_a_table_without_a_trampoline_is_not_looked_at() -> None:
    memory = make_memory()
    kept = InstanceTable(addr=NOWHERE, count=5, stride=INSTANCE_VALUES, trampoline=Addr(0))

    assert restore_callers(memory, [kept]) == 0


def test_a_call_that_the_kernels_own_return_probe_has_taken_from_us_is_waited_for() -> None:
    guest, theirs = make_guest(["p f"]).guest, TEXT + 0x5000
    named = replace(guest, kernel=make_kernel([symbol("arch_rethook_trampoline", theirs)]))
    enter(named.memory, F, STACK, CALLER)

    named.memory.set_u64(STACK, theirs)
    assert awaited(named, [F])

    named.memory.set_u64(STACK, CALLER)
    assert not awaited(named, [F])


def test_a_trampoline_is_kept_as_long_as_a_slot_or_another_call_leads_to_it() -> None:
    guest = make_guest(["p f"]).guest
    enter(guest.memory, F, STACK, CALLER)
    guest.memory.set_u64(STACK, F.trampoline)
    assert returned_to(guest, [F, G], []) == [F]

    enter(guest.memory, G, STACK, F.trampoline, CALLER)
    guest.memory.set_u64(STACK, G.trampoline)
    assert returned_to(guest, [F], [G]) == [F]
    assert returned_to(guest, [F], []) == []

    guest.memory.set_u64(STACK, CALLER)
    assert returned_to(guest, [G], [F]) == []


def test_the_caller_is_found_whoever_has_taken_the_return_over() -> None:
    memory = make_memory()
    memory.set_u64(STACK, CALLER)
    assert find_caller(memory, [F, G], STACK, Addr(memory.u64(STACK))) == CALLER

    enter(memory, G, STACK, F.trampoline, CALLER, further=2)
    memory.set_u64(STACK, G.trampoline)
    assert find_caller(memory, [F, G], STACK, Addr(memory.u64(STACK))) == CALLER


def test_a_call_that_was_not_taken_over_says_nothing_of_the_one_outside() -> None:
    memory = make_memory()
    enter(memory, F, STACK, 0)
    enter(memory, F, STACK, CALLER, further=1)
    memory.set_u64(STACK, F.trampoline)

    assert find_caller(memory, [F], STACK, Addr(memory.u64(STACK))) == CALLER
    assert restore_callers(memory, [F]) == 1
    assert memory.u64(STACK) == CALLER


def test_a_trampoline_without_a_call_is_shown_as_it_is() -> None:
    memory = make_memory()
    memory.set_u64(STACK, F.trampoline)

    assert find_caller(memory, [F], STACK, Addr(memory.u64(STACK))) == F.trampoline
