"""X-rays of whole functions: their parts, and every way out of them."""

from kprobes.drivers.anatomy import Subject
from kprobes.drivers.exits import Classified, Prover
from kprobes.drivers.instructions import Text
from kprobes.drivers.specimen import Specimen
from kprobes.drivers.xray import function_at
from kprobes.errors import MemoryFault, RefusedError
from kprobes.image.function_text import read_function
from kprobes.units import Addr


def parts_at(specimen: Specimen, addr: Addr) -> tuple[Subject, ...]:
    """Return the function that an address lies in, then its ``.cold`` parts.

    Raises:
        TargetError: it lies in none.
    """
    alone = function_at(specimen, addr)
    try:
        _, parts = read_function(specimen.compiled(), specimen.kernel, addr)
    except (RefusedError, MemoryFault):
        return (alone,)
    return tuple(Subject(start=part.addr, stop=Addr(part.addr + len(part.code))) for part in parts)


def exits_at(specimen: Specimen, addr: Addr) -> Classified:
    """Return every way out of the function that begins at an address, without anybody's probes.

    Raises:
        TargetError: it lies in none.
    """
    symbol = specimen.kernel.symbols.at(function_at(specimen, addr).start)
    assert symbol is not None
    text = Text(
        kernel=specimen.kernel,
        open_memory=specimen.compiled,
        read_tables=lambda: specimen.tables,
    )
    return Prover(text, specimen.arch.patch).classify(symbol)
