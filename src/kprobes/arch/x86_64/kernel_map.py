"""Where an x86-64 kernel lives: Documentation/arch/x86/x86_64/mm.rst and head_64.S."""

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
