"""Records of one layout as columns: strings, names, numbers and faults."""

import struct

import numpy as np
import pytest
from numpy.typing import NDArray

from kprobes.ring.chunk import Shapes
from kprobes.ring.merge import join
from kprobes.ring.reader import decode
from tests.build.ring import Hit, IdentityClock, chunk_of, make_layout, record, stream

pytestmark = pytest.mark.usefixtures("few_and_many")

NUMBERS = ("u8", "u16", "u32", "u64", "s8", "s16", "s32", "s64", "x8", "x16", "x32", "x64")
CLOCK = IdentityClock()


def test_a_string_outside_its_record_drops_the_record() -> None:
    strings = make_layout(4, ("s32", "ustring", "string", "comm"))
    hits = [Hit(layout=strings, counter=i, values=(1, b"abc", b"d", None)) for i in range(3)]
    out = bytearray(stream(hits))
    field = strings.fields[1]
    struct.pack_into("<I", out, field.offset, 0xFFFF << 16 | 8)

    decoded = decode(chunk_of(bytes(out)), Shapes([strings]), CLOCK)

    assert decoded.batches[0].ts.tolist() == [1, 2]
    assert decoded.damaged == 1


def test_strings_that_share_bytes_are_refused_so_memory_stays_bounded() -> None:
    layout = make_layout(4, ("string",) * 8)
    out = bytearray(record(Hit(layout=layout, values=(b"x" * 60000, *[b""] * 7)), 0))
    for field in layout.fields:
        struct.pack_into("<I", out, field.offset, 60000 << 16 | layout.size)

    decoded = decode(chunk_of(bytes(out)), Shapes([layout]), CLOCK)

    assert (len(decoded), decoded.damaged) == (0, 1)


def test_a_name_ends_at_its_first_nul_and_a_string_too() -> None:
    comm = b"sh\0rker/0:1"
    layout = make_layout(4, ("string", "comm"))
    hit = Hit(layout=layout, comm=comm, values=(b"ab\0cd", None))
    long = Hit(layout=layout, comm=b"kworker/0:1-eve", values=(b"", None))
    split = Hit(layout=layout, comm=b"12345678\0junk", values=(b"", None))

    batch = decode(chunk_of(stream([hit, hit, long, split])), Shapes([layout]), CLOCK).batches[0]

    names = [b"sh", b"sh", b"kworker/0:1-eve", b"12345678"]
    assert batch.comm.tolist() == names
    assert batch.values[1].tolist() == names
    assert batch.values[0].tolist() == [b"ab", b"ab", b"", b""]


def test_numbers_keep_their_width_and_sign() -> None:
    layout = make_layout(1, NUMBERS)
    hit = Hit(layout=layout, values=((1 << 64) - 2,) * len(NUMBERS))

    batch = decode(chunk_of(record(hit, 0)), Shapes([layout]), CLOCK).batches[0]

    assert [values.dtype.str for values in batch.values] == [
        "|u1", "<u2", "<u4", "<u8", "|i1", "<i2", "<i4", "<i8", "|u1", "<u2", "<u4", "<u8",
    ]  # fmt: skip
    assert [values.tolist()[0] for values in batch.values][4:8] == [-2, -2, -2, -2]


def test_fault_bits_past_the_first_word_belong_to_their_fields() -> None:
    layout = make_layout(1, ("u8",) * 70, can_fault=True)
    values = tuple(None if i in (0, 63, 64, 69) else i for i in range(70))

    batch = decode(
        chunk_of(record(Hit(layout=layout, values=values), 0)), Shapes([layout]), CLOCK
    ).batches[0]

    masks = [mask is not None and bool(mask[0]) for mask in batch.faulted]
    assert [i for i, is_bad in enumerate(masks) if is_bad] == [0, 63, 64, 69]


def test_an_array_of_strings_that_reaches_out_of_its_record_is_dropped() -> None:
    layout = make_layout(1, ("string[3]",))
    sound = record(Hit(layout=layout, values=((b"a", None, b"bc"),)), 0)
    bad = bytearray(record(Hit(layout=layout, values=((b"a", b"b", b"c"),)), len(sound)))
    third = layout.fields[0].offset + 8
    bad[third : third + 4] = struct.pack("<I", 2 << 16 | len(bad) - 1)

    decoded = decode(chunk_of(sound + bytes(bad)), Shapes([layout]), CLOCK)

    (batch,) = decoded.batches
    assert batch.values[0].tolist() == [[b"a", None, b"bc"]]
    assert batch.faulted[0] is not None
    assert batch.faulted[0].tolist() == [[False, True, False]]
    assert decoded.damaged == 1


def test_arrays_of_numbers_are_views_with_one_fault_for_all() -> None:
    layout = make_layout(1, ("s16[3]", "x64[2]"), can_fault=True)
    hits = [
        Hit(layout=layout, values=((1, -2, 3), None)),
        Hit(layout=layout, values=(None, (4, 5))),
    ]

    (batch,) = decode(chunk_of(stream(hits)), Shapes([layout]), CLOCK).batches

    assert batch.values[0].tolist()[0] == [1, -2, 3]
    assert batch.values[1].tolist()[1] == [4, 5]
    assert [mask.tolist() for mask in batch.faulted if mask is not None] == [
        [False, True],
        [True, False],
    ]
    assert batch.values[0].base is not None


class _EveryCpuItsOwn:
    """A clock that ticks every 10 ns, and is 1,000 ns ahead on each CPU of the one before."""

    def ns(self, counter: NDArray[np.uint64], cpu: int) -> NDArray[np.uint64]:
        return counter * np.uint64(10) + np.uint64(1000 * cpu)


def test_a_duration_is_the_time_between_two_counters_of_the_clock_and_none_is_0() -> None:
    layout = make_layout(1, ("u8", "duration"), has_caller=True)
    hits = [
        Hit(layout=layout, counter=500, values=(1, 200)),
        # Entered on a CPU whose counter is ahead.
        Hit(layout=layout, counter=500, values=(2, 501)),
    ]

    (batch,) = decode(chunk_of(stream(hits), cpu=3), Shapes([layout]), _EveryCpuItsOwn()).batches

    assert batch.ts.tolist() == [8000, 8000]
    assert batch.values[1].tolist() == [3000, 0]
    assert (batch.values[1].dtype, batch.faulted[0]) == (np.uint64, None)
    assert batch.faulted[1] is not None
    assert batch.faulted[1].tolist() == [False, True]


def test_callers_are_a_view_and_go_where_their_rows_go() -> None:
    layout = make_layout(1, ("u8",), has_caller=True)
    hits = [Hit(layout=layout, counter=n, values=(n,), caller=(1 << 64) - n) for n in range(1, 4)]
    chunk = chunk_of(stream(hits))

    (batch,) = decode(chunk, Shapes([layout]), CLOCK).batches

    assert batch.caller is not None
    assert np.shares_memory(batch.caller, chunk.data)
    some = join([batch.take(slice(2, 3)), batch.take(np.array([0, 1]))])
    assert some.caller is not None
    assert some.caller.tolist() == [(1 << 64) - 3, (1 << 64) - 1, (1 << 64) - 2]


def test_entries_have_no_callers() -> None:
    layout = make_layout(1)

    (batch,) = decode(chunk_of(stream([Hit(layout=layout)] * 2)), Shapes([layout]), CLOCK).batches

    assert batch.caller is None
    assert join([batch, batch]).take(slice(1)).caller is None
