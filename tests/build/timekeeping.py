"""Layouts of timekeeping's structs, for kernels of tests."""

TIMEKEEPER = {
    "tk_fast.seq": (0, 8),
    "tk_fast.base": (8, 112),
    "tk_read_base.clock": (0, 8),
    "tk_read_base.mask": (8, 8),
    "tk_read_base.cycle_last": (16, 8),
    "tk_read_base.mult": (24, 4),
    "tk_read_base.shift": (28, 4),
    "tk_read_base.xtime_nsec": (32, 8),
    "tk_read_base.base": (40, 8),
    "tk_read_base.base_real": (48, 8),
    "clocksource.read": (0, 8),
}
"""Places and sizes of members, as 6.1 has them for x86-64."""
TICKS = {
    "sched_clock_data.tick_raw": (0, 8),
    "sched_clock_data.tick_gtod": (8, 8),
    "sched_clock_data.clock": (16, 8),
}
"""Likewise, of a CPU's last tick."""
