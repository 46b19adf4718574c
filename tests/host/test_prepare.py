"""Definitions to events: names, filters, tasks."""

import pytest
from msgspec.structs import replace

from kprobes.errors import DefinitionError, NotLoadedError, RefusedError, UsageError
from kprobes.host.prepare import HostPreparer, HostProbe
from kprobes.model.options import Tasks
from tests.build.host_machine import make_machine
from tests.build.kernel import read

MACHINE = make_machine()


def prepared(*texts: str, filter: str = "", tasks: Tasks | None = None) -> list[HostProbe]:
    definitions = [replace(read(text), filter=filter) for text in texts]
    preparer = HostPreparer(MACHINE)
    return [each for one in definitions for each in preparer.prepare(one, tasks or Tasks())]


def test_every_probe_is_an_event_of_its_own() -> None:
    found = prepared("p:one vfs_read", "p:one void_fn", "p:theirs/one many", "p:two vfs_read")

    assert [each.name for each in found] == ["one", "one_2", "one_3", "two"]
    assert [each.resolved.layout.event for each in found] == ["one", "one", "one", "two"]
    assert [each.resolved.layout.event_id for each in found] == [1, 2, 3, 4]


def test_a_name_that_is_given_is_not_made_again() -> None:
    found = prepared("p:one vfs_read", "p:one_2 void_fn", "p:theirs/one many")

    assert [each.name for each in found] == ["one", "one_2", "one_3"]


def test_a_pattern_names_what_the_function_tracer_knows() -> None:
    found = prepared("p:all *e*")

    assert {each.resolved.layout.function for each in found} >= {"vfs_read"}
    assert "untyped" not in {each.resolved.layout.function for each in found}


def test_a_pattern_of_nothing_is_refused() -> None:
    with pytest.raises(RefusedError, match="function tracer knows none"):
        prepared("p untype*")


def test_a_module_that_is_not_loaded_is_told() -> None:
    with pytest.raises(NotLoadedError):
        prepared("p nfs:nfs_open")


def test_a_filter_goes_to_the_kernel_as_it_was_written() -> None:
    (found,) = prepared("p vfs_read count", filter='count > 5 && comm != "cat"')

    assert found.filter == 'count > 5 && comm != "cat"'


def test_a_wrong_filter_is_refused_before_the_kernel_sees_it() -> None:
    with pytest.raises(DefinitionError, match="Field not found"):
        prepared("p vfs_read count", filter="nothing > 5")


def test_a_filter_of_nothing_is_none() -> None:
    assert prepared("p vfs_read count", filter="0")[0].filter == ""


def test_tasks_are_part_of_the_filter() -> None:
    tasks = Tasks(pids=(7, 8), comms=("ls", "kworker/*", "a-name-that-is-too-long"))

    (found,) = prepared("p vfs_read count", filter="count > 5", tasks=tasks)

    assert found.filter == (
        "(common_pid == 7 || common_pid == 8) && "
        '(comm == "ls" || comm ~ "kworker/*" || comm == "a-name-that-is-") && (count > 5)'
    )


def test_an_argument_called_comm_does_not_take_the_tasks_place() -> None:
    (found,) = prepared("p vfs_read comm=%di", tasks=Tasks(comms=('q"q',)))

    assert found.filter == "COMM == 'q\"q'"


def test_a_task_that_no_filter_can_name_is_refused() -> None:
    with pytest.raises(UsageError):
        prepared("p vfs_read", tasks=Tasks(comms=("'\"",)))


def test_probes_of_one_event_must_be_alike() -> None:
    with pytest.raises(DefinitionError):
        prepared("p:one vfs_read a=count", "p:one many a=p1:s8")


def test_what_is_deleted_is_not_compared_with_what_comes_in_its_place() -> None:
    preparer, old, new = (
        HostPreparer(MACHINE),
        read("p:a vfs_read %di"),
        read("p:a vfs_read %di:u8"),
    )
    preparer.prepare(old, Tasks())

    with pytest.raises(DefinitionError, match="Argument type or name is different"):
        preparer.prepare(new, Tasks())
    preparer.compare_without([old])

    assert [each.name for each in preparer.prepare(new, Tasks())] == ["a_2"]


def test_the_name_of_what_the_kernel_never_had_is_given_again_at_once() -> None:
    preparer, one = HostPreparer(MACHINE), read("p:a vfs_read")
    preparer.prepare(one, Tasks())
    preparer.forget(one, is_new=True)

    assert [each.name for each in preparer.prepare(read("p:a vfs_read"), Tasks())] == ["a"]
