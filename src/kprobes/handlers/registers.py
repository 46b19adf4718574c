"""The registers of probed code as a handler sees them: ``struct pt_regs`` by the kernel's names."""

from collections.abc import Callable, Iterator, Mapping
from operator import index
from typing import Any, SupportsIndex

from msgspec import Struct

from kprobes.errors import UsageError
from kprobes.handlers.arguments import RETVAL, Argument, Arguments, load_returned, store_returned
from kprobes.handlers.live import LiveKernel
from kprobes.handlers.memory import TaskMemory, pattern
from kprobes.handlers.values import Pointer, Typed
from kprobes.model.kernel import Prototype
from kprobes.model.upcall import WaitingVcpu

_IP = "ip"
"""What requests call the instruction pointer, whatever its name is."""


def _no_return() -> Prototype | None:
    raise UsageError("what a function returns is known only when it returns: to a Kretprobe")


class Hit(Struct, frozen=True, kw_only=True):
    """One vCPU at a probe.

    Attributes:
        live: the kernel that it runs.
        vcpu: the vCPU.
        module: whose code is probed, or "".
        constants: registers whose value is known at such a hit.
        arguments: returns those of the function that is entered, by name; UsageError when none
            is.
        returning: returns the function that returns, or None where no types tell; UsageError when
            none does.
    """

    live: LiveKernel
    vcpu: WaitingVcpu
    module: str
    constants: Mapping[str, int]
    arguments: Callable[[], Mapping[str, Argument]]
    returning: Callable[[], Prototype | None] = _no_return

    @property
    def typed(self) -> Typed:
        """The task's memory, with the types that the probed code has."""
        return self.live.typed(self.memory, self.module)

    @property
    def memory(self) -> TaskMemory:
        """All memory of the current task."""
        return self.live.memory_of(self.vcpu.page_table)

    @property
    def task(self) -> Pointer:
        """The current task."""
        return self.live.task(self.memory, self.vcpu.task)


class Registers:
    """What a handler gets as ``regs``: ``regs.di``, also ``regs["di"]``. Assigning changes them.

    Attributes:
        values_: of all registers by their pt_regs names.
        before_: the same when the handler was called.
        is_sent_: whether the instruction pointer was set, perhaps to what it was.
        hit_: what they belong to.
        pc_: the name of the instruction pointer.
    """

    __slots__ = ("before_", "hit_", "is_sent_", "pc_", "values_")
    is_sent_: bool
    before_: dict[str, int]
    hit_: Hit
    pc_: str
    values_: dict[str, int]

    def __init__(self, hit: Hit, *, ip: int) -> None:
        """Show the hit's registers, and this as ``ip``."""
        object.__setattr__(self, "hit_", hit)
        pc = hit.live.guest.arch.code.call.pc
        object.__setattr__(self, "pc_", pc)
        before = {**hit.constants, **hit.vcpu.registers}
        del before[_IP]
        before[pc] = ip
        object.__setattr__(self, "is_sent_", False)
        object.__setattr__(self, "before_", before)
        object.__setattr__(self, "values_", dict(before))

    @property
    def is_changed_(self) -> bool:
        """Whether any was changed, or ``pc_`` set to anything."""
        return self.is_sent_ or self.values_ != self.before_

    @property
    def changed_(self) -> set[str]:
        """Names of those that were changed, and ``pc_`` when that was set to anything."""
        changed = {name for name, value in self.values_.items() if value != self.before_[name]}
        return changed | {self.pc_} if self.is_sent_ else changed

    @property
    def ip_(self) -> int:
        """The instruction pointer."""
        return self.values_[self.pc_]

    @property
    def args(self) -> Arguments:
        """The arguments of the function that is entered, by name.

        Raises:
            UsageError: the probe is not at a function's entry, or its types are not known.
        """
        arguments = self.hit_.arguments()
        return Arguments(arguments, self.values_, self.hit_.typed)

    @property
    def retval(self) -> Any:
        """What the function returns, by its type; None for nothing. A number can be assigned.

        Where the kernel's types do not tell, it is the number in the register of returned values.

        Raises:
            UsageError: the probe is not at a function's return.
        """
        hit = self.hit_
        info, prototype = hit.live.guest.arch.returns, hit.returning()
        if prototype is None:
            return self.values_[info.value]
        return load_returned(info, prototype, self.values_, hit.typed)

    @retval.setter
    def retval(self, value: SupportsIndex) -> None:
        hit = self.hit_
        info, prototype = hit.live.guest.arch.returns, hit.returning()
        if prototype is None:
            self[info.value] = value
        else:
            store_returned(info, prototype, value, self.values_, hit.typed)

    @property
    def task(self) -> Pointer:
        """The current ``struct task_struct *``: ``regs.task.pid``, ``regs.task.comm.string()``."""
        return self.hit_.task

    @property
    def user(self) -> TaskMemory:
        """Memory as the current task has it: its user's and the kernel's."""
        return self.hit_.memory

    @property
    def cpu(self) -> int:
        """The number of the CPU that was hit."""
        return self.hit_.vcpu.cpu

    def __getattr__(self, name: str) -> int:
        name = self._aliases.get(name, name)
        if name not in self.values_:
            raise AttributeError(self._unknown(name))
        return self.values_[name]

    def __setattr__(self, name: str, value: Any) -> None:
        if name == RETVAL:
            object.__setattr__(self, name, value)
            return
        name = self._aliases.get(name, name)
        if name not in self.values_:
            raise AttributeError(self._unknown(name))
        self[name] = value

    def __getitem__(self, name: str) -> int:
        name = self._aliases.get(name, name)
        if name not in self.values_:
            raise KeyError(self._unknown(name))
        return self.values_[name]

    def __setitem__(self, name: str, value: Any) -> None:
        name = self._aliases.get(name, name)
        if name not in self.values_:
            raise KeyError(self._unknown(name))
        if name != self.pc_ and name not in self.hit_.vcpu.registers:
            raise AttributeError(f"regs.{name} can only be read")
        self.values_[name] = pattern(index(value), 64)
        if name == self.pc_:
            object.__setattr__(self, "is_sent_", True)

    def __iter__(self) -> Iterator[str]:
        return iter(self.values_)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self.values_, *self._aliases]

    def __repr__(self) -> str:
        live = self.hit_.live
        return live.guest.arch.show(self.values_, live.symbol(self.ip_))

    @property
    def _aliases(self) -> Mapping[str, str]:
        return self.hit_.live.guest.arch.code.call.aliases

    def _unknown(self, name: str) -> str:
        return f"no register {name}; there are {', '.join(self.values_)}"
