"""The names of a guest's own events, from lists in its memory."""

import struct

import pytest

from kprobes.guest.places import read_events
from kprobes.image.types import parse_types
from kprobes.model.kernel import Kernel
from tests.build.btf import BtfBuilder
from tests.build.kernel import TEXT, make_kernel, symbol
from tests.build.pages import FakeRam

HEAD, CALLS, NAMES = TEXT + 0x100, TEXT + 0x1000, TEXT + 0x2000
TRACEPOINT, KPROBE = 1 << 4, 1 << 5
STEP = 0x100


def make_types() -> BtfBuilder:
    b = BtfBuilder()
    word, flags = b.int_("unsigned long", 8), b.int_("int", 4)
    ring = b.struct("list_head", 16, [("next", word, 0), ("prev", word, 64)])
    b.struct("trace_event_class", 16, [("system", word, 64)])
    b.struct("tracepoint", 8, [("name", word, 0)])
    either = b.union("", 8, [("name", word, 0), ("tp", word, 0)])
    b.struct("trace_event_call", 64, [
        ("class", word, 0), ("list", ring, 64), ("", either, 192), ("flags", flags, 320),
    ])  # fmt: skip
    b.enum("", {"TRACE_EVENT_FL_TRACEPOINT": TRACEPOINT, "TRACE_EVENT_FL_KPROBE": KPROBE})
    return b


def make_memory(*calls: tuple[bytes, bytes, int], last: int = HEAD) -> FakeRam:
    """Events with group, name and flags, in a ring whose last link may be another one."""
    memory = FakeRam(0x4000, start=TEXT)
    links = [HEAD, *(CALLS + STEP * n + 8 for n in range(len(calls)))]
    for here, there in zip(links, [*links[1:], last], strict=True):
        memory.write(here, struct.pack("<Q", there))
    for n, (group, name, flags) in enumerate(calls):
        call, texts = CALLS + STEP * n, NAMES + STEP * n
        memory.write(call, struct.pack("<Q", texts))
        memory.write(texts, struct.pack("<QQQ", 0, texts + 32, texts + 96))
        memory.write(texts + 32, group + b"\0")
        memory.write(texts + 96, name + b"\0")
        is_point = bool(flags & TRACEPOINT)
        memory.write(call + 24, struct.pack("<Q", texts + (16 if is_point else 96)))
        memory.write(call + 40, struct.pack("<I", flags))
    return memory


def make_typed(btf: BtfBuilder | None = None) -> Kernel:
    return make_kernel(
        [symbol("ftrace_events", HEAD, type="D")], types=parse_types((btf or make_types()).build())
    )


def test_every_event_is_named_by_itself_or_by_its_tracepoint() -> None:
    memory = make_memory((b"syscalls", b"sys_enter_read", 0), (b"sched", b"switch", TRACEPOINT))

    found = read_events(memory, make_typed())

    assert found == {("syscalls", "sys_enter_read"), ("sched", "switch")}


def test_its_own_kprobe_events_are_none() -> None:
    memory = make_memory((b"kprobes", b"mine", KPROBE), (b"sched", b"switch", 0))

    assert read_events(memory, make_typed()) == {("sched", "switch")}


@pytest.mark.parametrize("last", [0, CALLS + 8, TEXT - 8])
def test_a_ring_that_does_not_close_ends_somewhere(last: int) -> None:
    memory = make_memory((b"a", b"x", 0), (b"b", b"y", 0), last=last)

    assert read_events(memory, make_typed()) == {("a", "x"), ("b", "y")}


def test_an_event_that_does_not_read_is_left_out() -> None:
    memory = make_memory((b"a", b"x", 0), (b"b", b"y", 0))
    memory.write(CALLS, struct.pack("<Q", 1 << 63))

    assert read_events(memory, make_typed()) == {("b", "y")}


def test_a_kernel_that_does_not_tell_has_none() -> None:
    memory = make_memory((b"a", b"x", 0))

    assert read_events(memory, make_kernel([])) == frozenset()
    assert read_events(memory, make_kernel([symbol("ftrace_events", HEAD)])) == frozenset()
    assert read_events(memory, make_typed(BtfBuilder())) == frozenset()
