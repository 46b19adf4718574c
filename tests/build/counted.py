"""Probes of the emulated guest that count by a hist trigger, and what their tables then hold."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from msgspec import Struct
from msgspec.structs import replace

from kprobes.lang.filter import parse_filter
from kprobes.lang.hist import parse_hist
from kprobes.lang.parser import parse
from kprobes.model.abi import WALK_STACK, WALK_USER_STACK, GuestAbi
from kprobes.model.definition import DURATION, SyntheticFields
from kprobes.model.filter import Header
from kprobes.model.hist import USER_STACK, HistField, HistTable, HistTrigger, Modifier, Special
from kprobes.model.plan import ReturnMethod, Returns
from kprobes.model.resolved import COMM_SIZE, Resolved
from kprobes.resolve.hist import known_fields
from kprobes.resolve.resolve import resolve
from kprobes.units import U64, Addr
from tests.build import arm64, arm64_returning, kernel, machine, returning
from tests.build.arm64 import Arm64Machine
from tests.build.filtered import known_of
from tests.build.kernel import make_kernel, symbol
from tests.build.machine import COMM, HARDIRQ, PID, TGID, Action, Machine
from tests.build.overridden import ARM64, Isa

CPUS = 2
_SPACING = 0x100
_TABLES = 0x1_0000
"""Of the data: between the counters of events that no test has."""
_TABLES_SIZE = 0x7_0000
_NEXT_TABLE = 0x1_0000
"""From one table to that with the next number, where there are several."""
_HEADER, _WORD = 64, 8
_SCRIPT = machine.KERNEL + 0x1000
_RDTSC = bytes.fromhex("0f31")
_MRS_CNTVCT, _TARGET = 0xD53B_E040, 0x1F
"""mrs x0, cntvct_el0, and the bits of its register."""


def make_counted(
    isa: Isa, text: str, trigger: str, filter_text: str = "", *, number: int = 0
) -> Resolved:
    """Resolve a definition on a function ``f``, with a hist trigger.

    Args:
        isa: of the guest.
        text: of the definition.
        trigger: by which its hits are counted; "" where they are recorded.
        filter_text: of its filter, or "".
        number: of the function: each has a place and an event of its own.
    """
    walkers = [symbol(name, kernel.TEXT) for name in (WALK_STACK, WALK_USER_STACK)]
    names = make_kernel([symbol("f", site_of(isa, number)), *walkers])
    is_user = USER_STACK in trigger
    fields = SyntheticFields(
        duration=DURATION in trigger,
        stacktrace="stack" in trigger and not is_user,
        userstacktrace=is_user,
    )
    probe = resolve(
        replace(parse(text, registers=isa.arch.registers), synthetic_fields=fields),
        replace(names, arch=isa.arch.name),
        isa.arch,
        event_id=number + 1,
        locate=lambda function: function.addr,
    )
    if filter_text:
        probe = replace(probe, filter=parse_filter(filter_text, known_of(probe)))
    if not trigger:
        return probe
    found = parse_hist(trigger, known_fields(probe.layout, of_guest=True))
    return replace(probe, hist=HistTable(trigger=found, number=0))


def site_of(isa: Isa, number: int) -> int:
    """Return where a function is."""
    return (arm64.SITE if isa is ARM64 else kernel.SITE) + _SPACING * number


def _symbols(probes: Sequence[Resolved], tables: int) -> dict[str, int]:
    numbers: dict[str, int] = {}
    for n, probe in enumerate(probes):
        for table in probe.tables:
            numbers[f"table{table.number}_event{n}"] = tables + _NEXT_TABLE * table.number
            numbers[f"ip_event{n}"] = int(probe.layout.ip)
    return numbers


# What links code asks the machine for all numbers, wherever it is put.
class _Amd64(Machine):
    def numbers(self, probes: Sequence[Resolved]) -> dict[str, int]:
        return super().numbers(probes) | _symbols(probes, machine.DATA + _TABLES)


class _Arm64(Arm64Machine):
    def numbers(self, probes: Sequence[Resolved], site: int) -> dict[str, int]:
        return super().numbers(probes, site) | _symbols(probes, arm64.DATA + _TABLES)


class Entry(Struct, frozen=True, kw_only=True):
    """One entry that is not free.

    Attributes:
        slot: its number in the table.
        tracked: with an action: how often something was kept, its number, when, what is saved.
    """

    slot: int
    mark: int
    hitcount: int
    keys: tuple[int, ...]
    vals: tuple[int, ...]
    comm: bytes
    tracked: tuple[int, ...] = ()


class Table(Struct, frozen=True, kw_only=True):
    """One CPU's table."""

    used: int
    dropped: int
    unmeasured: int
    entries: tuple[Entry, ...]

    @property
    def counts(self) -> dict[tuple[int, ...], tuple[int, ...]]:
        """Hitcount and values by key; no hit is under way, and each key has one entry."""
        found = {each.keys: (each.hitcount, *each.vals) for each in self.entries}
        assert len(found) == len(self.entries) == self.used
        assert all(each.mark >= 2 for each in self.entries)
        return found

    @property
    def totals(self) -> dict[int, tuple[int, int, int, int]]:
        """Hits, sum, least and greatest of each key, which may have several entries.

        No hit is under way; the trigger has one key, and these three values of a signed number.
        """
        assert self.used == len(self.entries)
        found: dict[int, tuple[int, int, int, int]] = {}
        for entry in self.entries:
            assert entry.mark >= 2
            assert entry.hitcount > 0
            (key,), (sum_, least, greatest) = entry.keys, map(signed, entry.vals)
            hits, total, low, high = found.get(key, (0, 0, least, greatest))
            joined = (hits + entry.hitcount, total + sum_, min(low, least), max(high, greatest))
            found[key] = joined
        return found


def signed(word: int) -> int:
    """Return the number that a word is where it has a sign."""
    return word - (1 << 64) if word >> 63 else word


def words_of(comm: bytes) -> tuple[int, int]:
    """Return a task's name as the two words of a key."""
    first, second = _words(comm.ljust(COMM_SIZE, b"\0"))
    return first, second


def log2(number: int) -> int:
    """Return ``ilog2(roundup_pow_of_two(number))``, and 0 of 0, in plain Python."""
    return (number - 1).bit_length() if number else 0


def bucket_of(number: int) -> int:
    """Return the bucket for percentiles: 64 of each power of two, from 1 on; in plain Python."""
    if number <= 0:
        return -bucket_of(-number) if number else 0
    power = number.bit_length() - 1
    return 64 * power + 1 + (64 * number - (64 << power) >> power)


def read_table(trigger: HistTrigger, data: bytes) -> Table:
    """Read a table as it is drawn in ``model.hist``; its free entries must be empty."""
    head, size = 2 + _key_words(trigger), entry_size(trigger)
    end, own = head + len(trigger.columns), _WORD * _tracked_words(trigger)
    used, dropped, unmeasured = _words(data[: 3 * _WORD])
    entries: list[Entry] = []
    for slot in range(2 * trigger.room):
        raw = data[_HEADER + slot * size :][:size]
        words = _words(raw)
        if not words[0]:
            assert not any(raw), f"free entry {slot} is not empty"
            continue
        entry = Entry(
            slot=slot,
            mark=words[0],
            hitcount=words[1],
            keys=words[2:head],
            vals=words[head:end],
            comm=raw[_WORD * end : size - own],
            tracked=words[len(words) - own // _WORD :] if own else (),
        )
        entries.append(entry)
    return Table(used=used, dropped=dropped, unmeasured=unmeasured, entries=tuple(entries))


def entry_size(trigger: HistTrigger) -> int:
    """Return an entry's bytes: mark, hitcount, keys, columns, with execname a name; an action's."""
    has_comm = any(key.modifier is Modifier.EXECNAME for key in trigger.keys)
    words = 2 + _key_words(trigger) + len(trigger.columns)
    return _WORD * (words + (2 if has_comm else 0) + _tracked_words(trigger))


def _tracked_words(trigger: HistTrigger) -> int:
    return 3 + len(trigger.action.saved) if trigger.action else 0


def _key_words(trigger: HistTrigger) -> int:
    words = sum(2 if key.source is Header.COMM else 1 for key in trigger.keys)
    return words + len(trigger.percentiles)


def _words(data: bytes) -> tuple[int, ...]:
    return tuple(
        int.from_bytes(data[at : at + _WORD], "little") for at in range(0, len(data), _WORD)
    )


class Tables:
    """The tables of both CPUs, in the memory of a machine."""

    def __init__(self, isa: Isa, guest: _Amd64 | _Arm64, table: HistTable) -> None:
        """Have empty ones."""
        self._guest, self._trigger = guest, table.trigger
        first = (arm64.DATA if isa is ARM64 else machine.DATA) + _TABLES
        self._place = first + _NEXT_TABLE * table.number
        self._room = _TABLES_SIZE - _NEXT_TABLE * table.number
        self._entries = _HEADER + 2 * self._trigger.room * entry_size(self._trigger)
        self._size = table.size
        assert self._size * CPUS <= (_NEXT_TABLE if table.number else self._room)
        self.clear()

    def read(self, cpu: int = 0) -> Table:
        """Return a CPU's table."""
        data = self._guest.cpu.read(self._place + cpu * self._size, self._entries)
        return read_table(self._trigger, data)

    def kept(self, place: int, cpu: int = 0) -> bytes:
        """Return the bytes of a key whose word says that they are at this place of the area."""
        area = self._place + cpu * self._size + self._entries
        assert 0 < place < self._size - self._entries
        _, size = _words(self._guest.cpu.read(area + place, 2 * _WORD))
        return self._guest.cpu.read(area + place + 2 * _WORD, size)

    def clear(self) -> None:
        """Make both empty, with nothing but zeros in all of the memory after them."""
        self._guest.cpu.write(self._place, bytes(self._room))

    def copy(self) -> bytes:
        """Return the bytes of both."""
        return self._guest.cpu.read(self._place, self._size * CPUS)

    def restore(self, data: bytes) -> None:
        """Put back what ``copy`` has returned."""
        self._guest.cpu.write(self._place, data)


class Counted:
    """Functions whose probes count in one table, and hits of them.

    Attributes:
        machine: that runs them.
        trigger: of the table.
        tables: what they count in.
        others: of triggers with greater numbers, where there are some.
        task: where the running task's facts are.
    """

    def __init__(
        self,
        isa: Isa,
        *sites: Sequence[Resolved],
        abi: GuestAbi | None = None,
        is_watched: bool = False,
    ) -> None:
        """Put probes on some functions; only in one that is watched hits have steps."""
        self.isa = isa
        self._hits: list[Callable[..., dict[str, int]]]
        if isa is ARM64:
            self.task = arm64.TASK
            self.machine = guest = _Arm64(abi or arm64.ABI, is_watched=is_watched)
            self._hits = [partial(guest.hit, guest.load(probes)) for probes in sites]
        else:
            self.task = machine.TASK
            self.machine = guest = _Amd64(abi or machine.ABI, is_watched=is_watched)
            self._hits = [partial(guest.hit, guest.load(probes)) for probes in sites]
        tables = {t.number: t for probes in sites for each in probes for t in each.tables}
        all_tables = [Tables(isa, guest, tables[number]) for number in sorted(tables)]
        self.tables, *self.others = all_tables
        self.trigger = tables[min(tables)].trigger

    def set_task(self, comm: bytes = b"", pid: int = 0, tgid: int = 0) -> None:
        """Give the running task a name and numbers."""
        cpu = self.machine.cpu
        cpu.write(self.task + COMM, comm.ljust(COMM_SIZE, b"\0"))
        for place, number in ((PID, pid), (TGID, tgid)):
            cpu.set_number(self.task + place, number & 0xFFFF_FFFF, 4)

    def hit(
        self, *arguments: int, site: int = 0, at: Mapping[int, Action] | None = None, **fixed: int
    ) -> None:
        """Call a function once, which must go on with all that it is given.

        Args:
            arguments: its first ones; all other registers are random.
            site: which function.
            at: what happens before the n-th instruction of its probes' code.
            fixed: registers by name.
        """
        guest, given = self.machine, zip(self.isa.arch.arguments, arguments, strict=False)
        registers = {name: value & U64 for name, value in given} | fixed
        make = arm64.random_state if isinstance(guest, Arm64Machine) else machine.random_state
        state = make(guest.random, **registers)
        held, word = guest.preempt_count, guest.guard()

        after = self._hits[site](state, at=at)

        names = [*self.isa.kept, *self.isa.given, "sp"]
        assert {n: after[n] for n in names} == {n: state[n] for n in names}
        assert (guest.preempt_count, guest.guard()) == (held, word)

    def steps(self, *arguments: int, site: int = 0) -> int:
        """Hit once, and return how many instructions of our code that took."""
        self.hit(*arguments, site=site)
        return len(self.machine.cpu.trace)

    def interrupt(
        self,
        *arguments: int,
        site: int = 0,
        level: int = HARDIRQ,
        at: Mapping[int, Action] | None = None,
    ) -> None:
        """Call a function in an interrupt of the code that runs now.

        Args:
            arguments: its first ones.
            site: which function.
            level: what the interrupt adds to the preempt count.
            at: as of ``hit``.
        """
        guest, cpu = self.machine, self.machine.cpu
        trace, actions = cpu.trace, cpu.actions
        stack = cpu.register("sp") - 512 & -16
        guest.preempt_count += level
        cpu.aside(lambda: self.hit(*arguments, site=site, at=at, sp=stack))
        guest.preempt_count -= level
        cpu.trace, cpu.actions = trace, actions


def rivals(counted: Counted) -> tuple[int, int]:
    """Return two keys that begin at the same slot, of a first field; all tables are empty then."""
    slots: dict[int, int] = {}
    for key in range(1, 1000):
        counted.tables.clear()
        counted.hit(key)
        (entry,) = counted.tables.read().entries
        other = slots.setdefault(entry.slot, key)
        if other != key:
            break
    else:
        raise AssertionError("no two keys begin at one slot")
    counted.tables.clear()
    return other, key


class Model:
    """The tables of both CPUs in plain Python, each a dict.

    Attributes:
        dropped: hits without room, of both.
    """

    def __init__(self, counted: Counted, types: Sequence[str]) -> None:
        """Have empty ones for a function whose n-th argument is the n-th field, of these types."""
        self.dropped = 0
        self._counted, self._types = counted, types
        self._rows: list[dict[tuple[int, ...], tuple[int, ...]]] = [{} for _ in range(CPUS)]
        self._comms: list[dict[tuple[int, ...], bytes]] = [{} for _ in range(CPUS)]

    def hit(self, arguments: Sequence[int]) -> None:
        """Count a hit that the running task would have now."""
        trigger, guest = self._counted.trigger, self._counted.machine
        comm = guest.cpu.read(self._counted.task + COMM, COMM_SIZE)
        key: tuple[int, ...] = ()
        for each in trigger.keys:
            is_comm = each.source is Header.COMM
            key += words_of(comm) if is_comm else (self._taken(each, arguments),)
        key += tuple(self._bucket(each, arguments) for each in trigger.percentiles)
        rows = self._rows[guest.number]
        if key not in rows and len(rows) == trigger.room:
            self.dropped += 1
            return
        self._comms[guest.number].setdefault(key, comm)
        vals = tuple(self._taken(each, arguments) for each in trigger.columns)
        hits, *before = rows.get(key, (0, *vals))
        if hits:
            both = zip(trigger.columns, before, vals, strict=True)
            vals = tuple(_joined(field, one, other) for field, one, other in both)
        rows[key] = hits + 1, *vals

    def check(self) -> None:
        """Compare with what the guest has counted."""
        tables = [self._counted.tables.read(cpu) for cpu in range(CPUS)]
        assert sum(table.dropped for table in tables) == self.dropped
        for table, rows, comms in zip(tables, self._rows, self._comms, strict=True):
            assert table.counts == rows
            found = {each.keys: each.comm for each in table.entries if each.comm}
            assert found == (comms if found else {})

    def _bucket(self, field: HistField, arguments: Sequence[int]) -> int:
        number = self._number(field, arguments)
        return bucket_of(signed(number) if field.is_signed else number) & U64

    def _taken(self, field: HistField, arguments: Sequence[int]) -> int:
        number = self._number(field, arguments)
        match field.modifier:
            case Modifier.LOG2:
                return log2(number)
            case Modifier.BUCKETS:
                return number - number % field.width
            case _:
                return number

    def _number(self, field: HistField, arguments: Sequence[int]) -> int:
        guest = self._counted.machine
        match field.source:
            case int(index):
                type_ = self._types[index]
                data = (arguments[index] & U64).to_bytes(8, "little")[: int(type_[1:]) // 8]
                return int.from_bytes(data, "little", signed=type_[0] == "s") & U64
            case Header.PID:
                pid = guest.cpu.read(self._counted.task + PID, 4)
                return int.from_bytes(pid, "little", signed=True) & U64
            case Header.CPU:
                return guest.number
            case _:
                assert field.source is Special.HITCOUNT
                return 1


def _joined(field: HistField, first: int, second: int) -> int:
    order = signed if field.is_signed else int
    match field.modifier:
        case Modifier.MIN:
            return min(first, second, key=order)
        case Modifier.MAX:
            return max(first, second, key=order)
        case _:
            return first + second & U64


class CountedReturns:
    """A function whose returns are counted, called from several places.

    Attributes:
        tables: what they are counted in.
    """

    def __init__(
        self,
        isa: Isa,
        probe: Resolved,
        return_method: ReturnMethod = ReturnMethod.RETINSN,
        *,
        abi: GuestAbi | None = None,
    ) -> None:
        """Arm a probe at the function's returns."""
        if probe.hist is None:
            raise ValueError("it counts nothing")
        returns = Returns(
            entry=Addr(site_of(isa, 0)),
            return_method=return_method,
            probes=(probe,),
            is_timed=bool(probe.at_entry),
        )
        if isa is ARM64:
            self._guest = guest = _Arm64(abi or arm64.ABI, is_watched=True)
            self._call = _arm64_caller(guest, returns)
        else:
            self._guest = guest = _Amd64(abi or machine.ABI, is_watched=True)
            self._call = _amd64_caller(guest, returns)
        self.tables = Tables(isa, guest, probe.hist)
        self._asked = self._times_asked() if returns.is_timed else []
        self.tables.clear()

    def call(self, number: int = 0) -> int:
        """Call it from one of the callers; return that one's address."""
        self._guest.cpu.trace, self._guest.cpu.actions = [], {}
        return self._call(number)

    def call_at(self, entered: int, left: int) -> None:
        """Call it with these times at its entry and at its return."""
        cpu, guest = self._guest.cpu, self._guest
        cpu.trace = []
        if guest.abi.clock is None:
            # An instruction that is skipped is not in the trace.
            times = enumerate(zip(self._asked, (entered, left), strict=True))
            cpu.actions = {step - n: partial(self._skip_counter, at) for n, (step, at) in times}
        else:
            times = zip(self._asked, (entered, left), strict=True)
            cpu.actions = {step: partial(self._set_clock, at) for step, at in times}

        self._call(0)

        assert not cpu.actions

    def _times_asked(self) -> list[int]:
        # Before which instructions the times that ``call_at`` is given have to be set.
        self.call()
        cpu, readers = self._guest.cpu, self._guest.readers
        if self._guest.abi.clock is None:
            return [n for n, pc in enumerate(cpu.trace) if self._reads_counter(pc)]
        steps, before, seen = len(cpu.trace), readers.time, list[int]()
        cpu.trace = []
        cpu.actions = dict.fromkeys(range(steps), lambda: seen.append(readers.time))
        self._call(0)
        return [0, next(n for n, time in enumerate(seen) if time > before)]

    def _reads_counter(self, pc: int) -> bool:
        if isinstance(self._guest, Arm64Machine):
            return self._guest.cpu.number(pc, 4) & ~_TARGET == _MRS_CNTVCT
        return self._guest.cpu.read(pc, 2) == _RDTSC

    def _skip_counter(self, time: int) -> None:
        cpu = self._guest.cpu
        if isinstance(self._guest, Arm64Machine):
            pc = cpu.register("pc")
            cpu.set_registers({f"x{cpu.number(pc, 4) & _TARGET}": time, "pc": pc + 4})
        else:
            low, high = time & 0xFFFF_FFFF, time >> 32
            cpu.set_registers({"ax": low, "dx": high, "ip": cpu.register("ip") + len(_RDTSC)})

    def _set_clock(self, time: int) -> None:
        # It goes on by one each time it is asked.
        self._guest.readers.time = time - 1


def _amd64_caller(guest: _Amd64, returns: Returns) -> Callable[[int], int]:
    callers = [returning.CALLERS + 16 * number for number in range(8)]
    for caller in callers:
        guest.cpu.add_exit(caller)
    function = returning.Function(guest, returns)
    function.arm()

    def call(number: int) -> int:
        state = machine.random_state(guest.random, bp=_SCRIPT, sp=machine.STACK + 0x1000)
        guest.cpu.set_number(state["sp"], callers[number])
        guest.cpu.set_number(_SCRIPT, function.leave.addr)
        went, _ = returning.run(guest, function.addr, state)
        assert went == callers[number]
        return went

    return call


def _arm64_caller(guest: _Arm64, returns: Returns) -> Callable[[int], int]:
    leaving = arm64_returning.Leaving(arm64_returning.RET)
    function = arm64_returning.Function(guest, returns, leaving)
    function.arm()

    def call(number: int) -> int:
        went, _, _ = function.call(number, sp=arm64.STACK + 0x1000)
        assert went == arm64_returning.CALLERS + 16 * number
        return went

    return call
