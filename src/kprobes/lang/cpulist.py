"""Lists of CPUs, ``0-3,8-31:1/4``, as bitmap_parselist() in the kernel reads them."""

import re

_SEPARATORS = re.compile(r"[\s,]+")
_REGION = re.compile(
    r"(?:[aA][lL][lL]|(?P<start>[0-9]+|N)(?:-(?P<end>[0-9]+|N))?)"
    r"(?::(?P<used>[0-9]+|N)/(?P<group>[0-9]+|N))?"
)


def read_cpus(text: str, *, count: int) -> frozenset[int] | None:
    """Return the CPUs of a list, or None when it is none.

    Args:
        text: numbers, ranges, ``all`` or ``N`` (the last CPU), and of a range ``:USED/GROUP`` for
            the first of every group.
        count: how many CPUs there may be.
    """
    found: set[int] = set()
    for region in filter(None, _SEPARATORS.split(text)):
        cpus = _region(region, count)
        if cpus is None:
            return None
        found |= cpus
    return frozenset(found)


def _region(text: str, count: int) -> set[int] | None:
    found = _REGION.fullmatch(text)
    if found is None or (found["used"] and found["start"] and not found["end"]):
        return None
    start = _number(found["start"] or "0", count)
    end = _number(found["end"] or found["start"] or "N", count)
    used = _number(found["used"], count) if found["used"] else end + 1
    group = _number(found["group"], count) if found["group"] else end + 1
    if start > end or end >= count or not group or used > group or group >> 32:
        return None
    return {cpu for cpu in range(start, end + 1) if (cpu - start) % group < used}


def _number(text: str, count: int) -> int:
    # Python refuses to convert thousands of digits; what is too large is too large.
    return count - 1 if text == "N" else int(text.lstrip("0")[:20] or "0")
