"""A kernel's events for the decoder: formats, layouts that they are shown by, and records."""

import struct

from kprobes.model.events import EventField, EventFormat, HostEvent, Locator
from kprobes.model.resolved import Field, RecordLayout, Storage
from kprobes.units import Addr

OPEN_ID, OPENED_ID, NEW_ID, RENAME_ID = 1740, 1741, 300, 301
OPEN_IP, OPENED_IP, CALLER = 0xFFFFFFFF81301230, 0xFFFFFFFF81301230, 0xFFFFFFFF8100AB00

COMMON = (
    EventField(name="common_type", type="unsigned short", offset=0, size=2, is_signed=False),
    EventField(name="common_flags", type="unsigned char", offset=2, size=1, is_signed=False),
    EventField(
        name="common_preempt_count", type="unsigned char", offset=3, size=1, is_signed=False
    ),
    EventField(name="common_pid", type="int", offset=4, size=4, is_signed=True),
)


def field(
    name: str, offset: int, size: int, *, kind: str = "u64", locator: Locator = Locator.HERE
) -> EventField:
    return EventField(
        name=name, type=kind, offset=offset, size=size, is_signed=False, locator=locator
    )


def form(number: int, name: str, *fields: EventField) -> EventFormat:
    return EventFormat(name=name, number=number, common=COMMON, fields=fields)


def shown(
    name: str, kind: str, *, storage: Storage = Storage.NUMBER, count: int | None = None
) -> Field:
    size = 4 if storage is Storage.STRING else int(kind[1:]) // 8
    return Field(name=name, type=kind, storage=storage, offset=0, size=size, index=0, count=count)


def layout(event_id: int, event: str, ip: int, *fields: Field) -> RecordLayout:
    return RecordLayout(
        event_id=event_id,
        group="kp",
        event=event,
        ip=Addr(ip),
        where=f"{event}_at+0x0/0x10",
        function=f"{event}_at",
        fields=fields,
        size=40,
        is_dynamic=False,
        size_offset=0,
        faults_offset=None,
    )


OPEN = HostEvent(
    format=form(
        OPEN_ID,
        "open",
        field("__probe_ip", 8, 8),
        field("n", 16, 4),
        field("path", 20, 4, locator=Locator.DATA),
        field("four", 24, 4),
        field("both", 28, 8, locator=Locator.DATA),
        field("near", 36, 4, locator=Locator.RELATIVE),
    ),
    layouts=(
        layout(
            1,
            "open",
            OPEN_IP,
            shown("n", "s32"),
            shown("path", "string", storage=Storage.STRING),
            shown("four", "x8", count=4),
            shown("both", "string", storage=Storage.STRING, count=2),
            shown("near", "string", storage=Storage.STRING),
        ),
    ),
)
OPENED = HostEvent(
    format=form(
        OPENED_ID,
        "opened",
        field("__probe_func", 8, 8),
        field("__probe_ret_ip", 16, 8),
        field("fd", 24, 2),
    ),
    layouts=(layout(2, "opened", OPENED_IP, shown("fd", "u16")),),
)
NEW_TASK = form(NEW_ID, "task_newtask", field("pid", 8, 4), field("comm", 12, 16))
RENAME = form(
    RENAME_ID,
    "task_rename",
    field("pid", 8, 4),
    field("oldcomm", 12, 16),
    field("newcomm", 28, 16),
)


def common(number: int, pid: int = 7, *, flags: int = 0, preempt: int = 0) -> bytes:
    return struct.pack("<HBBi", number, flags, preempt, pid)


def opening(
    n: int, path: bytes | None, *, pid: int = 7, ip: int = OPEN_IP, both: bytes = b"a"
) -> bytes:
    """A record of OPEN; every string but a path of None has its bytes after the fixed part."""
    end = 40
    texts = [path, both, None, b"near"]
    located: list[int] = []
    tail = b""
    for text in texts:
        held = b"" if text is None else text + b"\0"
        at = end + len(tail)
        located.append(len(held) << 16 | at)
        tail += held
    located[3] -= 40
    fixed = struct.pack("<QiI4B3I", ip, n, located[0], 1, 2, 3, 4, *located[1:])
    data = common(OPEN_ID, pid) + fixed + tail
    return data + bytes(-len(data) % 4)


def opened(fd: int, *, pid: int = 7, ip: int = OPENED_IP) -> bytes:
    return common(OPENED_ID, pid) + struct.pack("<QQHxx", ip, CALLER, fd)


def new_task(pid: int, name: bytes) -> bytes:
    return common(NEW_ID, 1) + struct.pack("<i16s", pid, name)


def rename(pid: int, old: bytes, new: bytes) -> bytes:
    return common(RENAME_ID, pid) + struct.pack("<i16s16s", pid, old, new)
