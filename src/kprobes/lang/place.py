"""The second word of a statement: where the probe goes."""

import re
from dataclasses import replace

from kprobes.lang.numbers import read_signed, read_unsigned
from kprobes.lang.piece import Piece
from kprobes.model.codes import Code
from kprobes.model.definition import Place
from kprobes.units import Addr

_OFFSET_MAX = (1 << 32) - 1
_SYMBOL = re.compile(r"[A-Za-z_.][A-Za-z0-9_.]*")
_MODULE = re.compile(r"[A-Za-z0-9_]+")
_PATTERN = re.compile(r"[A-Za-z0-9_.*?\[\]!^-]+")
# A pattern may hold [a-z], whose hyphen starts no offset.
_UP_TO_OFFSET = re.compile(r"(?:\[[^\]]*\]|[^+-])*")
_RETURN = "%return"
_PLACES = "a place is SYMBOL, SYMBOL+OFFSET, MODULE:SYMBOL or an address"


def read_place(word: Piece) -> tuple[Place, bool]:
    """Read ``[MOD:]SYM[+OFF][%return]`` or an address; SYM may be a shell pattern.

    Returns:
        The place, and whether ``%return`` follows it.

    Raises:
        DefinitionError: it cannot be a place.
    """
    addr = read_unsigned(word.text)
    if addr is not None:
        return Place(symbol="", offset=0, span=word.span, addr=Addr(addr)), False
    if "/" in word.text and ":" in word.text:
        raise word.error(Code.NOT_KPROBE, hint="a path and an offset are a user-space probe")
    symbol, percent, suffix = word.text.partition("%")
    if percent and percent + suffix != _RETURN:
        raise word.error(Code.BAD_ADDR_SUFFIX, len(symbol), hint="the only suffix is %return")
    place = _split_module(word, _symbol_and_offset(word.cut(0, len(symbol))))
    # The kernel would look the symbol up; no kernel has one of other characters.
    if not (_PATTERN if place.is_glob else _SYMBOL).fullmatch(place.symbol):
        raise word.error(Code.BAD_PROBE_ADDR, hint=_PLACES)
    return place, bool(percent)


def _split_module(word: Piece, place: Place) -> Place:
    module, colon, symbol = place.symbol.partition(":")
    if not colon:
        return place
    if not _MODULE.fullmatch(module):
        raise word.error(Code.BAD_PROBE_ADDR, hint="a module is named by letters, digits and _")
    return replace(place, module=module, symbol=symbol)


def _symbol_and_offset(piece: Piece) -> Place:
    symbol = _prefix(piece.text)
    rest = piece.text[len(symbol) :]
    offset = read_signed(rest) if rest else 0
    if not symbol:
        raise piece.error(Code.BAD_PROBE_ADDR, hint=_PLACES)
    if offset is None or not 0 <= offset <= _OFFSET_MAX:
        raise piece.error(Code.BAD_PROBE_ADDR, hint="an offset is + and a number, such as +0x10")
    return Place(symbol=symbol, offset=offset, span=piece.span)


def _prefix(text: str) -> str:
    found = _UP_TO_OFFSET.match(text)
    return found[0] if found else ""
