"""Our judgement of addresses beside the guest's own ``kprobe_events``: which, and both answers."""

import random
from collections.abc import Iterable, Sequence

from msgspec import Struct

from kprobes.arch.x86_64.decode import decode_function
from kprobes.arch.x86_64.insn import Flow
from kprobes.arch.x86_64.machine import MACHINE
from kprobes.arch.x86_64.verdict import SlotVerdict, insn_verdict
from kprobes.guest.attach import registers_of
from kprobes.image.find import FoundKernel, find_spaces, read_kernel
from kprobes.image.init_tables import read_image_tables
from kprobes.image.tables import read_function, read_tables
from kprobes.model.kernel import Kernel, TextTables
from kprobes.plan.ftrace import read_sites
from kprobes.transport.find_ram import open_ram
from kprobes.transport.qemu_command import MachineOptions
from kprobes.transport.stub import Stub
from tests.build.relocation import kernel_of
from tests.system.conftest import boot_or_skip

OF_EACH = 20
# Disabled probes are checked and prepared like others, and leave the text as it is.
SCRIPT = b"""
cd /sys/kernel/tracing
while read offset; do
    if echo "p:k/e$offset _text+0x$offset" 2> /dev/null >> kprobe_events
    then echo "$offset yes"; else echo "$offset no"; fi
done < /offsets
: > kprobe_events
"""

WE_REFUSE = {
    "exception table": "a slot's fault would not be repaired; the kernel single-steps instead",
    "ftrace strategy": "its probe there is an ftrace one, and so is ours",
    "endbr64": "it takes the entry for the instruction after endbr64",
    "may hide": "it asks its own debugger whether an int3 is a breakpoint, or the code's own",
    "interrupts": "it lets a trap come between sti and hlt",
}
"""Words of our reasons where the kernel accepts, and why that differs."""


class Case(Struct, frozen=True, kw_only=True):
    """One address, and both answers."""

    place: str
    is_accepted: bool
    ours: SlotVerdict


def compared(suite: str, count: int) -> list[Case]:
    """Ask a guest, and judge, some random addresses and some of each kind that may be refused."""
    offsets = chosen(suite, count)
    lines = "".join(f"{offset:x}\n" for offset in offsets)
    files = {"/offsets": lines.encode(), "/try.sh": SCRIPT}
    options = MachineOptions(suite=suite, cpus=1, memory_mib=256, files=files)
    with boot_or_skip(options) as machine:
        words = machine.run("sh /try.sh", 600).output.decode().split()
        with Stub.open(str(machine.stub_address)) as stub:
            return judged(found_in(stub), zip(words[::2], words[1::2], strict=True))


def unexplained(cases: Sequence[Case]) -> list[str]:
    """Return where the answers differ and nobody knows why."""
    differ = [case for case in cases if case.is_accepted == case.ours.is_refused]
    strange = [case for case in differ if explained(case) is None]
    return [f"{c.place}: {c.is_accepted} {c.ours.why}" for c in strange]


def found_in(stub: Stub) -> FoundKernel:
    return read_kernel(find_spaces(open_ram(stub), MACHINE, registers_of(stub, MACHINE)))


def judged(found: FoundKernel, answers: Iterable[tuple[str, str]]) -> list[Case]:
    """Judge the guest's live text by its live tables."""
    memory, kernel = found.tables, found.kernel
    base = kernel.symbols.named("_text").addr
    tables = read_tables(memory, kernel, ftrace=read_sites(memory, kernel).addrs.tolist())
    cases: list[Case] = []
    for offset, answer in answers:
        addr = base + int(offset, 16)
        function = decode_function(*read_function(memory, kernel, addr), tables)
        ours = insn_verdict(function, addr, tables)
        cases.append(Case(place=function.place(addr), is_accepted=answer == "yes", ours=ours))
    return cases


def chosen(suite: str, count: int) -> list[int]:
    """Addresses of the file's kernel: any, and some of each kind that may be refused."""
    image, kernel = kernel_of(suite)
    tables = read_image_tables(image, kernel)
    rng = random.Random(4)
    base = kernel.symbols.named("_text").addr
    sites = rng.sample(sorted(tables.ftrace), count)
    functions = [decode_function(*read_function(image, kernel, site), tables) for site in sites]
    inside = [rng.randrange(p.addr, p.stop) for f in functions for p in f.parts[:1]]
    kinds: dict[str, list[int]] = {}
    for function in functions:
        for addr, each in function.instructions.items():
            kinds.setdefault(f"{each.flow} {each.target is None}", []).append(addr)
    kinds["boundaries"] = [addr for found in kinds.values() for addr in found]
    kinds |= {"tables": traced(kernel, tables, rng), "sites": sites}
    taken = [a for found in kinds.values() for a in rng.sample(found, min(OF_EACH, len(found)))]
    return sorted({addr - base for addr in (*inside, *taken)})


def traced(kernel: Kernel, tables: TextTables, rng: random.Random) -> list[int]:
    """Entries of the tables, in functions that kprobe_events does not refuse as a whole."""
    found: list[int] = []
    for table in (tables.exceptions, tables.jump_labels, tables.static_calls):
        for addr in rng.sample(sorted(table), OF_EACH):
            symbol = kernel.symbols.at(addr)
            if symbol and not tables.ftrace.isdisjoint(range(symbol.addr, symbol.addr + 5)):
                found.append(addr)
    return found


def explained(case: Case) -> str | None:
    """Return why the kernel may answer otherwise, or None when it should not."""
    if case.is_accepted:
        return next((w for words, w in WE_REFUSE.items() if words in case.ours.why), None)
    instruction = case.ours.instruction
    assert instruction is not None
    if instruction.flow in (Flow.INDIRECT_CALL, Flow.INDIRECT_JUMP) and instruction.target is None:
        return "the kernel does not emulate branches through memory"
    return None
