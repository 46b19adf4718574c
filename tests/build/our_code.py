"""A kernel whose function carries probes of ours: real code, and the journal that names it."""

from msgspec.structs import replace

from kprobes.arch.x86_64.arch import X86_64
from kprobes.arch.x86_64.machine import TASK_SIZE
from kprobes.codegen.compile import compile_probes
from kprobes.guest.allocations import Allocation, AllocationLog, Kind
from kprobes.guest.arena import COUNTERS_SIZE, MISSED_SIZE
from kprobes.guest.armed import ArmedProbe
from kprobes.inspect.subject import TextSnapshot
from kprobes.model.abi import GuestAbi, Readers, TaskAbi
from kprobes.units import Addr
from tests.build.journals import make_entry, make_patch
from tests.build.kernel import SITE, TEXT, make_probe, symbol
from tests.build.snapshot import NOP, REST, call, make_snapshot

CODE = 0xFFFF_FFFF_C000_0000
DATA = 0xFF18_0000_0000_0000
PER_CPU = 0x3CA40
ABI = GuestAbi(
    task=TaskAbi(
        current=0x1FB80,
        preempt_count=0x1FB40,
        pid=0x970,
        tgid=0x974,
        exec_id=0x980,
        comm=0xBA0,
        flags=0,
        migration_disabled=None,
        resched_mask=8,
    ),
    readers=Readers(
        copy_kernel=Addr(SITE + 0x1000),
        copy_user=Addr(SITE + 0x1100),
        string_kernel=Addr(SITE + 0x1200),
        string_user=Addr(SITE + 0x1300),
    ),
    percpu=PER_CPU,
    missed=Addr(DATA),
    nmissed=Addr(DATA + MISSED_SIZE),
    text=(Addr(TEXT), Addr(TEXT + 0x1_0000)),
    rings=Addr(DATA + COUNTERS_SIZE),
    texts=Addr(DATA + COUNTERS_SIZE + 0x10_0000),
    ring_size=1 << 16,
    task_size=TASK_SIZE,
    thread_size=X86_64.thread_size,
    clock=None,
    is_guarded=False,
)


_READERS = [
    symbol("copy_from_kernel_nofault", ABI.readers.copy_kernel),
    symbol("copy_from_user_nofault", ABI.readers.copy_user),
    symbol("strncpy_from_kernel_nofault", ABI.readers.string_kernel),
    symbol("strncpy_from_user_nofault", ABI.readers.string_user),
]


def ours(*definitions: str, veneer: bytes = b"", abi: GuestAbi = ABI) -> TextSnapshot:
    """Return a kernel whose function ``f`` has probes of ours, one journal and their code.

    Args:
        definitions: of the probes.
        veneer: in front of their code, which reads user memory through it.
        abi: what that knows of the kernel.
    """
    texts = definitions or ("p:first f one=%di two=%si:u32",)
    probes = [make_probe(text, event_id=n) for n, text in enumerate(texts, 1)]
    template = compile_probes(X86_64, abi, probes, is_framed=False)
    numbers = {f"event{n}": probe.layout.event_id for n, probe in enumerate(probes)}
    start = CODE - len(veneer)
    readers = {"copy_kernel": 1, "copy_user": start, "string_kernel": 1, "string_user": 1}
    code = template.link(Addr(CODE), {**numbers, **readers, "site": SITE, "clock": 0})
    patch = call(CODE)
    undo = make_patch(SITE, old=bytes.fromhex(NOP), new=bytes.fromhex(patch), what="first")
    allocations = AllocationLog()
    allocations.live = (
        Allocation(kind=Kind.DATA, addr=DATA, size=1 << 24),
        Allocation(kind=Kind.CODE, addr=start, size=CODE + len(code) - start),
        Allocation(kind=Kind.PER_CPU, addr=PER_CPU, size=64),
    )
    entry = replace(
        make_entry("qemu:/s.sock", replace(undo, addr=Addr(SITE)), is_live=True),
        allocations=allocations,
        probes=tuple(
            ArmedProbe(site=Addr(SITE), entry=Addr(CODE), event_id=n, definition=text)
            for n, text in enumerate(texts, 1)
        ),
    )
    return make_snapshot(
        patch + REST, pieces={start: (veneer + code).hex()}, symbols=_READERS, entries=[entry]
    )
