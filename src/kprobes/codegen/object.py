"""Object files of LLVM as templates: the text section and its relocations."""

from kprobes.arch.arch import CodeInfo
from kprobes.errors import FormatError
from kprobes.formats.elf import Rela, relocations, sections
from kprobes.model.abi import Relocation, Template

_TEXT = ".text"


def read_template(data: bytes, code: CodeInfo) -> Template:
    """Return the one function of an object file, position-free.

    Raises:
        FormatError: there is data or a relocation that a probe may not have.
    """
    # Only code is written into the guest: a jump table or a constant beside it would be lost. The
    # attributes of our functions leave LLVM no reason to make one.
    found = sections(data)
    for section in found:
        if section.name.startswith((".rodata", ".data", ".bss")) and section.size:
            raise FormatError(f"generated code has a section {section.name}")
    text = next(section.data for section in found if section.name == _TEXT)
    return Template(
        code=text,
        relocations=tuple(_relocation(entry, code) for entry in relocations(found, _TEXT)),
    )


def _relocation(entry: Rela, code: CodeInfo) -> Relocation:
    if entry.kind not in code.relocations:
        raise FormatError(f"generated code has a relocation of type {entry.kind}")
    return Relocation(
        offset=entry.offset,
        field=code.relocations[entry.kind],
        symbol=entry.symbol,
        addend=entry.addend,
    )
