"""aarch64 as far as it must be known to reach a guest."""

from collections.abc import Mapping, Sequence

from kprobes.arch.aarch64 import kernel_map
from kprobes.arch.aarch64.borrowing import BORROWING
from kprobes.arch.aarch64.landings import has_landings, listed_sites, pointer
from kprobes.arch.aarch64.paging import PageTables
from kprobes.arch.aarch64.references import references
from kprobes.arch.aarch64.registers import STUB_NAMES
from kprobes.arch.machine import Machine, PagingFacts, TaskFacts, TextFacts
from kprobes.errors import TargetError
from kprobes.formats import elf
from kprobes.formats.vmcoreinfo import VmcoreInfo
from kprobes.ports import Ram, Tables

_TRAMPOLINES = (0, 2, 1)
"""Pages from what TTBR1 has to the kernel's table, with page-table isolation and in user mode: its
trampoline's table comes before the reserved one, which is before the kernel's (vmlinux.lds.S)."""
_LAZY_SINCE = (6, 16)
"""Since "arm64: enable PREEMPT_LAZY" the lazy flag is the bit above TIF_NEED_RESCHED."""
_EL1H, _EL2H = 0b0101, 0b1001
_HOST = 1 << 34 | 1 << 27
"""HCR_EL2.E2H and TGE."""
_GRANULES = {4096: 0b10, 16384: 0b01, 65536: 0b11}


def _check(registers: Mapping[str, int]) -> None:
    if not _in_use(registers)[0]:
        raise TargetError("the guest has paging turned off: still in firmware or a boot loader")


def runs_at_el2(registers: Mapping[str, int]) -> bool:
    """Whether a vCPU runs a kernel at EL2 (VHE), or its user's code.

    In user mode HCR_EL2 tells: E2H and TGE (DDI 0487, D19.2). Under a hypervisor that protects its
    guests from the kernel E2H alone is set, and the kernel is at EL1.
    """
    mode = registers["cpsr"] & 0xF
    return mode == _EL2H or (mode == 0 and registers.get("HCR_EL2", 0) & _HOST == _HOST)


def _in_use(registers: Mapping[str, int]) -> tuple[int, int]:
    # A kernel at EL2 finds its own under EL1's names; those have what boot left.
    level = "EL2" if runs_at_el2(registers) else "EL1"
    return registers.get(f"TTBR1_{level}", 0), registers.get(f"TCR_{level}", 0)


def _tables(ram: Ram, registers: Mapping[str, int]) -> Sequence[PageTables]:
    root, tcr = _in_use(registers)
    if not root:
        return ()
    found = PageTables(ram, root, tcr=tcr)
    page = 1 << found.layout.shift
    return [found.rooted(found.root + n * page) for n in _TRAMPOLINES]


def _again(tables: Tables) -> Mapping[str, int]:
    return {"cpsr": _EL1H, "TTBR1_EL1": tables.root, "TCR_EL1": _known(tables).tcr}


def _noted(ram: Ram, info: VmcoreInfo) -> Sequence[PageTables]:
    numbers, virt = info.numbers, info.symbols.get("swapper_pg_dir")
    moved, size = numbers.get("kimage_voffset"), numbers.get("TCR_EL1_T1SZ")
    granule = _GRANULES.get(numbers.get("PAGESIZE", 4096))
    if virt is None or moved is None or size is None or granule is None:
        return ()
    return [PageTables(ram, max(virt - moved, 0), tcr=granule << 30 | (size & 0x3F) << 16)]


def _resched_mask(version: tuple[int, int]) -> int:
    # TIF_NEED_RESCHED, and TIF_NEED_RESCHED_LAZY.
    return 0b110 if version >= _LAZY_SINCE else 0b010


def _known(tables: Tables) -> PageTables:
    if not isinstance(tables, PageTables):
        raise TypeError(f"{tables!r} are no tables of this architecture")
    return tables


PAGING = PagingFacts(
    registers=("TTBR1_EL1", "TCR_EL1"),
    rare=("TTBR1_EL2", "TCR_EL2", "HCR_EL2"),
    pc="pc",
    check=_check,
    tables=_tables,
    again=_again,
    noted=_noted,
    image=lambda tables: kernel_map.image(_known(tables)),
    window=lambda tables: kernel_map.window(_known(tables).layout),
    link=lambda tables, version: kernel_map.link(_known(tables).layout, version),
    link_step=kernel_map.LINK_STEP,
    master="swapper_pg_dir",
    # TASK_SIZE in asm/processor.h: vabits_actual is of both halves.
    task_size=lambda tables: 1 << _known(tables).layout.va_bits,
    signature=lambda tables: kernel_map.signature(_known(tables).layout),
)

TEXT = TextFacts(
    returns=(),
    indirect="",
    no_return=kernel_map.NO_RETURN,
    # arch_populate_kprobe_blacklist() in arch/arm64/kernel/probes/kprobes.c.
    unprobed=("__irqentry_text", "__idmap_text", "__hyp_text", "__hyp_idmap_text"),
    without_jump_tables="",
    has_landings=has_landings,
    # 2e77a62cb3a6 ("arm64: extable: add a dedicated uaccess handler") (v5.16): type and data.
    exception_words=lambda version: 3 if version >= (5, 16) else 2,
    pointer=pointer,
    # A stub that is there with CONFIG_DYNAMIC_FTRACE_WITH_CALL_OPS only: kernel/trace/ftrace.c.
    with_pointers="ftrace_ops_nop_func",
    listed_sites=listed_sites,
    references=references,
)

TASK = TaskFacts(
    # current_thread_info() in arch/arm64/include/asm/current.h.
    register="SP_EL0",
    preempt_count="thread_info.preempt.count",
    resched_mask=_resched_mask,
    pc=STUB_NAMES["pc"],
    sp=STUB_NAMES["sp"],
    returns=(STUB_NAMES["x30"],),
    excepted=("ELR_EL1", "__entry_text_start", "__entry_text_end"),
    saved_sp="thread.cpu_context.sp",
    # struct user_pt_regs { ... pc, pstate; }: PSR_MODE_EL1h or PSR_MODE_EL2h; the upper half of it
    # is (next to) unused, and an address's is not.
    interrupted=(0xFFFF_FFF0_0000_001F, (0b0101, 0b1001)),
)

MACHINE = Machine(
    name="aarch64",
    gdb="aarch64",
    elf=elf.EM_AARCH64,
    paging=PAGING,
    text=TEXT,
    borrowing=BORROWING,
    task=TASK,
    # CNTVCT_EL0: arch/arm64/include/asm/arch_timer.h. Others read the physical counter, or correct
    # the erratum of some CPU.
    counters=("arch_counter_get_cntvct",),
    rate=("", "CNTFRQ_EL0"),
)
