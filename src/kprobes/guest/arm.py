"""Plans to armed code, and back: the only place where a guest's text is written.

Code is written through the stub and by physical address, but where there was none: a write that
QEMU does not see leaves stale translated code. Each patch of text goes to the journal first, and is
compared with what planning saw at the moment of writing.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress

from msgspec import Struct

from kprobes.codegen.breakpoint import hash_table, table_mask
from kprobes.errors import GuestGoneError, GuestReplacedError, KprobesError, TargetError
from kprobes.guest.arena import Arena
from kprobes.guest.armed import FLAGS, ArmedPatch, ArmedProbe
from kprobes.guest.ftrace_records import Records, stale_records, unloaded_text
from kprobes.guest.guest import Code, Guest, GuestMemory, remembering, write_code, write_new_code
from kprobes.guest.journal import Journal
from kprobes.guest.link import Linker, Program
from kprobes.guest.notes import NotesWriter
from kprobes.guest.notifier import BreakpointNotifier
from kprobes.guest.patches import StoppedMemory, restore_text
from kprobes.guest.room import joined
from kprobes.guest.stacks import restore_callers
from kprobes.guest.tracepoints import Tracepoints
from kprobes.model.abi import GuestAbi
from kprobes.model.plan import Patch, Plan, Returns, Site, Strategy
from kprobes.plan.ftrace import DISABLED
from kprobes.ports import Text
from kprobes.transport.ram import StubRam
from kprobes.units import Addr

_FLAGS = 8
"""Offset of dyn_ftrace.flags."""
_MOST_GONE = 4096
"""Patches that are gone, in the journal beside as many as are there: it is written anew then."""


class _Armed(Struct, frozen=True, kw_only=True):
    # One site: its program, and the patches of text and of its ftrace record.
    program: Program
    text: tuple[ArmedPatch, ...]
    flags: tuple[ArmedPatch, ...] = ()

    @property
    def addr(self) -> Addr:
        return self.program.plan.site.addr

    @property
    def patches(self) -> tuple[ArmedPatch, ...]:
        return *self.flags, *self.text


class StagedChange(Struct, frozen=True, kw_only=True):
    """A change of a guest's text that is in the journal, and not made yet.

    Attributes:
        gone: sites that are as they were, or lead elsewhere, afterwards.
        new: sites that lead to new programs.
        covered: text that nobody may be inside when it is made.
        restored: patches that are taken back, those of text first.
        made: patches that are made, those of ftrace records first.
    """

    gone: tuple[_Armed, ...]
    new: tuple[_Armed, ...]
    covered: tuple[Text, ...]
    restored: list[ArmedPatch]
    made: list[ArmedPatch]

    @property
    def programs(self) -> list[Program]:
        """What is new."""
        return [each.program for each in self.new]

    @property
    def left(self) -> list[Program]:
        """What nothing leads to any more."""
        return [each.program for each in self.gone]


def _addr_of(patch: Patch) -> Addr:
    return patch.addr


class TextPatcher:
    """Puts programs into a guest's arena and leads its text to them, and takes that back.

    ``load``, ``apply`` and ``disarm`` need a stopped guest, ``load_new`` does not.

    Attributes:
        linker: of the programs.
        notes: in the guest, beside the journal, how it is put right.
    """

    def __init__(
        self,
        guest: Guest,
        arena: Arena,
        abi: GuestAbi,
        journal: Journal,
        patched: dict[Addr, bytes] | None = None,
    ) -> None:
        """Patch nothing yet.

        Args:
            guest: whose text is patched.
            arena: for the code.
            abi: what the code knows of the guest.
            journal: of what is done.
            patched: is kept: what was there before at addresses that are patched.
        """
        self.linker = Linker(guest.arch, abi, arena)
        self.notes = NotesWriter(guest.memory, arena, journal)
        self._guest = guest
        self._arena = arena
        self._journal = journal
        self._notifier = BreakpointNotifier(guest, arena, journal.allocations)
        self._tracepoints = Tracepoints(guest, arena, journal.allocations)
        self._stopped = StoppedMemory(guest.stub, guest.memory.ram)
        self._sites: dict[Addr, _Armed] = {}
        self._patched = {} if patched is None else patched
        self._detours: dict[Addr, Addr] = {}
        self._table: Text | None = None
        self._recorded = 0
        self._is_retried = False
        # Patches of a change that failed and could not be taken back.
        self._stuck: Sequence[ArmedPatch] = ()
        self._staged: Sequence[ArmedPatch] = ()
        self._listed: tuple[Patch, ...] | None = None

    @property
    def is_armed(self) -> bool:
        """Whether the guest's text holds patches of ours."""
        return bool(self._sites or self._stuck)

    @property
    def patches(self) -> tuple[Patch, ...]:
        """What is patched, by address; the same object as before when nothing has changed."""
        if self._listed is None:
            found = (patch for each in self._sites.values() for patch in each.patches)
            listed = (Patch(addr=p.addr, old=p.old, new=p.new) for p in found)
            self._listed = tuple(sorted(listed, key=_addr_of))
        return self._listed

    @property
    def programs(self) -> list[Program]:
        """What the guest's text leads to."""
        return [each.program for each in self._sites.values()]

    def texts(self, gone: Iterable[Plan], returns: Iterable[Returns]) -> list[Text]:
        """Return the code that sites of some plans lead to, and calls of some return probes."""
        programs = (self._sites[plan.site.addr].program for plan in gone)
        return self.linker.texts(programs, returns)

    def leads_to(self, programs: Sequence[Program]) -> bool:
        """Whether the guest's text leads to any of some programs."""
        found = (self._sites.get(each.plan.site.addr) for each in programs)
        pairs = zip(found, programs, strict=True)
        return any(site is not None and site.program is each for site, each in pairs)

    def check(self) -> None:
        """Check that the guest's text is what it is taken for.

        Raises:
            TargetError: a change failed, and could not be taken back: only disarming is left.
        """
        if self._stuck:
            raise TargetError(
                f"{self._stuck[0].what}: {self._stuck[0].addr:#x} could not be put back when "
                "arming failed: nothing is armed any more before all is disarmed"
            )

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

    def switch_on(self, plans: Iterable[Plan]) -> None:
        """Switch the tracepoints on that some plans need; the guest runs.

        Raises:
            RefusedError, TargetError: as of ``Tracepoints``.
        """
        if self._tracepoints.switch_on(_tracepoints(plans)):
            self.notes.change((), ())

    def switch_off(
        self, gone: Iterable[Plan], others: Iterable[Plan], warn: Callable[[str], None]
    ) -> None:
        """Switch those off again that some plans needed, and others do not; the guest runs.

        Args:
            gone: that are not armed any more.
            others: that are.
            warn: is told what stays on until the session ends, and why.
        """
        try:
            if self._tracepoints.switch_off(_tracepoints(gone) - _tracepoints(others)):
                self.notes.change((), ())
        except GuestGoneError:
            return
        except TargetError as error:
            warn(f"tracepoints stay on until the session ends: {error}")

    def stage(self, programs: Sequence[Program], gone: Sequence[Plan] = ()) -> StagedChange:
        """Write down what leading sites to some programs will write; the guest may run.

        Args:
            programs: that are linked.
            gone: whose sites are to be as they were, or to lead to one of the programs.
        """
        memory = remembering(self._guest.memory)
        before = {plan.site.addr: self._sites[plan.site.addr] for plan in gone}
        new: list[_Armed] = []
        for program in programs:
            site, text = program.plan.site, tuple(self._undo(program, memory))
            flags = before[site.addr].flags if site.addr in before else ()
            if site.strategy is not Strategy.FTRACE:
                flags = ()
            elif not flags and not site.is_tracepoint:
                flags = tuple(_flag_patch(site, memory))
            new.append(_Armed(program=program, text=text, flags=flags))
        old = before.values()
        change = StagedChange(
            gone=tuple(old),
            new=tuple(new),
            covered=self._covered(programs, before),
            restored=[*_text_of(old), *_flags_of(old, new)],
            made=[*_flags_of(new, old), *_text_of(new)],
        )
        made = change.made
        self._stopped.note_data(undo.phys for each in new for undo in each.flags)
        trampolines = [table for table in self.linker.instances if table.trampoline]
        if trampolines != list(self._journal.allocations.instances):
            self._journal.allocations.keep_instances(trampolines)
        self._journal.describe(_described(programs))
        if made:
            self._tell_state()
            self._staged = made
            self._journal.record(made)
            self._recorded += len(made)
            self._journal.check()
            self.notes.change((), made)
        return change

    def _covered(
        self, programs: Sequence[Program], before: Mapping[Addr, _Armed]
    ) -> tuple[Text, ...]:
        found = [text for each in programs for text in each.plan.site.covered]
        sites = [each.program.plan.site for each in before.values()]
        sites += [program.plan.site for program in programs]
        if any(site.strategy is Strategy.BREAKPOINT for site in sites):
            # Who looks a breakpoint up must not find half of another table.
            found.append(self._arena.lookup)
        return tuple(found)

    def unstage(self) -> None:
        """Forget what was staged and is not made; of a guest that is gone nothing matters."""
        staged, self._staged = self._staged, ()
        if staged and not self._stuck:
            with suppress(KprobesError):
                self._journal.check()
                self._unstage(staged)

    def codes(self, programs: Sequence[Program]) -> list[Code]:
        """Return the code of some programs, and all that they call and that is not loaded yet."""
        own = ((each.entry, each.code) for each in programs)
        return sorted([*self.linker.routines, *own])

    def load_new(self, codes: Sequence[Code]) -> list[Code]:
        """Write code to where there was none, while the guest runs, and return the rest of it.

        Args:
            codes: with their addresses, by which they are sorted.
        """
        memory = remembering(self._guest.memory)
        if isinstance(memory.ram, StubRam):
            return list(codes)
        # With the same byte the kernel fills memory for code.
        filler = self._guest.arch.patch.filler
        return write_new_code(memory, joined(codes), filler, self._journal.check)

    def load(self, codes: Sequence[Code]) -> None:
        """Write code to the arena of a guest that stands still, where nothing calls it yet.

        Args:
            codes: with their addresses, by which they are sorted.
        """
        self._journal.check()
        self._write_codes(joined(codes))

    def apply(self, change: StagedChange) -> int:
        """Make a change: all of it, or nothing; ``commit`` comes next, and the guest may run then.

        Returns:
            How many places that are taken back somebody else has put back before.

        Raises:
            TargetError: a place no longer holds what it must; nothing has changed.
            GuestReplacedError: another guest runs there, or another state of it.
        """
        self._journal.check()
        made, restored = change.made, self._still_there(change.gone, change.restored)
        try:
            put_back = self._verify_change(made, restored)
            self._verify_records(change.new)
        except TargetError:
            self.unstage()
            raise
        records = Records(self._guest, self._stopped) if any(e.flags for e in change.gone) else None
        settled = restored if records is None else records.settled(restored)
        self._write_all(change, settled)
        self._staged = ()
        for each in change.gone:
            del self._sites[each.addr]
        self._sites |= {each.addr: each for each in change.new}
        self._listed = None
        if records is not None:
            records.make_calls([patch for patch in restored if patch.what == FLAGS])
        return put_back

    def _write_all(self, change: StagedChange, settled: Sequence[ArmedPatch]) -> None:
        made, before = change.made, self._detours
        writes = [(patch.phys, patch.old) for patch in settled]
        writes += [(patch.phys, patch.new) for patch in made]
        gone, new = _detours(change.gone), _detours(change.new)
        try:
            # Whoever dies meanwhile: a breakpoint that is still there must be found.
            self._set_detours(before | new)
            self._stopped.write_physical_many(writes)
            self._set_detours({a: at for a, at in before.items() if a not in gone} | new)
            # A monitor's ``loadvm`` may have come after the check before. The guest has not run
            # since: what was written into the other state goes again before it does.
            self._journal.check()
        except GuestReplacedError:
            self._take_back(made)
            raise
        except BaseException:
            self._stuck = made
            self._take_back(made)
            self._stuck = ()
            self._set_detours(before)
            self._make_again(settled)
            self.unstage()
            raise

    def _verify_change(self, made: Sequence[ArmedPatch], restored: Sequence[ArmedPatch]) -> int:
        text = [patch for patch in restored if patch.what != FLAGS]
        put_back = 0
        # What a place holds afterwards where it is patched again, byte by byte.
        before: dict[int, int] = {}
        for patch, now in zip(text, self._read(text), strict=True):
            put_back += now == patch.old != patch.new
            if made:
                before |= enumerate(patch.old, patch.phys)
            if now not in (patch.old, patch.new):
                raise TargetError(
                    f"{patch.what}: {patch.addr:#x} holds {now.hex()}, which is neither ours nor "
                    "the kernel's: somebody else has changed it; nothing was changed"
                )
        self._verify(made, before)
        return put_back

    def _verify_records(self, sites: Iterable[_Armed]) -> None:
        those = self._not_lasting(sites)
        stale = self._stale_records(those)
        if stale:
            raise TargetError(
                f"{stale[0].addr:#x} is not an ftrace record any more: its module was unloaded, "
                "or boot is over; nothing was patched"
            )
        text = [patch for each in those for patch in each.text]
        if gone := unloaded_text(text, self._guest, self._stopped):
            raise TargetError(
                f"{gone[0].what}: {gone[0].addr:#x} is text that is not there any more: boot is "
                "over; nothing was patched"
            )

    def _still_there(self, sites: Iterable[_Armed], patches: list[ArmedPatch]) -> list[ArmedPatch]:
        those = self._not_lasting(sites)
        if not those:
            return patches
        text = [patch for each in those for patch in each.text]
        gone = {*self._stale_records(those), *unloaded_text(text, self._guest, self._stopped)}
        return [each for each in patches if each not in gone]

    def _stale_records(self, sites: Iterable[_Armed]) -> list[ArmedPatch]:
        records = [(each.addr, patch) for each in sites for patch in each.flags]
        return stale_records(records, self._stopped)

    def _not_lasting(self, sites: Iterable[_Armed]) -> list[_Armed]:
        # Those in modules, and in what only boot uses.
        start, stop = self._guest.kernel.text
        return [each for each in sites if not start <= each.addr < stop]

    def _take_back(self, patches: Sequence[ArmedPatch]) -> None:
        found = zip(patches, self._read(patches), strict=True)
        self._stopped.write_physical_many([(p.phys, p.old) for p, now in found if now == p.new])

    def _make_again(self, patches: Sequence[ArmedPatch]) -> None:
        found = zip(patches, self._read(patches), strict=True)
        self._stopped.write_physical_many([(p.phys, p.new) for p, now in found if now == p.old])

    def _unstage(self, made: Sequence[ArmedPatch]) -> None:
        if not self._sites:
            self._keep(())
        elif made:
            self._tell_state()
            self._journal.restored(made, ())
            self.notes.change(made, ())

    def commit(self, change: StagedChange) -> None:
        """Take what a change has restored out of the journal, which ``apply`` has made."""
        restored = change.restored
        for each in change.gone:
            for patch in each.patches:
                self._patched.pop(patch.addr, None)
        self._patched |= {patch.addr: patch.old for each in change.new for patch in each.patches}
        if not self._sites:
            self._keep(())
        elif restored:
            sites = {each.addr for each in change.gone} - {each.addr for each in change.new}
            self._tell_state()
            self._journal.restored(restored, sites)
            self.notes.change(restored, ())
            live = 2 * len(self._sites)
            if self._recorded > _MOST_GONE + 2 * live:
                self._keep([patch for each in self._sites.values() for patch in each.patches])

    def _set_detours(self, detours: dict[Addr, Addr]) -> None:
        if detours == self._detours:
            return
        table, before = hash_table(detours), self._table
        where = self.linker.place(len(table))
        self._write_codes([(where[0], table)])
        self._notifier.set_table(where[0], table_mask(table))
        self._detours, self._table = detours, where
        if before is not None:
            # Nobody is in the code that looks there.
            self.linker.pool.give_code(before)

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
        armed = [*_flags_of(self._sites.values()), *_text_of(self._sites.values())]
        patches = self._still_there(self._sites.values(), armed)
        stuck = zip(self._stuck, self._read(self._stuck), strict=True)
        count = self._restore([*patches, *(patch for patch, now in stuck if now == patch.new)])
        self._is_retried, self._stuck = False, ()
        self._sites, self._detours, self._listed = {}, {}, None
        self._patched.clear()
        self._keep(())
        if self._guest.arch.returns.comes_back:
            restore_callers(self._guest.memory, self.linker.instances)
        return count if is_first else 0

    def _restore(self, patches: Sequence[ArmedPatch]) -> int:
        # How many places hold what they must, though it was not us who put it there.
        records = Records(self._guest, self._stopped)
        wanted = records.settled(patches)
        patched = sum(undo.new != undo.old for undo in wanted)
        count = patched - restore_text(wanted, self._stopped)
        records.make_calls(patches)
        return count

    def _keep(self, patches: Sequence[ArmedPatch]) -> None:
        self._recorded = len(patches)
        self._tell_state()
        self._journal.keep(patches)
        self.notes.write(patches)

    def _tell_state(self) -> None:
        # Who was interrupted before the guest heard of a state must not begin another.
        if self._journal.noted != self._journal.state:
            self.notes.change((), ())

    def _undo(self, program: Program, memory: GuestMemory) -> list[ArmedPatch]:
        site = program.plan.site
        addr = self._tracepoints.place(site.addr) if site.is_tracepoint else site.addr
        start = self._start(site.strategy, addr, program.entry)
        filler = self._guest.arch.patch.filler * (len(site.old) - len(start))
        patch = Patch(addr=addr, old=site.old, new=start + filler)
        return _place(patch, program.plan.name, memory)

    def _start(self, strategy: Strategy, addr: Addr, entry: Addr) -> bytes:
        arch = self._guest.arch
        match strategy:
            case Strategy.FTRACE:
                return arch.site.branch(addr, entry)
            case Strategy.JUMP:
                return arch.patch.jump(addr, entry)
            case Strategy.BREAKPOINT:
                return arch.patch.breakpoint

    def _read(self, patches: Sequence[ArmedPatch]) -> list[bytes]:
        return self._stopped.read_physical_many([(patch.phys, len(patch.old)) for patch in patches])

    def _verify(self, patches: Sequence[ArmedPatch], before: Mapping[int, int]) -> None:
        # Where a patch is taken back, what was there before is known.
        for undo, found in zip(patches, self._read(patches), strict=True):
            now = found
            if before:
                now = bytes(before.get(at, byte) for at, byte in enumerate(found, undo.phys))
            if now != undo.old:
                raise TargetError(
                    f"{undo.what}: {undo.addr:#x} holds {now.hex()}, not {undo.old.hex()} as "
                    "before: the guest changed it; nothing was patched"
                )

    def _write_codes(self, codes: Sequence[Code]) -> None:
        stub, memory = self._guest.stub, remembering(self._guest.memory)
        before = [(addr, memory.read(addr, len(code))) for addr, code in codes]
        write_code(stub, memory, codes)
        try:
            self._journal.check()
        except GuestReplacedError:
            # As in ``_write_all``: this memory belongs to somebody else there.
            now = remembering(self._guest.memory)
            ours = [now.read(addr, len(code)) == code for addr, code in codes]
            write_code(stub, now, [old for old, is_our in zip(before, ours, strict=True) if is_our])
            raise


def _text_of(sites: Iterable[_Armed]) -> list[ArmedPatch]:
    return [patch for each in sites for patch in each.text]


def _flags_of(sites: Iterable[_Armed], others: Iterable[_Armed] = ()) -> list[ArmedPatch]:
    # Those of records that the others do not have, too.
    kept = {patch for each in others for patch in each.flags}
    return [patch for each in sites for patch in each.flags if patch not in kept]


def _tracepoints(plans: Iterable[Plan]) -> frozenset[Addr]:
    return frozenset(plan.site.addr for plan in plans if plan.site.is_tracepoint)


def _detours(sites: Sequence[_Armed]) -> dict[Addr, Addr]:
    return {
        each.addr: each.program.entry
        for each in sites
        if each.program.plan.site.strategy is Strategy.BREAKPOINT
    }


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
    assert site.record is not None
    old, new = site.flags.to_bytes(8, "little"), (site.flags | DISABLED).to_bytes(8, "little")
    patch = Patch(addr=Addr(site.record + _FLAGS), old=old, new=new)
    return _place(patch, FLAGS, memory)


def _place(patch: Patch, what: str, memory: GuestMemory) -> list[ArmedPatch]:
    addr, old, new = patch.addr, patch.old, patch.new
    # One per page: kernels that are built for size align no function.
    return [
        ArmedPatch(phys, Addr(addr + at), old[at : at + size], new[at : at + size], what)
        for phys, at, size in memory.pieces(addr, len(old))
    ]
