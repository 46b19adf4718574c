"""Calls in progress whose return a Python handler awaits: ``struct kretprobe_instance``.

They are kept here and not in the guest, by the place of their return address on their stack. A call
may have left by a jump into another function that comes back to this one: such calls have one
place, and the newest returns first.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

from kprobes.errors import MemoryFault
from kprobes.handlers.live import LiveKernel

_TASK = "task_struct"


class TaskName(NamedTuple):
    """A task for as long as it lives, and no other after it.

    Attributes:
        addr: of its ``task_struct``, which another may have later.
        pid: its number, 0 where the kernel's types are not known.
    """

    addr: int
    pid: int


class Instance(SimpleNamespace):
    """One call of a function. Handlers may give it attributes of their own.

    Attributes:
        probe: whose it is.
        data: ``data_size`` bytes for its handlers.
        arguments: of the call when the function was entered, by name: those that its handler
            takes by name.
    """

    probe: Any
    data: bytearray
    arguments: dict[str, Any]

    def __init__(self, probe: object, data_size: int) -> None:
        """Begin with zeros."""
        super().__init__(probe=probe, data=bytearray(data_size), arguments={})


class Instances:
    """Those of one probe.

    Attributes:
        limit: how many there can be at a time.
        missed: calls that found no room.
    """

    def __init__(self, limit: int = 0) -> None:
        self.limit = limit
        self.missed = 0
        self._by_slot: dict[int, list[_Kept]] = {}

    def __len__(self) -> int:
        return sum(each.instance is not None for kept in self._by_slot.values() for each in kept)

    def start(self, limit: int) -> None:
        """Forget all."""
        self.limit, self.missed, self._by_slot = limit, 0, {}

    def has_room(self, is_gone: Callable[[TaskName], bool]) -> bool:
        """Whether one more call can be kept; those of tasks that are gone make room."""
        if len(self) >= self.limit:
            left = {
                slot: [each for each in kept if not is_gone(each.task)]
                for slot, kept in self._by_slot.items()
            }
            self._by_slot = {slot: kept for slot, kept in left.items() if kept}
        return len(self) < self.limit

    def begin(self, slot: int, task: TaskName, instance: Instance | None) -> None:
        """Keep a call, or None for one that is not to be told of when it returns."""
        # Only this task stands there: others have died.
        kept = [each for each in self._by_slot.pop(slot, ()) if each.task == task]
        if instance is not None or kept:
            self._by_slot[slot] = [*kept, _Kept(task, instance)]

    def end(self, slot: int, task: TaskName, *, is_last: bool) -> Instance | None:
        """Forget the newest call of a slot, and return it; None when it was not kept.

        Args:
            slot: of the call.
            task: that returns.
            is_last: whether no other call returns by this slot: what is kept of any is stale.
        """
        kept = self._by_slot.pop(slot, [])
        found = kept.pop() if kept else None
        if kept and not is_last:
            self._by_slot[slot] = kept
        return found.instance if found is not None and found.task == task else None


class _Kept(NamedTuple):
    task: TaskName
    instance: Instance | None


def name_task(live: LiveKernel, addr: int) -> TaskName:
    """Return the task that a vCPU runs."""
    types = live.guest.kernel.types_for("")
    if types is None:
        return TaskName(addr, 0)
    return TaskName(addr, live.read_u32(addr + types.offset(_TASK, "pid")))


def is_gone(live: LiveKernel, task: TaskName) -> bool:
    """Whether a task has ended, so that none of its calls will return."""
    types = live.guest.kernel.types_for("")
    if types is None:
        return False
    try:
        has_ended = live.read_u32(task.addr + types.offset(_TASK, "exit_state")) != 0
        return has_ended or name_task(live, task.addr) != task
    except MemoryFault:
        return True
