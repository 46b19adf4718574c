"""Plans to code that is linked to where it will run in an arena; nothing is written yet.

The upcall entry stub of an arena: the code through which all hits go that wait for Python.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from kprobes.arch.arch import Arch, Restored
from kprobes.codegen.compile import Form, calls_guest, compile_form, needs_frame, saved_reads
from kprobes.codegen.upcall import compile_upcall
from kprobes.drain import nothing
from kprobes.errors import RefusedError, TargetError, UsageError
from kprobes.guest.arena import Area, Arena, aligned
from kprobes.model.abi import GuestAbi, Template
from kprobes.model.override import OVERRIDE_SIZE
from kprobes.model.plan import (
    TRAMPOLINE_HEADER,
    InstanceTable,
    Plan,
    Returning,
    ReturnMethod,
    Returns,
    Role,
)
from kprobes.model.resolved import ExitAddress, Resolved
from kprobes.model.upcall import MAX_UPCALLS, Detour, SiteUpcalls, Upcall, UpcallGroup
from kprobes.ports import Text
from kprobes.units import MIB, Addr


def build_entry_stub(arch: Arch, abi: GuestAbi, arena: Arena, place: Addr) -> bytes:
    """Return the entry stub's code for a place in an arena, its entry first."""
    template = compile_upcall(arch, abi, arena.mailbox, arena.mailbox_layout)
    # How long it is does not depend on what it calls.
    head = len(arch.upcall.entry_stub(place, place))
    function = aligned(place + head)
    code = arch.upcall.entry_stub(place, function)
    code = padded(code, function - place, arch.code.call.padding)
    return code + template.link(function, {})


def padded(code: bytes, size: int, padding: bytes) -> bytes:
    """Return code and as much padding after it as makes it so long."""
    missing = size - len(code)
    return code + (padding * missing)[:missing]


_INSTANCES_ROOM = 8 * MIB
_LEAST_INSTANCES, _MOST_INSTANCES = 64, 1024
"""Of one function, if its definitions say nothing; the kernel has 10, or twice its CPUs."""
_UPCALL_INSTANCES = 256
"""Of one function whose returns only Python looks at: there may be many, registered one by one."""
_NO_INSTANCES = InstanceTable(addr=Addr(0), count=0, stride=8, trampoline=Addr(0))
_READERS = ("copy_kernel", "copy_user", "string_kernel", "string_user")


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The code of one plan; a hit enters it at its start."""

    plan: Plan
    entry: Addr
    code: bytes
    groups: tuple[UpcallGroup, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Trampoline:
    """Code that the calls of a function return to, and the words before it.

    Attributes:
        returns: what is done there.
        instances: of its calls.
        text: where the code is, with those words.
    """

    returns: Returns
    instances: InstanceTable
    text: Text

    @property
    def is_silent(self) -> bool:
        """Whether calls only return from it."""
        return not (self.returns.probes or self.returns.upcalls)

    @property
    def silenced(self) -> "Trampoline":
        """The same, when nothing but that is done there."""
        return replace(self, returns=replace(self.returns, probes=(), upcalls=()))


def instance_counts(plans: Iterable[Plan]) -> list[tuple[Returns, int]]:
    """Return the return probes that need instances, and how many of them.

    A definition's maxactive counts where its function is probed in the way that the kernel does it.
    """
    by_entry = {each.returns.entry: each.returns for plan in plans for each in plan.returning}
    found = [each for each in by_entry.values() if each.keeps or each.takes_over]
    room = _INSTANCES_ROOM // (len(found) or 1)

    def count(returns: Returns) -> int:
        if returns.return_method is ReturnMethod.RETHOOK and returns.maxactive:
            return returns.maxactive
        most = _MOST_INSTANCES if returns.probes else _UPCALL_INSTANCES
        return min(max(room // returns.stride, _LEAST_INSTANCES), most)

    return [(returns, count(returns)) for returns in found]


def instances_size(plans: Iterable[Plan]) -> int:
    """Return the bytes of all instances that some plans need."""
    return sum(returns.stride * count for returns, count in instance_counts(plans))


class Linker:
    """Gives the code of plans its places in an arena, where branches of their sites reach it.

    Attributes:
        instances: of all functions whose calls need any.
        trampoline_upcalls: what is asked in trampolines.
        trampolines: that calls in progress may return to.
    """

    def __init__(self, arch: Arch, abi: GuestAbi, arena: Arena) -> None:
        self.instances: list[InstanceTable] = []
        self.trampoline_upcalls: list[UpcallGroup] = []
        self.trampolines: list[Trampoline] = []
        self._arch = arch
        self._abi = abi
        self._arena = arena
        self._areas = [Area(text=text) for text in arena.programs]
        self._next_instance = arena.instances
        self._templates: dict[object, Template] = {}
        self._instances_of: dict[Addr, InstanceTable] = {}
        self._missed_upcalls: dict[Addr, Addr] = {}
        self._numbers_left = iter(range(MAX_UPCALLS))

    def link(
        self, plans: Iterable[Plan], checkpoint: Callable[[], None] = nothing
    ) -> list[Program]:
        """Compile and place the code of some plans.

        Args:
            plans: whose code it is.
            checkpoint: called for every one; what it raises ends the linking.

        Raises:
            TargetError: the arena's code memory, or its room for instances, is full.
            RefusedError: a site is out of a branch's reach.
            UsageError: Python is asked at too many places.
        """
        found = [(self._area_of(plan), plan) for plan in plans]
        for area, plan in found:
            self._open(area, makes_upcall=_makes_upcall(plan))
        self._make_room([plan for _, plan in found])
        programs: list[Program] = []
        for area, plan in found:
            checkpoint()
            link = self._link_upcall if plan.upcalls else self._link
            programs.append(link(area, plan))
        return programs

    def silent(self, trampoline: Trampoline) -> bytes:
        """Return code for a silent trampoline's place; this linker links nothing besides."""
        self._instances_of = {trampoline.returns.entry: trampoline.instances}
        area = Area(text=trampoline.text)
        code, _ = self._trampoline_code(area, trampoline.returns)
        area.place(len(code))
        return code

    def take_routines(self) -> list[tuple[Addr, bytes]]:
        """Return code besides that of plans, by address: to be written before it is called."""
        found = [routine for area in self._areas for routine in area.routines]
        for area in self._areas:
            area.routines = []
        return found

    def place(self, size: int) -> Addr:
        """Return where so many bytes may be that are looked up, wherever they are.

        Raises:
            TargetError: no room is left.
        """
        return self._first.place(size)

    @property
    def _first(self) -> Area:
        # Trampolines are here, too: a function returns to them, however far away.
        return self._areas[0]

    def _area_of(self, plan: Plan) -> Area:
        # From its code a branch leads after the site.
        reach = self._arch.reach
        aways = [(area.away(plan.site.addr), area) for area in self._areas]
        found = next((area for away, area in aways if away <= reach), None)
        if found is None:
            away = min(away for away, _ in aways)
            raise RefusedError(
                f"{plan.name} cannot be probed: it is {away // MIB} MiB away from the memory for "
                f"probes' code, and branches reach {reach // MIB + 1} MiB"
            )
        return found

    def _open(self, area: Area, *, makes_upcall: bool) -> None:
        # The first one, too: trampolines are there.
        for each in (self._first, area):
            if not each.called:
                readers = {name: getattr(self._abi.readers, name) for name in _READERS}
                functions = {**readers, "clock": self._abi.clock or Addr(0)}
                each.called = {n: self._callable(each, at) for n, at in functions.items()}
            if makes_upcall and each.entry_stub is None:
                each.entry_stub = each.add(
                    build_entry_stub(self._arch, self._abi, self._arena, each.next)
                )

    def _callable(self, area: Area, function: Addr) -> Addr:
        make = self._arch.code.veneer
        if make is None or not function or area.away(function) <= self._arch.reach:
            return function
        return area.add(make(function))

    def _make_room(self, plans: Sequence[Plan]) -> None:
        for returns, count in instance_counts(plans):
            trampoline = self._first.next + TRAMPOLINE_HEADER if returns.takes_over else 0
            instances = InstanceTable(
                addr=self._next_instance,
                count=count,
                stride=returns.stride,
                trampoline=Addr(trampoline),
            )
            self._next_instance = Addr(instances.addr + instances.size)
            if self._next_instance > self._arena.instances + self._arena.instances_size:
                raise TargetError("no room is left for calls in progress; probe fewer functions")
            self._instances_of[returns.entry] = instances
            self.instances.append(instances)
            if returns.takes_over:
                self._add_trampoline(returns, instances)

    def _add_trampoline(self, returns: Returns, instances: InstanceTable) -> None:
        number = self._number(returns.upcalls)
        code, copies = self._trampoline_code(self._first, returns, number)
        start = self._first.add(code)
        text = start, Addr(start + len(code))
        self.trampolines.append(Trampoline(returns=returns, instances=instances, text=text))
        if number is not None:
            group = UpcallGroup(number=number, upcalls=returns.upcalls, copies=copies)
            self.trampoline_upcalls.append(group)
            self._missed_upcalls[instances.trampoline] = self._arena.missed_upcall(number)

    def _trampoline_code(
        self, area: Area, returns: Returns, number: int | None = None
    ) -> tuple[bytes, Mapping[Addr, Addr]]:
        # Whoever finds the trampoline on a stack finds the instances through the words before it.
        instances = self._instances_of[returns.entry]
        header = instances.addr.to_bytes(8, "little")
        header += (instances.stride << 32 | instances.count).to_bytes(8, "little")
        here = Returning(role=Role.TRAMPOLINE, returns=returns)
        form = Form(probes=(), returning=(here,), is_framed=True, is_patched=True)
        body = self._body(returns.entry, form)
        place, flags = instances.trampoline, self._changed((), (here,))

        def detour(at: Addr) -> Detour:
            if number is None:
                code = self._arch.returns.trampoline(place, at, flags=flags)
                return Detour(code=code, copies={})
            groups = _groups(area, number, None)
            return self._arch.upcall.at_trampoline(place, at, groups, place)

        def head(_: Addr, at: Addr) -> bytes:
            return header + detour(at).code

        code, (at,) = self._assembled(area, head, [body])
        return code, {} if number is None else detour(at).copies

    def _link(self, area: Area, plan: Plan) -> Program:
        if _is_shared(plan):
            return self._link_shared(area, plan)
        if any(each.is_conditional for each in plan.returning):
            return self._link_conditional(area, plan)
        body = self._body_of(plan, is_framed=self._is_framed(plan))
        if not self._is_framed(plan):
            return _program(area, plan, body.link(area))
        code, _ = self._assembled(area, self._head(plan), [body])
        return _program(area, plan, code)

    def _link_shared(self, area: Area, plan: Plan) -> Program:
        # Where a function is left does not matter to what its return records.
        (here,) = plan.returning
        entry = here.returns.entry
        if entry not in area.bodies:
            area.bodies[entry] = area.add(self._body_of(plan, is_framed=True).link(area))
        return _program(area, plan, self._head(plan)(area.next, area.bodies[entry]))

    def _link_conditional(self, area: Area, plan: Plan) -> Program:
        site, displaced = plan.site, plan.site.displaced
        if displaced is None:
            raise ValueError(f"{site.addr:#x} is a conditional jump, and no instruction")
        whole = Form(probes=(), returning=plan.returning, is_framed=True, is_patched=True)
        tail = self._body(site.addr, whole)
        always = self._body(site.addr, replace(whole, probes=plan.probes, returning=()))
        bodies = [tail, always] if plan.probes else [tail]
        detour, flags = self._arch.returns.branch_detour, self._changed(plan.probes, plan.returning)

        def head(place: Addr, tail: Addr, always: Addr | None = None) -> bytes:
            return detour(place, always, tail, displaced, flags=flags)

        return _program(area, plan, self._assembled(area, head, bodies)[0])

    def _link_upcall(self, area: Area, plan: Plan) -> Program:
        has_body = plan.probes or plan.returning or plan.overrides
        bodies = [self._body_of(plan, is_framed=True)] if has_body else []
        groups = (plan.before, plan.after)
        before, after = map(self._number, groups)
        asked = _groups(area, before, after)

        def head(place: Addr, body: Addr | None = None) -> bytes:
            return self._detour(plan, place, asked, body).code

        code, places = self._assembled(area, head, bodies)
        copies = self._detour(plan, area.next, asked, *places).copies
        groups = tuple(
            UpcallGroup(number=number, upcalls=upcalls, copies=copies)
            for number, upcalls in zip((before, after), groups, strict=True)
            if number is not None
        )
        return _program(area, plan, code, groups)

    def _number(self, upcalls: Sequence[Upcall]) -> int | None:
        if not upcalls:
            return None
        number = next(self._numbers_left, None)
        if number is None:
            raise UsageError(f"Python handlers at too many places: at most {MAX_UPCALLS}")
        return number

    def _detour(
        self, plan: Plan, entry: Addr, groups: SiteUpcalls, body: Addr | None = None
    ) -> Detour:
        upcall, site, skips = self._arch.upcall, plan.site, bool(plan.overrides)
        if site.displaced is not None:
            return upcall.at_instruction(entry, body, groups, site.displaced, skips=skips)
        back = Addr(site.addr + self._arch.site.size)
        return upcall.at_call(entry, body, groups, back, skips=skips)

    def _is_framed(self, plan: Plan) -> bool:
        if plan.site.displaced is not None or plan.overrides:
            return True
        return needs_frame(self._arch, plan.probes, plan.returning)

    def _head(self, plan: Plan) -> "_Head":
        arch, site = self._arch, plan.site
        probes = (*plan.probes, *(override.probe for override in plan.overrides))
        flags = self._changed(probes, plan.returning)
        reads = saved_reads(arch, probes, plan.returning)
        skips = bool(plan.overrides)

        def head(place: Addr, body: Addr) -> bytes:
            if site.displaced is not None:
                return arch.patch.detour(place, body, site.displaced, flags=flags, skips=skips)
            return arch.site.entry(place, body, flags=flags, reads=reads, skips=skips)

        return head

    def _assembled(
        self, area: Area, head: Callable[..., bytes], bodies: "Sequence[_Body]"
    ) -> tuple[bytes, list[Addr]]:
        # How long the head is does not depend on what it calls.
        entry, padding = area.next, self._arch.code.call.padding
        at = aligned(entry + len(head(entry, *(entry for _ in bodies))))
        places: list[Addr] = []
        code = b""
        for body in bodies:
            place = aligned(at + len(code))
            code = padded(code, place - at, padding) + body.link(area, place)
            places.append(place)
        start = head(entry, *places)
        return padded(start, at - entry, padding) + code if bodies else start, places

    def _changed(self, probes: Sequence[Resolved], returning: Sequence[Returning]) -> Restored:
        # A function of the guest's may set and clear more than a body itself does.
        calls = calls_guest(self._abi, probes, returning)
        return Restored.ALL if calls else Restored.ARITHMETIC

    def _body_of(self, plan: Plan, *, is_framed: bool) -> "_Body":
        form = Form(
            probes=plan.probes,
            returning=plan.returning,
            overrides=plan.overrides,
            is_framed=is_framed,
            is_patched=plan.site.displaced is not None,
        )
        return self._body(plan.site.ip, form)

    def _body(self, site: Addr, form: Form) -> "_Body":
        if form.shape not in self._templates:
            self._templates[form.shape] = compile_form(self._arch, self._abi, form)
        return _Body(template=self._templates[form.shape], numbers=self._numbers(site, form))

    def _numbers(self, site: Addr, form: Form) -> dict[str, int]:
        recorded = (*form.probes, *(p for each in form.returning for p in each.returns.probes))
        numbers: dict[str, int] = {
            f"event{n}": probe.layout.event_id for n, probe in enumerate(recorded)
        }
        numbers |= {
            f"override{n}": self._arena.overrides + OVERRIDE_SIZE * each.number
            for n, each in enumerate(form.overrides)
        }
        entries = {each.returns.entry for each in form.returning}
        # What is left here belongs to one function.
        instances = next(
            (self._instances_of[e] for e in entries if e in self._instances_of), _NO_INSTANCES
        )
        numbers |= {
            "missed_upcall": self._missed_upcalls.get(instances.trampoline, 0),
            "instances": instances.addr,
            "instance_count": instances.count,
            "trampoline": instances.trampoline,
        }
        return numbers | {"site": site}


class _Head(Protocol):
    """Returns the code for a place that calls a body."""

    def __call__(self, place: Addr, body: Addr, /) -> bytes: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Body:
    template: Template
    numbers: Mapping[str, int]

    def link(self, area: Area, place: Addr | None = None) -> bytes:
        return self.template.link(place or area.next, {**self.numbers, **area.called})


def _makes_upcall(plan: Plan) -> bool:
    return bool(plan.upcalls) or any(each.returns.upcalls for each in plan.returning)


def _is_shared(plan: Plan) -> bool:
    if plan.probes or plan.overrides or [each.role for each in plan.returning] != [Role.RETURN]:
        return False
    fetches = (fetch for probe in plan.recorded for fetch in probe.fetches)
    return not any(isinstance(fetch.operand, ExitAddress) for fetch in fetches)


def _groups(area: Area, before: int | None, after: int | None) -> SiteUpcalls:
    if area.entry_stub is None:
        raise ValueError("upcalls without an entry stub")
    return SiteUpcalls(entry_stub=area.entry_stub, before=before, after=after)


def _program(area: Area, plan: Plan, code: bytes, groups: tuple[UpcallGroup, ...] = ()) -> Program:
    return Program(plan=plan, entry=area.place(len(code)), code=code, groups=groups)
