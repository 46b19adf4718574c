"""An address to its whole function: its bytes and those of its ``.cold`` parts."""

from kprobes.errors import RefusedError
from kprobes.model.kernel import Kernel
from kprobes.model.symbol import Symbol
from kprobes.model.text import TextPart
from kprobes.ports import Memory

_MAX_SIZE = 1 << 20
_MAX_PARTS = 64
_COLD = ".cold"


def read_function(memory: Memory, kernel: Kernel, addr: int) -> tuple[str, tuple[TextPart, ...]]:
    """Return the name and the parts of the function that an address lies in.

    The part with the entry comes first, also for an address in a ``.cold`` part.

    Raises:
        RefusedError: no function is there, or none that could be one.
        MemoryFault: its text is not mapped.
    """
    symbol = kernel.symbols.at(addr)
    if symbol is None or not symbol.is_text:
        raise RefusedError(f"{addr:#x} is in no function of {kernel.release}")
    parts = _parts(kernel, symbol)
    return parts[0].name, tuple(_read(memory, part) for part in parts)


def _parts(kernel: Kernel, symbol: Symbol) -> list[Symbol]:
    # Static functions of one name may have such a part each: all are taken, as a branch too many
    # does no harm, and one too few would.
    base = symbol.name.split(_COLD)[0]
    entries = (symbol,) if base == symbol.name else kernel.symbols.all_named(base)
    colds = kernel.symbols.all_named(base + _COLD)
    found = {part.addr: part for part in (*entries, *colds, symbol) if part.is_text}
    if len(found) > _MAX_PARTS:
        raise RefusedError(f"{base} has {len(found)} parts: which belong together is not known")
    return list(found.values())


def _read(memory: Memory, part: Symbol) -> TextPart:
    if not 0 < part.size <= _MAX_SIZE:
        raise RefusedError(f"{part.name} has {part.size} bytes, which no function has")
    return TextPart(addr=part.addr, code=memory.read(part.addr, part.size))
