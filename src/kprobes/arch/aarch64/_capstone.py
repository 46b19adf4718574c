"""The one door to capstone: words to their text.

capstone has no types, so its names stay in this file. Importing it takes some 20 ms: nothing
imports this module before something is to be shown.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingTypeStubs=false

from functools import cache
from typing import Any

import capstone


def text_of(code: bytes, addr: int) -> tuple[str, str] | None:
    """Return the mnemonic and the operands of four bytes, or None when they are no instruction."""
    found = next(_disassembler().disasm_lite(code, addr), None)
    return None if found is None else (str(found[2]), str(found[3]))


def written_by(code: bytes) -> frozenset[int]:
    """Return the numbers of the general registers that four bytes write, 31 being sp."""
    engine = _detailing()
    found = next(engine.disasm(code, 0), None)
    if found is None:
        return frozenset()
    names = [str(engine.reg_name(number)) for number in found.regs_access()[1]]
    return frozenset(_NUMBERS[name] for name in names if name in _NUMBERS)


@cache
def _disassembler() -> Any:
    return capstone.Cs(capstone.CS_ARCH_ARM64, capstone.CS_MODE_LITTLE_ENDIAN)


@cache
def _detailing() -> Any:
    engine = capstone.Cs(capstone.CS_ARCH_ARM64, capstone.CS_MODE_LITTLE_ENDIAN)
    engine.detail = True
    return engine


_NUMBERS = {
    **{f"{kind}{n}": n for kind in "xw" for n in range(31)},
    "fp": 29,
    "lr": 30,
    "sp": 31,
    "wsp": 31,
}
