"""aarch64 as far as it must be known to reach a guest: its memory, its text, its tasks.

Where a kernel is: Documentation/arch/arm64/memory.rst, asm/memory.h. The upper half of the
kernel's addresses, from PAGE_END on, has what is mapped page by page: BPF's code (until 5.17),
modules, the kernel's image, and what is allocated there.

In guarded pages calls through pointers must land on bti, or on paciasp (Arm ARM, D8.4.7 "PE
handling of branch target exceptions"). A compiler that makes a kernel for that
(CONFIG_ARM64_BTI_KERNEL) puts bti c before the function tracer's words; else paciasp at an entry is
an instruction like others. A compiler lists where the first of the tracer's words is, the kernel's
tracer where the last is (ftrace_call_adjust() in arch/arm64/kernel/ftrace.c).

Which data a function names is read from its instructions one by one, without following any: ADRP
gives a page, ADD (immediate) what is in it, loads and stores add an offset (Arm ARM, C4.1).
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from kprobes.arch.aarch64.inject import INJECT_OPS
from kprobes.arch.aarch64.paging import Layout, PageTables
from kprobes.arch.aarch64.registers import STUB_NAMES
from kprobes.arch.insn import Read
from kprobes.arch.machine import Machine, PagingInfo, TaskInfo, TextOps
from kprobes.errors import MemoryFault, TargetError
from kprobes.formats import elf
from kprobes.formats.vmcoreinfo import VmcoreInfo
from kprobes.ports import MappedRun, Ram, Tables
from kprobes.units import MIB, U64, Addr

LINK_STEP = 2 * MIB
"""MIN_KIMG_ALIGN; ``_stext``, the first symbol where data has none, is less after ``_text``."""

_MODULES_ARE_LARGE = (6, 5)
"""3e35d303ab7d ("arm64: module: rework module VA range selection")."""
_BPF_IS_ANYWHERE = (5, 17)
"""b89ddf4cca43 ("arm64/bpf: Remove 128MB limit for BPF JIT programs")."""


def window(layout: Layout) -> tuple[int, int]:
    """Return [start, stop) of what is mapped page by page."""
    return _page_end(layout), U64 + 1


def images(tables: PageTables) -> list[tuple[MappedRun, ...]]:
    """Return what is mapped of each piece that may be the kernel's image.

    All of an image lies in physical memory as it does in virtual memory. So does each piece of
    code that was allocated, which may be larger than the kernel's text.
    """
    pieces = dict[int, list[MappedRun]]()
    for run in tables.mapped_runs(*window(tables.layout)):
        pieces.setdefault(run.virt - run.phys, []).append(run)
    return [tuple(runs) for runs in pieces.values() if any(run.is_executable for run in runs)]


def link(layout: Layout, version: tuple[int, int]) -> Addr:
    """Return KIMAGE_VADDR, where the kernel is without KASLR."""
    old = 128 if version >= _BPF_IS_ANYWHERE else 256
    modules = 2048 if version >= _MODULES_ARE_LARGE else old
    return Addr(_page_end(layout) + modules * MIB)


def signature(layout: Layout) -> int:
    """Return the bits of a return address in which pointer authentication puts its code."""
    return U64 & -(1 << layout.va_bits) & ~(1 << 55)


def _page_end(layout: Layout) -> int:
    # VA_BITS_MIN: a kernel for 52 bits runs where there are fewer, and is laid out for those.
    least = 47 if layout.shift == 14 else 48
    return U64 + 1 - (1 << min(layout.va_bits, least) - 1)


NO_RETURN = (
    "__arm64_sys_exit",
    "__arm64_sys_exit_group",
    "__fortify_panic",
    "__kunit_abort",
    "__module_put_and_kthread_exit",
    "__primary_switched",
    "__reiserfs_panic",
    "__secondary_switched",
    "__stack_chk_fail",
    "__ubsan_handle_builtin_unreachable",
    "arch_cpu_idle_dead",
    "arm64_serror_panic",
    "bad_mode",
    "complete_and_exit",
    "cpu_die",
    "cpu_die_early",
    "cpu_park_loop",
    "cpu_panic_kernel",
    "cpu_startup_entry",
    "do_exit",
    "do_group_exit",
    "do_task_dead",
    "fortify_panic",
    "hyp_panic",
    "kthread_complete_and_exit",
    "kthread_exit",
    "kunit_try_catch_throw",
    "machine_restart",
    "make_task_dead",
    "nmi_panic_self_stop",
    "panic",
    "panic_bad_stack",
    "panic_smp_self_stop",
    "rest_init",
    "secondary_start_kernel",
    "start_kernel",
    "usercopy_abort",
    "vpanic",
)
"""Functions that never return: tools/objtool/noreturns.h, and arch/arm64's own."""


_BTI = (0xFFFFFF3F, 0xD503241F)
_BEFORE = 8
"""Bytes from bti to a site: a word that the tracer has, too, is between."""
_SAMPLE = 64
_NOP = 0xD503201F
_CALL_OPS = 8
_BEFORE_POINTER = 12
_NOPS = [_NOP, _NOP]


def has_landing_pads(read: Read, sites: Iterable[int]) -> bool:
    """Return whether calls through pointers land on instructions that must stay.

    Args:
        read: the kernel's text.
        sites: of its function tracer.
    """
    some = list(itertools.islice(sites, _SAMPLE))
    pads = [pad for site in some if (pad := _is_pad(read, site - _BEFORE)) is not None]
    return not pads or any(pads)


def pointer(site: int) -> Addr:
    """Return where a site's pointer to an ftrace_ops is: ftrace_rec_set_ops()."""
    return Addr((site - _BEFORE_POINTER) & -_CALL_OPS)


def listed_sites(read: Read, listed: Sequence[int]) -> list[int]:
    """Return the tracer's sites that a kernel's file lists by other addresses."""
    # Since 6.3 (CONFIG_DYNAMIC_FTRACE_WITH_CALL_OPS) two words before every function come first;
    # without them a function may begin with as many, which are its own.
    some = listed[:_SAMPLE]
    before = _CALL_OPS if 2 * sum(_is_before(read, at) for at in some) > len(some) else 0
    return [_site(read, at + before) for at in listed]


def _is_before(read: Read, addr: int) -> bool:
    words = np.frombuffer(read(addr, 16), "<u4").tolist()
    return words[:2] == _NOPS and (_is_bti(words[2]) or words[2:] == _NOPS)


def _site(read: Read, entry: int) -> int:
    is_guarded = _is_bti(int.from_bytes(read(entry, 4), "little"))
    return entry + 4 * is_guarded + 4


def _is_pad(read: Read, addr: int) -> bool | None:
    try:
        return _is_bti(int.from_bytes(read(addr, 4), "little"))
    except MemoryFault:
        # A module's first function: nothing is before it.
        return None


def _is_bti(word: int) -> bool:
    return word & _BTI[0] == _BTI[1]


_ADRP_MASK, _ADRP = 0b1_00_11111 << 24, 0b1_00_10000 << 24
_ADD_MASK, _ADD = 0b111111111 << 23, 0b100100010 << 23
# LDR and STR (unsigned immediate), LDP and STP (signed offset), of general registers.
_LOAD_MASK, _LOAD = 0b111_1_11 << 24, 0b111_0_01 << 24
_PAIR_MASK, _PAIR = 0b111_1_111 << 23, 0b101_0_010 << 23
# LDR of 64 bits (pre-indexed): lists are walked from a head that is loaded so.
_WALK_MASK, _WALK = 0xFFE0_0C00, 0b11_111_0_00_01_0_000000000_11_00000_00000
# LDR and STR of 64 bits (unsigned immediate), ADD of 1.
_WIDE_MASK, _LOAD_WIDE, _STORE_WIDE = 0x3FF << 22, 0b11_111_0_01_01 << 22, 0b11_111_0_01_00 << 22
_ADD_ONE_MASK, _ADD_ONE = 0xFFFF_FC00, 0b1_00_100010_0_000000000001 << 10
_MOV_MASK, _MOV = 0xFFE0_FFE0, 0b1_01_01010_00_0_00000_000000_11111_00000


def references(code: bytes, addr: int) -> Iterator[int]:
    """Yield the addresses of data that code names, as it comes to them."""
    known: dict[int, int] = {}
    words = np.frombuffer(code, "<u4", len(code) // 4).tolist()
    for at, word in zip(range(addr, addr + 4 * len(words), 4), words, strict=True):
        if word & _ADRP_MASK == _ADRP:
            known[word & 31] = _page(word, at)
        elif word & _MOV_MASK == _MOV and word >> 16 & 31 in known:
            known[word & 31] = known[word >> 16 & 31]
        elif word >> 5 & 31 in known:
            yield from _named(word, known)


def counted(code: bytes) -> Iterator[int]:
    """Yield the places in structs of numbers of 8 bytes that code adds 1 to."""
    loaded: dict[int, tuple[int, int]] = {}
    raised: dict[int, tuple[int, int]] = {}
    for word in np.frombuffer(code, "<u4", len(code) // 4).tolist():
        register, base, place = word & 31, word >> 5 & 31, (word >> 10 & 0xFFF) << 3
        if word & _WIDE_MASK == _LOAD_WIDE:
            loaded[register] = base, place
        elif word & _ADD_ONE_MASK == _ADD_ONE and base in loaded:
            raised[register] = loaded[base]
        elif word & _WIDE_MASK == _STORE_WIDE and raised.get(register) == (base, place):
            yield place


def _named(word: int, known: dict[int, int]) -> Iterator[int]:
    register, base = word & 31, word >> 5 & 31
    if word & _ADD_MASK == _ADD:
        known[register] = known[base] + _immediate(word) & U64
        yield known[register]
    elif word & _WALK_MASK == _WALK:
        known[base] = known[base] + _signed(word >> 12 & 0x1FF, 9) & U64
        yield known[base]
    elif word & _LOAD_MASK == _LOAD:
        yield known[base] + ((word >> 10 & 0xFFF) << (word >> 30)) & U64
    elif word & _PAIR_MASK == _PAIR:
        yield known[base] + _signed(word >> 15 & 0x7F, 7) * (8 if word >> 31 else 4) & U64


def _page(word: int, at: int) -> int:
    pages = _signed((word >> 5 & 0x7FFFF) << 2 | word >> 29 & 3, 21)
    return (at & ~0xFFF) + (pages << 12) & U64


def _immediate(word: int) -> int:
    return (word >> 10 & 0xFFF) << (12 if word >> 22 & 1 else 0)


def _signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value


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
        raise TypeError(f"{tables!r} are not tables of this architecture")
    return tables


PAGING = PagingInfo(
    registers=("TTBR1_EL1", "TCR_EL1"),
    rare=("TTBR1_EL2", "TCR_EL2", "HCR_EL2"),
    pc="pc",
    check=_check,
    tables=_tables,
    again=_again,
    noted=_noted,
    images=lambda tables: images(_known(tables)),
    window=lambda tables: window(_known(tables).layout),
    link=lambda tables, version: link(_known(tables).layout, version),
    link_step=LINK_STEP,
    master="swapper_pg_dir",
    master_user="",
    # TASK_SIZE in asm/processor.h: vabits_actual is of both halves.
    task_size=lambda tables: 1 << _known(tables).layout.va_bits,
    signature=lambda tables: signature(_known(tables).layout),
)

TEXT = TextOps(
    returns=(),
    indirect="",
    no_return=NO_RETURN,
    # arch_populate_kprobe_blacklist() in arch/arm64/kernel/probes/kprobes.c.
    unprobed=("__irqentry_text", "__idmap_text", "__hyp_text", "__hyp_idmap_text"),
    starting=(),
    without_jump_tables="",
    has_landing_pads=has_landing_pads,
    # 2e77a62cb3a6 ("arm64: extable: add a dedicated uaccess handler") (v5.16): type and data.
    exception_words=lambda version: 3 if version >= (5, 16) else 2,
    pointer=pointer,
    # A stub that is there with CONFIG_DYNAMIC_FTRACE_WITH_CALL_OPS only: kernel/trace/ftrace.c.
    with_pointers="ftrace_ops_nop_func",
    listed_sites=listed_sites,
    references=references,
    counted=counted,
)

TASK = TaskInfo(
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
    inject_ops=INJECT_OPS,
    task=TASK,
    # CNTVCT_EL0: arch/arm64/include/asm/arch_timer.h. Others read the physical counter, or correct
    # the erratum of some CPU.
    counters=("arch_counter_get_cntvct",),
    rate=("", "CNTFRQ_EL0"),
)
