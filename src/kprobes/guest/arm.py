"""Plans to armed code, and back: the only place where a guest's text is written.

All writes to code go through the stub and by physical address: a write behind QEMU's back would
leave stale translated code. Each goes to the journal first, and is compared with what planning
saw at the moment of writing.

Breakpoints of ours in a guest: its own exception chain is told whose they are.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack

from kprobes.codegen.breakpoint import (
    BLOCK_MASK,
    BLOCK_TABLE,
    EMPTY_TABLE,
    PRIORITY,
    compile_notifier,
    hash_table,
    table_mask,
)
from kprobes.drain import nothing
from kprobes.errors import GuestReplacedError, TargetError
from kprobes.guest.allocations import Allocation, AllocationLog, Kind
from kprobes.guest.arena import NOTIFIER_SIZE, Arena
from kprobes.guest.ftrace_records import Records
from kprobes.guest.guest import Guest, GuestMemory, remembering, write_code
from kprobes.guest.inject import CallInjector
from kprobes.guest.journal import FLAGS, ArmedPatch, ArmedProbe, Journal
from kprobes.guest.kernel_abi import first_of
from kprobes.guest.link import Linker, Program, Trampoline
from kprobes.guest.patches import StoppedMemory, restore_text
from kprobes.guest.stacks import restore_callers, stopped_outside
from kprobes.model.abi import GuestAbi
from kprobes.model.plan import InstanceTable, Patch, Plan, Site, Strategy
from kprobes.model.upcall import UpcallGroup
from kprobes.plan.ftrace import DISABLED
from kprobes.ports import Text
from kprobes.units import Addr, Phys

_CALLBACK, _NEXT, _PRIORITY = 0, 8, 16
_INT = 0xFFFF_FFFF


class BreakpointNotifier:
    """Our callback in a guest's exception chain: registered once, whatever is armed later.

    The guest must be stopped for all of it.
    """

    def __init__(self, guest: Guest, arena: Arena, allocations: AllocationLog) -> None:
        self._guest = guest
        self._arena = arena
        self._allocations = allocations

    @property
    def is_registered(self) -> bool:
        """Whether the guest calls us."""
        return any(allocation.kind is Kind.NOTIFIER for allocation in self._allocations.live)

    def register(self) -> None:
        """Have the guest call us; it runs meanwhile.

        Raises:
            TargetError: it has no such chain, refuses, or no task could make the call.
        """
        guest, block = self._guest, self._arena.block
        register = first_of(guest.kernel, "register_die_notifier")
        self._load()
        guest.memory.set_u64(block + _CALLBACK, self._arena.notifier)
        guest.memory.set_u64(block + _NEXT, 0)
        guest.memory.set_u64(block + _PRIORITY, PRIORITY)
        allocation = Allocation(kind=Kind.NOTIFIER, addr=block, size=0)
        injector = CallInjector(guest.stub, guest.memory, guest.kernel, self._allocations)
        with injector.task() as task:
            if task.call(register, block, allocates=allocation) & _INT:
                raise TargetError("the guest refused to tell us of breakpoints")

    def set_table(self, table: Addr, mask: int) -> None:
        """Have breakpoints led by a table of detours."""
        memory, block = self._guest.memory, self._arena.block
        memory.set_u64(block + BLOCK_TABLE, table)
        memory.set_u64(block + BLOCK_MASK, mask)

    def _load(self) -> None:
        code = compile_notifier(self._guest.arch)
        room = NOTIFIER_SIZE - len(EMPTY_TABLE)
        if len(code) > room:
            raise ValueError(f"the callback has {len(code)} bytes, and room for {room}")
        place = self._arena.notifier
        write_code(self._guest.stub, self._guest.memory, place, code.ljust(room) + EMPTY_TABLE)
        self.set_table(Addr(place + room), 0)


_FLAGS = 8
"""Offset of dyn_ftrace.flags."""


def _nothing(patches: Sequence[ArmedPatch]) -> None:
    del patches


class TextPatcher:
    """Puts programs into a guest's arena and its text, and takes them out.

    ``load``, ``arm``, ``disarm_ranges`` and ``disarm`` need a stopped guest.

    Args:
        guest: whose text is patched.
        arena: for the code; nothing in it is in use.
        abi: what the code knows of the guest.
        journal: of what is done.
        kept: that calls of earlier recordings will return to.

    Attributes:
        note: writes into the guest, beside the journal, how it is put right.
    """

    def __init__(
        self,
        guest: Guest,
        arena: Arena,
        abi: GuestAbi,
        journal: Journal,
        kept: Sequence[Trampoline] = (),
    ) -> None:
        self._kept = kept
        self.note: Callable[[Sequence[ArmedPatch]], None] = _nothing
        self._guest = guest
        self._arena = arena
        self._journal = journal
        self._notifier = BreakpointNotifier(guest, arena, journal.allocations)
        self._stopped = StoppedMemory(guest.stub, guest.memory.ram)
        self._linker = Linker(guest.arch, abi, arena)
        self._patches: list[ArmedPatch] = []
        self._owners: dict[Phys, Addr] = {}
        self._detours: dict[Addr, Addr] = {}
        self._is_retried = False

    @property
    def is_armed(self) -> bool:
        """Whether the guest's text holds patches of ours."""
        return bool(self._patches)

    @property
    def instances(self) -> Sequence[InstanceTable]:
        """Where calls in progress are kept, also those of earlier recordings."""
        return [*(each.instances for each in self._kept), *self._linker.instances]

    @property
    def trampolines(self) -> Sequence[Trampoline]:
        """What calls in progress may return to, also those of earlier recordings."""
        return [*self._kept, *self._linker.trampolines]

    @property
    def trampoline_upcalls(self) -> Sequence[UpcallGroup]:
        """What is asked when a call returns that was taken over."""
        return self._linker.trampoline_upcalls

    @property
    def lookup(self) -> Text:
        """The code that looks breakpoints up."""
        return self._arena.lookup

    def link(
        self, plans: Iterable[Plan], checkpoint: Callable[[], None] = nothing
    ) -> list[Program]:
        """Compile and place the code of some plans; nothing is written yet.

        Args:
            plans: to be armed.
            checkpoint: called for every one; what it raises ends the linking.

        Raises:
            TargetError: the arena is full.
        """
        return self._linker.link(plans, checkpoint)

    def register_notifier(self, plans: Iterable[Plan], *, more: bool = False) -> None:
        """Have the guest, which runs, tell us of breakpoints if some plans need it.

        Args:
            plans: to be armed.
            more: whether others may come while no task can make a call.

        Raises:
            TargetError: it does not, or no task could make the call.
        """
        is_needed = more or any(p.site.strategy is Strategy.BREAKPOINT for p in plans)
        has_breakpoints = self._guest.arch.patch.trap is not None
        if is_needed and has_breakpoints and not self._notifier.is_registered:
            with self._guest.stub.paused():
                self._notifier.register()

    def load(self, programs: Sequence[Program]) -> None:
        """Write code to the arena, where nothing calls it yet."""
        if not programs:
            return
        self._journal.check()
        codes = [*self._linker.take_routines(), *((p.entry, p.code) for p in programs)]
        for first, stop in self._arena.programs:
            self._load(sorted(code for code in codes if first <= code[0] < stop))
        self._load_table(programs)

    def _load(self, codes: Sequence[tuple[Addr, bytes]]) -> None:
        # Many pieces, one write.
        if not codes:
            return
        start, _ = codes[0]
        blob = bytearray()
        for addr, code in codes:
            blob += bytes(addr - start - len(blob)) + code
        self._write_code(start, bytes(blob))

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
        where = self._linker.place(len(table))
        self._write_code(where, table)
        self._notifier.set_table(where, table_mask(table))

    def stage(self, programs: Sequence[Program]) -> list[ArmedPatch]:
        """Put on the disk what arming some programs will write; the guest may run meanwhile."""
        memory = remembering(self._guest.memory)
        patches = [(p.plan.site, undo) for p in programs for undo in self._undo(p, memory)]
        sites = [program.plan.site for program in programs]
        idle = [site for site in sites if site.strategy is Strategy.FTRACE]
        flags = [(site, undo) for site in idle for undo in _flag_patch(site, memory)]
        self._stopped.note_data(undo.phys for _, undo in flags)
        self._owners |= {undo.phys: site.addr for site, undo in flags + patches}
        patches = [undo for _, undo in flags + patches]
        self._journal.allocations.keep_instances([f for f in self.instances if f.trampoline])
        self._journal.describe(_described(programs))
        self._journal.record(patches)
        self._journal.check()
        self.note([*self._patches, *patches])
        return patches

    def arm(self, patches: Sequence[ArmedPatch]) -> None:
        """Patch the sites of loaded and staged programs: all of them, or none.

        Raises:
            TargetError: a site no longer holds what planning saw; nothing is left patched.
        """
        self._journal.check()
        try:
            self._verify(patches)
        except TargetError:
            self._keep(self._patches)
            raise
        # Before the writes: what cannot be taken back now is for the next attempt to disarm.
        self._patches += patches
        with ExitStack() as undo:
            undo.callback(self.disarm)
            self._stopped.write_physical_many([(u.phys, u.new) for u in patches])
            self._check_written(patches)
            undo.pop_all()

    def disarm_ranges(self, ranges: Sequence[Text]) -> None:
        """Put the sites in some ranges of text back, and what belongs to them, and verify them.

        Raises:
            TargetError: somebody else has changed one meanwhile; the rest is as it was.
        """

        def is_gone(undo: ArmedPatch) -> bool:
            return any(start <= self._owners[undo.phys] < stop for start, stop in ranges)

        self._journal.check()
        gone = [undo for undo in self._patches if is_gone(undo)]
        self._restore(gone)
        self._patches = [undo for undo in self._patches if not is_gone(undo)]
        self._keep(self._patches)

    def disarm(self) -> int:
        """Put all text and records back and verify them.

        Returns:
            How many places somebody else has put back before.

        Raises:
            TargetError: somebody else has changed a site meanwhile; the rest is as it was.
            GuestReplacedError: another guest runs there, or another state of it.
        """
        self._journal.check()
        # What an attempt that failed has put back, nobody else has.
        is_first, self._is_retried = not self._is_retried, True
        count = self._restore(self._patches)
        self._is_retried = False
        self._patches = []
        self._keep(())
        if self._guest.arch.returns.comes_back:
            restore_callers(self._guest.memory, self.instances)
        return count if is_first else 0

    def _restore(self, patches: Sequence[ArmedPatch]) -> int:
        # How many places hold what they must, though it was not us who put it there.
        records = Records(self._guest, self._stopped)
        wanted = records.settled(patches)
        patched = sum(undo.new != undo.old for undo in wanted)
        count = patched - restore_text(wanted, self._stopped)
        records.make_calls(patches)
        return count

    def _check_written(self, patches: Sequence[ArmedPatch]) -> None:
        # A monitor's ``loadvm`` may have come after the check before. The guest has not run since:
        # what was written into the other state goes again before it does.
        try:
            self._journal.check()
        except GuestReplacedError:
            restore_text(patches, self._stopped)
            raise

    def _keep(self, patches: Sequence[ArmedPatch]) -> None:
        self._journal.keep(patches)
        self.note(patches)

    def _undo(self, program: Program, memory: GuestMemory) -> list[ArmedPatch]:
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

    def _verify(self, patches: Sequence[ArmedPatch]) -> None:
        found = self._stopped.read_physical_many([(undo.phys, len(undo.old)) for undo in patches])
        for undo, now in zip(patches, found, strict=True):
            if now != undo.old:
                raise TargetError(
                    f"{undo.what}: {undo.addr:#x} holds {now.hex()}, not {undo.old.hex()} as "
                    "before: the guest changed it; nothing was patched"
                )

    def _write_code(self, addr: Addr, code: bytes) -> None:
        stub, memory = self._guest.stub, self._guest.memory
        before = remembering(memory).read(addr, len(code))
        write_code(stub, memory, addr, code)
        try:
            self._journal.check()
        except GuestReplacedError:
            # As in ``_check_written``: this memory belongs to somebody else there.
            if remembering(memory).read(addr, len(code)) == code:
                write_code(stub, memory, addr, before)
            raise


def silence(guest: Guest, arena: Arena, abi: GuestAbi, trampolines: Sequence[Trampoline]) -> None:
    """Have calls only return from trampolines: what a recording before this did there is over.

    Args:
        guest: which runs, and runs on; nothing is armed.
        arena: of the session.
        abi: what the code knows of the guest.
        trampolines: that are to be silent.

    Raises:
        TargetError: somebody stays in their code for seconds.
    """
    linker = Linker(guest.arch, abi, arena)
    codes = [(each.text[0], linker.silent(each)) for each in trampolines]
    texts = [each.text for each in trampolines]
    with stopped_outside(guest, texts, otherwise="new probes cannot be armed yet"):
        for addr, code in codes:
            write_code(guest.stub, guest.memory, addr, code)


def _described(programs: Sequence[Program]) -> list[ArmedProbe]:
    return [
        ArmedProbe(
            site=program.plan.site.addr,
            entry=program.entry,
            event_id=probe.layout.event_id,
            definition=probe.definition.command,
        )
        for program in programs
        for probe in program.plan.recorded
    ]


def _flag_patch(site: Site, memory: GuestMemory) -> list[ArmedPatch]:
    # The guest's ftrace must not find bytes that it did not write: it would WARN and give up
    # tracing altogether. A site that it already uses is left to it.
    old, new = ((site.flags | bit).to_bytes(8, "little") for bit in (0, DISABLED))
    assert site.record is not None
    patch = Patch(addr=Addr(site.record + _FLAGS), old=old, new=new)
    return _place(patch, FLAGS, memory)


def _place(patch: Patch, what: str, memory: GuestMemory) -> list[ArmedPatch]:
    # One per page: kernels that are built for size align no function.
    return [
        ArmedPatch(
            phys=phys,
            addr=Addr(patch.addr + at),
            old=patch.old[at : at + size],
            new=patch.new[at : at + size],
            what=what,
        )
        for phys, at, size in memory.pieces(patch.addr, len(patch.old))
    ]
