"""What an x-ray is to look at, as text: a site, or a range of addresses."""

import re
from dataclasses import dataclass

from kprobes.errors import UsageError
from kprobes.model.symbol import Symbols
from kprobes.units import U64, Addr

_NUMBER = re.compile(r"0[xX][0-9a-fA-F]+|[0-9]+")
_BARE_ADDRESS = re.compile(r"[0-9a-fA-F]{16}")
_PLACE = re.compile(r"(?:(?P<module>[\w-]+):)?(?P<symbol>[A-Za-z_.$][\w.$]*)(?:\+(?P<offset>\w+))?")
_MAX_SIZE = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """Where an x-ray begins, and where it ends if that was said."""

    start: Addr
    stop: Addr | None = None


def read_place(text: str, symbols: Symbols) -> Chosen:
    """Read ``SYM[+OFF]``, ``MODULE:SYM[+OFF]`` or an address; ``START-END`` or ``START:LEN``.

    Raises:
        UsageError: it is none of them, or a range that ends before it begins or is too long.
        UnknownSymbolError: no symbol has this name.
        AmbiguousSymbolError: several have it.
    """
    start, dash, end = text.partition("-")
    if dash and _is_place(start) and _is_place(end):
        return _range(text, _addr(start, symbols), _addr(end, symbols))
    start, colon, size = text.rpartition(":")
    if colon and _NUMBER.fullmatch(size):
        at = _addr(start, symbols)
        return _range(text, at, Addr(at + _number(size)))
    return Chosen(start=_addr(text, symbols))


def _range(text: str, start: Addr, stop: Addr) -> Chosen:
    if not start < stop <= U64:
        raise UsageError(f"{text!r}: the range ends before it begins")
    if stop - start > _MAX_SIZE:
        raise UsageError(f"{text!r}: a range of {stop - start:,} bytes; 64 KiB at most")
    return Chosen(start=start, stop=stop)


def _is_place(text: str) -> bool:
    return bool(_NUMBER.fullmatch(text) or _BARE_ADDRESS.fullmatch(text) or _PLACE.fullmatch(text))


def _addr(text: str, symbols: Symbols) -> Addr:
    if _BARE_ADDRESS.fullmatch(text):
        # As kallsyms and System.map have it.
        return Addr(int(text, 16))
    if _NUMBER.fullmatch(text):
        return Addr(_number(text))
    found = _PLACE.fullmatch(text)
    offset = found["offset"] or "0" if found else ""
    if found is None or not _NUMBER.fullmatch(offset):
        raise UsageError(f"{text!r} is no place: use SYM, SYM+0x4, 0xADDR, START-END or START:LEN")
    return Addr(_symbol(found["module"], found["symbol"], symbols) + _number(offset))


def _symbol(module: str | None, name: str, symbols: Symbols) -> int:
    if module is None:
        return symbols.named(name).addr
    in_module = [each for each in symbols.all_named(name) if each.module == module]
    if not in_module:
        raise UsageError(f"no symbol {name!r} in a loaded module {module!r}")
    return in_module[0].addr


def _number(text: str) -> int:
    return int(text, 16 if text[:2] in ("0x", "0X") else 10) & U64
