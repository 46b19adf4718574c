"""Where an aarch64 kernel lives: Documentation/arch/arm64/memory.rst, asm/memory.h.

The upper half of the kernel's addresses, from PAGE_END on, has what is mapped page by page: BPF's
code (until 5.17), modules, the kernel's image, and what is allocated there.
"""

from kprobes.arch.aarch64.paging import Layout, PageTables
from kprobes.arch.paging import Run
from kprobes.units import MIB, U64, Addr

LINK_STEP = 2 * MIB
"""MIN_KIMG_ALIGN; ``_stext``, the first symbol where data has none, is less behind ``_text``."""

_MODULES_ARE_LARGE = (6, 5)
"""3e35d303ab7d ("arm64: module: rework module VA range selection")."""
_BPF_IS_ANYWHERE = (5, 17)
"""b89ddf4cca43 ("arm64/bpf: Remove 128MB limit for BPF JIT programs")."""


def window(layout: Layout) -> tuple[int, int]:
    """Return [start, stop) of what is mapped page by page."""
    return _page_end(layout), U64 + 1


def image(tables: PageTables) -> tuple[Run, ...]:
    """Return what is mapped of the kernel's image.

    Nothing else that is executable is as large as its text, and all of it lies in physical memory
    as it does in virtual memory.
    """
    runs = tables.mapped_runs(*window(tables.layout))
    text = max((run for run in runs if run.is_executable), key=lambda run: run.size, default=None)
    if text is None:
        return ()
    return tuple(run for run in runs if run.virt - run.phys == text.virt - text.phys)


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
