from pathlib import Path

import pytest

from kprobes.transport.tracefs import running_comms, saved_comms


def test_threads_have_names_of_their_own(tmp_path: Path) -> None:
    for pid, tid, name in ((10, 10, "python3"), (10, 11, "a worker"), (2, 2, "kthreadd")):
        task = tmp_path / str(pid) / "task" / str(tid)
        task.mkdir(parents=True)
        (task / "comm").write_text(f"{name}\n")

    assert running_comms(tmp_path) == {10: b"python3", 11: b"a worker", 2: b"kthreadd"}


@pytest.mark.parametrize(
    ("told", "name"),
    [
        (b"kworker/0:1-events", b"kworker/0:1"),
        (b"kworker/u4:0+writeback", b"kworker/u4:0"),
        (b"kworker/1:1H", b"kworker/1:1H"),
        (b"kworker/R-rcu_gp", b"kworker/R-rcu_g"),
        (b"rcu_tasks_kthread", b"rcu_tasks_kthre"),
        (b"a-b", b"a-b"),
    ],
)
def test_a_kernel_thread_is_called_as_its_comm_is(tmp_path: Path, told: bytes, name: bytes) -> None:
    task = tmp_path / "7/task/7"
    task.mkdir(parents=True)
    (task / "comm").write_bytes(told + b"\n")

    assert running_comms(tmp_path) == {7: name}


def test_the_tracers_notes_are_read(tmp_path: Path) -> None:
    (tmp_path / "saved_cmdlines").write_bytes(b"12 a name\n3 sh\n\nnonsense\n")

    assert saved_comms(tmp_path) == {12: b"a name", 3: b"sh"}


def test_a_tracer_without_notes_has_none(tmp_path: Path) -> None:
    assert saved_comms(tmp_path) == {}
