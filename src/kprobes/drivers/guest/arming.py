"""Plans to armed code, and back: the only place where a guest's text is written.

All writes to code go through the stub and by physical address: a write behind QEMU's back would
leave stale translated code. Each goes to the journal first, and is compared with what planning
saw at the moment of writing.
"""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from kprobes.codegen.catcher import hash_table, table_mask
from kprobes.codegen.compile import compile_probes, needs_frame
from kprobes.drivers.guest.arena import Arena
from kprobes.drivers.guest.catcher import Catcher
from kprobes.drivers.guest.gate import Gate, build_gate
from kprobes.drivers.guest.guest import Guest
from kprobes.drivers.guest.memory import GuestMemory, remembering, write_code
from kprobes.drivers.guest.stopped import StoppedMemory
from kprobes.drivers.journal import Described, Journal, Undo
from kprobes.drivers.rollback import roll_back
from kprobes.errors import TargetError
from kprobes.model.abi import GuestAbi, Template
from kprobes.model.plan import Patch, Plan, Site, Strategy
from kprobes.model.upcall import Detour, Question, Questions
from kprobes.plan.ftrace import DISABLED
from kprobes.ports import Text
from kprobes.units import Addr, Phys

_ALIGN = 16
_FLAGS = 8
"""Offset of dyn_ftrace.flags."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The code of one plan, linked to where it will run."""

    plan: Plan
    entry: Addr
    code: bytes
    questions: tuple[Question, ...] = ()


class Armory:
    """Puts programs into a guest's arena and its text, and takes them out.

    ``load``, ``arm``, ``withdraw`` and ``disarm`` need a stopped guest.
    """

    def __init__(self, guest: Guest, arena: Arena, abi: GuestAbi, journal: Journal) -> None:
        self._guest = guest
        self._arena = arena
        self._abi = abi
        self._journal = journal
        self._catcher = Catcher(guest, arena, journal.ledger)
        self._stopped = StoppedMemory(guest.stub, guest.memory.ram)
        self._next = arena.programs
        self._templates: dict[object, Template] = {}
        self._undos: list[Undo] = []
        self._owners: dict[Phys, Addr] = {}
        self._detours: dict[Addr, Addr] = {}
        self._gate: Gate | None = None
        self._is_gate_loaded = False

    @property
    def is_armed(self) -> bool:
        """Whether the guest's text holds patches of ours."""
        return bool(self._undos)

    @property
    def lookup(self) -> Text:
        """The code that looks breakpoints up."""
        return self._arena.catcher, self._arena.programs

    def link(self, plans: Iterable[Plan]) -> list[Program]:
        """Compile and place the code of some plans; nothing is written yet.

        Raises:
            TargetError: the arena's code memory is full.
        """
        found = list(plans)
        if self._gate is None and any(plan.upcalls for plan in found):
            self._gate = build_gate(self._guest.arch, self._abi, self._arena, self._next)
            self._place(len(self._gate.code))
        return [self._link_asking(plan) if plan.upcalls else self._link(plan) for plan in found]

    def catch(self, plans: Iterable[Plan], *, more: bool = False) -> None:
        """Have the guest, which runs, tell us of breakpoints if some plans need it.

        Args:
            plans: to be armed.
            more: whether others may come while no task can be borrowed.

        Raises:
            TargetError: it does not, or no task could be borrowed.
        """
        is_needed = more or any(p.site.strategy is Strategy.BREAKPOINT for p in plans)
        if is_needed and not self._catcher.is_registered:
            with self._guest.stub.paused():
                self._catcher.register()

    def load(self, programs: Sequence[Program]) -> None:
        """Write code to the arena, where nothing calls it yet."""
        if not programs:
            return
        if self._gate is not None and not self._is_gate_loaded:
            self._write_code(self._gate.addr, self._gate.code)
            self._is_gate_loaded = True
        blob, start = bytearray(), programs[0].entry
        for program in programs:
            blob += bytes(program.entry - start - len(blob)) + program.code
        self._write_code(Addr(start), bytes(blob))
        self._load_table(programs)

    def _load_table(self, programs: Sequence[Program]) -> None:
        more = {
            program.plan.site.addr: program.entry
            for program in programs
            if program.plan.site.strategy is Strategy.BREAKPOINT
        }
        if not more:
            return
        self._detours |= more
        table = hash_table(self._detours)
        where = self._place(len(table))
        self._write_code(where, table)
        self._catcher.lead(where, table_mask(table))

    def stage(self, programs: Sequence[Program]) -> list[Undo]:
        """Put on the disk what arming some programs will write; the guest may run meanwhile."""
        memory = remembering(self._guest.memory)
        undos = [(p.plan.site, undo) for p in programs for undo in self._undo(p, memory)]
        sites = [program.plan.site for program in programs]
        idle = [site for site in sites if site.strategy is Strategy.FTRACE and site.chain is None]
        flags = [(site, undo) for site in idle for undo in _flag_undo(site, memory)]
        self._stopped.note_data(undo.phys for _, undo in flags)
        self._owners |= {undo.phys: site.addr for site, undo in flags + undos}
        patches = [undo for _, undo in flags + undos]
        self._journal.describe(_described(programs))
        self._journal.record(patches)
        return patches

    def arm(self, patches: Sequence[Undo]) -> None:
        """Patch the sites of loaded and staged programs: all of them, or none.

        Raises:
            TargetError: a site no longer holds what planning saw; nothing is left patched.
        """
        try:
            self._verify(patches)
        except TargetError:
            self._journal.keep(self._undos)
            raise
        # Before the writes: what cannot be taken back now is for the next attempt to disarm.
        self._undos += patches
        with ExitStack() as undo:
            undo.callback(self.disarm)
            self._stopped.write_physical_many([(u.phys, u.new) for u in patches])
            undo.pop_all()

    def withdraw(self, ranges: Sequence[Text]) -> None:
        """Put the sites in some ranges of text back, and what belongs to them, and verify them.

        Raises:
            TargetError: somebody else has changed one meanwhile; the rest is as it was.
        """

        def is_gone(undo: Undo) -> bool:
            return any(start <= self._owners[undo.phys] < stop for start, stop in ranges)

        gone = [undo for undo in self._undos if is_gone(undo)]
        roll_back(gone, self._stopped)
        self._undos = [undo for undo in self._undos if not is_gone(undo)]
        self._journal.keep(self._undos)

    def disarm(self) -> None:
        """Put all text and records back and verify them.

        Raises:
            TargetError: somebody else has changed a site meanwhile; the rest is as it was.
        """
        roll_back(self._undos, self._stopped)
        self._undos = []
        self._journal.clear()

    def _link(self, plan: Plan) -> Program:
        entry, body = self._next, self._next
        is_framed = self._is_framed(plan)
        if is_framed:
            length = len(self._head(plan.site, entry, entry))
            body = _aligned(entry + length)
        code = self._template(plan, is_framed=is_framed).link(body, self._numbers(plan))
        if is_framed:
            head = self._head(plan.site, entry, body)
            code = head + bytes(body - entry - len(head)) + code
        return Program(plan=plan, entry=self._place(len(code)), code=code)

    def _link_asking(self, plan: Plan) -> Program:
        entry, body = self._next, None
        detour = self._detour(plan, entry, entry if plan.probes else None)
        code = detour.code
        if plan.probes:
            body = _aligned(entry + len(code))
            detour = self._detour(plan, entry, body)
            template = self._template(plan, is_framed=True)
            code = detour.code.ljust(body - entry, b"\0")
            code += template.link(body, self._numbers(plan))
        groups = (plan.before, plan.after)
        questions = [Question(upcalls=each, copies=detour.copies) for each in groups if each]
        entry = self._place(len(code))
        return Program(plan=plan, entry=entry, code=code, questions=tuple(questions))

    def _detour(self, plan: Plan, entry: Addr, body: Addr | None) -> Detour:
        if self._gate is None:
            raise ValueError("questions without a gate")
        before, after = (each[0].number if each else None for each in (plan.before, plan.after))
        questions = Questions(gate=self._gate.addr, before=before, after=after)
        arch, site = self._guest.arch, plan.site
        if site.displaced is not None:
            return arch.upcall.at_instruction(entry, body, questions, site.displaced)
        back = Addr(site.addr + arch.site.size)
        return arch.upcall.at_call(entry, body, questions, back, site.chain)

    def _place(self, size: int) -> Addr:
        place = self._next
        end = _aligned(place + size)
        if end > self._arena.code.stop:
            raise TargetError("no room is left for the probes' code; probe fewer functions")
        self._next = end
        return place

    def _is_framed(self, plan: Plan) -> bool:
        site = plan.site
        is_called = site.displaced is None and site.chain is None
        return not is_called or needs_frame(self._guest.arch, plan.probes)

    def _head(self, site: Site, entry: Addr, body: Addr) -> bytes:
        arch = self._guest.arch
        if site.displaced is not None:
            return arch.patch.detour(entry, body, site.displaced)
        return arch.site.entry(entry, body, site.chain)

    def _template(self, plan: Plan, *, is_framed: bool) -> Template:
        is_patched = plan.site.displaced is not None
        key = (is_framed, is_patched, tuple(probe.shape for probe in plan.probes))
        if key not in self._templates:
            self._templates[key] = compile_probes(
                self._guest.arch,
                self._abi,
                plan.probes,
                is_framed=is_framed,
                is_patched=is_patched,
            )
        return self._templates[key]

    def _numbers(self, plan: Plan) -> dict[str, int]:
        readers = self._abi.readers
        names = ("copy_kernel", "copy_user", "string_kernel", "string_user")
        numbers: dict[str, int] = {name: getattr(readers, name) for name in names}
        numbers |= {f"event{n}": p.layout.event_id for n, p in enumerate(plan.probes)}
        return {**numbers, "site": plan.site.addr, "clock": self._abi.clock or 0}

    def _undo(self, program: Program, memory: GuestMemory) -> list[Undo]:
        site = program.plan.site
        start = self._start(site, program.entry)
        patch = Patch(addr=site.addr, old=site.old, new=start + site.old[len(start) :])
        return _place(patch, program.plan.name, memory)

    def _start(self, site: Site, entry: Addr) -> bytes:
        arch = self._guest.arch
        match site.strategy:
            case Strategy.FTRACE:
                return arch.site.branch(site.addr, entry)
            case Strategy.JUMP:
                return arch.patch.jump(site.addr, entry)
            case Strategy.BREAKPOINT:
                return arch.patch.breakpoint

    def _verify(self, undos: Sequence[Undo]) -> None:
        found = self._stopped.read_physical_many([(undo.phys, len(undo.old)) for undo in undos])
        for undo, now in zip(undos, found, strict=True):
            if now != undo.old:
                raise TargetError(
                    f"{undo.what}: {undo.addr:#x} holds {now.hex()}, not {undo.old.hex()} as "
                    "before: the guest changed it; nothing was patched"
                )

    def _write_code(self, addr: Addr, code: bytes) -> None:
        write_code(self._guest.stub, self._guest.memory, addr, code)


def _aligned(addr: int) -> Addr:
    return Addr(-(-addr // _ALIGN) * _ALIGN)


def _described(programs: Sequence[Program]) -> list[Described]:
    return [
        Described(
            site=program.plan.site.addr,
            entry=program.entry,
            event_id=probe.layout.event_id,
            definition=probe.definition.command,
        )
        for program in programs
        for probe in program.plan.probes
    ]


def _flag_undo(site: Site, memory: GuestMemory) -> list[Undo]:
    # The guest's ftrace must not find bytes that it did not write: it would WARN and give up
    # tracing altogether. A site that it already uses is left to it.
    old, new = ((site.flags | bit).to_bytes(8, "little") for bit in (0, DISABLED))
    assert site.record is not None
    patch = Patch(addr=Addr(site.record + _FLAGS), old=old, new=new)
    return _place(patch, "dyn_ftrace.flags", memory)


def _place(patch: Patch, what: str, memory: GuestMemory) -> list[Undo]:
    # One per page: kernels that are built for size align no function.
    return [
        Undo(
            phys=phys,
            addr=Addr(patch.addr + at),
            old=patch.old[at : at + size],
            new=patch.new[at : at + size],
            what=what,
        )
        for phys, at, size in memory.pieces(patch.addr, len(patch.old))
    ]
