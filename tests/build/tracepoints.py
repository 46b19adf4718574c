"""Tracepoints of real kernels with random records, as bytes of a ring and as columns.

Fields and ``print fmt`` are those of Debian's 6.1 and 6.12 on x86-64, some lists of names
shortened; ghes_event and tcp_event have the conversions of several.
"""

import re
import struct
from collections.abc import Mapping

import numpy as np
from msgspec import Struct
from numpy.random import Generator

from kprobes.formats.ftrace import parse_event
from kprobes.model.events import Batch, Column
from kprobes.model.resolved import Field, RecordLayout, Storage
from kprobes.ring.ftrace_layouts import event_of

_GFP = (
    "{(unsigned long)((((( gfp_t)(0x400u|0x800u)) | (( gfp_t)0x40u) | (( gfp_t)0x80u) | "
    '(( gfp_t)0x100000u)) | (( gfp_t)0x02u)) | (( gfp_t)0x400000u)), "GFP_HIGHUSER"}, '
    "{(unsigned long)((( gfp_t)(0x400u|0x800u)) | (( gfp_t)0x40u) | (( gfp_t)0x80u)), "
    '"GFP_KERNEL"}, {(unsigned long)(( gfp_t)0x20u|( gfp_t)0x800u), "GFP_ATOMIC"}, '
    '{(unsigned long)(( gfp_t)0x200u), "__GFP_NOWARN"}, '
    '{(unsigned long)(( gfp_t)0x100u), "__GFP_ZERO"}'
)
_STATES = "(0x0000 | 0x0001 | 0x0002 | 0x0004 | 0x0008 | 0x0010 | 0x0020 | 0x0040)"

EVENTS: Mapping[str, tuple[str, str]] = {
    "sched_switch": (
        (
            "char prev_comm[16]; pid_t prev_pid; int prev_prio; long prev_state; char "
            "next_comm[16]; pid_t next_pid; int next_prio"
        ),
        (
            '"prev_comm=%s prev_pid=%d prev_prio=%d prev_state=%s%s ==> next_comm=%s next_pid=%d '
            'next_prio=%d", REC->prev_comm, REC->prev_pid, REC->prev_prio, (REC->prev_state & '
            f"((({_STATES} + 1) << 1) - 1)) ? __print_flags(REC->prev_state & ((({_STATES} + 1) "
            '<< 1) - 1), "|", { 0x0001, "S" }, { 0x0002, "D" }, { 0x0004, "T" }, { 0x0008, "t" '
            '}, { 0x0010, "X" }, { 0x0020, "Z" }, { 0x0040, "P" }, { 0x0080, "I" }) : "R", '
            f'REC->prev_state & (({_STATES} + 1) << 1) ? "+" : "", REC->next_comm, '
            "REC->next_pid, REC->next_prio"
        ),
    ),
    "sched_waking": (
        "char comm[16]; pid_t pid; int prio; int target_cpu",
        (
            '"comm=%s pid=%d prio=%d target_cpu=%03d", REC->comm, REC->pid, REC->prio, '
            "REC->target_cpu"
        ),
    ),
    "irq_handler_entry": (
        "int irq; __data_loc char[] name",
        '"irq=%d name=%s", REC->irq, __get_str(name)',
    ),
    "irq_handler_exit": (
        "int irq; int ret",
        '"irq=%d ret=%s", REC->irq, REC->ret ? "handled" : "unhandled"',
    ),
    "softirq_raise": (
        "unsigned int vec",
        (
            '"vec=%u [action=%s]", REC->vec, __print_symbolic(REC->vec, { 0, "HI" }, { 1, '
            '"TIMER" }, { 2, "NET_TX" }, { 3, "NET_RX" })'
        ),
    ),
    "timer_start": (
        (
            "void * timer; void * function; unsigned long expires; unsigned long now; unsigned "
            "int flags"
        ),
        (
            '"timer=%p function=%ps expires=%lu [timeout=%ld] cpu=%u idx=%u flags=%s", '
            "REC->timer, REC->function, REC->expires, (long)REC->expires - REC->now, REC->flags "
            "& 0x0003FFFF, REC->flags >> 22, __print_flags(REC->flags & (0x00040000 | 0x00080000 "
            '| 0x00100000 | 0x00200000), "|", { 0x00040000, "M" }, { 0x00080000, "D" }, { '
            '0x00100000, "P" }, { 0x00200000, "I" })'
        ),
    ),
    "hrtimer_start": (
        "void * hrtimer; void * function; s64 expires; s64 softexpires; unsigned int mode",
        (
            '"hrtimer=%p function=%ps expires=%llu softexpires=%llu mode=%s", REC->hrtimer, '
            "REC->function, (unsigned long long) REC->expires, (unsigned long long) "
            'REC->softexpires, __print_symbolic(REC->mode, { 0x00, "ABS" }, { 0x01, "REL" }, { '
            '0x02, "ABS|PINNED" })'
        ),
    ),
    "sys_enter": (
        "long id; unsigned long args[6]",
        (
            '"NR %ld (%lx, %lx, %lx, %lx, %lx, %lx)", REC->id, REC->args[0], REC->args[1], '
            "REC->args[2], REC->args[3], REC->args[4], REC->args[5]"
        ),
    ),
    "kmalloc": (
        (
            "unsigned long call_site; const void * ptr; size_t bytes_req; size_t bytes_alloc; "
            "unsigned long gfp_flags; int node"
        ),
        (
            '"call_site=%pS ptr=%p bytes_req=%zu bytes_alloc=%zu gfp_flags=%s node=%d '
            'accounted=%s", (void *)REC->call_site, REC->ptr, REC->bytes_req, REC->bytes_alloc, '
            f'(REC->gfp_flags) ? __print_flags(REC->gfp_flags, "|", {_GFP}) : "none", REC->node, '
            '(1 && (REC->gfp_flags & (unsigned long)(( gfp_t)0x400000u))) ? "true" : "false"'
        ),
    ),
    "mm_page_alloc": (
        "unsigned long pfn; unsigned int order; unsigned long gfp_flags; int migratetype",
        (
            '"page=%p pfn=0x%lx order=%d migratetype=%d gfp_flags=%s", REC->pfn != -1UL ? '
            "(((struct page *)vmemmap_base) + (REC->pfn)) : ((void *)0), REC->pfn != -1UL ? "
            "REC->pfn : 0, REC->order, REC->migratetype, (REC->gfp_flags) ? "
            f'__print_flags(REC->gfp_flags, "|", {_GFP}) : "none"'
        ),
    ),
    "block_rq_issue": (
        (
            "dev_t dev; sector_t sector; unsigned int nr_sector; unsigned int bytes; char "
            "rwbs[8]; char comm[16]; __data_loc char[] cmd"
        ),
        (
            '"%d,%d %s %u (%s) %llu + %u [%s]", ((unsigned int) ((REC->dev) >> 20)), ((unsigned '
            "int) ((REC->dev) & ((1U << 20) - 1))), REC->rwbs, REC->bytes, __get_str(cmd), "
            "(unsigned long long)REC->sector, REC->nr_sector, REC->comm"
        ),
    ),
    "workqueue_execute_start": (
        "void * work; void * function",
        '"work struct %p: function %ps", REC->work, REC->function',
    ),
    "signal_generate": (
        "int sig; int errno; int code; char comm[16]; pid_t pid; int group; int result",
        (
            '"sig=%d errno=%d code=%d comm=%s pid=%d grp=%d res=%d", REC->sig, REC->errno, '
            "REC->code, REC->comm, REC->pid, REC->group, REC->result"
        ),
    ),
    "net_dev_queue": (
        "void * skbaddr; unsigned int len; __data_loc char[] name",
        '"dev=%s skbaddr=%p len=%u", __get_str(name), REC->skbaddr, REC->len',
    ),
    "tlb_flush": (
        "int reason; unsigned long pages",
        (
            '"pages:%ld reason:%s (%d)", REC->pages, __print_symbolic(REC->reason, { 0, "flush '
            'on task switch" }, { 1, "remote shootdown" }), REC->reason'
        ),
    ),
    "rcu_utilization": (
        "const char * s",
        '"%s", REC->s',
    ),
    "ipi_raise": (
        "__data_loc unsigned long[] target_cpus; const char * reason",
        '"target_mask=%s (%s)", __get_bitmask(target_cpus), REC->reason',
    ),
    "ghes_event": (
        "u8 sev; __data_loc u8[] buf; u8 sec_type[16]; u32 len",
        (
            '"severity: %d; sec type:%pU; data len:%d; raw data:%s", REC->sev, REC->sec_type, '
            "REC->len, __print_hex(__get_dynamic_array(buf), __get_dynamic_array_len(buf))"
        ),
    ),
    "tcp_event": (
        "__u16 sport; __u8 saddr[4]; __u8 saddr_v6[16]; __u8 mac[6]; __u64 cookie; __u8 state",
        (
            '"sport=%hu saddr=%pI4 saddrv6=%pI6c mac=%pM cookie=%016llx state=%04x %5d|%-6u|", '
            "REC->sport, REC->saddr, REC->saddr_v6, REC->mac, REC->cookie, REC->state, "
            "REC->state, REC->sport"
        ),
    ),
}
"""By name, fields and ``print fmt``."""

_SIZES = {
    1: ("u8", "__u8", "s8", "char"),
    2: ("u16", "__u16", "s16"),
    4: ("int", "pid_t", "unsigned int", "u32", "s32", "dev_t"),
    8: ("long", "unsigned long", "s64", "u64", "__u64", "size_t", "sector_t"),
}
_SIZE_OF = {name: size for size, names in _SIZES.items() for name in names}
_SIGNED = {"int", "pid_t", "long", "s64", "s32", "s16", "s8", "char"}
_COMMON = (
    "\tfield:unsigned short common_type;\toffset:0;\tsize:2;\tsigned:0;\n"
    "\tfield:unsigned char common_flags;\toffset:2;\tsize:1;\tsigned:0;\n"
    "\tfield:unsigned char common_preempt_count;\toffset:3;\tsize:1;\tsigned:0;\n"
    "\tfield:int common_pid;\toffset:4;\tsize:4;\tsigned:1;\n"
)
SYMBOLS = {0xFFFFFFFF81000000 + 0x100 * i: f"function_{i}" for i in range(16)}
SYMBOLS_END = max(SYMBOLS) + 0x100
STRINGS = {0xFFFFFFFF82000000 + 0x20 * i: f"string {i}".encode() for i in range(4)}


class Tracepoint(Struct, frozen=True, kw_only=True):
    """An event with its records.

    Attributes:
        text: of its ``format`` file.
        records: each one's bytes.
        batch: the same as columns.
    """

    text: str
    records: list[bytes]
    batch: Batch


def format_text(name: str, number: int, fields: str, print_fmt: str) -> str:
    """Return a ``format`` file."""
    lines: list[str] = []
    at = 8
    for declared in fields.split("; "):
        one, size, is_signed = _size(declared)
        at = -(-at // one) * one
        lines.append(f"\tfield:{declared};\toffset:{at};\tsize:{size};\tsigned:{is_signed:d};\n")
        at += size
    own = "".join(lines)
    return f"name: {name}\nID: {number}\nformat:\n{_COMMON}\n{own}\nprint fmt: {print_fmt}\n"


def layout_of(
    fields: str, print_fmt: str, *, name: str = "event", number: int = 100
) -> RecordLayout:
    """Return how an event is shown."""
    form = parse_event(format_text(name, number, fields, print_fmt))
    return event_of("events", form, (6, 1)).layouts[0]


def tracepoint(name: str, number: int, rng: Generator, *, count: int) -> Tracepoint:
    """Return one of ``EVENTS`` with random records."""
    fields, print_fmt = EVENTS[name]
    text = format_text(name, number, fields, print_fmt)
    layout = event_of("events", parse_event(text), (6, 1)).layouts[0]
    columns = tuple(_column(field, rng, count) for field in layout.fields)
    pids = rng.integers(1, 1 << 15, count).astype(np.int32)
    records = [
        _record(layout, struct.pack("<HBBi", number, 0, 0, pids[row]), columns, row)
        for row in range(count)
    ]
    return Tracepoint(text=text, records=records, batch=batch_of(layout, columns, pids=pids))


def batch_of(
    layout: RecordLayout, columns: tuple[Column, ...], *, pids: Column | None = None
) -> Batch:
    """Return events of these columns, 1000 ns after each other."""
    count = len(columns[0])
    return Batch(
        layout=layout,
        ts=np.arange(count, dtype=np.uint64) * np.uint64(1000),
        cpu=np.zeros(count, np.uint16),
        pid=np.zeros(count, np.int32) if pids is None else pids,
        context=np.zeros(count, np.uint32),
        comm=np.full(count, b"sh", "S16"),
        columns=columns,
        faulted=(None,) * len(columns),
    )


def symbol_at(addr: int) -> str:
    """Return what ``%pS`` prints."""
    start = addr & ~0xFF
    return f"{SYMBOLS[start]}+{addr - start:#x}/0x100" if start in SYMBOLS else f"{addr:#x}"


def _size(declared: str) -> tuple[int, int, bool]:
    # Of an element, of the whole; and whether it is signed.
    if declared.startswith("__data_loc"):
        return 4, 4, False
    found = re.fullmatch(r"(.*?) ?(\**) ?(\w+)(?:\[(\d+)\])?", declared)
    assert found is not None
    one = 8 if found[2] else _SIZE_OF[found[1]]
    return one, one * int(found[4] or 1), not found[2] and found[1] in _SIGNED


def _column(field: Field, rng: Generator, count: int) -> Column:
    if field.storage is Storage.STRING:
        width = 8 if "long" in field.declared else 2
        found = np.empty(count, object)
        for row in range(count):
            length = int(rng.integers(0, min(field.size, 16) if field.size > 4 else 12))
            if field.type == "bytes":
                found[row] = rng.bytes(width * (1 if width == 8 else length))
            else:
                found[row] = bytes(rng.choice(list(b"abcXYZ019:/_-"), length).tolist())
        return found
    shape = (count,) if field.count is None else (count, field.count)
    if field.name in ("function", "call_site"):
        return rng.choice(list(SYMBOLS), shape).astype(np.uint64) + rng.integers(
            1, 99, shape
        ).astype(np.uint64)
    if field.declared == "const char *":
        return rng.choice(list(STRINGS), shape).astype(np.uint64)
    wide = rng.integers(0, 1 << 64, shape, dtype=np.uint64, endpoint=False)
    # Of all sizes, and none at all; flags and enumerators among them.
    wide >>= rng.integers(0, 65, shape).astype(np.uint64) & np.uint64(63)
    wide = np.where(rng.integers(0, 8, shape) == 0, np.uint64(0), wide)
    return wide.astype(f"<{'i' if field.is_signed else 'u'}{field.size}")


def _record(layout: RecordLayout, common: bytes, columns: tuple[Column, ...], row: int) -> bytes:
    data, after = bytearray(common.ljust(layout.size, b"\0")), b""
    for field, column in zip(layout.fields, columns, strict=True):
        value = column[row]
        if field.declared.startswith("__data_loc"):
            own = value if field.type == "bytes" else value + b"\0"
            place = len(own) << 16 | (layout.size + len(after))
            struct.pack_into("<I", data, field.offset, place)
            after += own
        elif field.storage is Storage.STRING:
            data[field.offset : field.offset + field.size] = value.ljust(field.size, b"\0")
        else:
            own = value.tobytes()
            data[field.offset : field.offset + len(own)] = own
    whole = bytes(data) + after
    return whole.ljust(-(-len(whole) // 4) * 4, b"\0")
