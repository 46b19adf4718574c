"""The function that the gate calls: one vCPU asks Python, and waits for the answer.

It holds preemption and this context's guard bit, so the CPU's slot for the context is its own; see
``model.upcall`` for the words of it. It calls nothing of the guest.
"""

from dataclasses import dataclass

from kprobes.arch.arch import Arch
from kprobes.codegen import guard, per_cpu
from kprobes.codegen.context import Context
from kprobes.codegen.ir import Function, Value, const
from kprobes.codegen.object import read_template
from kprobes.model.abi import CPU_SHIFT, PERCPU_WORD, GuestAbi, Template
from kprobes.model.upcall import CONTEXTS, REQUEST_HEAD, MailboxLayout
from kprobes.units import Addr

_WORD = 8
_NMI = 3

_MODULE = """{intrinsics}
define dso_local void @upcall(i64 %frame) #0 {{
{lines}
}}
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
    from kprobes.codegen import llvm

    source = module_text(arch, abi, mailbox, layout)
    found = llvm.compile_object(source, arch.code)
    return read_template(found, arch.code)


def module_text(arch: Arch, abi: GuestAbi, mailbox: Addr, layout: MailboxLayout) -> str:
    """Return the function as LLVM IR."""
    out = Function()
    out.place("entry")
    frame = Value("i64", "%frame")
    context = Context(out=out, abi=abi, arch=arch, registers={}, stack=frame)
    _Emitter(context=context, frame=frame, mailbox=mailbox, layout=layout).emit()
    return _MODULE.format(
        intrinsics=arch.code.intrinsics,
        alignment=arch.code.call.alignment,
        lines="\n".join(out.lines),
    )


@dataclass(frozen=True, slots=True)
class _Slot:
    # Addresses of one slot's words; `seq` is the question that was asked last.
    asked: Value
    gave_up: Value
    answered: Value
    request: Value
    answer: Value
    seq: Value


@dataclass(frozen=True, slots=True, kw_only=True)
class _Emitter:
    context: Context
    frame: Value
    mailbox: Addr
    layout: MailboxLayout

    def emit(self) -> None:
        f = self.context.out
        miss, leave, unhandled = (f.label(hint) for hint in ("miss", "leave", "unhandled"))
        number = self._load(self._number_at)
        count = self._counter(number)
        guard.hold(self.context, count, unhandled)
        level = f.resize(guard.context_number(self.context), "i64")
        # Whatever an NMI interrupted may be what Python waits for; and it stops all others.
        self._branch_away(f.compare("eq", level, _NMI), miss)
        present = self._present()
        self._branch_away(f.compare("eq", present, 0), miss)
        self._branch_away(f.compare("eq", present, f.load(self._word(self.layout.absent))), miss)
        slot = self._slot(level)
        self._ask(slot, number)
        self._wait(slot, (number, present), miss)
        self._take(slot)
        guard.leave(self.context)
        f.emit("ret void")
        f.place(miss)
        count()
        f.jump(leave)
        f.place(leave)
        guard.leave(self.context)
        f.jump(unhandled)
        f.place(unhandled)
        # Go on at [continue] with the stack as it was.
        if self.context.arch.upcall.pops:
            self._return_to(self._load(self._flags_at), self._top)
        else:
            f.store(self._at(self._number_at), const(0))
        f.emit("ret void")

    # What the gate pushed, in words from the frame on.

    @property
    def _flags_at(self) -> int:
        return len(self.context.arch.upcall.saved) - 1

    @property
    def _number_at(self) -> int:
        return self._flags_at + 1

    @property
    def _continue_at(self) -> int:
        return self._flags_at + 2

    def _at(self, index: int) -> Value:
        return self.context.out.op("add", self.frame, _WORD * index)

    def _load(self, index: int) -> Value:
        return self.context.out.load(self._at(index))

    @property
    def _top(self) -> Value:
        return self._at(self._continue_at + 1)

    def _saved(self, index: int) -> Value:
        f, arch = self.context.out, self.context.arch
        word = self._load(index)
        more = arch.code.call.computed.get(arch.upcall.saved[index])
        return word if more is None else f.op("or", word, f.value("i64", more))

    def _word(self, offset: int) -> Value:
        return const(self.mailbox + offset)

    def _present(self) -> Value:
        return self.context.out.load(self._word(self.layout.present))

    def _indexed(self, offset: int, index: Value, size: int = _WORD) -> Value:
        f = self.context.out
        return f.op("add", f.op("mul", index, size), self.mailbox + offset)

    def _branch_away(self, condition: Value, label: str) -> None:
        f, going = self.context.out, self.context.out.label("going")
        f.branch(condition, label, going, is_likely=False)
        f.place(going)

    def _counter(self, number: Value) -> "_Counter":
        return _Counter(self.context, self._indexed(self.layout.missed, number))

    def _slot(self, level: Value) -> _Slot:
        f, layout, abi = self.context.out, self.layout, self.context.abi
        word = per_cpu.load(self.context, abi.percpu + PERCPU_WORD)
        cpu = f.op("lshr", word, CPU_SHIFT)
        index = f.op("add", f.op("mul", cpu, CONTEXTS), level)
        asked = self._indexed(layout.asked, index)
        return _Slot(
            asked=asked,
            gave_up=self._indexed(layout.gave_up, index),
            answered=self._indexed(layout.answered, index),
            request=self._indexed(layout.requests, index, layout.room),
            answer=self._indexed(layout.answers, index, layout.room),
            seq=f.op("add", f.load(asked), 1),
        )

    def _ask(self, slot: _Slot, number: Value) -> None:
        f, context = self.context.out, self.context
        info = {
            "upcall": number,
            "task": per_cpu.task(context),
            "page_table": f.value("i64", context.arch.upcall.page_table),
        }
        registers = [self._saved(index) for index in range(self._number_at)]
        ip, sp = self._load(self._continue_at), self._top
        words = [*(info[name] for name in REQUEST_HEAD), *registers, ip, sp]
        for index, word in enumerate(words):
            f.store(f.op("add", slot.request, _WORD * index), word)
        f.publish(slot.asked, slot.seq)

    def _wait(self, slot: _Slot, asked: tuple[Value, Value], miss: str) -> None:
        f, layout = self.context.out, self.layout
        number, present = asked
        spin, alone, early, late, lost, done = (
            f.label(hint) for hint in ("spin", "alone", "early", "late", "lost", "done")
        )
        limit = f.load(self._indexed(layout.ticks, number))
        start = f.value("i64", self.context.code.counter)
        f.jump(spin)
        f.place(spin)
        f.branch(f.compare("eq", f.load(slot.answered), slot.seq), done, alone)
        f.place(alone)
        f.branch(f.compare("eq", self._present(), 0), lost, early, is_likely=False)
        f.place(early)
        f.emit(self.context.arch.upcall.pause)
        spent = f.op("sub", f.value("i64", self.context.code.counter), start)
        f.branch(f.compare("ugt", spent, limit), late, spin, is_likely=False)
        f.place(late)
        f.store(self._word(layout.absent), present)
        f.jump(lost)
        f.place(lost)
        f.publish(slot.gave_up, slot.seq)
        f.jump(miss)
        f.place(done)

    def _take(self, slot: _Slot) -> None:
        f = self.context.out
        flags, ip, sp = (self._answer(slot, self._flags_at + index) for index in range(3))
        for index in range(self._flags_at):
            f.store(self._at(index), self._answer(slot, index))
        if self.context.arch.upcall.pops:
            f.store(f.op("sub", sp, _WORD), ip)
            self._return_to(flags, sp)
            return
        f.store(self._at(self._flags_at), flags)
        is_stay = f.compare("eq", ip, self._load(self._continue_at))
        is_here = f.op("and", is_stay, f.compare("eq", sp, self._top))
        f.store(self._at(self._number_at), f.select(is_here, const(0), sp))
        f.store(self._at(self._continue_at), ip)

    def _answer(self, slot: _Slot, index: int) -> Value:
        f = self.context.out
        return f.load(f.op("add", slot.answer, _WORD * index))

    def _return_to(self, flags: Value, sp: Value) -> None:
        f = self.context.out
        below = f.op("sub", sp, 2 * _WORD)
        f.store(below, flags)
        f.store(self._at(self._flags_at), below)


@dataclass(frozen=True, slots=True)
class _Counter:
    context: Context
    place: Value

    def __call__(self) -> None:
        guard.count_at(self.context, self.place)
