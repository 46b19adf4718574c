"""Lines of arm64 assembly to machine code: as much of it as the benchmarks are written in.

LLVM's own assembler, as it comes to us, only knows the machine that it runs on. The syntax is
Arm's; besides it ``mov xN, #NUMBER`` takes any number, and a name that is not a label is left to
linking, where ``movz`` has it. Encodings: Arm ARM (DDI 0487), C6.2.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from msgspec import Struct

from kprobes.arch.aarch64.arch import CODE
from kprobes.model.abi import Relocation, Template

_SIZE = 4
_ZERO_OR_SP = {"sp": 31, "xzr": 31, "wzr": 31}
_CONDITIONS = {"eq": 0, "ne": 1, "hi": 8, "ls": 9}
# The lower bit of op0, op1, CRn, CRm and op2 of a register's name, as MRS and MSR have them.
_SYSTEM = {
    "sp_el0": 0b1_000_0100_0001_000,
    "tpidr_el0": 0b1_011_1101_0000_010,
    "tpidr_el1": 0b1_000_1101_0000_100,
    "tpidr_el2": 0b1_100_1101_0000_010,
    "cntvct_el0": 0b1_011_1110_0000_010,
    "daif": 0b1_011_0100_0010_001,
    "nzcv": 0b1_011_0100_0010_000,
}
_LINKED = "movz x@"
_MOVW_G0 = CODE.relocations[264]
_Put = Callable[[int], int]
_OPERAND = re.compile(
    r"(?P<register>(?:[xw]\d+|sp|xzr|wzr)\b)|#(?P<number>-?\w+)|lsl #(?P<shift>\d+)"
    r"|\[(?P<base>\w+)(?:, #(?P<offset>\w+))?\]|(?P<name>\w+)"
)


class _Line(Struct, frozen=True):
    # ``form`` is the mnemonic and the kinds of its operands: x, w (registers), # (number),
    # < (shift), [ (base and offset), s (system register), @ (label).
    form: str
    numbers: tuple[int, ...]
    label: str = ""


def assemble(text: str) -> Template:
    """Return the code of some lines; names that are not labels are left to linking.

    Raises:
        ValueError: a line is none that is known here, or a number does not fit.
    """
    lines, data, labels = _laid_out(text)
    code, relocations = bytearray(), list[Relocation]()
    for line in lines:
        at, form, numbers = len(code), line.form, line.numbers
        if line.label in labels:
            numbers = (*numbers, labels[line.label] - at)
        elif form == _LINKED:
            relocation = Relocation(offset=at, field=_MOVW_G0, symbol=line.label, addend=0)
            relocations.append(relocation)
            form, numbers = "movz x#", (*numbers, 0)
        elif line.label:
            raise ValueError(f"{line.label}: no such label, and nothing for linking")
        code += _word(form, numbers)
    return Template(code=bytes(code) + data, relocations=tuple(relocations))


def _laid_out(text: str) -> tuple[list[_Line], bytes, Mapping[str, int]]:
    # Instructions, then data, with what their labels are worth.
    lines, data, labels = list[_Line](), b"", dict[str, int]()
    for line in filter(None, map(str.strip, text.splitlines())):
        at = _SIZE * len(lines) + len(data)
        if line.endswith(":"):
            labels[line[:-1]] = at
        elif line.startswith(".asciz "):
            data += line.split('"')[1].encode() + b"\0"
        elif line.startswith(".balign "):
            data += bytes(-at % int(line.split()[1]))
        elif data:
            raise ValueError(f"{line}: after data")
        else:
            lines += map(_parsed, _expanded(line))
    return lines, data, labels


def _expanded(line: str) -> Sequence[str]:
    found = re.fullmatch(r"mov (\w+), #(-?\w+)", line)
    if found is None:
        return [line]
    register, number = found[1], int(found[2], 0)
    halves = [(shift, number >> shift & 0xFFFF) for shift in (0, 16, 32, 48)]
    (low, first), *others = [half for half in halves if half[1]] or [(0, 0)]
    return [
        f"movz {register}, #{first}, lsl #{low}",
        *(f"movk {register}, #{half}, lsl #{shift}" for shift, half in others),
    ]


def _parsed(line: str) -> _Line:
    mnemonic, _, rest = line.partition(" ")
    kinds, numbers, label = "", list[int](), ""
    for found in _operands(line, rest):
        match found.lastgroup:
            case "register":
                kinds += found[0][0].replace("s", "x")
                numbers.append(_register(found[0]))
            case "number":
                kinds += "#"
                numbers.append(int(found["number"], 0))
            case "shift":
                kinds += "<"
                numbers.append(int(found["shift"]))
            case "base" | "offset":
                kinds += "["
                numbers += [_register(found["base"]), int(found["offset"] or "0", 0)]
            case _ if found[0] in _SYSTEM:
                kinds += "s"
                numbers.append(_SYSTEM[found[0]])
            case _:
                kinds += "@"
                label = found[0]
    return _Line(f"{mnemonic} {kinds}".strip(), tuple(numbers), label)


def _operands(line: str, rest: str) -> Iterator[re.Match[str]]:
    while rest:
        found = _OPERAND.match(rest)
        if found is None:
            raise ValueError(f"{line}: {rest}")
        yield found
        rest = rest[found.end() :].removeprefix(",").lstrip()


def _register(name: str) -> int:
    return _ZERO_OR_SP[name] if name in _ZERO_OR_SP else int(name[1:])


def _word(form: str, numbers: Sequence[int]) -> bytes:
    if form not in _FORMS:
        raise ValueError(f"{form}: not among the instructions that are known here")
    opcode, *puts = _FORMS[form]
    parts = (put(number) for put, number in zip(puts, numbers, strict=False))
    return sum(parts, opcode).to_bytes(_SIZE, "little")


def _at(low: int, width: int, scale: int = 1) -> _Put:
    def put(number: int) -> int:
        if number % scale or not 0 <= number // scale < 1 << width:
            raise ValueError(f"{number} does not fit {width} bits of {scale}")
        return number // scale << low

    return put


def _near(low: int, width: int) -> _Put:
    # How far a branch goes, with its sign.
    whole = _at(low, width, _SIZE)
    half, sign = _SIZE << width - 1, 1 << low + width - 1
    return lambda distance: whole(distance + half) ^ sign


def _bits(number: int) -> int:
    # UBFX: the lowest bit is where to rotate from; the highest is known with the width.
    return _at(16, 6)(number) + (number << 10)


def _up(number: int) -> int:
    return _at(16, 6)(-number % 64)


def _shifted_up(number: int) -> int:
    return _up(number) + _at(10, 6)(63 - number)


def _width(number: int) -> int:
    return _at(10, 6)(number - 1)


def _byte_distance(number: int) -> int:
    return (number & 3) << 29 | _near(5, 19)(number & ~3)


_Form = tuple[int, *tuple[_Put, ...]]
"""An instruction without its operands, and where each of them goes."""
_D, _N, _A, _M = (_at(low, 5) for low in (0, 5, 10, 16))
_SHIFT, _BY, _IMM12 = _at(10, 6), _at(16, 6), _at(10, 12)
_IMM16, _HALF, _SYSREG = _at(5, 16), _at(21, 2, 16), _at(5, 15)
_PAIR = _at(15, 6, 8)
_FORMS: Mapping[str, _Form] = {
    "movz x#": (0xD2800000, _D, _IMM16),
    "movz x#<": (0xD2800000, _D, _IMM16, _HALF),
    "movk x#<": (0xF2800000, _D, _IMM16, _HALF),
    "mov xx": (0xAA0003E0, _D, _M),
    "add xx#": (0x91000000, _D, _N, _IMM12),
    "sub xx#": (0xD1000000, _D, _N, _IMM12),
    "subs xx#": (0xF1000000, _D, _N, _IMM12),
    "add xxx": (0x8B000000, _D, _N, _M),
    "sub xxx": (0xCB000000, _D, _N, _M),
    "eor xxx": (0xCA000000, _D, _N, _M),
    "orr xxx": (0xAA000000, _D, _N, _M),
    "orr xxx<": (0xAA000000, _D, _N, _M, _SHIFT),
    "cmp xx": (0xEB00001F, _N, _M),
    "madd xxxx": (0x9B000000, _D, _N, _M, _A),
    "lsr xx#": (0xD340FC00, _D, _N, _BY),
    "lsl xx#": (0xD3400000, _D, _N, _shifted_up),
    "ubfx xx##": (0xD3400000, _D, _N, _bits, _width),
    "bfi xx##": (0xB3400000, _D, _N, _up, _width),
    "ldr x[": (0xF9400000, _D, _N, _at(10, 12, 8)),
    "ldr w[": (0xB9400000, _D, _N, _at(10, 12, 4)),
    "ldrh w[": (0x79400000, _D, _N, _at(10, 12, 2)),
    "str x[": (0xF9000000, _D, _N, _at(10, 12, 8)),
    "str w[": (0xB9000000, _D, _N, _at(10, 12, 4)),
    "ldp xx[": (0xA9400000, _D, _A, _N, _PAIR),
    "stp xx[": (0xA9000000, _D, _A, _N, _PAIR),
    "stlr x[": (0xC89FFC00, _D, _N),
    "casal xx[": (0xC8E0FC00, _M, _D, _N),
    "stadd x[": (0xF820001F, _M, _N),
    "mrs xs": (0xD5300000, _D, _SYSREG),
    "msr sx": (0xD5100000, _SYSREG, _D),
    "b @": (0x14000000, _near(0, 26)),
    "bl @": (0x94000000, _near(0, 26)),
    "cbz x@": (0xB4000000, _D, _near(5, 19)),
    "cbnz x@": (0xB5000000, _D, _near(5, 19)),
    "adr x@": (0x10000000, _D, _byte_distance),
    "svc #": (0xD4000001, _IMM16),
    "ret x": (0xD65F0000, _N),
    **{f"b.{name} @": (0x54000000 | code, _near(5, 19)) for name, code in _CONDITIONS.items()},
}
