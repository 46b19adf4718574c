"""The context of every emitting function: the function being written and the target's facts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from kprobes.arch.arch import Arch, CodeInfo
from kprobes.codegen.ir import Function, Value
from kprobes.model.abi import GuestAbi
from kprobes.model.resolved import Operand


@dataclass(frozen=True, slots=True, kw_only=True)
class Early:
    """A field's number that the filter has fetched.

    Attributes:
        number: 0 where it could not be read.
        is_fault: whether it could not.
    """

    number: Value
    is_fault: Value


@dataclass(frozen=True, slots=True, kw_only=True)
class Returned:
    """What a return probe's record tells of the call that returns.

    Attributes:
        caller: where it returns to.
        exit: the instruction by which the function was left, or 0.
        frame: where what its entry has left is, or None when nothing is.
        kept: what that is, in order.
    """

    caller: Value
    exit: Value
    frame: Value | None
    kept: tuple[Operand, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Routine:
    """A function of its own that the one being written calls."""

    parameters: tuple[str, ...]
    out: Function


@dataclass(slots=True, kw_only=True)
class Context:
    """One function of IR while it is being emitted.

    Attributes:
        out: where instructions go.
        abi: the guest's facts.
        arch: the architecture's.
        registers: the probed code's registers that are at hand, by pt_regs name.
        stack: the probed code's stack pointer.
        link: where the register with a call's return address is kept, which goes back from there;
            None where the return address is on the stack.
        holds_preemption: whether the code emitted now runs with the preempt count raised by us.
        early: by index, fields of the probe that the filter has fetched on every way to here.
        returned: the call that returns, where return probes record.
        stamped: a variable with the time of the hit's last record, 0 before there is one; only
            where somebody asks for it.
        routines: functions that are called, by name.
    """

    out: Function
    abi: GuestAbi
    arch: Arch
    registers: Mapping[str, Value]
    stack: Value
    link: Value | None = None
    holds_preemption: bool = False
    early: dict[int, Early] = field(default_factory=dict[int, Early])
    returned: Returned | None = None
    stamped: Value | None = None
    routines: dict[str, Routine] = field(default_factory=dict[str, Routine])

    @property
    def code(self) -> CodeInfo:
        """How this architecture's code is made."""
        return self.arch.code


def rarely(
    context: Context,
    name: str,
    given: Mapping[str, Value],
    write: Callable[[Context], Value],
) -> Value:
    """Call a function of its own, whose registers are not saved where a hit does not come to it.

    Args:
        context: of the caller.
        name: of the function, which is written once.
        given: by the names of its parameters.
        write: adds its code, and returns what it returns.
    """
    if name not in context.routines:
        out = Function()
        out.place("entry")
        result = write(replace(context, out=out, registers={}, link=None))
        out.emit(f"ret {result}")
        context.routines[name] = Routine(parameters=tuple(given), out=out)
    return context.out.call(name, given.values(), convention=context.code.call.convention)
