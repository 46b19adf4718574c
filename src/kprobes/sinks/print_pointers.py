"""``%p`` and the letters after it, as pointer() of the kernel's lib/vsprintf.c prints them.

``%p`` itself prints a number that the kernel makes of the address; what it is made with is not in a
record, so that the address stands in its place, in as many digits. Letters that the kernel does not
know it leaves out, as if ``%p`` stood alone.
"""

import re
import struct
from collections.abc import Callable

import numpy as np

from kprobes.formats.print_c import UnknownPrint
from kprobes.sinks.names import Names
from kprobes.sinks.print_values import mask_text

ShowBytes = Callable[[bytes], bytes]
"""What the record has at an address, to what is printed."""
ShowSome = Callable[[bytes, int], bytes]
"""The same of so many bytes or bits."""
ShowAddress = Callable[[Names, int], bytes]

_HIDDEN = frozenset("RrVENdDCgGOtAeku4")
"""Letters for what no record has: structures and strings of the kernel, and its clocks."""
_HEX_MAX = 64
_AF_INET, _AF_INET6 = 2, 10
_SYMBOL = re.compile(rb"\+0x([0-9a-f]+)(/0x[0-9a-f]+)")


def address_shown(suffix: str) -> ShowAddress | None:
    """Return how an address is named, by the letters after ``%p``; None where it is a number.

    Raises:
        UnknownPrint: what is at the address is printed, which no record has.
    """
    letter = suffix[:1]
    if letter in ("S", "F"):
        return Names.symbol
    if letter in ("s", "f") and not suffix.startswith("fw"):
        return _without_offset
    if letter == "B":
        return _called_from
    if letter in _HIDDEN or letter == "f":
        raise UnknownPrint(f"the conversion %p{suffix}")
    return None


def bytes_shown(suffix: str) -> ShowBytes | None:
    """Return how what is at an address is printed, or None when the letters are of another kind."""
    match suffix[:1]:
        case "M" | "m":
            return _mac(suffix)
        case "I" | "i":
            return _internet(suffix)
        case "U":
            return _uuid(suffix[1:2])
        case "a":
            return lambda data: b"0x%016x" % int.from_bytes(data[:8], "little")
        case _:
            return None


def some_shown(suffix: str) -> ShowSome | None:
    """Return how so many bytes or bits are printed, which the width tells; else None."""
    if suffix.startswith("h"):
        separator = {"C": ":", "D": "-", "N": ""}.get(suffix[1:2], " ")
        return lambda data, count: _hex(
            data[: min(count, _HEX_MAX)] if count > 0 else b"", separator
        )
    if suffix.startswith("bl"):
        return _bit_list
    if suffix.startswith("b"):
        return _bits
    return None


def _without_offset(names: Names, addr: int) -> bytes:
    return _SYMBOL.sub(b"", names.symbol(addr))


def _called_from(names: Names, addr: int) -> bytes:
    # sprint_backtrace(): the call stands in front of where it returns to.
    before = names.symbol((addr - 1) & ((1 << 64) - 1))
    if _SYMBOL.search(before) is None:
        return b"%#x" % addr
    return _SYMBOL.sub(lambda found: b"+%#x%b" % (int(found[1], 16) + 1, found[2]), before)


def _hex(data: bytes, separator: str) -> bytes:
    return (data.hex(separator) if separator else data.hex()).encode()


def _bits(data: bytes, count: int) -> bytes:
    # bitmap_string(): words of 32 bits, of the highest as many digits as it has bits for.
    count = min(max(count, 0), 8 * len(data))
    whole = -(-count // 32) * 4
    text = mask_text(_masked(data, count).to_bytes(whole, "little"))
    return text[(-count % 32) // 4 :]


def _masked(data: bytes, count: int) -> int:
    return int.from_bytes(data, "little") & ((1 << count) - 1)


def _bit_list(data: bytes, count: int) -> bytes:
    # bitmap_list_string(): 0-3,5.
    number = _masked(data, min(max(count, 0), 8 * len(data)))
    bits = np.unpackbits(
        np.frombuffer(number.to_bytes(len(data) + 1, "little"), np.uint8), bitorder="little"
    ).astype(np.int8)
    edges = np.flatnonzero(np.diff(bits, prepend=np.int8(0))).reshape(-1, 2).tolist()
    runs = [b"%d" % a if b == a + 1 else b"%d-%d" % (a, b - 1) for a, b in edges]
    return b",".join(runs)


def _mac(suffix: str) -> ShowBytes:
    separator = "" if suffix[0] == "m" else "-" if suffix[1:2] == "F" else ":"
    step = -1 if suffix[1:2] == "R" else 1
    return lambda data: _hex(data[:6].ljust(6, b"\0")[::step], separator)


def _internet(suffix: str) -> ShowBytes:
    letters = suffix[2:]
    match suffix[1:2]:
        case "4":
            return lambda data: _ip4(data, suffix[0], letters[:1])
        case "6":
            return lambda data: _ip6(data, suffix[0], is_short=letters.startswith("c"))
        case "S":
            return lambda data: _socket_address(data, suffix[0], letters)
        case _:
            raise UnknownPrint(f"the conversion %p{suffix}")


def _ip4(data: bytes, letter: str, order: str) -> bytes:
    parts = data[:4].ljust(4, b"\0")[:: -1 if order in ("h", "l") else 1]
    return b".".join([b"%03d" % part if letter == "i" else b"%d" % part for part in parts])


def _ip6(data: bytes, letter: str, *, is_short: bool) -> bytes:
    address = data[:16].ljust(16, b"\0")
    if letter == "i":
        return address.hex().encode()
    if not is_short:
        return address.hex(":", 2).encode()
    return _compressed(address)


def _compressed(address: bytes) -> bytes:
    # ip6_compressed_string(): as RFC 5952, and of the last 32 bits as IPv4 where they are that.
    is_mapped = address.startswith(bytes(10) + b"\xff\xff")
    # ISATAP: 02 or 00, 00, 5e, fe.
    is_isatap = address[8] & 0xFD == 0 and address[9:12] == b"\x00\x5e\xfe"
    if is_mapped or is_isatap:
        head = _groups(struct.unpack(">6H", address[:12]))
        return b"%b%b%b" % (head, b"" if head.endswith(b":") else b":", _ip4(address[12:], "I", ""))
    return _groups(struct.unpack(">8H", address))


def _groups(words: tuple[int, ...]) -> bytes:
    # The longest run of more than one 0, the first of several, is left out.
    runs = [(0, 0)]
    for start in range(len(words)):
        length = next((i for i, word in enumerate(words[start:]) if word), len(words) - start)
        runs.append((length, -start))
    length, start = max(runs)
    texts = [f"{word:x}" for word in words]
    if length < 2:
        return ":".join(texts).encode()
    return f"{':'.join(texts[:-start])}::{':'.join(texts[-start + length :])}".encode()


def _socket_address(data: bytes, letter: str, letters: str) -> bytes:
    family, port = struct.unpack("<H", data[:2].ljust(2, b"\0"))[0], data[2:4].ljust(2, b"\0")
    port_text = b":%d" % int.from_bytes(port, "big") if "p" in letters else b""
    if family == _AF_INET:
        order = next((each for each in reversed(letters) if each in "hlnb"), "")
        return _ip4(data[4:8], letter, order) + port_text
    if family != _AF_INET6:
        return b"(einval)"
    text = _ip6(data[8:24], letter, is_short=letter == "I" and "c" in letters)
    if set("pfs") & set(letters):
        text = b"[%b]" % text
    if "f" in letters:
        port_text += b"/%d" % (int.from_bytes(data[4:8], "big") & 0xFFFFF)
    if "s" in letters:
        port_text += b"%%%d" % int.from_bytes(data[24:28], "little")
    return text + port_text


_LITTLE = (3, 2, 1, 0, 5, 4, 7, 6, 8, 9, 10, 11, 12, 13, 14, 15)


def _uuid(letter: str) -> ShowBytes:
    def show(data: bytes) -> bytes:
        whole = data[:16].ljust(16, b"\0")
        if letter in ("l", "L"):
            whole = bytes(whole[at] for at in _LITTLE)
        text = whole.hex()
        parts = (text[:8], text[8:12], text[12:16], text[16:20], text[20:])
        joined = "-".join(parts).encode()
        return joined.upper() if letter in ("B", "L") else joined

    return show
