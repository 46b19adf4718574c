"""A running kernel as Python at a probe sees it: memory, names, types."""

from collections.abc import Callable, Sequence
from operator import index
from typing import TYPE_CHECKING, Any, SupportsIndex

from kprobes.errors import MemoryFault, UnknownTypeError, UsageError
from kprobes.guest.guest import Guest
from kprobes.handlers.memory import MAX_STRING, NoUser, TaskMemory, task_memory
from kprobes.handlers.values import DataMemory, Pointer, Typed, load, pointer_to
from kprobes.image.log import MOST, KernelLog, LogRecord
from kprobes.model.kernel import Types, place_of
from kprobes.ports import Tables

if TYPE_CHECKING:
    # An extra.
    from drgn import Program

_TASK = "struct task_struct"


class LiveKernel:
    """A guest's kernel. Every read is of what is there now."""

    def __init__(self, find_guest: Callable[[], Guest]) -> None:
        """Hold a guest, of which more may be known later: modules come and go."""
        self._find_guest = find_guest
        guest, memory = self.guest, self.guest.memory
        self._memory = TaskMemory(memory.ram, memory.tables, NoUser(), task_size=guest.task_size)
        self._program: Program | None = None
        # Those of the last hit: the next one is mostly of the same task.
        self._task_memory: tuple[Tables, int, TaskMemory] | None = None
        self._typed: Typed | None = None

    def __repr__(self) -> str:
        """Return what it is: which kernel."""
        kernel = self.guest.kernel
        return f"<LiveKernel of Linux {kernel.release} ({kernel.arch})>"

    @property
    def guest(self) -> Guest:
        """What is known of it now."""
        return self._find_guest()

    def read(self, addr: SupportsIndex, size: int) -> bytes:
        """Return exactly ``size`` bytes, at most 16 MiB, or raise MemoryFault."""
        return self._memory.read(addr, size)

    def read_u8(self, addr: SupportsIndex) -> int:
        """Return the byte at an address, or raise MemoryFault."""
        return self._memory.read_u8(addr)

    def read_u16(self, addr: SupportsIndex) -> int:
        """Return the u16 at an address, or raise MemoryFault."""
        return self._memory.read_u16(addr)

    def read_u32(self, addr: SupportsIndex) -> int:
        """Return the u32 at an address, or raise MemoryFault."""
        return self._memory.read_u32(addr)

    def read_u64(self, addr: SupportsIndex) -> int:
        """Return the u64 at an address, or raise MemoryFault."""
        return self._memory.read_u64(addr)

    def string(self, addr: SupportsIndex, max_size: int = MAX_STRING) -> str:
        """Return the text up to its NUL, or ``max_size`` bytes, or raise MemoryFault."""
        return self._memory.string(addr, max_size)

    def write(self, addr: SupportsIndex, data: bytes) -> None:
        """Write data; MemoryFault where that is impossible, RefusedError for code."""
        self._memory.write(addr, data)

    def log(self, since: int = 0, *, most: int = MOST) -> Sequence[LogRecord]:
        """Return the kernel's log: messages from number ``since`` on, the latest ``most`` of them.

        ``print(kernel.log()[-1].text)``

        Raises:
            TargetError: it cannot be found.
        """
        return KernelLog(self.guest.memory, self.guest.kernel).records(since, most=most)

    def symbol(self, addr: SupportsIndex) -> str:
        """Return an address as ``%pS`` prints it: ``vfs_read+0x1a/0x2d0``."""
        return place_of(self.guest.kernel.symbols, index(addr))

    def address(self, name: str) -> int:
        """Return where a symbol is.

        Raises:
            UnknownSymbolError: there is none of this name; carries near ones.
            AmbiguousSymbolError: there are several.
        """
        return self.guest.kernel.symbols.named(name).addr

    def object(self, type_: str, addr: SupportsIndex) -> Any:
        """Return what is at an address: ``kernel.object("struct file", addr).f_mode``.

        Raises:
            UnknownTypeError: there is no such type.
            MemoryFault: it is a number that is not there.
        """
        typed = self.typed(self._memory)
        return load(typed, self._number(typed.types, type_), index(addr))

    def program(self) -> "Program":
        """Return the kernel as a Program of drgn's, made when it is asked for first.

        Raises:
            UsageError: drgn is not installed, or the kernel has no types.
        """
        if self._program is None:
            try:
                from kprobes.drgn.program import make_program
            except ModuleNotFoundError as error:
                raise UsageError("drgn is not installed: pip install 'kprobes[drgn]'") from error
            self.types_for("")
            self._program = make_program(self._find_guest)
        return self._program

    def memory_of(self, page_table: int) -> TaskMemory:
        """Return all memory of the task that a page table belongs to."""
        guest, last = self.guest, self._task_memory
        if last is not None and last[0] is guest.tables and last[1] == page_table:
            return last[2]
        found = task_memory(guest.tables, page_table=page_table, task_size=guest.task_size)
        self._task_memory = guest.tables, page_table, found
        return found

    def typed(self, memory: DataMemory, module: str = "") -> Typed:
        """Return memory with the types that code of a module, or of the kernel itself, has.

        Raises:
            UsageError: the kernel has no types.
        """
        types, symbols, last = self.types_for(module), self.guest.kernel.symbols, self._typed
        if last is not None and (last.memory, last.types, last.symbols) == (memory, types, symbols):
            return last
        found = Typed(memory=memory, types=types, symbols=symbols, program=self.program)
        self._typed = found
        return found

    def types_for(self, module: str) -> Types:
        """Return the types of a module, or of the kernel itself (``""``).

        Raises:
            UsageError: the kernel has none.
        """
        types = self.guest.kernel.types_for(module)
        if types is None:
            raise UsageError("this kernel has no type information (BTF): give its file (--vmlinux)")
        return types

    def is_code(self, addr: int) -> bool:
        """Whether the kernel may execute what is at an address."""
        try:
            runs = self.guest.memory.tables.mapped_runs(addr, addr + 1)
        except MemoryFault:
            return False
        return addr >= self.guest.task_size and any(run.is_executable for run in runs)

    def task(self, memory: DataMemory, addr: int) -> Pointer:
        """Return a pointer to the ``task_struct`` at an address; errors as for ``typed``."""
        typed = self.typed(memory)
        return pointer_to(typed, self._number(typed.types, _TASK), addr)

    def _number(self, types: Types, type_: str) -> int:
        number = types.named(type_)
        if number is None:
            raise UnknownTypeError(f"no type {type_} in this kernel")
        return number
