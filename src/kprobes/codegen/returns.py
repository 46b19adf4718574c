"""Code of return probes at a site: their records at returns, and what these need before.

The roles are those of ``model.plan``. At the entry, at a return and at a jump out of the
function alike the stack pointer is where the return address is: at the call's slot. In the
trampoline it is a word above. Instances and slots are handled whatever else a hit interrupts; only
records are guarded.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager

from msgspec import Struct
from msgspec.structs import replace

from kprobes.codegen import fetch, guard, instances, record
from kprobes.codegen.context import Context, Returned
from kprobes.codegen.ir import Value, const
from kprobes.model.plan import (
    INSTANCE_CALLER,
    INSTANCE_COUNTER,
    INSTANCE_EXIT,
    INSTANCE_GENERATION,
    INSTANCE_ORIGIN,
    INSTANCE_VALUES,
    Returning,
    Returns,
    Role,
)
from kprobes.model.resolved import calls_guest, can_fault

_WORD = 8


def emit(context: Context, returning: Sequence[Returning], first: int) -> None:
    """Add what return probes do at a site.

    Args:
        context: what is being written.
        returning: of one function each; all of the same.
        first: the number of the first one's event among the site's.
    """
    for each in returning:
        instances.add(context, each.returns.stride)
        roles = _Roles(context=context, returns=each.returns, first=first)
        match each.role:
            case Role.ENTER:
                roles.enter(is_hooked=False)
            case Role.HOOK:
                roles.enter(is_hooked=True)
            case Role.TAIL:
                roles.tail()
            case Role.RETURN:
                roles.at_return()
            case Role.TRAMPOLINE:
                roles.at_trampoline()
        first += len(each.returns.probes)


#              sp                     instance                      return address
#
# ENTER        slot                   claimed, values kept          as it is
# HOOK         slot                   claimed, values kept          the trampoline's
# TAIL         slot                   found, or claimed; exit set   the trampoline's
# RETURN       slot                   found, read, released         as it is
# TRAMPOLINE   slot, and a word (x86) found, read, released         put back from the instance
#
# A RETURN needs an instance only for probes that need something of the entry. That there is none is
# not an error: the call began before these were armed, or found no room and was counted. A probe
# that came when others were there already does not record calls whose entry kept nothing for it.
class _Roles(Struct, frozen=True, kw_only=True):
    context: Context
    returns: Returns
    first: int

    def enter(self, *, is_hooked: bool) -> None:
        f = self.context.out
        out = f.label("out")
        instance = self._inserted(out, is_hooked=is_hooked)
        f.store(f.op("add", instance, INSTANCE_EXIT), const(0))
        self._keep(instance)
        if is_hooked:
            instances.take_over(self.context, instance, self.context.stack)
        f.jump(out)
        f.place(out)

    def tail(self) -> None:
        f, context = self.context.out, self.context
        out = f.label("out")
        if self.returns.keeps:
            absent, kept = f.label("absent"), f.label("kept")
            instance = instances.find(context, context.stack, absent, is_taken=False)
            f.jump(kept)
            f.place(absent)
            self._count_nmissed(needs_entry=False)
            self._count_missed_upcall()
            f.jump(out)
            f.place(kept)
        else:
            instance = self._inserted(out, is_hooked=True)
        f.store(f.op("add", instance, INSTANCE_EXIT), f.address_of("site"))
        instances.take_over(context, instance, context.stack)
        f.jump(out)
        f.place(out)

    def at_return(self) -> None:
        f, slot = self.context.out, self.context.stack
        out, absent = f.label("out"), f.label("absent")
        if self.returns.keeps:
            instance = instances.find(self.context, slot, absent, is_taken=False)
            self._record(slot, self._left_here(slot), instance)
            instances.release(self.context, instance)
            f.jump(out)
            f.place(absent)
        if not all(probe.at_entry for probe in self.returns.probes):
            self._record(slot, self._left_here(slot), None)
        f.jump(out)
        f.place(out)

    def _left_here(self, slot: Value) -> tuple[Value, Value]:
        caller = instances.origin(self.context, self._caller(slot), slot)
        return caller, self.context.out.address_of("site")

    def at_trampoline(self) -> None:
        f, context = self.context.out, self.context
        slot = f.op("sub", context.stack, context.arch.returns.return_address_size)
        lost, put_back = f.label("lost"), f.label("put_back")
        instance = instances.find(context, slot, lost, is_taken=True)
        f.store(instances.link(context, slot), f.load(f.op("add", instance, INSTANCE_CALLER)))
        origin, left = (
            f.load(f.op("add", instance, at)) for at in (INSTANCE_ORIGIN, INSTANCE_EXIT)
        )
        self._record(slot, (origin, left), instance)
        instances.release(context, instance)
        f.jump(put_back)
        f.place(lost)
        # There is nowhere to return to.
        f.emit("call void @llvm.trap()")
        f.emit("unreachable")
        f.place(put_back)

    def _inserted(self, out: str, *, is_hooked: bool) -> Value:
        # Where there is no room Python does not see the return, unless it does so without an
        # instance.
        f, context = self.context.out, self.context
        full, inserted = f.label("full"), f.label("inserted")
        instance = instances.insert(context, context.stack, full)
        f.jump(inserted)
        f.place(full)
        # At a return instruction a probe that needs nothing of the entry sees it all the same.
        self._count_nmissed(needs_entry=True)
        if is_hooked:
            self._count_nmissed(needs_entry=False)
        if is_hooked:
            self._count_missed_upcall()
        f.jump(out)
        f.place(inserted)
        place = f.op("add", instance, INSTANCE_GENERATION)
        f.store(place, const(self.returns.generation))
        return instance

    def _count_nmissed(self, *, needs_entry: bool) -> None:
        for index, probe in enumerate(self.returns.probes, self.first):
            if bool(probe.at_entry) == needs_entry:
                guard.count(self.context, f"event{index}", self.context.abi.nmissed)

    def _count_missed_upcall(self) -> None:
        context = self.context
        if self.returns.upcalls:
            place = context.out.value("i64", context.code.address.format("missed_upcall"))
            guard.count_at(context, place)

    def _keep(self, instance: Value) -> None:
        f, context = self.context.out, self.context
        if self.returns.is_timed:
            self._keep_time(f.op("add", instance, INSTANCE_COUNTER))
        for index, operand in enumerate(self.returns.kept):
            if can_fault(operand):
                raise TypeError(f"{operand} is memory, which is read at the return")
            place = f.op("add", instance, INSTANCE_VALUES + _WORD * index)
            with self._held(is_needed=calls_guest(operand)):
                f.store(place, fetch.value_of(context, operand, ""))

    def _keep_time(self, place: Value) -> None:
        with self._held(is_needed=self.context.abi.clock is not None):
            self.context.out.store(place, record.stamp(self.context))

    @contextmanager
    def _held(self, *, is_needed: bool) -> Generator[None]:
        # What a hit of our own path keeps is not recorded either.
        if not is_needed:
            yield
            return
        f, missed = self.context.out, self.context.out.label("missed")
        guard.hold(self.context, lambda: None, missed)
        yield
        guard.leave(self.context)
        f.jump(missed)
        f.place(missed)

    def _caller(self, slot: Value) -> Value:
        # A return instruction may be one that checks the address, and has it protected until then.
        f, plain = self.context.out, self.context.arch.returns.plain
        found = f.load(instances.link(self.context, slot))
        return found if plain is None else f.value("i64", plain.format(found.text))

    def _record(self, slot: Value, where: tuple[Value, Value], instance: Value | None) -> None:
        # As the kernel's own return probes show it: the function has returned.
        context, (caller, left) = self.context, where
        stack = context.out.op("add", slot, context.arch.returns.return_address_size)
        names = (context.code.call.pc, context.code.call.link)
        shown = replace(
            context,
            registers={**context.registers, "sp": stack} | {n: caller for n in names if n},
            stack=stack,
            returned=Returned(caller=caller, exit=left, instance=instance, kept=self.returns.kept),
        )
        for index, probe in enumerate(self.returns.probes):
            if instance is None and probe.at_entry:
                continue
            generation = self.returns.first_generations[index]
            older = self._unless_older(instance, generation) if generation else None
            record.emit_probes(shown, (probe,), self.first + index)
            if older is not None:
                context.out.jump(older)
                context.out.place(older)

    def _unless_older(self, instance: Value | None, generation: int) -> str:
        # What a probe that came later needs, the entries of calls in progress have not kept.
        f = self.context.out
        if instance is None:
            raise ValueError("a probe needs what no entry keeps")
        found = f.load(f.op("add", instance, INSTANCE_GENERATION))
        older, newer = f.label("older"), f.label("newer")
        f.branch(f.compare("ult", found, generation), older, newer, is_likely=False)
        f.place(newer)
        return older
