"""Linux kernel probes as a Python system. See docs/design.md.

with kprobes.boot() as kernel:
    kernel.probe("p:open do_sys_openat2 path=+0($arg2):ustring")
    with kernel.record() as trace:
        kernel.run("ls /")
    print(trace)

    @kernel.entry("do_sys_openat2")
    def opened(dfd, filename, how):
        print(filename.string(), hex(how.flags))

``boot``, ``attach`` and ``host`` return a ``Session``: ``help(kprobes.Session)`` has all that can
be done with a kernel, docs/howto/recipes.md programs to begin with. Types, for annotations:
``GuestSession`` and ``HostSession`` (a Session with a guest, and with this machine's kernel),
``TraceProbe`` (of ``kernel.probe``), ``Trace`` (of ``kernel.record``), ``EventColumns`` (of
``trace[name]``), ``Event``, and ``Registers`` (of handlers). ``load`` reads a recording's file.
What can go wrong is in ``errors``.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # For type checkers only: importing the engine takes NumPy's 0.1 s, and `kprobe --help`
    # does without it.
    from kprobes import errors
    from kprobes.event_table import TraceProbe
    from kprobes.handlers.probe import Kprobe, Kretprobe
    from kprobes.handlers.registers import Registers
    from kprobes.host.driver import HostOptions
    from kprobes.model.events import Event
    from kprobes.open import GuestSession, HostSession, attach, boot, host, load
    from kprobes.session import Session
    from kprobes.trace import Trace
    from kprobes.trace_columns import EventColumns
    from kprobes.transport.qemu_command import MachineOptions

__all__ = [
    "Event",
    "EventColumns",
    "GuestSession",
    "HostOptions",
    "HostSession",
    "Kprobe",
    "Kretprobe",
    "MachineOptions",
    "Registers",
    "Session",
    "Trace",
    "TraceProbe",
    "attach",
    "boot",
    "errors",
    "host",
    "load",
]
_HOMES = {
    "Event": "model.events",
    "EventColumns": "trace_columns",
    "HostOptions": "host.driver",
    "Kprobe": "handlers.probe",
    "Kretprobe": "handlers.probe",
    "MachineOptions": "transport.qemu_command",
    "Registers": "handlers.registers",
    "Session": "session",
    "Trace": "trace",
    "TraceProbe": "event_table",
}
_SESSIONS = ("GuestSession", "HostSession")
"""A Session of some types, which only type checkers tell apart."""


def __getattr__(name: str) -> Any:
    if name in _SESSIONS:
        name = "Session"
    if name == "errors":
        return import_module("kprobes.errors")
    if name in __all__:
        return getattr(import_module(f"kprobes.{_HOMES.get(name, 'open')}"), name)
    raise AttributeError(f"module 'kprobes' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])


class _Package(ModuleType):
    # An import of the package kprobes.host would put it in the place of the function.
    @property
    def host(self) -> Any:
        return __getattr__("host")

    @host.setter
    def host(self, module: ModuleType) -> None:
        del module


sys.modules[__name__].__class__ = _Package
