"""A gdb server beside our probes: a debugger joins a guest that is traced."""
