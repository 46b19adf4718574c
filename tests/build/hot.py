"""Functions that run all the time: probes on them are hit in every context a kernel has."""

from collections.abc import Callable

VFS = (
    "vfs_read vfs_write vfs_open vfs_getattr vfs_statx new_sync_read new_sync_write rw_verify_area "
    "ksys_read ksys_write do_sys_openat2 do_filp_open path_openat link_path_walk walk_component "
    "lookup_fast step_into dput __fput filp_close dentry_open do_dentry_open iterate_dir "
    "generic_file_read_iter generic_file_write_iter filemap_read generic_perform_write "
    "copy_page_to_iter copy_page_from_iter_atomic pipe_read pipe_write security_file_permission "
    "security_file_open security_inode_permission inode_permission alloc_empty_file getname_flags "
    "fget __fget_light fd_install close_fd proc_reg_read seq_read_iter single_open "
    "kernfs_fop_readdir"
)
TASKS = (
    "schedule finish_task_switch.isra.0 try_to_wake_up ttwu_do_activate ttwu_queue_wakelist "
    "select_task_rq_fair enqueue_task_fair dequeue_task_fair pick_next_task_fair "
    "put_prev_task_fair set_next_entity update_curr update_load_avg check_preempt_curr "
    "check_preempt_wakeup resched_curr wake_up_new_task copy_process kernel_clone sched_fork "
    "do_exit do_wait release_task wait_consider_task do_group_exit sched_move_task load_balance "
    "newidle_balance update_rq_clock account_user_time account_system_time migrate_task_rq_fair "
    "prepare_to_wait autoremove_wake_function __wake_up_common __wake_up_sync_key wake_up_q "
    "do_nanosleep"
)
TIMERS = (
    "hrtimer_interrupt __hrtimer_run_queues tick_sched_timer tick_sched_handle "
    "update_process_times scheduler_tick task_tick_fair run_local_timers "
    "hrtimer_run_queues rcu_sched_clock_irq "
    "perf_event_task_tick run_timer_softirq tick_program_event clockevents_program_event ktime_get "
    "ktime_get_update_offsets_now hrtimer_start_range_ns hrtimer_try_to_cancel hrtimer_nanosleep "
    "tick_nohz_idle_enter tick_nohz_idle_exit tick_nohz_irq_exit irq_enter_rcu irq_exit_rcu "
    "rcu_core note_gp_changes raise_softirq mod_timer __mod_timer.constprop.0 timekeeping_advance "
    "update_wall_time wake_up_process hrtimer_wakeup process_timeout delayed_work_timer_fn"
)
MEMORY = (
    "handle_mm_fault __handle_mm_fault do_anonymous_page do_user_addr_fault find_vma do_fault "
    "filemap_map_pages do_wp_page wp_page_copy finish_fault do_set_pte mas_walk "
    "__alloc_pages get_page_from_freelist free_unref_page free_unref_page_list kmem_cache_alloc "
    "kmem_cache_free __kmem_cache_alloc_node kfree kmalloc_trace mmap_region do_mmap unmap_region "
    "unmap_vmas unmap_page_range free_pgtables vma_link flush_tlb_mm_range folio_add_lru "
    "lru_add_drain __pagevec_lru_add charge_memcg try_charge_memcg exit_mmap "
    "dup_mmap copy_page_range"
)
OUR_OWN = (
    "copy_from_kernel_nofault copy_from_kernel_nofault_allowed copy_from_user_nofault "
    "strncpy_from_kernel_nofault strncpy_from_user_nofault __strncpy_from_user strncpy_from_user "
    "do_user_addr_fault do_kern_addr_fault bad_area_nosemaphore __bad_area_nosemaphore "
    "kernelmode_fixup_or_oops fixup_exception search_exception_tables search_extable "
    "search_kernel_exception_table search_module_extables search_bpf_extables ex_get_fixup_type "
    "ex_handler_default is_prefetch.constprop.0 spurious_kernel_fault find_vma __get_user_pages "
    "down_read_trylock up_read"
)
"""What a hit that reads memory may call, the page fault included."""

ALL = tuple(dict.fromkeys(" ".join((VFS, TASKS, TIMERS, MEMORY, OUR_OWN)).split()))
_FETCHES = (
    "",
    "a=$arg1 b=$arg2 c=%sp",
    "name=+0($arg1):string there=+8($arg2):u32",
    "text=+0(+0($arg1)):string comm=$comm",
    "user=+0($arg2):ustring n=+u0($arg2):x64",
    "deep=+0(+8(+16($arg1))):x64 stack=$stack2",
    "wild=+0(\\0xffffffff00000000):u64 null=+0(\\0):string gap=+0(\\0x8000000000000000):x8",
)


def definitions(is_there: Callable[[str], bool], *, plain: bool = False) -> list[str]:
    """Return a probe for each of these functions that a kernel has, every form of fetch among them.

    Args:
        is_there: whether a kernel's function of this name can be probed.
        plain: fetch nothing.
    """
    names = [name for name in ALL if is_there(name)]
    forms = ("",) if plain else _FETCHES
    return [f"p:h{n} {name} {forms[n % len(forms)]}".rstrip() for n, name in enumerate(names)]
