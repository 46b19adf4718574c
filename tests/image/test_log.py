"""The kernel's log in memory: what is read of its rings, whole, torn, or hostile."""

import struct

import pytest
from msgspec.structs import replace

from kprobes.errors import MemoryFault, TargetError
from kprobes.formats import btf_index
from kprobes.formats.btf import Btf
from kprobes.image.log import KernelLog, LogRecord
from kprobes.image.types import BtfTypes
from kprobes.model.kernel import Kernel
from tests.build.armed_sites import SparseMemory
from tests.build.btf import BtfBuilder
from tests.build.kernel import make_kernel, symbol

PRB, RING, DESCS, INFOS, TEXTS, NOTE = (0xFFFF_8880_0000_0000 + (n << 20) for n in range(6))
COUNT_BITS, SIZE_BITS = 3, 8
COMMITTED, FINALIZED, REUSABLE = 1, 2, 3
FIRST = (1 << 62) - 9
"""The number of the first descriptor, as the kernel's: it runs over early."""


def types() -> BtfTypes:
    b = BtfBuilder()
    u64, u32, u16, u8 = (b.int_(f"u{8 * n}", n) for n in (8, 4, 2, 1))
    lpos = b.struct("prb_data_blk_lpos", 16, [("begin", u64, 0), ("next", u64, 64)])
    desc = b.struct("prb_desc", 24, [("state_var", u64, 0), ("text_blk_lpos", lpos, 64)])
    info = b.struct("printk_info", 88, [
        ("seq", u64, 0), ("ts_nsec", u64, 64), ("text_len", u16, 128), ("facility", u8, 144),
        ("flags", u8, 5 << 24 | 152), ("level", u8, 3 << 24 | 157), ("caller_id", u32, 160),
    ], flag=True)  # fmt: skip
    descs = b.struct("prb_desc_ring", 40, [
        ("count_bits", u32, 0), ("descs", b.ptr(desc), 64), ("infos", b.ptr(info), 128),
        ("head_id", u64, 192), ("tail_id", u64, 256),
    ])  # fmt: skip
    texts = b.struct("prb_data_ring", 32, [
        ("size_bits", u32, 0), ("data", b.ptr(u8), 64), ("head_lpos", u64, 128),
        ("tail_lpos", u64, 192),
    ])  # fmt: skip
    b.struct("printk_ringbuffer", 80, [("desc_ring", descs, 0), ("text_data_ring", texts, 320)])
    return BtfTypes(Btf(btf_index.parse(b.build())))


class Printk:
    """A log as printk keeps it, of 8 messages and 256 bytes at most."""

    def __init__(self) -> None:
        self.descs = bytearray(24 << COUNT_BITS)
        self.infos = bytearray(88 << COUNT_BITS)
        self.texts = bytearray(1 << SIZE_BITS)
        self.head, self.lpos, self.seq = FIRST - 1, 0, 0
        self.bits: tuple[int, int] = COUNT_BITS, SIZE_BITS

    def say(self, text: bytes, *, state: int = FINALIZED, ts: int = 0, level: int = 6) -> None:
        """Add a message; data blocks are never torn in two."""
        self.head = (self.head + 1) & ((1 << 62) - 1)
        size = 8 + -(-len(text) // 8) * 8
        begin, end = self.lpos, self.lpos + size
        at = begin & 0xFF
        if not text:
            begin = end = 1
        elif begin >> SIZE_BITS != (end - 1) >> SIZE_BITS:
            at, end = 0, (end >> SIZE_BITS << SIZE_BITS) + size
        if text:
            self.texts[at : at + 8] = struct.pack("<Q", self.head)
            self.texts[at + 8 : at + 8 + len(text)] = text
            self.lpos = end
        index = self.head & 7
        struct.pack_into("<QQQ", self.descs, 24 * index, state << 62 | self.head, begin, end)
        struct.pack_into(
            "<QQHBB", self.infos, 88 * index, self.seq, ts, len(text), 0, level << 5 | 1
        )
        self.seq += 1

    def memory(self) -> SparseMemory:
        count_bits, size_bits = self.bits
        descs = struct.pack("<QQQQQ", count_bits, DESCS, INFOS, self.head, 0)
        texts = struct.pack("<QQQQ", size_bits, TEXTS, 0, 0)
        return SparseMemory(
            {
                PRB: struct.pack("<Q", RING),
                RING: descs + texts,
                DESCS: bytes(self.descs),
                INFOS: bytes(self.infos),
                TEXTS: bytes(self.texts),
            }
        )

    def log(self) -> KernelLog:
        return KernelLog(self.memory(), kernel())

    def texts_of(self, since: int = 0, most: int = 100) -> list[bytes]:
        return [each.text for each in self.log().records(since, most=most)]


def kernel(name: str = "prb", addr: int = PRB) -> Kernel:
    return replace(make_kernel([symbol(name, addr, type="d")]), types=types())


@pytest.fixture
def printk() -> Printk:
    return Printk()


def test_messages_are_read_as_they_were_said(printk: Printk) -> None:
    printk.say(b"Linux version", ts=1_234_567_890, level=5)
    printk.say(b"two\nlines", ts=70_000_000_000_000)

    first, second = printk.log().records()

    assert first == LogRecord(seq=0, ts_ns=1_234_567_890, level=5, text=b"Linux version")
    assert first.lines() == [b"[    1.234567] Linux version"]
    assert second.lines() == [b"[70000.000000] two", b"[70000.000000] lines"]


def test_what_was_overwritten_is_left_out_and_what_runs_over_the_end_is_whole(
    printk: Printk,
) -> None:
    said = [b"%d " % n + b"x" * (7 * n % 23) for n in range(40)]
    for count, text in enumerate(said):
        printk.say(text)

        found = printk.texts_of()

        assert found == said[count + 1 - len(found) : count + 1]
        assert len(found) >= min(count + 1, 5)


def test_the_latest_ones_are_chosen_and_those_from_a_number_on(printk: Printk) -> None:
    for n in range(5):
        printk.say(b"%d" % n)

    assert printk.texts_of(most=2) == [b"3", b"4"]
    assert printk.texts_of(since=3) == [b"3", b"4"]
    assert printk.texts_of(since=9) == []


@pytest.mark.parametrize("state", [0, REUSABLE])
def test_what_is_being_written_is_no_message_and_hides_none(printk: Printk, state: int) -> None:
    printk.say(b"before")
    printk.say(b"half", state=state)
    printk.say(b"after", state=COMMITTED)

    assert printk.texts_of() == [b"before", b"after"]


def test_a_message_without_text_is_empty(printk: Printk) -> None:
    printk.say(b"")

    assert printk.texts_of() == [b""]


def test_an_empty_log_has_no_messages(printk: Printk) -> None:
    assert printk.texts_of() == []


@pytest.mark.parametrize("bits", [(0, 8), (31, 8), (3, 0), (3, 63)])
def test_sizes_that_make_no_sense_are_refused(printk: Printk, bits: tuple[int, int]) -> None:
    printk.bits = bits

    with pytest.raises(TargetError, match="the kernel's log cannot be read: 2\\^"):
        printk.log()


def test_positions_that_make_no_sense_are_no_message(printk: Printk) -> None:
    for begin, end in ((0, 0), (8, 0), (0, 1 << 63), (1 << 62, 8), (250, 258), (248, 240)):
        printk.say(b"hostile")
        index = printk.head & 7
        struct.pack_into("<QQ", printk.descs, 24 * index + 8, begin, end)
    printk.say(b"good")

    assert printk.texts_of() == [b"good"]


def test_memory_that_is_gone_is_told(printk: Printk) -> None:
    memory = printk.memory()
    log = KernelLog(memory, kernel())
    del memory.pieces[DESCS]

    with pytest.raises(MemoryFault):
        log.records()


def test_a_kernel_whose_data_has_no_names_tells_by_its_note_for_crash_dumps(
    printk: Printk,
) -> None:
    printk.say(b"found")
    memory = printk.memory()
    note = f"OSRELEASE=6.1.0\nSYMBOL(prb)={PRB:x}\n".encode().ljust(4096, b"\0")
    memory.pieces[NOTE] = struct.pack("<Q", NOTE + 0x1000)
    memory.pieces[NOTE + 0x1000] = note

    (record,) = KernelLog(memory, kernel("vmcoreinfo_data", NOTE)).records()

    assert record.text == b"found"


@pytest.mark.parametrize("is_known", [True, False])
def test_a_kernel_without_types_or_names_is_told_so(printk: Printk, is_known: bool) -> None:
    bare = kernel("other") if is_known else replace(kernel(), types=None)

    with pytest.raises(TargetError, match="the kernel's log cannot be read: "):
        KernelLog(printk.memory(), bare)
