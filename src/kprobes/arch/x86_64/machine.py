"""x86-64 as far as it must be known to reach a guest."""

from collections.abc import Mapping, Sequence

from kprobes.arch.machine import Machine, PagingFacts, TaskFacts, TextFacts
from kprobes.arch.paging import Run
from kprobes.arch.x86_64 import kernel_map
from kprobes.arch.x86_64.borrowing import BORROWING
from kprobes.arch.x86_64.paging import PTI_USER, PageTables, check_long_mode
from kprobes.arch.x86_64.references import references
from kprobes.arch.x86_64.registers import KERNEL_CS, STUB_NAMES
from kprobes.formats import elf
from kprobes.formats.vmcoreinfo import VmcoreInfo
from kprobes.ports import Ram, Tables
from kprobes.units import Addr

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
    start = kernel_map.WINDOW[0]
    if virt is None or base is None or virt < start:
        return ()
    return _of_any_level(ram, max(virt - start + base, 0))


def _image(tables: Tables) -> tuple[Run, ...]:
    return _known(tables).mapped_runs(*kernel_map.WINDOW)


def _known(tables: Tables) -> PageTables:
    if not isinstance(tables, PageTables):
        raise TypeError(f"{tables!r} are no tables of this architecture")
    return tables


def _window(tables: Tables) -> tuple[int, int]:
    del tables
    return kernel_map.WINDOW


def _signature(tables: Tables) -> int:
    del tables
    return 0


def _link(tables: Tables, version: tuple[int, int]) -> Addr:
    del tables, version
    return Addr(kernel_map.LINK)


def _resched_mask(version: tuple[int, int]) -> int:
    bit = 4 if version >= _GENERIC_TIF_SINCE else 3
    return (0b11 if version >= _LAZY_SINCE else 0b1) << bit


PAGING = PagingFacts(
    registers=(),
    rare=(),
    pc="rip",
    check=check_long_mode,
    tables=_tables,
    again=_again,
    noted=_noted,
    image=_image,
    window=_window,
    link=_link,
    link_step=1,
    master=kernel_map.MASTER_TABLE,
    task_size=lambda tables: _TASK_SIZES[_known(tables).levels],
    signature=_signature,
)

TEXT = TextFacts(
    returns=kernel_map.RETURN_THUNKS,
    indirect=kernel_map.RETPOLINES,
    no_return=kernel_map.NO_RETURN,
    unprobed=(),
    without_jump_tables=kernel_map.RETPOLINE,
    # endbr64 does nothing else, and is never probed.
    has_landings=lambda _read, _sites: True,
    exception_words=lambda _version: 3,
    pointer=None,
    with_pointers="",
    listed_sites=lambda _read, listed: listed,
    references=references,
)

TASK = TaskFacts(
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
    borrowing=BORROWING,
    task=TASK,
    # The time stamp counter is scaled for each CPU: struct cyc2ns.
    counters=(),
    rate=("tsc_khz", ""),
)
