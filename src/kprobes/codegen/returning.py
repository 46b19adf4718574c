"""What return probes do at a site: their records at returns, and what these need before.

The roles are those of ``model.returns``. Here the stack pointer is where the return address is, the
call's slot: at the entry, at a return and at a jump out of the function alike.
"""

from collections.abc import Sequence
from dataclasses import replace

from kprobes.codegen import body
from kprobes.codegen.context import Context, Returned
from kprobes.codegen.ir import Value
from kprobes.model.returns import Returning, Returns, Role


def emit(context: Context, returning: Sequence[Returning], first: int) -> None:
    """Add what return probes do at a site; their events count from ``first``."""
    for each in returning:
        if each.role is not Role.RETURN:
            raise ValueError(f"{each.role} is not built")
        _emit_return(context, each.returns, first)
        first += len(each.returns.probes)


def _emit_return(context: Context, returns: Returns, first: int) -> None:
    f, slot = context.out, context.stack
    returned = Returned(
        caller=f.load(slot),
        exit=f.address_of("site"),
        frame=None,
        kept=returns.kept,
    )
    body.emit_probes(_behind(context, slot, returned), returns.probes, first)


def _behind(context: Context, slot: Value, returned: Returned) -> Context:
    # As the kernel's own return probes show it: the function has returned.
    stack = context.out.op("add", slot, context.arch.returns.behind)
    registers = {**context.registers, "sp": stack, "ip": returned.caller}
    return replace(context, registers=registers, stack=stack, returned=returned)
