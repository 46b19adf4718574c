"""System calls of a kernel: their numbers, and what their arguments are called.

    struct syscall_metadata { const char *name; int syscall_nr; int nb_args;
                              const char **types; const char **args; ... };   // trace/syscall.h

is there for most of them where the kernel has events of its own for system calls
(CONFIG_FTRACE_SYSCALLS): ``__syscall_meta__openat``. Newer kernels have nb_args in 7 bits. The
number is there when it has booted.
"""

from collections.abc import Iterator
from contextlib import suppress

from msgspec import Struct

from kprobes.errors import MemoryFault
from kprobes.model.kernel import Kernel
from kprobes.ports import Memory

_META = "__syscall_meta__"
_MOST, _COUNT = 6, 0x7F
_TEXT, _PAGE = 64, 4096


class SystemCall(Struct, frozen=True, kw_only=True):
    """One system call.

    Attributes:
        name: ``openat``.
        number: what a program gives for it, or None where the kernel does not tell.
        parameters: names and C types of its arguments; None likewise.
    """

    name: str
    number: int | None = None
    parameters: tuple[tuple[str, str], ...] | None = None


def system_call_names(memory: Memory, kernel: Kernel) -> dict[int, str]:
    """Return the names of system calls, ``sys_openat``, by their numbers, where a kernel tells.

    Args:
        memory: of the kernel, which may run: it is only read.
        kernel: that has them.
    """
    found = kernel.symbols.glob(f"{_META}*")
    calls = (read_system_call(memory, kernel, each.name.removeprefix(_META)) for each in found)
    return {call.number: f"sys_{call.name}" for call in calls if call.number is not None}


def read_system_call(memory: Memory, kernel: Kernel, name: str) -> SystemCall:
    """Return what a kernel tells of a system call.

    Args:
        memory: of the kernel, which may run: it is only read.
        kernel: that has it.
        name: ``openat``.
    """
    meta = kernel.symbols.find(f"{_META}{name}")
    if meta is None:
        return SystemCall(name=name)
    with suppress(MemoryFault):
        number = int.from_bytes(memory.read(meta.addr + 8, 4), "little", signed=True)
        count = memory.read(meta.addr + 12, 1)[0] & _COUNT
        if count <= _MOST:
            types, names = (list(_texts(memory, meta.addr + at, count)) for at in (16, 24))
            parameters = tuple(zip(names, types, strict=True))
            return SystemCall(
                name=name, number=number if number >= 0 else None, parameters=parameters
            )
    return SystemCall(name=name)


def _texts(memory: Memory, at: int, count: int) -> Iterator[str]:
    array = _pointer(memory, at) if count else 0
    for n in range(count):
        text = _pointer(memory, array + 8 * n)
        # It may end shortly before memory that is not there.
        data = memory.read(text, min(_TEXT, -text % _PAGE or _PAGE))
        if b"\0" not in data and len(data) < _TEXT:
            data += memory.read(text + len(data), _TEXT - len(data))
        yield data.partition(b"\0")[0].decode(errors="backslashreplace")


def _pointer(memory: Memory, addr: int) -> int:
    return int.from_bytes(memory.read(addr, 8), "little")
