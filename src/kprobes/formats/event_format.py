r"""An event's ``format`` file and the page's own, ``events/header_page``, into facts.

    name: open
    ID: 1740
    format:
    \tfield:unsigned short common_type;\toffset:0;\tsize:2;\tsigned:0;
    ...                          // an empty line between the common fields and the event's
    print fmt: ...               // not looked at: kernel/trace/trace_events.c, f_show

``header_page`` has lines of the same kind only (ring_buffer_print_page_header).
"""

import re
from dataclasses import dataclass

from kprobes.errors import FormatError
from kprobes.model.host_event import EventField, EventFormat, Locator

_FIELD = re.compile(
    r"\tfield: ?(?P<declaration>[^;]+);\toffset:(?P<offset>\d+);\tsize:(?P<size>\d+);"
    r"(?:\tsigned:(?P<signed>[01]);)?"
)
# The name is the declaration's last word, but for the brackets of an array behind it.
_DECLARATION = re.compile(r"(?P<type>.*\S)\s+\**(?P<name>\w+)(?P<array>(?:\[[^\]]*\])*)", re.DOTALL)
_HEAD = re.compile(r"name: (?P<name>\S+)\nID: (?P<id>\d+)\nformat:\n")
_NUMBER_MAX = (1 << 16) - 1
_SIZE_MAX = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PageFormat:
    """How a page of the ring, a sub-buffer, lies in memory.

    Attributes:
        size: of all of it.
        data: offset of its records.
        commit: offset of the count of their bytes, of which the low 4 bytes matter.
    """

    size: int
    data: int
    commit: int


def parse_event(text: str) -> EventFormat:
    """Read an event's ``format`` file, or raise FormatError."""
    head = _HEAD.match(text)
    if head is None:
        raise FormatError(f"no event's format: {text[:40]!r}")
    body = text[head.end() :].partition("\nprint fmt:")[0]
    common, _, own = body.partition("\n\n")
    number = int(head["id"])
    if not 0 < number <= _NUMBER_MAX:
        raise FormatError(f"event {head['name']} has the number {number}")
    return EventFormat(
        name=head["name"], number=number, common=_fields(common), fields=_fields(own)
    )


def parse_page(text: str) -> PageFormat:
    """Read ``header_page``, or raise FormatError."""
    fields = {field.name: field for field in _fields(text)}
    try:
        stamp, commit, data = fields["timestamp"], fields["commit"], fields["data"]
    except KeyError as e:
        raise FormatError(f"header_page has no {e.args[0]}") from e
    if (stamp.offset, stamp.size) != (0, 8) or data.offset % 4 or commit.offset % 4:
        raise FormatError(f"a page with its stamp at {stamp.offset} and data at {data.offset}")
    return PageFormat(size=data.end, data=data.offset, commit=commit.offset)


def _fields(text: str) -> tuple[EventField, ...]:
    return tuple(_field(line) for line in text.splitlines() if line.strip())


def _field(line: str) -> EventField:
    found = _FIELD.fullmatch(line.rstrip())
    declared = None if found is None else _DECLARATION.fullmatch(found["declaration"])
    if found is None or declared is None:
        raise FormatError(f"no field of an event: {line[:60]!r}")
    offset, size = int(found["offset"]), int(found["size"])
    if offset + size > _SIZE_MAX:
        raise FormatError(f"a field beyond the longest record: {line[:60]!r}")
    return EventField(
        name=declared["name"],
        type=declared["type"] + declared["array"],
        offset=offset,
        size=size,
        is_signed=found["signed"] == "1",
        locator=_locator(declared["type"], size),
    )


def _locator(declared: str, size: int) -> Locator:
    word = declared.split(" ", 1)[0]
    if word not in (Locator.DATA, Locator.RELATIVE):
        return Locator.HERE
    if size % 4 or not size:
        raise FormatError(f"a {declared!r} of {size} bytes")
    return Locator(word)
