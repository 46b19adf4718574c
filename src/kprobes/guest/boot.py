"""A guest that boots: whether its kernel has come so far that it can be probed, and waiting for it.

init/main.c: ``start_kernel`` sets up memory and one CPU; then process 1 runs ``kernel_init``, which
wakes the other CPUs, patches what suits them into the text, and calls ``driver_init``. That is
where a guest is stopped that is waited for: its memory can be had, it may sleep there, and all of
its initcalls are still to come. ``free_initmem`` comes after them, and then its first program.
Where memory for code can only be had after one of the first initcalls, ``execmem_late_init`` in
mm/execmem.c (arm64, not before v6.10), it is the next one.

    enum system_states { SYSTEM_BOOTING, SYSTEM_SCHEDULING, ... };     // linux/kernel.h

``free_initmem`` frees the text of ``__init`` functions, too. Until then it can be probed like
other text; afterwards nobody runs it, and what was patched there is not put back.
"""

import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

from kprobes.arch.machine import address_of
from kprobes.errors import FormatError, GuestGoneError, TargetError
from kprobes.guest.guest import INITIALISING, Guest, GuestMemory, InitText
from kprobes.guest.stops import breakpoint_at, run_until_stop
from kprobes.model.kernel import Kernel
from kprobes.transport.stub import Stub

_FIRST_JIFFIES = frozenset((-300 * hz) & 0xFFFF_FFFF for hz in (100, 250, 300, 1000))
"""include/linux/jiffies.h: INITIAL_JIFFIES, five minutes before the lower half overflows."""
_EARLY = ("__per_cpu_offset", "nr_cpu_ids")
"""Without KALLSYMS_ALL these names are found when the kernel has made its read-only data so."""
_HEAD = 512
"""Bytes of the text that boot frees, by which one sees whether it is still there."""
_POLL_S, _LONG_POLL_S = 0.005, 0.2
"""Between looks for a kernel; and at one that is there and cannot be probed yet."""
_HELD_POLL_S = 0.1
_INIT_S = 30.0
_FIRST, _EXECMEM, _EACH, _LAST = (
    "driver_init",
    "execmem_late_init",
    "do_one_initcall",
    "free_initmem",
)
"""Functions that process 1 calls before, at and after its initcalls; it may sleep in all."""


def is_initialising(memory: GuestMemory, kernel: Kernel) -> bool:
    """Whether the kernel has not yet freed what only its boot uses, as far as it tells."""
    found = kernel.symbols.find("system_state")
    if found is None:
        return False
    return int.from_bytes(memory.read(found.addr, 4), "little") in INITIALISING


def read_init_text(memory: GuestMemory, kernel: Kernel) -> InitText | None:
    """Return the text that only boot uses, or None where it is gone, or not known."""
    state, start, stop = map(kernel.symbols.find, ("system_state", "_sinittext", "_einittext"))
    if state is None or start is None or stop is None or not is_initialising(memory, kernel):
        return None
    return InitText(
        start=start.addr,
        stop=stop.addr,
        state=memory.physical(state.addr),
        phys=memory.physical(start.addr),
        head=memory.read(start.addr, min(_HEAD, stop.addr - start.addr)),
    )


def has_code_memory(memory: GuestMemory, kernel: Kernel) -> bool:
    """Whether a kernel can allocate memory for code: mm/execmem.c follows a pointer for that."""
    info = kernel.symbols.find("execmem_info")
    return info is None or memory.u64(info.addr) != 0


def sleeping_places(memory: GuestMemory, kernel: Kernel) -> tuple[str, ...]:
    """Return the functions in which process 1 of a kernel that boots may sleep, once it can be had.

    Not ``do_one_initcall`` in general: the earliest are called while only one CPU runs, and on
    arm64 before alternatives are patched into the text.
    """
    if not is_initialising(memory, kernel):
        return ()
    if address_of(kernel, _EXECMEM) is None:
        return _FIRST, _LAST
    return (_EACH, _LAST) if has_code_memory(memory, kernel) else ()


def has_started(guest: Guest) -> bool:
    """Whether its kernel has come so far that CPUs have their areas, and a timer that ticks."""
    symbols = guest.kernel.symbols
    if any(symbols.find(name) is None for name in _EARLY):
        return False
    jiffies = symbols.find("jiffies_64")
    return jiffies is None or guest.memory.u64(jiffies.addr) not in _FIRST_JIFFIES


def await_boot(stub: Stub, inspect: Callable[[], Guest], check: Callable[[str], None]) -> Guest:
    """Return a guest that runs, or one that stands still at the beginning of its initcalls.

    Args:
        stub: of the guest, which is stopped.
        inspect: returns the guest as it is, while it is stopped; TargetError if no kernel is there.
        check: called often with why it is still waited for; what it raises ends that.
    """
    while True:
        while stub.is_held:
            check("it is paused")
            time.sleep(_HELD_POLL_S)
            stub.stands()
        if stub.is_running:
            stub.stop()
        why, pause_s, began = "it has not booted", _LONG_POLL_S, time.monotonic()
        try:
            guest = _inspected(stub, inspect, partial(check, why))
            if guest is not None:
                return guest
        except GuestGoneError:
            raise
        except (TargetError, FormatError) as error:
            why, pause_s = str(error), _POLL_S
        stub.let_run()
        check(why)
        # It stood meanwhile: on a busy machine it would never boot.
        time.sleep(max(pause_s, time.monotonic() - began))


def _inspected(stub: Stub, inspect: Callable[[], Guest], check: Callable[[], None]) -> Guest | None:
    # As ``await_boot`` returns it; else it stands still.
    guest = inspect()
    if is_initialising(guest.memory, guest.kernel):
        # Then by its lasting page tables.
        return inspect() if _come_to_initcalls(stub, guest, check) else None
    if not has_started(guest):
        return None
    stub.resume()
    return guest


def _come_to_initcalls(stub: Stub, guest: Guest, check: Callable[[], None]) -> bool:
    # Else it has come nowhere in time. It stands still afterwards in any case.
    stages = (_FIRST,) if address_of(guest.kernel, _EXECMEM) is None else (_EXECMEM, _EACH)
    return all(_come_to(stub, guest.kernel, stage, check) for stage in stages)


def _come_to(stub: Stub, kernel: Kernel, name: str, check: Callable[[], None]) -> bool:
    found = (address_of(kernel, each) for each in (name, _LAST))
    with ExitStack() as breakpoints:
        for place in (addr for addr in found if addr is not None):
            breakpoints.enter_context(breakpoint_at(stub, place, is_hardware=True))
        return run_until_stop(stub, time.monotonic() + _INIT_S, check) is not None
