"""A vCPU that waits for Python: what it tells, what it takes back, and when it gives up."""

from collections.abc import Callable

import pytest

from kprobes.model.abi import GuestAbi
from kprobes.model.upcall import CONTEXTS
from tests.build.asking import AFTER, ELSEWHERE, LAYOUT, NUMBER, REGISTERS, AskingGuest
from tests.build.cpu import GPRS
from tests.build.machine import (
    ABI,
    ABI_FAR,
    ABI_HIGH,
    HARDIRQ,
    NMI,
    NO_RESCHED,
    SOFTIRQ,
    TASK,
    random_state,
)

LEVELS = {0: 0, SOFTIRQ: 1, HARDIRQ: 2, HARDIRQ | SOFTIRQ: 2}
"""Preempt counts and the contexts that they are."""


def _gives_all_back(guest: AskingGuest) -> bool:
    machine = guest.machine
    return (machine.guard(), machine.preempt_count & 0xFF) == (0, 0)


@pytest.mark.parametrize("abi", [ABI, ABI_HIGH, ABI_FAR], ids=["low", "high", "far"])
def test_an_answer_that_changes_nothing_leaves_every_register_flag_and_stack_word(
    abi: GuestAbi,
) -> None:
    guest = AskingGuest(abi)
    for _ in range(20):
        state = random_state(guest.random)

        pc, after = guest.hit(state, then=lambda: guest.answer(0))

        assert (pc, after) == (AFTER, state)
        assert guest.is_stack_untouched()
        assert _gives_all_back(guest)
    assert guest.missed == 0


def test_a_request_tells_registers_flags_task_and_page_table() -> None:
    guest = AskingGuest()
    state = random_state(guest.random)
    seen: dict[str, int] = {}

    def look() -> None:
        seen.update(guest.request(0))
        guest.answer(0)

    guest.hit(state, then=look)

    assert {name: seen[name] for name in (*GPRS, "sp", "flags")} == state
    assert (seen["upcall"], seen["task"], seen["page_table"]) == (NUMBER, TASK, 0)


def test_every_register_that_an_answer_changes_is_changed() -> None:
    guest = AskingGuest()
    for _ in range(20):
        new = random_state(guest.random)
        state = random_state(guest.random)
        new["sp"] = state["sp"]

        pc, after = guest.hit(state, then=lambda new=new: guest.answer(0, lambda r: r.update(new)))

        assert (pc, after) == (AFTER, new)
        assert guest.is_stack_untouched()


@pytest.mark.parametrize("up", [0, 8, 16, 24, 256])
def test_an_answer_may_go_elsewhere_with_the_stack_pointer_further_up(up: int) -> None:
    guest = AskingGuest()
    state = random_state(guest.random)
    state["sp"] = min(state["sp"], state["sp"] - 512)

    def redirect(registers: dict[str, int]) -> None:
        registers["ip"] = ELSEWHERE
        registers["sp"] += up

    pc, after = guest.hit(state, then=lambda: guest.answer(0, redirect))

    assert (pc, after) == (ELSEWHERE, {**state, "sp": state["sp"] + up})
    above = guest.machine.cpu.read(after["sp"], 64)
    assert above == guest.stack_before[up : up + 64]


@pytest.mark.parametrize(("count", "level"), LEVELS.items())
@pytest.mark.parametrize("cpu", [0, 1])
def test_every_context_of_every_cpu_asks_in_a_slot_of_its_own(
    count: int, level: int, cpu: int
) -> None:
    guest = AskingGuest()
    guest.machine.move_to(cpu)
    guest.machine.preempt_count = NO_RESCHED | count
    slot = guest.slot(level)

    pc, _ = guest.hit(then=lambda: guest.answer(slot))

    assert pc == AFTER
    assert [guest.asked(n) for n in range(LAYOUT.slots)] == [
        int(n == cpu * CONTEXTS + level) for n in range(LAYOUT.slots)
    ]


def test_questions_are_numbered_and_an_old_answer_answers_no_new_question() -> None:
    guest = AskingGuest()
    guest.hit(then=lambda: guest.answer(0))
    order: list[str] = []

    def late() -> None:
        order.append("waits")
        guest.answer(0)

    guest.hit(then=late)

    assert order == ["waits"]
    assert guest.asked(0) == 2


def test_an_interrupt_of_a_vcpu_that_waits_is_served_meanwhile() -> None:
    guest = AskingGuest()
    state = random_state(guest.random)
    inner: list[int] = []

    def interrupt() -> None:
        below = guest.below()
        pc, after = guest.hit(below, then=lambda: guest.answer(guest.slot(2)))
        assert after == below
        inner.append(pc)

    def meanwhile() -> None:
        before = guest.stack_before
        guest.in_interrupt(HARDIRQ, interrupt)
        guest.stack_before = before
        guest.answer(0)

    pc, after = guest.hit(state, then=meanwhile)

    assert (pc, after, inner) == (AFTER, state, [AFTER])
    assert guest.is_stack_untouched()
    assert _gives_all_back(guest)


def _is_missed(guest: AskingGuest, then: Callable[[], None] | None = None) -> bool:
    state, before = random_state(guest.random), guest.missed
    preempt, guard = guest.machine.preempt_count, guest.machine.guard()

    pc, after = guest.hit(state, then=then)

    assert (pc, after) == (AFTER, state)
    assert guest.is_stack_untouched()
    assert (guest.machine.preempt_count, guest.machine.guard()) == (preempt, guard)
    return guest.missed == before + 1


def test_a_hit_where_nobody_attends_does_not_ask_and_is_counted() -> None:
    guest = AskingGuest()
    guest.set(LAYOUT.present, 0)

    assert _is_missed(guest)
    assert guest.asked(0) == 0


def test_a_hit_without_an_answer_goes_on_after_its_deadline_and_is_counted() -> None:
    guest = AskingGuest()
    guest.set(LAYOUT.ticks + 8 * NUMBER, 10_000)

    assert _is_missed(guest)
    assert guest.asked(0) == guest.get(LAYOUT.gave_up) == 1


def test_after_one_gave_up_nobody_waits_until_python_says_that_it_is_there() -> None:
    guest = AskingGuest()
    guest.set(LAYOUT.ticks + 8 * NUMBER, 10_000)
    assert _is_missed(guest)

    assert _is_missed(guest)
    assert guest.asked(0) == 1

    guest.set(LAYOUT.present, 2)
    guest.set(LAYOUT.ticks + 8 * NUMBER, 1 << 62)
    assert not _is_missed(guest, lambda: guest.answer(0))


def test_an_answer_that_comes_too_late_is_not_taken_for_the_next_question() -> None:
    guest = AskingGuest()
    guest.set(LAYOUT.ticks + 8 * NUMBER, 10_000)
    assert _is_missed(guest)
    guest.answer(0, lambda registers: registers.update(dict.fromkeys(REGISTERS, 0)))
    guest.set(LAYOUT.present, 2)

    assert _is_missed(guest)


def test_who_waits_when_nobody_attends_any_more_goes_on_at_once() -> None:
    guest = AskingGuest()

    assert _is_missed(guest, lambda: guest.set(LAYOUT.present, 0))
    assert guest.get(LAYOUT.gave_up) == 1


@pytest.mark.parametrize(("count", "bit"), [(0, 1), (SOFTIRQ, 2), (HARDIRQ, 4)])
def test_a_hit_inside_another_hit_s_own_path_is_counted_and_does_not_ask(
    count: int, bit: int
) -> None:
    guest = AskingGuest()
    machine = guest.machine
    machine.preempt_count = NO_RESCHED | count
    machine.cpu.set_number(machine.percpu(ABI.percpu + 24), bit, 4)

    assert _is_missed(guest)
    assert not any(guest.asked(n) for n in range(LAYOUT.slots))


def test_an_nmi_never_waits() -> None:
    guest = AskingGuest()
    guest.machine.preempt_count = NO_RESCHED | NMI | HARDIRQ

    assert _is_missed(guest)
    assert not any(guest.asked(n) for n in range(LAYOUT.slots))


def test_preemption_and_interrupts_of_the_same_context_are_held_off_while_it_waits() -> None:
    guest = AskingGuest()

    def look() -> None:
        guest.machine.must_be_guarded()
        guest.answer(0)

    pc, _ = guest.hit(then=look)

    assert pc == AFTER
