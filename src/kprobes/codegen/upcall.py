"""Upcall function: one vCPU asks Python through the mailbox, and waits for the answer.

The code is C, runtime/upcall.c, where its frame and the exchange are drawn; here is what it needs
of an architecture, a kernel and a session. It calls nothing of the guest.
"""

from collections.abc import Mapping

from kprobes.arch.arch import Arch
from kprobes.codegen import guard, per_cpu, runtime
from kprobes.codegen.context import Context
from kprobes.codegen.ir import Function, Value, const
from kprobes.codegen.object import read_template
from kprobes.model.abi import CPU_SHIFT, PERCPU_WORD, GuestAbi, Template
from kprobes.model.upcall import MailboxLayout
from kprobes.units import Addr

_MODULE = """{intrinsics}
{runtime}
{definitions}
{function}
!0 = !{{!"branch_weights", i32 1000, i32 1}}
!1 = !{{!"branch_weights", i32 1, i32 1000}}
!2 = !{{i32 1, !"override-stack-alignment", i32 {alignment}}}
!llvm.module.flags = !{{!2}}
attributes #0 = {{ noredzone nounwind "frame-pointer"="none" "no-builtins" }}
"""


def compile_upcall(arch: Arch, abi: GuestAbi, mailbox: Addr, layout: MailboxLayout) -> Template:
    """Return the code of ``void upcall(frame)``; it has no relocations.

    Args:
        arch: of the guest.
        abi: its constants and the session's.
        mailbox: where the area is.
        layout: of it.
    """
    from kprobes import llvm

    source = module_text(arch, abi, mailbox, layout)
    found = llvm.compile_object(source, arch.code)
    return read_template(found, arch.code)


def module_text(arch: Arch, abi: GuestAbi, mailbox: Addr, layout: MailboxLayout) -> str:
    """Return the module of the function, as LLVM IR.

    Args:
        arch: of the guest.
        abi: its constants and the session's.
        mailbox: where the area is.
        layout: of it.
    """
    context = Context(out=Function(), abi=abi, arch=arch, registers={}, stack=const(0))
    return _MODULE.format(
        intrinsics=arch.code.intrinsics,
        runtime=runtime.INTRINSICS,
        definitions=_definitions(context, mailbox, layout),
        function=runtime.part("upcall"),
        alignment=arch.code.call.alignment,
    )


def _definitions(context: Context, mailbox: Addr, layout: MailboxLayout) -> str:
    upcall, code = context.arch.upcall, context.code
    areas = {
        "absent": layout.absent,
        "present": layout.present,
        "ticks": layout.ticks,
        "missed": layout.missed,
        "asked": layout.asked,
        "gave_up": layout.gave_up,
        "answered": layout.answered,
        "requests": layout.requests,
        "answers": layout.answers,
    }
    values = {name: mailbox + offset for name, offset in areas.items()}
    values |= {"room": layout.room, "flags_at": len(upcall.saved) - 1, "pops": upcall.pops}
    functions: Mapping[str, runtime.Write] = {
        "guard_enter()": _guard_enter,
        "guard_leave()": guard.leave,
        "context_number()": _context_number,
        "cpu()": _cpu,
        "current_task()": per_cpu.task,
        "page_table()": lambda c: c.out.value("i64", upcall.page_table),
        "counter()": lambda c: c.out.value("i64", code.counter),
        "pause()": lambda c: c.out.emit(code.pause),
        "other_flags()": _other_flags,
        "count(i64 %place)": lambda c: guard.count_at(c, Value("i64", "%place")),
    }
    return runtime.definitions(context, values, functions)


def _guard_enter(context: Context) -> Value:
    # C has one return value where the guard has two ways to go on.
    f = context.out
    held, missed, done = (f.label(hint) for hint in ("held", "missed", "done"))
    guard.hold(context, lambda: None, missed)
    f.jump(held)
    f.place(held)
    f.jump(done)
    f.place(missed)
    f.jump(done)
    f.place(done)
    return f.phi({held: const(1, "i1"), missed: const(0, "i1")})


def _context_number(context: Context) -> Value:
    return context.out.resize(guard.context_number(context), "i64")


def _cpu(context: Context) -> Value:
    # The reservation word is ``cpu << 48 | position``, also where nothing is recorded.
    word = per_cpu.load(context, context.abi.percpu + PERCPU_WORD)
    return context.out.op("lshr", word, CPU_SHIFT)


def _other_flags(context: Context) -> Value:
    # On arm64 the entry stub saves the condition flags; DAIF and the like are read here.
    computed = context.code.call.computed.get(context.arch.upcall.saved[-1])
    return const(0) if computed is None else context.out.value("i64", computed)
