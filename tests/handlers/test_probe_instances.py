"""Calls in progress: the newest of a slot first, those of the dead make room."""

import pytest

from kprobes.handlers.probe import Instance, Instances, TaskName, is_gone, name_task
from tests.build.handled import DATA, TASK, make_handled

ONE, OTHER = TaskName(0x1000, 7), TaskName(0x2000, 8)
SLOT, NEXT = 0x8000, 0x8100


def make_instances(limit: int = 10) -> Instances:
    made = Instances()
    made.start(limit)
    return made


def make_instance() -> Instance:
    return Instance(None, 0)


def nobody(task: TaskName) -> bool:
    del task
    return False


def test_a_call_is_found_by_its_slot_once() -> None:
    instances, instance = make_instances(), make_instance()

    instances.begin(SLOT, ONE, instance)

    assert instances.end(NEXT, ONE, is_last=True) is None
    assert instances.end(SLOT, ONE, is_last=True) is instance
    assert instances.end(SLOT, ONE, is_last=True) is None
    assert len(instances) == 0


def test_calls_that_jumped_into_each_other_return_newest_first() -> None:
    instances, outer, inner = make_instances(), make_instance(), make_instance()
    instances.begin(SLOT, ONE, outer)
    instances.begin(SLOT, ONE, inner)

    assert instances.end(SLOT, ONE, is_last=False) is inner
    assert instances.end(SLOT, ONE, is_last=True) is outer


def test_what_is_left_of_a_slot_that_nobody_else_returns_by_is_stale() -> None:
    instances, inner = make_instances(), make_instance()
    instances.begin(SLOT, ONE, make_instance())
    instances.begin(SLOT, ONE, inner)

    assert instances.end(SLOT, ONE, is_last=True) is inner
    assert instances.end(SLOT, ONE, is_last=True) is None


def test_a_call_that_is_not_told_of_hides_the_one_outside() -> None:
    instances, outer = make_instances(), make_instance()
    instances.begin(SLOT, ONE, outer)
    instances.begin(SLOT, ONE, None)

    assert instances.end(SLOT, ONE, is_last=False) is None
    assert instances.end(SLOT, ONE, is_last=True) is outer


def test_a_call_that_is_not_told_of_takes_no_room_by_itself() -> None:
    instances = make_instances(limit=1)

    instances.begin(SLOT, ONE, None)

    assert instances.has_room(nobody)
    assert instances.end(SLOT, ONE, is_last=True) is None


def test_a_slot_that_another_task_enters_is_no_longer_that_of_the_one_before() -> None:
    instances, mine = make_instances(), make_instance()
    instances.begin(SLOT, OTHER, make_instance())
    instances.begin(SLOT, ONE, mine)

    assert len(instances) == 1
    assert instances.end(SLOT, ONE, is_last=False) is mine
    assert instances.end(SLOT, ONE, is_last=False) is None


def test_another_task_s_call_is_not_returned() -> None:
    instances = make_instances()
    instances.begin(SLOT, OTHER, make_instance())

    assert instances.end(SLOT, ONE, is_last=True) is None


def test_at_the_limit_only_tasks_that_are_gone_make_room() -> None:
    instances = make_instances(limit=2)
    instances.begin(SLOT, ONE, make_instance())
    instances.begin(NEXT, OTHER, make_instance())

    assert not instances.has_room(nobody)
    assert len(instances) == 2
    assert instances.has_room(lambda task: task == OTHER)
    assert len(instances) == 1


@pytest.mark.parametrize("is_typed", [False, True])
def test_a_task_is_its_address_and_its_number(is_typed: bool) -> None:
    live = make_handled(is_typed=is_typed).live

    assert name_task(live, TASK) == TaskName(TASK, 77 if is_typed else 0)
    assert not is_gone(live, name_task(live, TASK))


@pytest.mark.parametrize(("offset", "value"), [(8, 78), (24, 16)])
def test_a_task_with_another_number_or_an_end_is_gone(offset: int, value: int) -> None:
    made = make_handled()
    task = name_task(made.live, TASK)

    made.put(TASK + offset, value, 4)

    assert is_gone(made.live, task)


def test_a_task_whose_memory_is_gone_is_gone() -> None:
    assert is_gone(make_handled().live, TaskName(DATA + 0x100_0000, 7))
