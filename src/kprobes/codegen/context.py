"""Context of all that emits code: the function that is being written, and facts of the target."""

from collections.abc import Mapping

from msgspec import Struct, field

from kprobes.arch.arch import Arch, CodeInfo
from kprobes.codegen.ir import Function, Value
from kprobes.model.abi import GuestAbi
from kprobes.model.resolved import Operand


class Early(Struct, frozen=True, kw_only=True):
    """A field's number that the filter has fetched.

    Attributes:
        number: 0 where it could not be read.
        is_fault: whether it could not.
    """

    number: Value
    is_fault: Value


class Returned(Struct, frozen=True, kw_only=True):
    """What a return probe's record tells of the call that returns.

    Attributes:
        caller: where it returns to.
        exit: the instruction by which the function was left, or 0.
        instance: where what its entry has left is, or None when nothing is.
        kept: what that is, in order.
    """

    caller: Value
    exit: Value
    instance: Value | None
    kept: tuple[Operand, ...]


class Context(Struct, kw_only=True):
    """One function of IR while it is being emitted.

    Attributes:
        out: where instructions go.
        abi: the guest's facts.
        arch: the architecture's.
        registers: the probed code's registers that are at hand, by pt_regs name.
        stack: the probed code's stack pointer.
        link: where the register with a call's return address is kept, which goes back from there;
            None where the return address is on the stack.
        result: where the register is kept that has what a function returns; None without a frame.
        holds_preemption: whether the code emitted now runs with the preempt count raised by us.
        early: by index, fields of the probe that the filter has fetched on every way to here.
        returned: the call that returns, where return probes record.
        pt_regs: where one is for the guest's unwinder; None where no stack is recorded.
        asked_stack: a variable that is 0 where no trigger has asked for the hit's stack; only where
            there are such triggers.
        stamped: a variable with the time of the hit's last record, 0 before there is one; only
            where somebody asks for it.
        parts: of the guest-side runtime that are called, with what they declare, in IR.
    """

    out: Function
    abi: GuestAbi
    arch: Arch
    registers: Mapping[str, Value]
    stack: Value
    link: Value | None = None
    result: Value | None = None
    holds_preemption: bool = False
    early: dict[int, Early] = field(default_factory=dict[int, Early])
    returned: Returned | None = None
    pt_regs: Value | None = None
    asked_stack: Value | None = None
    stamped: Value | None = None
    parts: dict[str, str] = field(default_factory=dict[str, str])

    # Two functions of one module have two contexts: a filter's quick steps, and the record. What
    # sees other registers, as a return's record does, has a copy made by ``replace``:
    # `out`, `early` and `parts` are then shared.
    @property
    def code(self) -> CodeInfo:
        """How this architecture's code is made."""
        return self.arch.code

    def time(self) -> Value:
        """Return the time as records have it: the raw counter, or the guest's own clock."""
        if self.abi.clock is None:
            return self.out.value("i64", self.code.counter)
        return self.out.call("clock", ())
