"""An arm64 guest's CPUs running generated code, with as much kernel around it as a probe sees."""

from collections.abc import Callable, Mapping, Sequence
from random import Random

from msgspec import Struct
from msgspec.structs import replace

from kprobes.arch.aarch64 import encode
from kprobes.arch.aarch64.arch import AARCH64
from kprobes.codegen.compile import compile_probes, saved_reads
from kprobes.lang.filter import parse_filter
from kprobes.lang.parser import parse
from kprobes.model.abi import (
    CPU_SHIFT,
    PERCPU_GUARD,
    PERCPU_LIMIT,
    PERCPU_LOST,
    PERCPU_WORD,
    SLACK,
    WALK_STACK,
    WALK_USER_STACK,
    GuestAbi,
    Readers,
    TaskAbi,
    Template,
)
from kprobes.model.definition import NO_SYNTHETIC_FIELDS, SyntheticFields
from kprobes.model.plan import Displaced
from kprobes.model.resolved import Resolved
from kprobes.resolve.resolve import resolve
from kprobes.units import Addr
from tests.build.cpu import ARM64, ARM64_GPRS, Cpu
from tests.build.filtered import known_of
from tests.build.kernel import make_kernel, symbol
from tests.build.readers import ARM64 as CALLS
from tests.build.readers import Readers as ReaderCode

TEXT = 0xFFFF_8000_0801_0000
CODE = TEXT - 0x20_0000
CODE_SIZE = 0x2_0000
READERS = TEXT + 0x7800
CLOCK = READERS + 64
DATA = 0xFFFF_8000_0A00_0000
MISSED, NMISSED = DATA, DATA + 0x8_0000
RINGS = DATA + 0x10_0000
TEXTS = RINGS + 0x4_0000
MAILBOX = RINGS + 0x5_0000
STACK = 0xFFFF_8000_0B00_0000
KERNEL = 0xFFFF_0000_0300_0000
TASK = 0xFFFF_0000_0200_0000
PERCPU = (0xFFFF_0000_0100_0000, 0xFFFF_0000_0110_0000)
USER = 0x40_0000
DATA_SIZE = 0x4000
PID, TGID, EXEC_ID, COMM, FLAGS, COUNT = 1424, 1428, 1440, 2000, 0, 8
IRQS_OFF = 1 << 7
SITE = TEXT + 0x1000
HARDIRQ = 0x10000

ABI = GuestAbi(
    task=TaskAbi(
        current=0,
        preempt_count=COUNT,
        pid=PID,
        tgid=TGID,
        exec_id=EXEC_ID,
        comm=COMM,
        flags=FLAGS,
        migration_disabled=None,
        resched_mask=2,
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
    task_size=1 << 48,
    thread_size=AARCH64.thread_size,
    clock=None,
    is_guarded=True,
)
_REGIONS = (
    (TEXT, 0x10000),
    (CODE, CODE_SIZE),
    (DATA, MAILBOX - DATA + 0x2_0000),
    (STACK, ABI.thread_size),
    (KERNEL, DATA_SIZE),
    (TASK, 0x4000),
    (USER, DATA_SIZE),
    *((base, 0x40000) for base in PERCPU),
)
_EL1H = 5


class Loaded(Struct, frozen=True):
    """Probes on one site; a hit runs from ``start`` to ``end``."""

    probes: Sequence[Resolved]
    start: int
    end: int


def make_probe(
    text: str,
    filter_text: str = "",
    *,
    event_id: int = 1,
    addr: int = SITE,
    extra: SyntheticFields = NO_SYNTHETIC_FIELDS,
) -> Resolved:
    """Resolve a definition on a function ``f``, with a filter if there is one, and extra fields."""
    walkers = (WALK_STACK, WALK_USER_STACK)
    symbols = [symbol("f", addr), *(symbol(each, TEXT) for each in walkers)]
    kernel = replace(make_kernel(symbols), arch="aarch64")
    definition = replace(parse(text, registers=AARCH64.registers), synthetic_fields=extra)
    probe = resolve(definition, kernel, AARCH64, event_id=event_id, locate=lambda s: s.addr)
    if not filter_text:
        return probe
    return replace(probe, filter=parse_filter(filter_text, known_of(probe)))


def random_state(random: Random, **fixed: int) -> dict[str, int]:
    """Return registers and flags as any instruction may find them."""
    state = {n: random.getrandbits(64) >> random.choice([0, 0, 32, 60]) for n in ARM64_GPRS}
    masks = random.choice([0, IRQS_OFF, 0x3C0])
    pstate = random.getrandbits(4) << 28 | masks | _EL1H
    stack = STACK + ABI.thread_size - 16 * random.randrange(1, 64)
    return {**state, "sp": stack, "pstate": pstate, **fixed}


class Arm64Machine:
    """Two CPUs, one of which runs at a time.

    Attributes:
        cpu: the CPU that runs; its memory is the guest's.
        number: which one it is.
    """

    def __init__(self, abi: GuestAbi = ABI, *, seed: int = 0, is_watched: bool = False) -> None:
        self.abi = abi
        self.random = Random(seed)
        self.loaded: list[Loaded] = []
        self.cpu = Cpu(_REGIONS, [*range(READERS, READERS + 112, 16)], ARM64)
        self.readers = ReaderCode(self.cpu, abi, self.must_be_guarded, seed, CALLS)
        if is_watched:
            self.cpu.watch(CODE, CODE + CODE_SIZE)
        self.number = 0
        self._next = CODE
        self.move_to(0)
        self.cpu.set_registers({"sp_el0": TASK})
        self.cpu.write(RINGS, b"\xd6" * (2 * (abi.ring_size + SLACK)))
        for number in range(len(PERCPU)):
            self.set_position(number, 0)

    def percpu(self, offset: int, number: int | None = None) -> int:
        """Return where one of our words is on a CPU; the one that runs by default."""
        return PERCPU[self.number if number is None else number] + self.abi.percpu + offset

    def word(self, number: int) -> int:
        """Return a CPU's reservation word."""
        return self.cpu.number(self.percpu(PERCPU_WORD, number))

    def guard(self, number: int | None = None) -> int:
        return self.cpu.number(self.percpu(PERCPU_GUARD, number), 4)

    def set_guard(self, value: int, number: int) -> None:
        self.cpu.set_number(self.percpu(PERCPU_GUARD, number), value, 4)

    @property
    def preempt_count(self) -> int:
        return self.cpu.number(TASK + COUNT, 4)

    @preempt_count.setter
    def preempt_count(self, value: int) -> None:
        self.cpu.set_number(TASK + COUNT, value, 4)

    def lost(self, number: int) -> int:
        return self.cpu.number(self.percpu(PERCPU_LOST, number))

    def missed(self, event_id: int) -> int:
        return self.cpu.number(MISSED + 8 * event_id)

    def place(self, number: int, position: int) -> int:
        """Return the address of a position of a CPU's ring."""
        ring = RINGS + number * (self.abi.ring_size + SLACK)
        return ring + position % self.abi.ring_size

    def set_position(self, number: int, position: int, *, room: int | None = None) -> None:
        """Put a CPU's ring at a position, with so many bytes free."""
        name, size = number << CPU_SHIFT, self.abi.ring_size if room is None else room
        self.cpu.set_number(self.percpu(PERCPU_WORD, number), name | position)
        self.cpu.set_number(self.percpu(PERCPU_LIMIT, number), name | position + size)

    def move_to(self, number: int) -> None:
        """Let the running task go on on another CPU."""
        self.number = number
        self.cpu.set_registers({"tpidr_el1": PERCPU[number]})

    def must_be_guarded(self) -> None:
        """Check what the guest's functions may rely on."""
        assert self.preempt_count & 0xFF, "preemption is not held off"
        assert self.guard(), "nothing guards against recursion"

    def numbers(self, probes: Sequence[Resolved], site: int) -> dict[str, int]:
        """Return what linking puts into the code of some probes of one site."""
        readers = self.abi.readers
        return {
            "copy_kernel": readers.copy_kernel,
            "copy_user": readers.copy_user,
            "string_kernel": readers.string_kernel,
            "string_user": readers.string_user,
            "walk_stack": readers.walk_stack,
            "walk_user_stack": readers.walk_user_stack,
            "site": site,
            "clock": CLOCK,
            **{f"event{n}": probe.layout.event_id for n, probe in enumerate(probes)},
        }

    def put(self, link: Callable[[Addr], bytes]) -> Addr:
        """Put code into the arena; return where it is."""
        place = Addr(self._next)
        code = link(place)
        self.cpu.write(place, code)
        self._next = place + -(-len(code) // 16) * 16
        return place

    def random_state(self) -> dict[str, int]:
        """Return registers and flags as any instruction may find them."""
        return random_state(self.random)

    def know(self, probes: Sequence[Resolved]) -> None:
        """Know the records of probes whose code is there."""
        self.loaded.append(Loaded(probes, 0, 0))

    def sign(self) -> None:
        """Have the CPU sign return addresses and check them; it does nothing by default."""
        self.cpu.write_system((1, 0, 3, 0, 0), 1 << 31 | self.cpu.read_system((1, 0, 3, 0, 0)))
        # SCR_EL3: API, APK, RW, NS; HCR_EL2: API, APK. Nobody above wants to know of it.
        self.cpu.write_system((1, 1, 3, 4, 0), 3 << 40)
        self.cpu.write_system((1, 1, 3, 6, 0), 3 << 16 | 1 << 10 | 1)
        # TCR_EL1: 48 bits of addresses in both halves, no top byte ignored.
        self.cpu.write_system((2, 0, 3, 0, 2), 16 | 16 << 16)
        # APIAKeyLo_EL1, APIAKeyHi_EL1.
        for op2 in (0, 1):
            self.cpu.write_system((2, 1, 3, 0, op2), self.random.getrandbits(64))

    def load_written(self, probes: Sequence[Resolved], template: Template) -> Loaded:
        """Put code that saves what it uses on the ftrace site of a function."""
        start = probes[0].layout.ip
        entry = self.put(lambda place: template.link(place, self.numbers(probes, start)))
        site = Addr(start + 4)
        self.cpu.write(start, AARCH64.site.preamble + AARCH64.site.branch(site, entry))
        return self._loaded(probes, start, site + 4)

    def load(self, probes: Sequence[Resolved]) -> Loaded:
        """Put probes on the ftrace site of a function."""
        start = probes[0].layout.ip
        template = compile_probes(AARCH64, self.abi, probes, is_framed=True)
        body = self.put(lambda place: template.link(place, self.numbers(probes, start)))
        reads = saved_reads(AARCH64, probes)
        entry = self.put(lambda place: AARCH64.site.entry(place, body, reads=reads))
        site = Addr(start + 4)
        self.cpu.write(start, AARCH64.site.preamble + AARCH64.site.branch(site, entry))
        return self._loaded(probes, start, site + 4)

    def patch(self, probes: Sequence[Resolved], code: bytes, end: int | None = None) -> Loaded:
        """Put probes on an instruction; a hit ends after it, or elsewhere."""
        addr = probes[0].layout.ip
        displaced = Displaced(addr=addr, code=code, count=1, stop=Addr(addr + 4))
        template = compile_probes(AARCH64, self.abi, probes, is_framed=True, is_patched=True)
        body = self.put(lambda place: template.link(place, self.numbers(probes, addr)))
        detour = self.put(lambda place: AARCH64.patch.detour(place, body, displaced))
        self.cpu.write(addr, encode.b(addr, detour))
        return self._loaded(probes, addr, addr + 4 if end is None else end)

    def hit(
        self,
        loaded: Loaded,
        state: Mapping[str, int] | None = None,
        *,
        at: Mapping[int, Callable[[], None]] | None = None,
    ) -> dict[str, int]:
        """Run a hit and return the registers after it.

        Args:
            loaded: whose.
            state: registers before it; random by default.
            at: what happens before the n-th instruction of our code.
        """
        cpu = self.cpu
        cpu.writes, cpu.trace, cpu.actions = [], [], dict(at or {})
        cpu.set_registers(state or random_state(self.random))
        assert self.run(loaded.start) == loaded.end
        assert not cpu.actions, "the code has fewer instructions"
        return cpu.registers()

    def run(self, pc: int) -> int:
        """Run until the guest goes on by itself, and return where."""
        pc = self.cpu.run(pc)
        while pc in self.readers:
            pc = self.cpu.run(self.readers.run(pc))
        return pc

    def _loaded(self, probes: Sequence[Resolved], start: int, end: int) -> Loaded:
        self.cpu.add_exit(end)
        self.loaded.append(Loaded(probes, start, end))
        return self.loaded[-1]
