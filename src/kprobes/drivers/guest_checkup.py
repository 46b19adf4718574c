"""What an attached guest has of all that tracing it needs."""

from collections.abc import Callable, Iterator

from kprobes.drivers.finding import Finding, Verdict
from kprobes.drivers.guest.clock import clock_function, open_clock
from kprobes.drivers.guest.guest import Guest
from kprobes.drivers.guest.layout import per_cpu_bases, readers, task_abi
from kprobes.drivers.guest.obstacles import allocators
from kprobes.drivers.guest.stacks import check_types
from kprobes.drivers.look import looking
from kprobes.errors import KprobesError
from kprobes.plan.ftrace import has_tracer, read_sites
from kprobes.transport.connect import parse_target

_WITH_BTF = (
    "a kernel with CONFIG_DEBUG_INFO_BTF, or `kprobe trace --vmlinux FILE`: its vmlinux with BTF "
    "in it (`pahole -J` makes that of debug info)"
)
_WITH_SITES = "a kernel with CONFIG_DYNAMIC_FTRACE"
_WITH_DATA = "a kernel with CONFIG_KALLSYMS_ALL"


def check_target(target: str) -> list[Finding]:
    """Connect to a guest and look at everything.

    Raises:
        UsageError: no target in the text.
    """
    parse_target(target)
    try:
        with looking(target) as guest:
            reached = Finding(subject="target", verdict=Verdict.OK, found=target)
            return [reached, *check_guest(guest)]
    except KprobesError as error:
        return [Finding(subject="target", verdict=Verdict.MISSING, found=str(error))]


def check_guest(guest: Guest) -> Iterator[Finding]:
    """Look at everything in turn; what is wrong is a finding, not an error."""
    checks: dict[str, tuple[Callable[[Guest], str], str]] = {
        "kernel": (_kernel, ""),
        "memory": (_memory, ""),
        "symbols": (_symbols, ""),
        "state": (_state, ""),
        "types": (_types, _WITH_BTF),
        "tasks": (_tasks, _WITH_DATA if guest.kernel.types else _WITH_BTF),
        "sites": (_sites, _WITH_DATA if has_tracer(guest.kernel) else _WITH_SITES),
        "CPUs": (_cpus, _WITH_DATA),
        "clock": (_clock, _WITH_DATA),
        "allocators": (_allocators, "a kernel with CONFIG_MODULES"),
        "readers": (_readers, ""),
    }
    for subject, (look, advice) in checks.items():
        yield _finding(subject, look, guest, advice)


def _finding(subject: str, look: Callable[[Guest], str], guest: Guest, advice: str) -> Finding:
    try:
        return Finding(subject=subject, verdict=Verdict.OK, found=look(guest))
    except KprobesError as error:
        return Finding(subject=subject, verdict=Verdict.MISSING, found=str(error), advice=advice)


def _kernel(guest: Guest) -> str:
    kernel = guest.kernel
    build = f", build id {kernel.build_id.hex()}" if kernel.build_id else ", no build id"
    return f"{kernel.release} ({kernel.arch}), KASLR slide {kernel.slide:#x}{build}"


def _memory(guest: Guest) -> str:
    ram = guest.memory.ram
    size = sum(size for _, size in ram.runs) >> 20
    start, _ = ram.runs[0]
    if ram.view(start, 1) is not None:
        how = "mapped: no copies"
    elif guest.host is not None:
        how = f"read from QEMU's own memory (/proc/{guest.host.pid}/mem)"
    else:
        how = "read through the stub only (slow)"
    return f"{size} MiB, {how}"


def _symbols(guest: Guest) -> str:
    return f"{len(guest.kernel.symbols):,}"


def _types(guest: Guest) -> str:
    check_types(guest.kernel)
    return "BTF"


def _tasks(guest: Guest) -> str:
    task_abi(guest.kernel)
    return "the running one is found"


def _state(guest: Guest) -> str:
    return "paused by somebody else" if guest.stub.stands() else "running"


def _sites(guest: Guest) -> str:
    return f"{len(read_sites(guest.memory, guest.kernel).addrs):,} functions with an ftrace site"


def _cpus(guest: Guest) -> str:
    return str(len(per_cpu_bases(guest.memory, guest.kernel)))


def _clock(guest: Guest) -> str:
    function = clock_function(guest.memory, guest.kernel)
    if function is None:
        open_clock(guest.memory, guest.kernel, per_cpu_bases(guest.memory, guest.kernel))
        return "local: the TSC, read directly"
    symbol = guest.kernel.symbols.at(function)
    name = symbol.name if symbol else f"{function:#x}"
    return f"{name}(): called at each hit, which takes longer than the TSC"


def _allocators(guest: Guest) -> str:
    symbols = (guest.kernel.symbols.at(addr) for addr in allocators(guest))
    return ", ".join(symbol.name for symbol in symbols if symbol)


def _readers(guest: Guest) -> str:
    readers(guest.kernel)
    return "fault-safe readers of kernel and user memory"
