"""Plans to code that is linked to where it will run in an arena; nothing is written yet.

The upcall entry stub of an arena: the code through which all hits go that wait for Python.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol

from msgspec import Struct, field
from msgspec.structs import replace

from kprobes.arch.arch import Arch, Restored
from kprobes.codegen.compile import Form, calls_guest, compile_form, needs_frame, saved_reads
from kprobes.codegen.upcall import compile_upcall
from kprobes.drain import nothing
from kprobes.errors import NoRoomError, RefusedError
from kprobes.guest.arena import Arena
from kprobes.guest.room import NOWHERE, Area, Pool, Retired, aligned
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
from kprobes.model.upcall import Detour, SiteUpcalls, Upcall, UpcallGroup
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
_HEAD_ROOM, _STUB_ROOM, _ALIGNMENT = 1024, 4096, 16
"""Bytes that are enough: for what comes before a site's bodies, for the entry stub, for padding."""
_READERS = (
    *("copy_kernel", "copy_user", "string_kernel", "string_user"),
    *("walk_stack", "walk_user_stack"),
)


class Program(Struct, frozen=True, kw_only=True):
    """The code of one plan; a hit enters it at its start."""

    plan: Plan
    entry: Addr
    code: bytes
    groups: tuple[UpcallGroup, ...] = ()

    @property
    def text(self) -> Text:
        """Where it is: [start, stop)."""
        return self.entry, Addr(self.entry + len(self.code))


class _Function(Struct, kw_only=True):
    # What one version of a function's return probes has: its bodies by area, the trampoline's text
    # with the words before it, and what is asked there.
    instances: InstanceTable | None = None
    trampoline: Text | None = None
    bodies: dict[Text, Text] = field(default_factory=dict[Text, Text])
    group: UpcallGroup | None = None
    missed_upcall: int = 0

    def retired(self) -> list[Retired]:
        numbers = () if self.group is None else (self.group.number,)
        end = Retired(text=self.trampoline or NOWHERE, numbers=numbers, instances=self.instances)
        return [*(Retired(text=text) for text in self.bodies.values()), end]


_NO_FUNCTION = _Function()


def instance_counts(plans: Iterable[Plan]) -> list[tuple[Returns, int]]:
    """Return the return probes that need instances, and how many of them.

    A definition's maxactive counts where its function is probed in the way that the kernel does it.
    """
    by_entry = {each.returns.entry: each.returns for plan in plans for each in plan.returning}
    found = [each for each in by_entry.values() if each.has_instances]
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
    """Gives the code of plans its places in a session's memory, where branches of sites reach it.

    Attributes:
        abi: what code that is linked from now on knows of the guest.
        pool: the memory.
        tables: where those of hist triggers are, by their numbers.
    """

    def __init__(self, arch: Arch, abi: GuestAbi, arena: Arena) -> None:
        self.abi = abi
        self.tables: dict[int, Addr] = {}
        self.pool = Pool(arena)
        self._arch = arch
        self._arena = arena
        self._templates: dict[object, Template] = {}
        # By a function's entry, and the generation of its return probes.
        self._functions: dict[Addr, dict[int, _Function]] = {}

    def set_abi(self, abi: GuestAbi) -> None:
        """Let this be what code knows of the guest that is linked from now on."""
        if abi != self.abi:
            self.abi = abi
            self._templates.clear()

    @property
    def live(self) -> list[InstanceTable]:
        """Tables of calls of functions whose returns are probed."""
        versions = (each for found in self._functions.values() for each in found.values())
        return [each.instances for each in versions if each.instances is not None]

    @property
    def instances(self) -> list[InstanceTable]:
        """Tables of all calls that may be in progress, one for each trampoline that they have."""
        retired = (each.instances for each in self.pool.retired)
        return [*self.live, *(table for table in retired if table is not None)]

    def tables_of(self, entries: Collection[Addr]) -> list[InstanceTable]:
        """Return the tables of all calls of some functions that may be in progress."""
        found = (each for entry in entries for each in self._functions.get(entry, {}).values())
        addrs = {each.instances.addr for each in found if each.instances is not None}
        return [table for table in self.instances if table.addr in addrs and table.trampoline]

    def link(
        self, plans: Sequence[Plan], checkpoint: Callable[[], None] = nothing
    ) -> tuple[list[Program], list[UpcallGroup]]:
        """Compile and place the code of some plans: of all of them, or of none.

        Args:
            plans: whose code it is.
            checkpoint: called for every one; what it raises ends the linking.

        Returns:
            Their programs, and all that Python is asked there and in their trampolines.

        Raises:
            NoRoomError: the memory for code, or for instances, is full.
            RefusedError: a site is out of a branch's reach.
            UsageError: Python is asked at too many places.
        """
        functions = {entry: dict(found) for entry, found in self._functions.items()}
        try:
            with self.pool.all_or_nothing():
                new = self._make_room(plans)
                programs: list[Program] = []
                for plan in plans:
                    checkpoint()
                    programs.append(self._link_near(plan))
        except BaseException:
            self._functions = functions
            raise
        groups = [group for program in programs for group in program.groups]
        return programs, [*groups, *(each.group for each in new if each.group is not None)]

    def retire(self, programs: Iterable[Program], returns: Iterable[Returns] = ()) -> list[int]:
        """Let code go that no site leads to any more, and return the numbers that it asks by.

        Args:
            programs: of sites that are as they were, or lead elsewhere.
            returns: return probes, all of whose sites are so.
        """
        returns = list(returns)
        gone = self._going(programs, returns)
        for each in returns:
            versions = self._functions.get(each.entry, {})
            versions.pop(each.generation, None)
            if not versions:
                self._functions.pop(each.entry, None)
        self.pool.retired += gone
        return [number for each in gone for number in each.numbers]

    def texts(self, programs: Iterable[Program], returns: Iterable[Returns]) -> list[Text]:
        """Return where the code is that ``retire`` would let go, and that asks nobody."""
        gone = self._going(programs, returns)
        return [each.text for each in gone if each.text != NOWHERE and not each.numbers]

    def _going(self, programs: Iterable[Program], returns: Iterable[Returns]) -> list[Retired]:
        gone = [
            Retired(text=each.text, numbers=tuple(group.number for group in each.groups))
            for each in programs
        ]
        for each in returns:
            function = self._functions.get(each.entry, {}).get(each.generation)
            gone += () if function is None else function.retired()
        return gone

    def free_retired(
        self, are_inside: Sequence[bool], in_use: Collection[InstanceTable]
    ) -> list[InstanceTable]:
        """Have room again where code was let go of; see ``Pool.free_retired``."""
        return self.pool.free_retired(are_inside, in_use, self.live)

    @property
    def routines(self) -> list[tuple[Addr, bytes]]:
        """Code besides that of plans, by address: to be written before it is called."""
        return [routine for area in self.pool.areas for routine in area.routines]

    def forget_routines(self) -> None:
        """Take all routines as written."""
        for area in self.pool.areas:
            area.routines = []

    def place(self, size: int) -> Text:
        """Take so many bytes of code memory that are looked up, wherever they are.

        Raises:
            NoRoomError: no room is left.
        """
        place, _ = self.pool.take_code(self._first, size, lambda _: bytes(size))
        return place, Addr(place + size)

    @property
    def _first(self) -> Area:
        return self.pool.areas[0]

    def _link_near(self, plan: Plan) -> Program:
        # From its code a branch leads after the site.
        reach, site = self._arch.reach, plan.site
        place = self._arena.listeners if site.is_tracepoint else site.addr
        aways = [area.away(place) for area in self.pool.areas]
        near = [area for area, away in zip(self.pool.areas, aways, strict=True) if away <= reach]
        if not near:
            raise RefusedError(
                f"{plan.name} cannot be probed: it is {min(aways) // MIB} MiB away from the memory "
                f"for probes' code, and branches reach {reach // MIB + 1} MiB"
            )
        for area in near[:-1]:
            try:
                return self._link(area, plan)
            except NoRoomError:
                continue
        return self._link(near[-1], plan)

    def _open(self, area: Area, *, makes_upcall: bool) -> None:
        if not area.called:
            readers = {name: getattr(self.abi.readers, name) for name in _READERS}
            functions = {**readers, "clock": self.abi.clock or Addr(0)}
            area.called = {n: self._callable(area, at) for n, at in functions.items()}
        if makes_upcall and area.entry_stub is None:

            def make(place: Addr) -> bytes:
                return build_entry_stub(self._arch, self.abi, self._arena, place)

            area.entry_stub = self.pool.take_routine(area, _STUB_ROOM, make, is_own=True)[0]

    def _callable(self, area: Area, function: Addr) -> Addr:
        make = self._arch.code.veneer
        if make is None or not function or area.away(function) <= self._arch.reach:
            return function
        code = make(function)
        return self.pool.take_routine(area, len(code), lambda _: code, is_own=True)[0]

    def _make_room(self, plans: Sequence[Plan]) -> "list[_Function]":
        all_returns = {e.returns.entry: e.returns for plan in plans for e in plan.returning}
        counts = {returns.entry: n for returns, n in instance_counts(plans)}
        found: list[_Function] = []
        for entry, returns in all_returns.items():
            versions = self._functions.setdefault(entry, {})
            if returns.generation in versions:
                continue
            function = _Function()
            if entry in counts:
                function.instances = self._table(returns, counts[entry], versions)
            versions[returns.generation] = function
            found.append(function)
            if returns.takes_over:
                self._add_trampoline(returns, function)
        return found

    def _table(
        self, returns: Returns, count: int, versions: "Mapping[int, _Function]"
    ) -> InstanceTable:
        # Calls in progress stay where they are when other probes come, or some go.
        tables = [each.instances for each in versions.values() if each.instances is not None]
        if tables and tables[-1].stride == returns.stride:
            return tables[-1]
        addr = self.pool.take_instances(returns.stride * count)
        return InstanceTable(addr=addr, count=count, stride=returns.stride, trampoline=Addr(0))

    def _add_trampoline(self, returns: Returns, function: "_Function") -> None:
        # Who finds the trampoline on a stack finds the instances through the words before it.
        table = function.instances
        if table is None:
            raise ValueError("a trampoline without instances")
        self._open(self._first, makes_upcall=bool(returns.upcalls))
        number = self._number(returns.upcalls)
        if number is not None:
            function.missed_upcall = self._arena.missed_upcall(number)
        copies: dict[Addr, Addr] = {}

        def make(start: Addr) -> bytes:
            place = Addr(start + TRAMPOLINE_HEADER)
            function.instances = replace(table, trampoline=place)
            code, found = self._trampoline_code(returns, function, place, number)
            copies.update(found)
            return code

        most = self._trampoline_body(returns).most + _HEAD_ROOM
        function.trampoline = self.pool.take_routine(self._first, most, make)
        if number is not None:
            function.group = UpcallGroup(number=number, upcalls=returns.upcalls, copies=copies)

    def _function(self, returns: Returns) -> "_Function":
        return self._functions[returns.entry][returns.generation]

    def _trampoline_body(self, returns: Returns) -> "_Body":
        here = Returning(role=Role.TRAMPOLINE, returns=returns)
        form = Form(probes=(), returning=(here,), is_framed=True, is_patched=True)
        return self._body(returns.entry, form)

    def _trampoline_code(
        self, returns: Returns, function: "_Function", place: Addr, number: int | None
    ) -> tuple[bytes, Mapping[Addr, Addr]]:
        table, area = function.instances, self._first
        assert table is not None
        header = bytes(8) + table.addr.to_bytes(8, "little")
        header += (table.stride << 32 | table.count).to_bytes(8, "little")
        body = self._trampoline_body(returns)
        flags = self._changed((), (Returning(role=Role.TRAMPOLINE, returns=returns),))

        def detour(at: Addr) -> Detour:
            if number is None:
                code = self._arch.returns.trampoline(place, at, flags=flags)
                return Detour(code=code, copies={})
            groups = _groups(area, number, None)
            return self._arch.upcall.at_trampoline(place, at, groups, place)

        def head(_: Addr, at: Addr) -> bytes:
            return header + detour(at).code

        start = Addr(place - TRAMPOLINE_HEADER)
        code, (at,) = self._assembled(area, head, [body], start)
        return code, {} if number is None else detour(at).copies

    def _link(self, area: Area, plan: Plan) -> Program:
        self._open(area, makes_upcall=_makes_upcall(plan))
        if plan.upcalls:
            return self._link_upcall(area, plan)
        if _is_shared(plan):
            return self._link_shared(area, plan)
        if any(each.is_conditional for each in plan.returning):
            return self._link_conditional(area, plan)
        is_framed = self._is_framed(plan)
        body = self._body_of(plan, is_framed=is_framed)
        if not is_framed:
            return self._program(area, plan, body.most, lambda place: body.link(area, place))
        return self._headed(area, plan, self._head(plan), [body])

    def _link_shared(self, area: Area, plan: Plan) -> Program:
        # Where a function is left does not matter to what its return records.
        (here,) = plan.returning
        function = self._function(here.returns)
        if area.text not in function.bodies:
            body = self._body_of(plan, is_framed=True)
            function.bodies[area.text] = self.pool.take_routine(
                area, body.most, lambda place: body.link(area, place)
            )
        shared, head = function.bodies[area.text][0], self._head(plan)
        return self._program(area, plan, _HEAD_ROOM, lambda place: head(place, shared))

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

        return self._headed(area, plan, head, bodies)

    def _link_upcall(self, area: Area, plan: Plan) -> Program:
        has_body = plan.probes or plan.returning or plan.overrides
        bodies = [self._body_of(plan, is_framed=True)] if has_body else []
        upcalls = (plan.before, plan.after)
        before, after = map(self._number, upcalls)
        asked = _groups(area, before, after)
        copies: dict[Addr, Addr] = {}

        def head(place: Addr, body: Addr | None = None) -> bytes:
            found = self._detour(plan, place, asked, body)
            copies.clear()
            copies.update(found.copies)
            return found.code

        program = self._headed(area, plan, head, bodies)
        groups = tuple(
            UpcallGroup(number=number, upcalls=found, copies=copies)
            for number, found in zip((before, after), upcalls, strict=True)
            if number is not None
        )
        return replace(program, groups=groups)

    def _headed(
        self, area: Area, plan: Plan, head: Callable[..., bytes], bodies: "Sequence[_Body]"
    ) -> Program:
        most = _HEAD_ROOM + sum(body.most for body in bodies)
        return self._program(
            area, plan, most, lambda place: self._assembled(area, head, bodies, place)[0]
        )

    def _program(self, area: Area, plan: Plan, most: int, make: Callable[[Addr], bytes]) -> Program:
        entry, code = self.pool.take_code(area, most, make)
        return Program(plan=plan, entry=entry, code=code)

    def _number(self, upcalls: Sequence[Upcall]) -> int | None:
        return self.pool.take_number() if upcalls else None

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
        self, area: Area, head: Callable[..., bytes], bodies: "Sequence[_Body]", entry: Addr
    ) -> tuple[bytes, list[Addr]]:
        # How long the head is does not depend on what it calls.
        padding = self._arch.code.call.padding
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
        calls = calls_guest(self.abi, probes, returning)
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
        shape = form.shape
        template = self._templates.get(shape)
        if template is None:
            template = self._templates[shape] = compile_form(self._arch, self.abi, form)
        return _Body(template=template, numbers=self._numbers(site, form))

    def _numbers(self, site: Addr, form: Form) -> dict[str, int]:
        numbers: dict[str, int] = {"site": site}
        for n, probe in enumerate(form.recorded):
            numbers[f"event{n}"] = probe.layout.event_id
            for table in probe.tables:
                numbers[f"ip_event{n}"] = probe.layout.ip
                numbers[f"table{table.number}_event{n}"] = self.tables[table.number]
        for n, override in enumerate(form.overrides):
            numbers[f"override{n}"] = self._arena.overrides + OVERRIDE_SIZE * override.number
        # What is left here belongs to one function.
        functions = [self._function(each.returns) for each in form.returning]
        function = next((each for each in functions if each.instances is not None), _NO_FUNCTION)
        instances = function.instances or _NO_INSTANCES
        numbers["missed_upcall"] = function.missed_upcall
        numbers["instances"] = instances.addr
        numbers["instance_count"] = instances.count
        numbers["trampoline"] = instances.trampoline
        return numbers


class _Head(Protocol):
    """Returns the code for a place that calls a body."""

    def __call__(self, place: Addr, body: Addr, /) -> bytes: ...


class _Body(Struct, frozen=True, kw_only=True):
    template: Template
    numbers: Mapping[str, int]

    @property
    def most(self) -> int:
        """Bytes that it takes at most, wherever it is."""
        return aligned(len(self.template.code) + _ALIGNMENT)

    def link(self, area: Area, place: Addr) -> bytes:
        return self.template.link(place, {**self.numbers, **area.called})


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
