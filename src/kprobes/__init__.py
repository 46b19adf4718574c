"""Linux kernel probes as a Python system. See docs/design.md.

with kprobes.boot() as kernel:
    kernel.probe("p:open do_sys_openat2 path=+0($arg2):ustring")
    with kernel.record() as trace:
        kernel.run("ls /")
    print(trace)

    @kernel.entry("do_sys_openat2")
    def opened(dfd, filename, how):
        print(filename.string(), hex(how.flags))
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # For type checkers only: importing the engine takes NumPy's 0.1 s, and `kprobe --help`
    # does without it.
    from kprobes.handlers.probe import Kprobe, Kretprobe
    from kprobes.host.driver import HostOptions
    from kprobes.open import attach, boot, host
    from kprobes.transport.qemu_command import MachineOptions

__all__ = ["HostOptions", "Kprobe", "Kretprobe", "MachineOptions", "attach", "boot", "host"]
_HOMES = {
    "HostOptions": "kprobes.host.driver",
    "MachineOptions": "kprobes.transport.qemu_command",
    "Kprobe": "kprobes.handlers.probe",
    "Kretprobe": "kprobes.handlers.probe",
}


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module(_HOMES.get(name, "kprobes.open")), name)
    raise AttributeError(f"module 'kprobes' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
