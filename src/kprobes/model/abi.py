"""Facts for generated code: of one guest, and of the session's arena in it."""

from collections.abc import Mapping

from msgspec import Struct

from kprobes.units import Addr, signed

CPU_SHIFT = 48
"""The reservation word is ``cpu << 48 | position``."""

PERCPU_WORD, PERCPU_LIMIT, PERCPU_LOST, PERCPU_GUARD = 0, 8, 16, 24
PERCPU_SIZE = 64
"""Our per-CPU memory, one cache line: the reservation word; the limit (CPU and position that may
not be passed); the u64 of records dropped because the ring was full; the guard's context bits."""

LOAD_SIZE = 16
"""Bytes that count what an event's hits take: how many, and their time."""

MAX_STRING = 4096
"""Longest string in a record, its NUL included, as the kernel's MAX_STRING_SIZE."""

TEXT_SLOTS = 4
"""MAX_STRING bytes each that a CPU has for strings that a filter reads: one per context, from
tasks to NMIs."""

MAX_DYNAMIC = 16384
"""Room for all strings of one record."""

MAX_DEPTH = 127
"""Most addresses of a stack in a record."""
WALK_STACK = "stack_trace_save_regs"
"""The kernel's own unwinder, from given registers: kernel/stacktrace.c."""
WALK_USER_STACK = "stack_trace_save_user"
"""Likewise of a program, by its frame pointers."""

SLACK = 32768
"""Bytes after a ring for a record that begins before the ring's end."""


class TaskAbi(Struct, frozen=True, kw_only=True):
    """Where the running task and its facts are. Offsets are in task_struct.

    Attributes:
        current: per-CPU offset of the pointer to the running task; 0 where a register has it.
        preempt_count: per-CPU offset of the preempt count, or where a register has the task, in it.
        pid, tgid, comm, flags: offsets of ``pid``, ``tgid``, ``comm`` and ``thread_info.flags``.
        exec_id: offset of ``self_exec_id``, a u64 that fork copies and every exec adds 1 to.
        migration_disabled: offset and size, or None on kernels without it.
        resched_mask: of the flags: need-resched, and perhaps above it need-resched-lazy.
    """

    current: int
    preempt_count: int
    pid: int
    tgid: int
    exec_id: int
    comm: int
    flags: int
    migration_disabled: tuple[int, int] | None
    resched_mask: int


class Readers(Struct, frozen=True, kw_only=True):
    """The guest's functions that probes call to read what may not be there.

    Attributes:
        copy_kernel, copy_user, string_kernel, string_user: (to, from, bytes), fault-safe.
        walk_stack: (pt_regs, to, addresses, how many to skip) to the number of addresses; 0 where
            the kernel has no such function.
        walk_user_stack: (to, addresses), likewise of the task's program.
    """

    copy_kernel: Addr
    copy_user: Addr
    string_kernel: Addr
    string_user: Addr
    walk_stack: Addr = Addr(0)
    walk_user_stack: Addr = Addr(0)


class GuestAbi(Struct, frozen=True, kw_only=True):
    """Everything that generated code has as constants.

    Attributes:
        task: of the running kernel.
        readers: its fault-safe readers.
        percpu: per-CPU offset of our PERCPU_SIZE bytes.
        missed: of the u64 counters of missed hits, by event id.
        nmissed: of the u64 counters of calls whose return is not seen since no instance was free
            for them, by event id.
        loads: of what hits take, LOAD_SIZE bytes per event id: u64 of hits, and of the time from
            their begin to their end, as records have it; None where that is not counted.
        text: [start, stop) of the kernel's own: who returns elsewhere may come to a trampoline.
        rings: of the first ring; the others follow, each ``ring_size + SLACK`` bytes.
        texts: of every CPU's TEXT_SLOTS, in CPU order.
        ring_size: bytes of each CPU's ring, a power of two, slack not counted.
        task_size: addresses below it are user space's.
        thread_size: bytes of a kernel stack, a power of two.
        clock: the guest's function that returns nanoseconds of its trace clock, to be called at
            every hit; None where its raw counter tells the same.
        ns_per_count: of the raw counter, in 32.32 bits.
        words: of the session's triggers, which ``model.trigger`` draws; None without any.
        checks_tracing_on: whether the word there counts that says whether anything is recorded.
        is_guarded: whether the clock, or any probe of the session, calls into the guest, so that
            all must look at the guard.
    """

    task: TaskAbi
    readers: Readers
    percpu: int
    missed: Addr
    nmissed: Addr
    loads: Addr | None = None
    text: tuple[Addr, Addr]
    rings: Addr
    texts: Addr
    ring_size: int
    task_size: int
    thread_size: int
    clock: Addr | None
    ns_per_count: int = 1 << 32
    words: Addr | None = None
    checks_tracing_on: bool = False
    is_guarded: bool


class Field(Struct, frozen=True, kw_only=True):
    """Bits of code that a number goes into.

    Attributes:
        size: bytes of the instruction, or of the number itself.
        at: the lowest bit of them.
        width: how many; all by default.
        drop: lower bits of the number that are left out. They must be zero where it is relative.
        is_relative: subtract the place's own address.
        is_part: whether others have the rest of the number; else it must fit, with its sign.
    """

    size: int
    at: int = 0
    width: int = 0
    drop: int = 0
    is_relative: bool = False
    is_part: bool = False

    def put(self, code: bytes, number: int) -> bytes:
        """Return the bytes with a number in them.

        Raises:
            ValueError: it does not fit.
        """
        if not (self.width or self.at or self.drop or self.is_part):
            # All of the bytes, nearly always.
            try:
                return number.to_bytes(self.size, "little", signed=True)
            except OverflowError:
                raise ValueError(f"{number:#x} in {8 * self.size} bits") from None
        width = self.width or 8 * self.size
        value, mask = number >> self.drop, (1 << width) - 1
        is_whole = -(1 << width - 1) <= value < 1 << width - 1
        if self.is_relative and number != value << self.drop:
            is_whole = False
        if not (self.is_part or is_whole):
            raise ValueError(f"{number:#x} in {width} bits")
        left = int.from_bytes(code, "little") & ~(mask << self.at)
        return (left | (value & mask) << self.at).to_bytes(self.size, "little")


class Relocation(Struct, frozen=True, kw_only=True):
    """A number to be put into a template at ``offset``.

    Attributes:
        field: what of the code it goes into.
        symbol: whose value goes there.
        addend: added to it.
    """

    offset: int
    field: Field
    symbol: str
    addend: int


class Template(Struct, frozen=True, kw_only=True):
    """Machine code of one shape of probes, its entry at offset 0.

    Attributes:
        code: with zeros where numbers are still to come.
        relocations: what comes there.
    """

    code: bytes
    relocations: tuple[Relocation, ...]

    def link(self, base: Addr, values: Mapping[str, int]) -> bytes:
        """Return the code as it runs at ``base``.

        Raises:
            ValueError: a number does not fit its place.
        """
        code = bytearray(self.code)
        for relocation in self.relocations:
            field, start = relocation.field, relocation.offset
            place = base + start if field.is_relative else 0
            # Kernel addresses are negative numbers to an instruction's four bytes.
            value = signed(values[relocation.symbol] + relocation.addend - place)
            end = start + field.size
            try:
                code[start:end] = field.put(bytes(code[start:end]), value)
            except ValueError as e:
                raise ValueError(f"{relocation.symbol}: {e}") from e
        return bytes(code)
