"""Definitions to resolved probes of one guest, each with its number, kept as long as it is defined.

Filters as text to filters of one guest's probes: it knows its CPUs and functions.

Commands that are followed: a mark in their task, which fork copies to all that descends.

    struct task_struct { ... pid_t pid; ... u64 parent_exec_id; u64 self_exec_id; ... };

copy_process() copies the struct whole, setup_new_exec() adds one to ``self_exec_id``, and only
CLONE_PARENT's choice of a signal compares it, with a copy of itself. So a task that waits just
before its exec gets FOLLOWED - 1: nothing that it did until then counts.
"""

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from itertools import count

from msgspec import Struct
from msgspec.structs import replace

from kprobes.errors import NotLoadedError, RefusedError, TargetError
from kprobes.guest.guest import Guest
from kprobes.guest.kernel_abi import per_cpu_bases, task_abi
from kprobes.guest.places import Places
from kprobes.guest.stacks import each_task
from kprobes.lang.filter import FOLLOWED, parse_filter
from kprobes.lang.filter_value import Known
from kprobes.lang.hist import parse_hist
from kprobes.model.definition import Definition, EventType
from kprobes.model.filter import Filter, every
from kprobes.model.hist import HistTable
from kprobes.model.kernel import span_of
from kprobes.model.resolved import RecordLayout, Resolved
from kprobes.model.trigger import CompiledTrigger, Trigger
from kprobes.resolve.hist import known_fields
from kprobes.resolve.resolve import check_alike, filter_fields


def with_options(
    probe: Resolved, guest: Guest, tasks: Filter | None, *, trigger: str = ""
) -> Resolved:
    """Give a probe what its definition says of hits, and what a recording does.

    Args:
        probe: without any of it.
        guest: whose probe it is.
        tasks: what a hit must pass before everything else.
        trigger: a hist trigger that counts hits in place of recording them; or "".

    Raises:
        DefinitionError: a filter or the trigger is wrong, or names what the event has not.
    """
    return _with_triggers(with_filter(_with_hist(probe, trigger), guest, tasks), guest, tasks)


def with_filter(probe: Resolved, guest: Guest, tasks: Filter | None) -> Resolved:
    """Give a probe the filter that its definition has.

    Args:
        probe: without one.
        guest: whose probe it is.
        tasks: what a hit must pass before that.

    Raises:
        DefinitionError: the filter is wrong, or names what the event has not.
    """
    chosen = _filter(probe, guest, tasks, probe.definition.filter)
    return replace(probe, filter=chosen) if chosen is not None else probe


def _filter(probe: Resolved, guest: Guest, tasks: Filter | None, text: str) -> Filter | None:
    if not text:
        return tasks
    own = parse_filter(text, _known(probe, guest))
    return every([each for each in (tasks, own) if each is not None])


def _with_hist(probe: Resolved, trigger: str) -> Resolved:
    # The trigger has a filter of its own.
    if not trigger:
        return probe
    found = parse_hist(trigger, known_fields(probe.layout, of_guest=True))
    table = HistTable(trigger=found, number=0)
    own, chosen = probe.definition.filter, table.trigger.filter
    both = f"({own}) && ({chosen})" if own and chosen else own or chosen
    return replace(probe, definition=replace(probe.definition, filter=both), hist=table)


def _with_triggers(probe: Resolved, guest: Guest, tasks: Filter | None) -> Resolved:
    definition = probe.definition
    if not (definition.triggers or definition.soft_enable):
        return probe
    triggers = tuple(
        CompiledTrigger(
            trigger=each,
            filter=_filter(probe, guest, tasks, each.filter),
            hist=_triggered(probe, each),
        )
        for each in definition.triggers
    )
    return replace(probe, triggers=triggers, soft_enable=definition.soft_enable)


def _triggered(probe: Resolved, trigger: Trigger) -> HistTable | None:
    if trigger.hist is None:
        return None
    # Of one that is there: what it said of one is done. With a name it has another one's size.
    known = known_fields(probe.layout, of_guest=True)
    found = parse_hist(trigger.text, known, may_be_there=True)
    return HistTable(trigger=replace(found, size=trigger.hist.size), number=trigger.table)


def _known(probe: Resolved, guest: Guest) -> Known:
    function = partial(span_of, guest.kernel.symbols)
    cpus = len(per_cpu_bases(guest.memory, guest.kernel))
    return Known(fields=filter_fields(probe, of_guest=True), cpus=cpus, function=function)


def follow(guest: Guest, pid: int) -> None:
    """Have a task that waits to exec followed from its exec on, with all that descends from it.

    Raises:
        TargetError: there is no such task any more.
    """
    abi, memory = task_abi(guest.kernel), guest.memory
    with guest.stub.paused():
        for task in each_task(memory, guest.kernel):
            if int.from_bytes(memory.read(task + abi.pid, 4), "little") == pid:
                memory.set_u64(task + abi.exec_id, FOLLOWED - 1)
                return
    raise TargetError(f"the command, process {pid} of the guest, ended before it began")


_MAX_EVENTS = (1 << 16) - 1


class Single(Struct, kw_only=True, eq=False):
    """A definition of one place, as long as it is defined.

    Attributes:
        definition: of it.
        event_id: in its records.
        sequence: grows with every one: of probes at one place the newest comes first.
        probe: what it is, without a filter; None while its module is not loaded.
        module: that it is in, or "".
        may_go: whether its text may: that of a module, or what only boot uses.
    """

    definition: Definition
    event_id: int
    sequence: int
    probe: Resolved | None = None
    module: str = ""
    may_go: bool = False


class Resolver:
    """Resolves definitions once, and gives their events numbers.

    Attributes:
        places: what resolves them; may be set, with the modules that are loaded then.
    """

    def __init__(self, places: Places) -> None:
        self.places = places
        self._known: dict[int, tuple[Definition, tuple[Single, ...]]] = {}
        # By group and event, then by command: those of one pattern are many.
        self._by_event: dict[tuple[str, str], dict[str, dict[int, Single]]] = {}
        self._sequences = count()
        self._new_numbers = iter(range(1, _MAX_EVENTS + 1))
        self._free_numbers: deque[int] = deque()
        self._old_numbers: list[int] = []
        self._deleted: set[int] = set()

    @property
    def probes(self) -> list[Resolved]:
        """Everything that is defined and there."""
        singles = (single for _, found in self._known.values() for single in found)
        return [single.probe for single in singles if single.probe is not None]

    @property
    def waiting(self) -> list[Definition]:
        """What is defined in modules that were not loaded when it was looked up."""
        singles = (single for _, found in self._known.values() for single in found)
        return [single.definition for single in singles if single.probe is None]

    def numbers_of(self, definition: Definition) -> list[int]:
        """Return the event ids of a definition."""
        _, singles = self._known.get(id(definition), (definition, ()))
        return [single.event_id for single in singles]

    def resolve(
        self, definition: Definition, checkpoint: Callable[[], None], *, may_wait: bool
    ) -> tuple[Single, ...]:
        """Return the singles of a definition: the same for the same object, until it is forgotten.

        Args:
            definition: of one place, or of those that a pattern names.
            checkpoint: called for each; what it raises ends this.
            may_wait: whether its module may be loaded later.

        Raises:
            DefinitionError: it names what this kernel has not, or is not like others of its event.
            RefusedError: no probe can be there; the numbers are used up.
        """
        if id(definition) in self._known:
            return self._known[id(definition)][1]
        found: list[Single] = []
        try:
            for single in self.places.expand(definition):
                checkpoint()
                found.append(self._single(single))
                self.identify(found[-1], may_wait=may_wait)
        except BaseException:
            self._drop(found, is_new=True)
            raise
        self._known[id(definition)] = definition, tuple(found)
        return tuple(found)

    def layout_of(
        self,
        definition: Definition,
        deleted: Iterable[Definition],
        checkpoint: Callable[[], None],
    ) -> RecordLayout:
        """Return the layout of a definition's first place; errors as for ``resolve``.

        Args:
            definition: whose.
            deleted: definitions that it need not be like.
            checkpoint: as of ``resolve``.
        """
        self.compare_without(deleted)
        for single in self.resolve(definition, checkpoint, may_wait=True):
            if single.probe is not None:
                return single.probe.layout
        name = f"{definition.event}: " if definition.event else ""
        raise RefusedError(
            f"{name}its fields are known when its module is loaded; until then it "
            "can have no hist trigger"
        )

    def identify(self, single: Single, *, may_wait: bool = True) -> None:
        """Find out what a single is now; errors as for ``resolve``."""
        definition = single.definition
        try:
            probe = self.places.resolve(definition, event_id=single.event_id)
        except NotLoadedError:
            if not may_wait:
                raise
            single.probe = None
            return
        gone = self._deleted
        # A pattern's functions may differ: each has a layout of its own.
        for command, others in self._by_event[_name(definition)].items():
            there = () if command == definition.command else others.items()
            other = next((each.probe for n, each in there if each.probe and n not in gone), None)
            if other is not None:
                check_alike(other, probe)
                break
        start, stop = self.places.kernel.text
        single.probe, single.module = probe, self._module(probe.addr)
        is_tracepoint = definition.type is EventType.TRACEPOINT
        single.may_go = not is_tracepoint and not start <= probe.addr < stop

    def compare_without(self, deleted: Iterable[Definition]) -> None:
        """Have new definitions not compared with some, which are forgotten when all is well."""
        self._deleted = {number for each in deleted for number in self.numbers_of(each)}

    def forget(self, definition: Definition, *, is_new: bool = False) -> None:
        """Let a definition go that is defined no more, and armed nowhere; a new one never was."""
        known = self._known.pop(id(definition), None)
        if known is not None:
            self._drop(known[1], is_new=is_new)

    def replace_definition(self, old: Definition, new: Definition) -> None:
        """Take a definition for one with another filter, or triggers: its numbers stay."""
        known = self._known.pop(id(old), None)
        if known is None:
            return
        found: list[Single] = []
        state = {name: getattr(new, name) for name in ("filter", "triggers", "soft_enable")}
        for single in known[1]:
            definition, probe = replace(single.definition, **state), single.probe
            if probe is not None:
                probe = replace(probe, definition=replace(probe.definition, **state))
            other = replace(single, definition=definition, probe=probe)
            self._same(definition)[single.event_id] = other
            found.append(other)
        self._known[id(new)] = new, tuple(found)

    def reuse_numbers(self) -> None:
        """Give numbers of forgotten definitions to others: no record can have them any more."""
        self._free_numbers += self._old_numbers
        self._old_numbers = []

    def _module(self, addr: int) -> str:
        kernel = self.places.kernel
        if kernel.has_text(addr):
            return ""
        symbol = kernel.symbols.at(addr)
        return symbol.module if symbol is not None else ""

    def _single(self, definition: Definition) -> Single:
        number = next(self._new_numbers, None)
        if number is None:
            if not self._free_numbers:
                why = " until a recording begins; before, deleted ones count, too"
                few = f"too many probes: at most {_MAX_EVENTS:,}"
                raise RefusedError(few + why if self._old_numbers else few)
            number = self._free_numbers.popleft()
        single = Single(definition=definition, event_id=number, sequence=next(self._sequences))
        self._same(definition)[number] = single
        return single

    def _drop(self, singles: "list[Single] | tuple[Single, ...]", *, is_new: bool) -> None:
        for single in singles:
            definition = single.definition
            same = self._same(definition)
            del same[single.event_id]
            if not same:
                commands = self._by_event[_name(definition)]
                del commands[definition.command]
                if not commands:
                    del self._by_event[_name(definition)]
            numbers = self._free_numbers if is_new else self._old_numbers
            numbers.append(single.event_id)
            self._deleted.discard(single.event_id)

    def _same(self, definition: Definition) -> dict[int, Single]:
        commands = self._by_event.setdefault(_name(definition), {})
        return commands.setdefault(definition.command, {})


def _name(definition: Definition) -> tuple[str, str]:
    return definition.group, definition.event
