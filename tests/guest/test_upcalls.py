"""The mailbox from Python's side: who asks, what it asks, answers that are heard in time."""

import pytest
from msgspec.structs import replace

from kprobes.errors import GuestReplacedError
from kprobes.guest.upcalls import ticks_per_s
from kprobes.units import U64
from tests.build.callers import REGISTERS, SP, Callers
from tests.build.guest import make_guest
from tests.build.kernel import TEXT, make_kernel, symbol


@pytest.fixture(params=[True, False], ids=["mapped", "copied"])
def callers(request: pytest.FixtureRequest) -> Callers:
    made = Callers(has_views=request.param)
    made.mailbox.open()
    return made


def test_nobody_waits_before_it_is_open_nor_after_it_is_closed() -> None:
    callers = Callers()
    before = callers.is_anyone_there

    callers.mailbox.open()
    meanwhile = callers.is_anyone_there
    callers.mailbox.close()

    assert (before, meanwhile, callers.is_anyone_there) == (False, True, False)


def test_a_question_is_seen_once(callers: Callers) -> None:
    callers.ask(3)

    assert list(callers.mailbox.newly_asked()) == [3]
    assert list(callers.mailbox.newly_asked()) == []


def test_several_questions_are_all_seen(callers: Callers) -> None:
    for slot in (0, 5, 7):
        callers.ask(slot)

    assert list(callers.mailbox.newly_asked()) == [0, 5, 7]


def test_who_waits_is_read_as_it_asked(callers: Callers) -> None:
    callers.ask(6, upcall=9, ax=U64, r15=1 << 63)
    list(callers.mailbox.newly_asked())

    vcpu = callers.mailbox.read(6)

    assert vcpu is not None
    assert (vcpu.upcall, vcpu.cpu) == (9, 1)
    assert (vcpu.task, vcpu.page_table) == (0xFFFF_8880_0000_1000, 0x1234_5000)
    expected = {name: n for n, name in enumerate(REGISTERS)}
    assert vcpu.registers == expected | {"sp": SP, "ax": U64, "r15": 1 << 63}


def test_an_answer_has_every_register_and_the_question_s_number(callers: Callers) -> None:
    seq = callers.ask(2)
    list(callers.mailbox.newly_asked())
    vcpu = callers.mailbox.read(2)
    assert vcpu is not None
    vcpu.registers = {name: 100 + n for n, name in enumerate(REGISTERS)}

    callers.mailbox.answer(2, vcpu)

    assert callers.answer(2) == vcpu.registers
    assert callers.answered(2) == seq


def test_numbers_that_no_register_can_hold_are_cut(callers: Callers) -> None:
    callers.ask(0)
    list(callers.mailbox.newly_asked())
    vcpu = callers.mailbox.read(0)
    assert vcpu is not None
    vcpu.registers |= {"ax": -1, "bx": 1 << 64 | 5}

    callers.mailbox.answer(0, vcpu)

    assert (callers.answer(0)["ax"], callers.answer(0)["bx"]) == (U64, 5)


def test_who_has_given_up_is_not_read(callers: Callers) -> None:
    callers.ask(1)
    list(callers.mailbox.newly_asked())
    callers.give_up(1)

    assert callers.mailbox.read(1) is None


def test_after_one_gave_up_they_wait_again_when_python_comes_back(callers: Callers) -> None:
    callers.ask(1)
    callers.give_up(1)
    alone = callers.is_anyone_there

    callers.mailbox.come_back()

    assert (alone, callers.is_anyone_there) == (False, True)


def test_who_gives_up_late_does_not_make_python_absent_again(callers: Callers) -> None:
    before = callers.get(callers.layout.present)
    callers.give_up(0)
    callers.mailbox.come_back()

    callers.set(callers.layout.absent, before)

    assert callers.is_anyone_there


def test_questions_of_before_it_was_open_are_answered_if_somebody_still_waits() -> None:
    callers = Callers()
    callers.ask(0)
    callers.ask(1)
    callers.give_up(1)

    callers.mailbox.open()

    assert [slot for slot in callers.mailbox.newly_asked() if callers.mailbox.read(slot)] == [0]


def test_deadlines_and_counters_of_each_upcall_are_its_own(callers: Callers) -> None:
    layout = callers.layout
    callers.set(layout.missed + 8 * 4095, 17)

    callers.mailbox.set_ticks(4095, 1 << 40)

    assert (callers.mailbox.missed(4095), callers.mailbox.missed(0)) == (17, 0)
    assert (callers.get(layout.ticks + 8 * 4095), callers.get(layout.ticks)) == (1 << 40, 0)


def test_a_guest_that_writes_nonsense_everywhere_is_read_without_harm(callers: Callers) -> None:
    size = callers.layout.size
    callers.memory.write(callers.arena.mailbox, b"\xff" * size)

    seen = list(callers.mailbox.newly_asked())

    assert all(callers.mailbox.read(slot) is None for slot in seen)


def test_a_mailbox_of_a_guest_that_is_another_one_is_not_written(callers: Callers) -> None:
    def is_another() -> None:
        raise GuestReplacedError("the guest was rebooted")

    callers.mailbox.check = is_another

    for step in (callers.mailbox.open, callers.mailbox.close):
        with pytest.raises(GuestReplacedError):
            step()

    assert callers.is_anyone_there


def test_a_counter_that_nothing_tells_of_counts_as_fast_as_an_emulated_cpus() -> None:
    made = make_guest(["p f"])
    made.guest.memory.write(TEXT, (2_500_000).to_bytes(4, "little"))
    named = replace(made.guest, kernel=make_kernel([symbol("tsc_khz", TEXT, type="d")]))

    assert ticks_per_s(made.guest) == 1_000_000_000
    assert ticks_per_s(named) == 2_500_000_000
