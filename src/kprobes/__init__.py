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
    from kprobes.handlers.kprobe import Kprobe
    from kprobes.handlers.kretprobe import Kretprobe
    from kprobes.host_session import host
    from kprobes.session import attach, boot

__all__ = ["Kprobe", "Kretprobe", "attach", "boot", "host"]
_HOMES = {
    "host": "kprobes.host_session",
    "Kprobe": "kprobes.handlers.kprobe",
    "Kretprobe": "kprobes.handlers.kretprobe",
}


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module(_HOMES.get(name, "kprobes.session")), name)
    raise AttributeError(f"module 'kprobes' has no attribute {name!r}")
