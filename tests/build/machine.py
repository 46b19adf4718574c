"""A guest's CPUs running generated code, with as much kernel around it as a probe sees."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from random import Random

from msgspec import Struct
from msgspec.structs import replace

from kprobes.arch.x86_64.arch import X86_64
from kprobes.arch.x86_64.machine import TASK_SIZE
from kprobes.codegen.compile import compile_probes, needs_frame
from kprobes.model.abi import (
    CPU_SHIFT,
    PERCPU_GUARD,
    PERCPU_LIMIT,
    PERCPU_LOST,
    PERCPU_WORD,
    SLACK,
    GuestAbi,
    Readers,
    TaskAbi,
    Template,
)
from kprobes.model.resolved import Resolved
from kprobes.units import U64, Addr
from tests.build.cpu import GPRS, Cpu
from tests.build.kernel import TEXT
from tests.build.readers import Readers as ReaderCode

CODE = 0xFFFF_FFFF_C000_0000
CODE_SIZE = 0x2_0000
MORE_CODE = CODE + 0x100_0000
CLOCK = TEXT + 0x7840
READERS = TEXT + 0x7800
DATA = 0xFFFF_C900_0100_0000
MISSED = DATA
NMISSED = DATA + 0x8_0000
RINGS = DATA + 0x10_0000
TEXTS = RINGS + 0x4_0000
MAILBOX = RINGS + 0x5_0000
STACK = 0xFFFF_C900_0020_0000
KERNEL = 0xFFFF_8880_0300_0000
TASK = 0xFFFF_8880_0200_0000
PERCPU = (0xFFFF_8880_0100_0000, 0xFFFF_8880_0110_0000)
USER = 0x40_0000
DATA_SIZE = 0x4000
"""Of KERNEL and USER each, where things to fetch are."""

PID, TGID, EXEC_ID, COMM, FLAGS, MIGRATION = 1424, 1428, 1440, 2000, 0, 800
SOFTIRQ, HARDIRQ, NMI = 0x100, 0x10000, 0x100000
ARITHMETIC, IRQS_ON = 0x8D5, 0x200
NO_RESCHED = 1 << 31

ABI = GuestAbi(
    task=TaskAbi(
        current=0x1FBC0,
        preempt_count=0x1FBD0,
        pid=PID,
        tgid=TGID,
        exec_id=EXEC_ID,
        comm=COMM,
        flags=FLAGS,
        migration_disabled=(MIGRATION, 2),
        resched_mask=0b11000,
    ),
    readers=Readers(
        copy_kernel=Addr(READERS),
        copy_user=Addr(READERS + 16),
        string_kernel=Addr(READERS + 32),
        string_user=Addr(READERS + 48),
        walk_stack=Addr(READERS + 80),
        walk_user_stack=Addr(READERS + 96),
    ),
    percpu=0x3C000,
    missed=Addr(MISSED),
    nmissed=Addr(NMISSED),
    text=(Addr(TEXT), Addr(TEXT + 0x1_0000)),
    rings=Addr(RINGS),
    texts=Addr(TEXTS),
    ring_size=1 << 16,
    task_size=TASK_SIZE,
    thread_size=X86_64.thread_size,
    clock=None,
    is_guarded=True,
)
"""Per-CPU addresses from zero on, as up to 6.12."""

HIGH = 0xFFFF_FFFF_8300_0000
ABI_HIGH = replace(
    ABI,
    percpu=HIGH + ABI.percpu,
    task=replace(
        ABI.task,
        current=HIGH + ABI.task.current,
        preempt_count=HIGH + ABI.task.preempt_count,
        migration_disabled=None,
        resched_mask=0b110000,
    ),
)
"""Per-CPU addresses among the kernel's own, as in 7.x, and its flags."""

FAR = 0x41FF_CA5A_4000
ABI_FAR = replace(ABI, percpu=FAR)
"""Our per-CPU memory lies after the first chunk, beyond a displacement's reach."""

_REGIONS = (
    (TEXT, 0x10000),
    (CODE, CODE_SIZE),
    (MORE_CODE, CODE_SIZE),
    (DATA, MAILBOX - DATA + 0x2_0000),
    (STACK, ABI.thread_size),
    (KERNEL, DATA_SIZE),
    (TASK, 0x4000),
    (USER, DATA_SIZE),
    *((base, 0x40000) for base in PERCPU),
    *((base + FAR, 0x1000) for base in PERCPU),
)

State = Mapping[str, int]
Action = Callable[[], None]


class Loaded(Struct, frozen=True):
    """Probes on one site, and their code from ``entry`` to ``stop``."""

    probes: Sequence[Resolved]
    site: int
    entry: int
    stop: int

    @property
    def end(self) -> int:
        """Where a hit is over."""
        return self.site + X86_64.site.size


def random_state(random: Random, **fixed: int) -> dict[str, int]:
    """Return registers and flags as any function's caller may leave them."""
    flags = 2 | random.getrandbits(12) & ARITHMETIC | random.choice([0, IRQS_ON])
    state = {name: random.getrandbits(64) >> random.choice([0, 0, 32, 60]) for name in GPRS}
    stack = STACK + ABI.thread_size - 8 * random.randrange(1, 128)
    return {**state, "sp": stack, "flags": flags, **fixed}


class Machine:
    """Two CPUs, one of which runs at a time.

    Attributes:
        cpu: the CPU that runs; its memory is the guest's.
        number: which one it is.
        abi: what code is generated for.
        readers: the guest's fault-safe readers.
        loaded: every site.
    """

    def __init__(self, abi: GuestAbi = ABI, *, seed: int = 0, is_watched: bool = False) -> None:
        """Make a guest without probes; only in one that is watched hits have steps."""
        self.abi = abi
        self.random = Random(seed)
        self.loaded: list[Loaded] = []
        self.cpu = Cpu(_REGIONS, [*range(READERS, READERS + 112, 16)])
        self.readers = ReaderCode(self.cpu, abi, self.must_be_guarded, seed)
        if is_watched:
            self.cpu.watch(CODE, CODE + CODE_SIZE)
        self.number = 0
        self._next = CODE
        self.move_to(0)
        self.reset()

    # The guest's words.

    def percpu(self, addr: int, number: int | None = None) -> int:
        """Return where a per-CPU address is on a CPU; the one that runs by default."""
        return self._base(self.number if number is None else number) + addr & U64

    def word(self, number: int) -> int:
        """Return a CPU's reservation word."""
        return self.cpu.number(self.percpu(self.abi.percpu + PERCPU_WORD, number))

    def guard(self) -> int:
        return self.cpu.number(self.percpu(self.abi.percpu + PERCPU_GUARD), 4)

    @property
    def preempt_count(self) -> int:
        return self.cpu.number(self.percpu(self.abi.task.preempt_count), 4)

    @preempt_count.setter
    def preempt_count(self, value: int) -> None:
        self.cpu.set_number(self.percpu(self.abi.task.preempt_count), value, 4)

    def lost(self, number: int) -> int:
        return self.cpu.number(self.percpu(self.abi.percpu + PERCPU_LOST, number))

    def missed(self, event_id: int) -> int:
        return self.cpu.number(MISSED + 8 * event_id)

    def nmissed(self, event_id: int) -> int:
        return self.cpu.number(NMISSED + 8 * event_id)

    def ring(self, number: int) -> int:
        return RINGS + number * (self.abi.ring_size + SLACK)

    def place(self, number: int, position: int) -> int:
        """Return the address of a position of a CPU's ring."""
        return self.ring(number) + position % self.abi.ring_size

    def set_position(self, number: int, position: int, *, room: int | None = None) -> None:
        """Put a CPU's ring at a position, with so many bytes free."""
        name, size = number << CPU_SHIFT, self.abi.ring_size if room is None else room
        word = self.percpu(self.abi.percpu + PERCPU_WORD, number)
        self.cpu.set_number(word, name | position)
        limit = self.percpu(self.abi.percpu + PERCPU_LIMIT, number)
        self.cpu.set_number(limit, name | position + size)

    def move_to(self, number: int) -> None:
        """Let the running task go on on another CPU."""
        self.number = number
        self.cpu.set_gs(self._base(number))

    def must_be_guarded(self) -> None:
        """Check what the guest's functions may rely on."""
        assert self.preempt_count & 0xFF, "preemption is not held off"
        assert self.guard(), "nothing guards against recursion"

    def reset(self) -> None:
        """Make rings empty and counters zero; what the rings hold is of some older lap."""
        for number in range(len(PERCPU)):
            self.cpu.set_number(self.percpu(self.abi.task.current, number), TASK)
            self.cpu.set_number(self.percpu(self.abi.task.preempt_count, number), NO_RESCHED, 4)
            self.cpu.set_number(self.percpu(self.abi.percpu + PERCPU_GUARD, number), 0)
            self.cpu.set_number(self.percpu(self.abi.percpu + PERCPU_LOST, number), 0)
            self.set_position(number, 0)
        self.cpu.write(RINGS, b"\xd6" * (len(PERCPU) * (self.abi.ring_size + SLACK)))
        for counters in (MISSED, NMISSED):
            self.cpu.write(counters, bytes(8 * 64))

    # Code.

    def load(
        self,
        probes: Sequence[Resolved],
        *,
        template: Template | None = None,
    ) -> Loaded:
        """Compile probes that share a site, put their code into the arena and patch the site."""
        is_framed = needs_frame(X86_64, probes)
        template = template or _compiled(self.abi, tuple(probes), is_framed)
        site, entry = probes[0].layout.ip, Addr(self._next)
        head, body = b"", entry
        if is_framed:
            body = Addr(entry + 0x40)
            head = X86_64.site.entry(entry, body).ljust(body - entry, b"\xcc")
        code = head + template.link(body, self.numbers(probes))
        self.cpu.write(entry, code)
        self.cpu.write(site, X86_64.site.branch(site, entry))
        self.cpu.add_exit(site + X86_64.site.size)
        self._next = entry + -(-len(code) // 16) * 16
        self.loaded.append(Loaded(probes, site, entry, entry + len(code)))
        return self.loaded[-1]

    def put(self, link: Callable[[Addr], bytes], probes: Sequence[Resolved] = ()) -> Addr:
        """Put code into the arena, and know the records of its probes; return where it is."""
        place = Addr(self._next)
        code = link(place)
        self.cpu.write(place, code)
        self._next = place + -(-len(code) // 16) * 16
        self.loaded.append(Loaded(probes, place, place, place + len(code)))
        return place

    def grow(self) -> None:
        """Put code into another piece of memory from now on."""
        self._next = MORE_CODE

    def numbers(self, probes: Sequence[Resolved]) -> dict[str, int]:
        """Return what linking puts into the code of some probes of one site."""
        readers = self.abi.readers
        events = {f"event{n}": probe.layout.event_id for n, probe in enumerate(probes)}
        return {
            "copy_kernel": readers.copy_kernel,
            "copy_user": readers.copy_user,
            "string_kernel": readers.string_kernel,
            "string_user": readers.string_user,
            "walk_stack": readers.walk_stack,
            "walk_user_stack": readers.walk_user_stack,
            "site": probes[0].layout.ip,
            "clock": CLOCK,
            **events,
        }

    def hit(
        self, loaded: Loaded, state: State | None = None, *, at: Mapping[int, Action] | None = None
    ) -> dict[str, int]:
        """Run a site's call and return the registers after it.

        Args:
            loaded: whose site.
            state: registers at the site; random by default.
            at: what happens before the n-th instruction of the code.
        """
        cpu = self.cpu
        cpu.writes, cpu.trace, cpu.actions = [], [], dict(at or {})
        cpu.set_registers(state or random_state(self.random))
        pc = cpu.run(loaded.site)
        while pc != loaded.end:
            pc = cpu.run(self.readers.run(pc))
        assert not cpu.actions, "the code has fewer instructions"
        return cpu.registers()

    def steps(self, loaded: Loaded, state: State | None = None) -> list[int]:
        """Return the addresses of the instructions of one hit, in order."""
        self.hit(loaded, state)
        return self.cpu.trace

    def interrupt(self, loaded: Loaded, *, level: int = HARDIRQ) -> None:
        """Hit another site in an interrupt of the code that runs now."""
        cpu = self.cpu
        writes, trace, actions = cpu.writes, cpu.trace, cpu.actions
        self.preempt_count += level
        stack = cpu.register("sp") - 256 & -16
        cpu.aside(lambda: self._hit_aside(loaded, stack))
        self.preempt_count -= level
        cpu.writes, cpu.trace, cpu.actions = [*writes, *cpu.writes], trace, actions

    def _hit_aside(self, loaded: Loaded, stack: int) -> None:
        self.hit(loaded, random_state(self.random, sp=stack))

    def _base(self, number: int) -> int:
        return PERCPU[number] - (HIGH if self.abi.task.current >= HIGH else 0) & U64


@cache
def _compiled(abi: GuestAbi, probes: tuple[Resolved, ...], is_framed: bool) -> Template:
    return compile_probes(X86_64, abi, probes, is_framed=is_framed)
