"""Requirements of probing that a guest's kernel does not meet; looking alone needs less."""

from kprobes.arch.machine import CodeRequest
from kprobes.arch.registry import machine
from kprobes.errors import RefusedError, TargetError
from kprobes.guest.clock import open_clock
from kprobes.guest.guest import Guest
from kprobes.guest.kernel_abi import first_of, per_cpu_bases, readers, task_abi
from kprobes.guest.stacks import check_types
from kprobes.plan.ftrace import read_sites
from kprobes.units import Addr

_ALLOCATORS = (
    ("set_memory_x",),
    ("vzalloc_noprof", "vzalloc"),
    ("pcpu_alloc_noprof", "__alloc_percpu"),
)


def check_possible(guest: Guest) -> None:
    """Check that probes can be armed in a guest.

    Raises:
        RefusedError: its kernel was built without something that they need; says what.
    """
    kernel = guest.kernel
    try:
        check_types(kernel)
        task_abi(kernel)
        read_sites(guest.memory, kernel)
        readers(kernel)
        allocators(guest)
        open_clock(guest.memory, kernel, per_cpu_bases(guest.memory, kernel))
    except RefusedError:
        raise
    except TargetError as error:
        raise RefusedError(f"nothing can be probed in this guest: {error}") from error


def allocators(guest: Guest) -> tuple[Addr, ...]:
    """Return the guest's functions that allocate memory, that for code first.

    Raises:
        TargetError: it lacks one of them.
    """
    kernel, inject_ops = guest.kernel, machine(guest.kernel.arch).inject_ops
    inject_ops.return_path(guest.memory, kernel)
    text = Addr(kernel.text[0])
    code = inject_ops.code(guest.memory, kernel, CodeRequest(size=1, like=text, caller=text))
    return code.function, *(first_of(kernel, *names) for names in _ALLOCATORS)
