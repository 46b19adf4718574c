"""The kernel's own log, read from its memory: what ``dmesg`` shows, also where nothing runs.

Kernels since v5.10 keep it in two rings, kernel/printk/printk_ringbuffer.h:

    struct printk_ringbuffer { prb_desc_ring desc_ring; prb_data_ring text_data_ring; }
    desc_ring       descs and infos, 2^count_bits of each; head_id counts descriptors
    struct prb_desc { state_var: a state in 2 bits, above the id; text_blk_lpos.begin and .next }
    text_data_ring  2^size_bits bytes; a block is the id in 8 bytes, and text; one that would pass
                    the end begins at the start instead; an odd position is that of no text
"""

from collections.abc import Iterator, Sequence

from msgspec import Struct

from kprobes.errors import FormatError, MemoryFault, TargetError, UnknownTypeError
from kprobes.formats import vmcoreinfo
from kprobes.model.kernel import Kernel
from kprobes.ports import Memory

_WORD, _PAGE = 8, 4096
_STATE_SHIFT = 62
_ID = (1 << _STATE_SHIFT) - 1
_COMMITTED, _FINALIZED = 1, 2
_MAX_BITS = 30
MOST = 1000
"""Records that are returned at most, if nothing else is said."""


class LogRecord(Struct, frozen=True, kw_only=True):
    """One message.

    Attributes:
        seq: its number, from the boot on.
        ts_ns: of the kernel's ``local_clock``.
        level: 0 to 7, as of ``<linux/kern_levels.h>``.
        text: without a newline at its end; it may have some inside.
    """

    seq: int
    ts_ns: int
    level: int
    text: bytes

    def lines(self) -> list[bytes]:
        """Return it as ``dmesg`` prints it: each line of it begins with the time."""
        seconds, ns = divmod(self.ts_ns, 10**9)
        start = b"[%5d.%06d] " % (seconds, ns // 1000)
        return [start + line for line in self.text.split(b"\n")]


class KernelLog:
    """The log of one kernel, which may run meanwhile: what it overwrites then is left out."""

    def __init__(self, memory: Memory, kernel: Kernel) -> None:
        """Find it.

        Raises:
            TargetError: this kernel has none that can be found.
        """
        if kernel.types is None:
            raise TargetError("the kernel's log cannot be read: it has no types (BTF)")
        self._memory, self._types = memory, kernel.types
        try:
            self._ring = self._u64(_pointer(memory, kernel))
            self._find()
        except (UnknownTypeError, FormatError, MemoryFault) as error:
            raise TargetError(f"the kernel's log cannot be read: {error}") from error

    def records(self, since: int = 0, *, most: int = MOST) -> Sequence[LogRecord]:
        """Return messages, oldest first.

        Args:
            since: the number of the first.
            most: so many, the latest, at most.

        Raises:
            MemoryFault: nothing is there any more.
        """
        found = list[LogRecord]()
        for record in self._backwards():
            if record.seq < since or len(found) >= most:
                break
            found.append(record)
        return found[::-1]

    def _find(self) -> None:
        descs, texts = "desc_ring", "text_data_ring"
        self._count = self._power(self._at(f"{descs}.count_bits"))
        self._descs = self._u64(self._at(f"{descs}.descs"))
        self._infos = self._u64(self._at(f"{descs}.infos"))
        self._size = self._power(self._at(f"{texts}.size_bits"))
        self._data = self._u64(self._at(f"{texts}.data"))
        offset = self._types.offset
        self._desc_size = self._types.size("prb_desc")
        self._state = offset("prb_desc", "state_var")
        self._begin = offset("prb_desc", "text_blk_lpos.begin")
        self._next = offset("prb_desc", "text_blk_lpos.next")
        self._info_size = self._types.size("printk_info")
        self._seq, self._ts = offset("printk_info", "seq"), offset("printk_info", "ts_nsec")
        self._length = offset("printk_info", "text_len")
        # Its level is the upper 3 bits of the byte after it.
        self._facility = offset("printk_info", "facility")

    def _at(self, path: str) -> int:
        return self._ring + self._types.offset("printk_ringbuffer", path)

    def _u64(self, addr: int) -> int:
        return int.from_bytes(self._memory.read(addr, _WORD), "little")

    def _power(self, addr: int) -> int:
        bits = int.from_bytes(self._memory.read(addr, 4), "little")
        if not 0 < bits <= _MAX_BITS:
            raise FormatError(f"2^{bits} entries")
        return 1 << bits

    @property
    def _head(self) -> int:
        return self._u64(self._at("desc_ring.head_id")) & _ID

    def _backwards(self) -> Iterator[LogRecord]:
        # What is being written, or was overwritten, is no record; the others have fewer and fewer.
        latest = self._head
        last = None
        for step in range(self._count):
            record = self._record((latest - step) & _ID)
            if record is not None and (last is None or record.seq < last):
                last = record.seq
                yield record

    def _record(self, number: int) -> LogRecord | None:
        index = number % self._count
        desc = self._memory.read(self._descs + index * self._desc_size, self._desc_size)
        state = _word(desc, self._state)
        if state & _ID != number or state >> _STATE_SHIFT not in (_COMMITTED, _FINALIZED):
            return None
        info = self._memory.read(self._infos + index * self._info_size, self._info_size)
        length = int.from_bytes(info[self._length : self._length + 2], "little")
        text = self._text(number, _word(desc, self._begin), _word(desc, self._next), length)
        if text is None:
            return None
        return LogRecord(
            seq=_word(info, self._seq),
            ts_ns=_word(info, self._ts),
            level=info[self._facility + 1] >> 5,
            text=text,
        )

    def _text(self, number: int, begin: int, end: int, length: int) -> bytes | None:
        if begin & 1:
            return b""
        if begin // self._size != (end - 1) // self._size:
            begin = end - end % self._size
        start, size = begin % self._size, (end - begin) % (self._size + 1)
        if size < _WORD or start + size > self._size:
            return None
        block = self._memory.read(self._data + start, min(size, _WORD + length))
        return block[_WORD:] if _word(block, 0) & _ID == number else None


def _pointer(memory: Memory, kernel: Kernel) -> int:
    # Where the kernel keeps the address of its ring.
    found = kernel.symbols.find("prb")
    if found is not None:
        return found.addr
    note = kernel.symbols.find("vmcoreinfo_data")
    if note is not None:
        for text in vmcoreinfo.texts_at(memory.read, note.addr):
            symbols = vmcoreinfo.parse(text).symbols
            if "prb" in symbols:
                return symbols["prb"]
    raise FormatError("its place is not known")


def _word(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + _WORD], "little")
