"""Modules that come and go while probes are armed.

At two steps of the kernel's own the vCPU waits until we have done our part (kernel/module/main.c,
kernel/trace/ftrace.c):

    static int do_init_module(struct module *mod);      // text is final, mod->init comes next
    void ftrace_release_mod(struct module *mod);        // mod->exit is over, or init failed; the
                                                        // sites' records and the text go next
"""

from collections.abc import Callable
from functools import partial

from kprobes.drivers.guest.guest import Guest
from kprobes.drivers.guest.reception import MAX_TIMEOUT_S, can_ask
from kprobes.model.mailbox import MAX_UPCALLS
from kprobes.model.symbol import Symbol
from kprobes.model.upcall import Upcall, Waiting
from kprobes.units import Addr

_COMES, _GOES = "do_init_module", "ftrace_release_mod"

Step = Callable[[int], None]
"""Gets the address of a ``struct module``; must not raise."""


def can_watch(guest: Guest) -> bool:
    """Whether modules of a guest can be waited for: a vCPU has to wait for Python then."""
    has_steps = all(guest.kernel.symbols.find(name) is not None for name in (_COMES, _GOES))
    return has_steps and can_ask(guest)


def watching(
    guest: Guest, locate: Callable[[Symbol], Addr], steps: tuple[Step, Step]
) -> tuple[Upcall, ...]:
    """Return the upcalls that tell of modules; their numbers are the highest.

    Args:
        guest: one that ``can_watch``.
        locate: a function to where a probe at its entry is.
        steps: what to do when one comes, and when one goes.
    """
    first = guest.arch.arguments[0]
    return tuple(
        Upcall(
            number=MAX_UPCALLS - 1 - index,
            addr=locate(guest.kernel.symbols.named(name)),
            is_after=False,
            timeout_s=MAX_TIMEOUT_S,
            serve=partial(_serve, step, first),
        )
        for index, (name, step) in enumerate(zip((_COMES, _GOES), steps, strict=True))
    )


def _serve(step: Step, first: str, waiting: Waiting) -> None:
    step(waiting.registers[first])
