"""Names of data that a kernel's own table leaves out: without KALLSYMS_ALL it has code's only.

Some are exported to modules, and so have a name after all. The others are found by a function that
works with little else: of the addresses that its instructions name, the one that looks right. What
looks like none of them stays unknown. The exported names are found by their looks, too:

    struct kernel_symbol { int value_offset, name_offset, namespace_offset; };   // linux/export.h

Each offset counts from itself; the names are strings nearby. Written down in kernel/module.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import permutations

import numpy as np
from msgspec import Struct

from kprobes.arch.machine import TextOps
from kprobes.errors import MemoryFault
from kprobes.formats import vmcoreinfo
from kprobes.image.build import Build, Region
from kprobes.image.tables import (
    ALTERNATIVES,
    BLACKLIST,
    JUMP_LABELS,
    MAX_SIZE,
    MCOUNT,
    PROBE_BUCKETS,
    STATIC_CALLS,
    Table,
    exceptions,
)
from kprobes.model.kernel import version_of
from kprobes.ports import Memory
from kprobes.units import U64

_MAX_PLACES = 16


def find(data: bytes, addr: int, names: Iterable[str]) -> Mapping[str, int]:
    """Return the addresses of those names that are exported.

    Args:
        data: a kernel's read-only data, aligned to words.
        addr: where it is.
        names: to look for.
    """
    words = np.frombuffer(data, "<i4", len(data) // 4)
    targets = words + 4 * np.arange(len(words), dtype=np.int64)
    found = ((name, _value(data, words, targets, name)) for name in names)
    return {name: addr + value & U64 for name, value in found if value is not None}


def _value(data: bytes, words: np.ndarray, targets: np.ndarray, name: str) -> int | None:
    for place in _places(data, name):
        for at in np.flatnonzero(targets == place).tolist():
            if at:
                return 4 * (at - 1) + int(words[at - 1])
    return None


def _places(data: bytes, name: str) -> Iterator[int]:
    # To search for bytes takes a fiftieth of what a regular expression does.
    text = b"\0%s\0" % name.encode()
    at = data.find(text)
    for _ in range(_MAX_PLACES):
        if at < 0:
            return
        yield at + 1
        at = data.find(text, at + 1)


_EXPORTED = (
    "__per_cpu_offset",
    "__preempt_count",
    "current_task",
    "init_task",
    "nr_cpu_ids",
    "pcpu_hot",
    "system_percpu_wq",
    "system_wq",
    # What people's scripts look at by drgn.
    "__cpu_active_mask",
    "__cpu_online_mask",
    "__cpu_possible_mask",
    "__cpu_present_mask",
    "_totalram_pages",
    "avenrun",
    "blockdev_superblock",
    "cgrp_dfl_root",
    "init_net",
    "init_pid_ns",
    "init_user_ns",
    "init_uts_ns",
    "iomem_resource",
    "ioport_resource",
    "mem_section",
    "memstart_addr",
    "net_namespace_list",
    "node_data",
    "node_states",
    "nr_node_ids",
    "nr_swap_pages",
    "page_offset_base",
    "vm_committed_as",
    "vm_event_states",
    "vm_node_stat",
    "vm_zone_stat",
    "vmemmap_base",
)
_ALWAYS = b"init_task"
"""Every kernel has it; one whose table has it too leaves nothing out."""
_LONGEST = 1024
_MOST = 32
_PAGE = 4096
_SAMPLES = 16
_MAX_HZ = 1000
_TRACE_HEAD = 64
_NAME, _TRACEPOINT = 16, 64
_MAX_TRACERS = 1 << 10
_SYSTEM = re.compile(rb"[\w-]+(\0|$)")

Test = Callable[[Memory, int], bool]
"""(memory, address) to whether that is what is looked for. MemoryFault means no."""


class Recipe(Struct, frozen=True, kw_only=True):
    """Where to look for one name.

    Attributes:
        functions: that name the data; the first that the kernel has is read.
        test: what it looks like.
    """

    functions: tuple[bytes, ...]
    test: Test


def with_data_symbols(
    build: Build,
    memory: Memory,
    info: TextOps,
    constant: Iterable[Region],
    *,
    is_file: bool = False,
) -> Build:
    """Return a build with the names of data that its table lacks, as far as they are found.

    Args:
        build: at its running addresses.
        memory: of the guest, or its kernel's file.
        info: of its architecture.
        constant: pieces of its read-only data.
        is_file: whether what boot frees is there, too.
    """
    if build.address(_ALWAYS) is not None:
        return build
    found: dict[str, int] = {}
    for region in constant:
        found = {**find(region.data, region.addr, _EXPORTED), **found}
    lookup = _Lookup(build, memory, info)
    found |= dict(lookup.single())
    tables = {exceptions(info, version_of(build.release)): _EXCEPTIONS, **_TABLES}
    for table, functions in (tables | _BOOT if is_file else tables).items():
        found |= lookup.table(table, functions)
    found |= lookup.tracepoints()
    return build.with_data(found)


class _Lookup:
    def __init__(self, build: Build, memory: Memory, info: TextOps) -> None:
        self._build, self._memory, self._info = build, memory, info

    def single(self) -> Iterator[tuple[str, int]]:
        for name, recipe in _recipes(self._build).items():
            for addr in self._named_by(recipe.functions):
                if self._is(recipe.test, addr):
                    yield name, addr
                    break

    def table(self, table: Table, functions: tuple[bytes, ...]) -> Mapping[str, int]:
        # Its two ends, in whichever order.
        named = self._named_by(functions)
        for start, stop in (*permutations(named, 2), *self._after(named)):
            test = partial(_is_table, table=table, stop=stop, text=_text(self._build))
            if start < stop and self._is(test, start):
                return {table.start: start, table.stop: stop}
        return {}

    def tracepoints(self) -> Mapping[str, int]:
        # tracepoint_ptr_t __start___tracepoints_ptrs[], __stop_...: addresses, or offsets to them;
        # struct tracepoint { const char *name; ... };
        for start, stop in permutations(self._named_by((b"for_each_kernel_tracepoint",)), 2):
            if 0 < stop - start <= MAX_SIZE:
                for places in (self._offsets(start, stop), self._addresses(start, stop)):
                    with suppress(MemoryFault, ValueError):
                        return dict(self._named(places))
        return {}

    def _offsets(self, start: int, stop: int) -> Iterator[int]:
        for at in range(start, stop, 4):
            yield at + _s32(self._memory, at)

    def _addresses(self, start: int, stop: int) -> Iterator[int]:
        for at in range(start, stop, 8):
            yield _u64(self._memory, at)

    def _named(self, places: Iterable[int]) -> Iterator[tuple[str, int]]:
        for place in places:
            name, end, _ = self._memory.read(_u64(self._memory, place), _TRACEPOINT).partition(
                b"\0"
            )
            if not end or self._build.address(b"__traceiter_" + name) is None:
                raise ValueError("not the name of a tracepoint")
            yield f"__tracepoint_{name.decode()}", place

    def _after(self, named: Iterable[int]) -> Iterator[tuple[int, int]]:
        # struct alt_region { struct alt_instr *begin, *end; };   // arm64: kernel/alternative.c
        for addr in named:
            with suppress(MemoryFault):
                yield _u64(self._memory, addr), _u64(self._memory, addr + 8)

    def _named_by(self, functions: tuple[bytes, ...]) -> list[int]:
        found = (self._build.extent(name) for name in functions)
        first = next((extent for extent in found if extent is not None), None)
        if first is None:
            return []
        try:
            code = self._memory.read(first[0], min(first[1], _LONGEST))
        except MemoryFault:
            return []
        return list(dict.fromkeys(self._info.references(code, first[0])))[:_MOST]

    def _is(self, test: Test, addr: int) -> bool:
        try:
            return test(self._memory, addr)
        except MemoryFault:
            return False


def _is_list(memory: Memory, addr: int) -> bool:
    # struct list_head { struct list_head *next, *prev; };
    following, before = _u64(memory, addr), _u64(memory, addr + 8)
    return _u64(memory, following + 8) == addr and _u64(memory, before) == addr


def _is_events(memory: Memory, addr: int) -> bool:
    # struct trace_event_call { struct list_head list; struct trace_event_class *class; ... };
    # struct trace_event_class { const char *system; ... };
    if not _is_list(memory, addr):
        return False
    system = _u64(memory, _u64(memory, _u64(memory, addr) + 16))
    return _SYSTEM.match(memory.read(system, _NAME)) is not None


def _is_probe_table(memory: Memory, addr: int) -> bool:
    # struct hlist_head { struct hlist_node *first; }; each node begins { next, **pprev }.
    heads = [_u64(memory, addr + 8 * bucket) for bucket in range(PROBE_BUCKETS)]
    return addr % 8 == 0 and all(
        _u64(memory, head + 8) == addr + 8 * bucket for bucket, head in enumerate(heads) if head
    )


def _is_ftrace_page(memory: Memory, addr: int, *, text: range) -> bool:
    # struct ftrace_page { struct ftrace_page *next; struct dyn_ftrace *records; ... };
    page = _u64(memory, addr)
    return _u64(memory, _u64(memory, page + 8)) in text


def _is_tracers(memory: Memory, addr: int, *, stub: int) -> bool:
    # struct ftrace_ops { ftrace_func_t func; struct ftrace_ops *next; ... }, up to the list's end.
    ops = _u64(memory, addr)
    for _ in range(_MAX_TRACERS):
        if _is_no_tracer(memory, ops, stub=stub):
            return True
        ops = _u64(memory, ops + 8)
    return False


def _is_no_tracer(memory: Memory, addr: int, *, stub: int) -> bool:
    # struct ftrace_ops ftrace_list_end = { .func = ftrace_stub, ... };
    return stub != 0 and (_u64(memory, addr), _u64(memory, addr + 8)) == (stub, 0)


def _is_mutex(memory: Memory, addr: int) -> bool:
    # struct mutex { atomic_long_t owner; raw_spinlock_t; struct optimistic_spin_queue;
    # struct list_head wait_list; };
    return _is_list(memory, addr + 16)


def _is_note(memory: Memory, addr: int) -> bool:
    return next(vmcoreinfo.find(memory.read(_u64(memory, addr), _PAGE)), None) is not None


def _is_work(memory: Memory, addr: int, *, function: int) -> bool:
    # struct work_struct { atomic_long_t data; struct list_head entry; work_func_t func; ... };
    return function != 0 and _u64(memory, addr + 24) == function


def _is_trace(memory: Memory, addr: int) -> bool:
    # struct trace_array { struct list_head list; ...; struct array_buffer { struct trace_array *tr;
    # ... } array_buffer; ... }: after the list, it is what points to itself.
    return any(_u64(memory, addr + at) == addr for at in range(16, _TRACE_HEAD, 8))


def _is_clocks(memory: Memory, addr: int, *, first: int) -> bool:
    # struct { u64 (*func)(void); const char *name; int in_ns; }: "local" is the first.
    return first != 0 and _u64(memory, addr) == first


def _is_jiffies(memory: Memory, addr: int) -> bool:
    # It begins five minutes before it overflows 32 bits.
    return 0 <= _u64(memory, addr) - (1 << 32) + 300 * _MAX_HZ < 1 << 40


def _is_table(memory: Memory, addr: int, *, table: Table, stop: int, text: range) -> bool:
    # Some of what it tells of may have been freed after the boot.
    size = stop - addr
    if not 0 < size <= MAX_SIZE or size % table.entry:
        return False
    count = size // table.entry
    places = range(addr, stop, table.entry * max(count // _SAMPLES, 1))
    if table.is_absolute:
        matches = [_u64(memory, place) in text for place in places]
    else:
        matches = [place + _s32(memory, place) in text for place in places]
    return 2 * sum(matches) > len(matches)


def _recipes(build: Build) -> Mapping[str, Recipe]:
    text = _text(build)
    shepherd = build.address(b"vmstat_shepherd") or 0
    local = build.address(b"trace_clock_local") or 0
    stub = build.address(b"ftrace_stub") or 0
    tracers = b"arch_ftrace_ops_list_func", b"ftrace_ops_list_func", b"__ftrace_ops_list_func"
    return {
        "global_trace": Recipe(functions=(b"tracing_snapshot", b"tracing_on"), test=_is_trace),
        "trace_clocks": Recipe(
            functions=(b"tracing_clock_show",), test=partial(_is_clocks, first=local)
        ),
        "ftrace_events": Recipe(
            functions=(b"trace_event_update_all", b"trace_event_eval_update"), test=_is_events
        ),
        "ftrace_pages_start": Recipe(
            functions=(b"ftrace_location_range", b"lookup_rec"),
            test=partial(_is_ftrace_page, text=text),
        ),
        "ftrace_ops_list": Recipe(functions=tracers, test=partial(_is_tracers, stub=stub)),
        "ftrace_list_end": Recipe(functions=tracers, test=partial(_is_no_tracer, stub=stub)),
        "ftrace_lock": Recipe(functions=(b"unregister_ftrace_function",), test=_is_mutex),
        "modules": Recipe(functions=(b"m_start",), test=_is_list),
        "kprobe_blacklist": Recipe(functions=(b"kprobe_blacklist_seq_start",), test=_is_list),
        "kprobe_table": Recipe(functions=(b"get_kprobe",), test=_is_probe_table),
        "error_injection_list": Recipe(
            functions=(b"get_injectable_error_type", b"within_error_injection_list"), test=_is_list
        ),
        "btf_modules": Recipe(functions=(b"btf_try_get_module",), test=_is_list),
        "vmcoreinfo_data": Recipe(functions=(b"vmcoreinfo_append_str",), test=_is_note),
        "jiffies_64": Recipe(functions=(b"jiffies_read",), test=_is_jiffies),
        "shepherd": Recipe(
            functions=(b"vmstat_shepherd",), test=partial(_is_work, function=shepherd)
        ),
    }


_EXCEPTIONS = b"search_kernel_exception_table", b"search_exception_tables"
_TABLES: dict[Table, tuple[bytes, ...]] = {
    JUMP_LABELS: (b"jump_label_text_reserved",),
    STATIC_CALLS: (b"static_call_text_reserved",),
}
_BOOT: dict[Table, tuple[bytes, ...]] = {
    MCOUNT: (b"ftrace_init",),
    BLACKLIST: (b"init_kprobes",),
    ALTERNATIVES: (
        b"__apply_alternatives_multi_stop",
        b"apply_alternatives_all",
        b"apply_boot_alternatives",
        b"alternative_instructions",
    ),
}


def _text(build: Build) -> range:
    return range(build.text or 0, build.address(b"_etext") or 0)


def _u64(memory: Memory, addr: int) -> int:
    return int.from_bytes(memory.read(addr, 8), "little")


def _s32(memory: Memory, addr: int) -> int:
    return int.from_bytes(memory.read(addr, 4), "little", signed=True)
