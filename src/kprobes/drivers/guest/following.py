"""Commands that are followed: a mark in their task, which fork copies to all that descends.

    struct task_struct { ... pid_t pid; ... u64 parent_exec_id; u64 self_exec_id; ... };

copy_process() copies the struct whole, setup_new_exec() adds one to ``self_exec_id``, and only
CLONE_PARENT's choice of a signal compares it, with a copy of itself. So a task that waits just
before its exec gets FOLLOWED - 1: nothing that it did until then counts.
"""

from kprobes.drivers.guest.guest import Guest
from kprobes.drivers.guest.layout import task_abi
from kprobes.drivers.guest.stacks import each_task
from kprobes.errors import TargetError
from kprobes.lang.tasks import FOLLOWED


def follow(guest: Guest, pid: int) -> None:
    """Have a task that waits to exec followed from its exec on, with all that descends from it.

    Raises:
        TargetError: there is no such task any more.
    """
    abi, memory = task_abi(guest.kernel), guest.memory
    with guest.stub.paused():
        for task in each_task(memory, guest.kernel):
            if int.from_bytes(memory.read(task + abi.pid, 4), "little") == pid:
                memory.set_u64(task + abi.exec_id, FOLLOWED - 1)
                return
    raise TargetError(f"the command, process {pid} of the guest, ended before it began")
