"""x86-64 as far as it must be known to reach a guest: its memory, its text, its tasks.

Where a kernel is: Documentation/arch/x86/x86_64/mm.rst and head_64.S. Which data a function names
is read from the operands of its instructions.
"""

import re
from collections.abc import Iterator, Mapping, Sequence

from kprobes.arch.machine import Machine, PagingInfo, TaskInfo, TextOps
from kprobes.arch.x86_64.inject import INJECT_OPS
from kprobes.arch.x86_64.paging import PTI_USER, PageTables, check_long_mode
from kprobes.arch.x86_64.registers import KERNEL_CS, STUB_NAMES
from kprobes.formats import elf
from kprobes.formats.vmcoreinfo import VmcoreInfo
from kprobes.ports import MappedRun, Ram, Tables
from kprobes.units import U64, Addr

WINDOW = (0xFFFF_FFFF_8000_0000, 0xFFFF_FFFF_C000_0000)
"""The kernel's image, [start, stop), wherever KASLR puts it."""
LINK = 0xFFFF_FFFF_8100_0000
"""Where ``_text`` is linked with the default PHYSICAL_START."""
MASTER_TABLE = "init_top_pgt"
"""The page table that no process owns; C calls it swapper_pg_dir."""

RETURN_THUNKS = (
    "__x86_return_thunk",
    "retbleed_return_thunk",
    "srso_return_thunk",
    "srso_alias_return_thunk",
    "its_return_thunk",
    "call_depth_return_thunk",
)
"""What a return may be instead: arch/x86/lib/retpoline.S."""
RETPOLINES = "__x86_indirect_*thunk_*"
"""Names of what an indirect branch may be instead, one for each register."""
RETPOLINE = "__x86_indirect_thunk_rax"
"""A kernel that has it was compiled without jump tables."""

NO_RETURN = (
    "__fortify_panic",
    "__ia32_sys_exit",
    "__ia32_sys_exit_group",
    "__kunit_abort",
    "__module_put_and_exit",
    "__module_put_and_kthread_exit",
    "__reiserfs_panic",
    "__stack_chk_fail",
    "__tdx_hypercall_failed",
    "__ubsan_handle_builtin_unreachable",
    "__x64_sys_exit",
    "__x64_sys_exit_group",
    "arch_cpu_idle_dead",
    "complete_and_exit",
    "cpu_bringup_and_idle",
    "cpu_startup_entry",
    "do_exit",
    "do_group_exit",
    "do_task_dead",
    "ex_handler_msr_mce",
    "fortify_panic",
    "hlt_play_dead",
    "hv_ghcb_terminate",
    "kthread_complete_and_exit",
    "kthread_exit",
    "kunit_try_catch_throw",
    "machine_real_restart",
    "make_task_dead",
    "mpt_halt_firmware",
    "mwait_play_dead",
    "nmi_panic_self_stop",
    "panic",
    "panic_smp_self_stop",
    "rest_init",
    "rewind_stack_and_make_dead",
    "rewind_stack_do_exit",
    "sev_es_terminate",
    "snp_abort",
    "start_kernel",
    "stop_this_cpu",
    "usercopy_abort",
    "vpanic",
    "x86_64_start_kernel",
    "x86_64_start_reservations",
    "xen_cpu_bringup_again",
    "xen_start_kernel",
)
"""Functions that never return: tools/objtool/noreturns.h, and its ancestor in check.c."""


STARTING = (
    "__startup_64",
    "__startup_secondary_64",
    "common_startup_64",
    "early_setup_idt",
    "secondary_startup_64",
    "secondary_startup_64_no_verify",
    "sev_verify_cbit",
    "soft_restart_cpu",
    "start_cpu0",
    "startup_64",
    "startup_64_load_idt",
    "startup_64_setup_env",
    "startup_64_setup_gdt_idt",
    "verify_cpu",
)
"""arch/x86/kernel/head_64.S, and what it calls in head64.c (later in boot/startup)."""
_KERNEL = 1 << 63


def references(code: bytes, addr: int) -> Iterator[int]:
    """Yield the addresses of data that code names, as it comes to them."""
    # It takes 15 ms to load, and only kernels that hide their data's names need it.
    from iced_x86 import Decoder, OpKind, Register

    for each in Decoder(64, code, ip=addr):
        for n in range(each.op_count):
            if each.op_kind(n) == OpKind.IMMEDIATE32TO64:
                yield each.immediate32to64 & U64
        if each.memory_base in (Register.RIP, Register.NONE) and each.memory_displacement:
            yield each.memory_displacement & U64


# add qword ptr [BASE + PLACE], 1; inc of the same; mov REG, [...], add REG, 1, mov [...], REG.
_BASED = rb"[\x80-\x83\x85-\x87]"
_LOADED = rb"(?P<rex>[\x48\x49])\x8b(?P<form>[\x80-\xbf])(?P<place>.{4})"
_STORED = rb".{0,16}?\x48\x83[\xc0-\xc7]\x01.{0,16}?(?P=rex)\x89(?P=form)(?P=place)"
_COUNTED = tuple(
    re.compile(pattern, re.DOTALL)
    for pattern in (
        rb"[\x48\x49]\x83" + _BASED + rb"(?P<place>.{4})\x01",
        rb"[\x48\x49]\xff" + _BASED + rb"(?P<place>.{4})",
        _LOADED + _STORED,
    )
)


def counted(code: bytes) -> Iterator[int]:
    """Yield the places in structs of numbers of 8 bytes that code adds 1 to."""
    for pattern in _COUNTED:
        for match in pattern.finditer(code):
            yield int.from_bytes(match["place"], "little")


TASK_SIZE = 0x7FFF_FFFF_F000
"""TASK_SIZE_MAX with four levels of page tables."""
_LAZY_SINCE = (6, 13)
"""The lazy flag is the bit above TIF_NEED_RESCHED."""
_GENERIC_TIF_SINCE = (6, 18)
"""da3f033a9fbf (x86: Use generic TIF bits): TIF_NEED_RESCHED went from bit 3 to 4."""
_TASK_SIZES = {4: TASK_SIZE, 5: (1 << 56) - 4096}


def _tables(ram: Ram, registers: Mapping[str, int]) -> Sequence[PageTables]:
    # Under page-table isolation a user-mode CR3 maps next to nothing of the kernel; whether there
    # is isolation, and how many levels, shows in what is mapped.
    cr3 = registers["cr3"]
    return _of_any_level(ram, *dict.fromkeys((cr3, cr3 & ~PTI_USER))) if cr3 else ()


def _of_any_level(ram: Ram, *roots: int) -> list[PageTables]:
    return [PageTables(ram, root, levels=levels) for root in roots for levels in (4, 5)]


def _again(tables: Tables) -> Mapping[str, int]:
    return {"cr3": tables.root}


def _noted(ram: Ram, info: VmcoreInfo) -> Sequence[PageTables]:
    virt, base = info.symbols.get("swapper_pg_dir"), info.numbers.get("phys_base")
    start = WINDOW[0]
    if virt is None or base is None or virt < start:
        return ()
    return _of_any_level(ram, max(virt - start + base, 0))


def _images(tables: Tables) -> list[tuple[MappedRun, ...]]:
    runs = _known(tables).mapped_runs(*WINDOW)
    return [runs] if runs else []


def _known(tables: Tables) -> PageTables:
    if not isinstance(tables, PageTables):
        raise TypeError(f"{tables!r} are not tables of this architecture")
    return tables


def _window(tables: Tables) -> tuple[int, int]:
    del tables
    return WINDOW


def _signature(tables: Tables) -> int:
    del tables
    return 0


def _link(tables: Tables, version: tuple[int, int]) -> Addr:
    del tables, version
    return Addr(LINK)


def _resched_mask(version: tuple[int, int]) -> int:
    bit = 4 if version >= _GENERIC_TIF_SINCE else 3
    return (0b11 if version >= _LAZY_SINCE else 0b1) << bit


PAGING = PagingInfo(
    registers=(),
    rare=(),
    pc="rip",
    check=check_long_mode,
    tables=_tables,
    again=_again,
    noted=_noted,
    images=_images,
    window=_window,
    link=_link,
    link_step=1,
    master=MASTER_TABLE,
    # pgd_offset_k() reads init_mm.pgd.
    master_user="lookup_address",
    task_size=lambda tables: _TASK_SIZES[_known(tables).levels],
    signature=_signature,
)

TEXT = TextOps(
    returns=RETURN_THUNKS,
    indirect=RETPOLINES,
    no_return=NO_RETURN,
    unprobed=(),
    starting=STARTING,
    without_jump_tables=RETPOLINE,
    # endbr64 does nothing else, and is never probed.
    has_landing_pads=lambda _read, _sites: True,
    exception_words=lambda _version: 3,
    pointer=None,
    with_pointers="",
    listed_sites=lambda _read, listed: listed,
    references=references,
    counted=counted,
)

TASK = TaskInfo(
    register=None,
    preempt_count="",
    resched_mask=_resched_mask,
    pc=STUB_NAMES["ip"],
    sp=STUB_NAMES["sp"],
    # Calls and exceptions put it on the stack at once.
    returns=(),
    excepted=None,
    saved_sp="thread.sp",
    # struct pt_regs { ... ip, cs, flags, sp, ss; }: the segment is in the low 16 bits.
    interrupted=(0xFFFF, (KERNEL_CS,)),
)

MACHINE = Machine(
    name="x86_64",
    gdb="i386:x86-64",
    elf=elf.EM_X86_64,
    paging=PAGING,
    text=TEXT,
    inject_ops=INJECT_OPS,
    task=TASK,
    # The time stamp counter is scaled for each CPU: struct cyc2ns.
    counters=(),
    rate=("tsc_khz", ""),
)
