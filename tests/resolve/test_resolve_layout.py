"""Fields in their records: order, sizes, alignment, and the words that only some records have."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kprobes.arch.x86_64.arch import X86_64
from kprobes.model.kernel import Symbol
from kprobes.model.resolved import ALIGN, HEADER, Field, RecordLayout, Storage
from kprobes.resolve.resolve import resolve
from kprobes.units import Addr
from tests.build.kernel import make_kernel, make_probe, read, symbol

WORDS = [f"{sign}{bits}" for sign in "usx" for bits in (8, 16, 32, 64)]
FORMS = ["$arg1", "+0($arg1)", "$stack1", "\\7"]


def _layout(text: str) -> RecordLayout:
    return make_probe(text).layout


def _places(layout: RecordLayout) -> list[tuple[int, int]]:
    return [(field.offset, field.size) for field in layout.fields]


def test_a_probe_without_arguments_records_the_header_alone() -> None:
    layout = _layout("p f")

    assert (layout.size, layout.fields) == (HEADER, ())
    assert (layout.is_dynamic, layout.faults_offset) == (False, None)


def test_fields_keep_their_order_and_are_aligned_to_their_sizes() -> None:
    layout = _layout("p f a=$arg1:u8 b=$arg1:u16 c=$arg1:u8 d=$arg1:u32 e=$arg1:u8 f=$arg1")

    assert _places(layout) == [(40, 1), (42, 2), (44, 1), (48, 4), (52, 1), (56, 8)]
    assert layout.size == 64


def test_a_number_from_memory_brings_a_word_of_fault_bits() -> None:
    layout = _layout("p f a=$arg1:u8 b=+0($arg1):u8")

    assert (layout.faults_offset, _places(layout)) == (40, [(48, 1), (49, 1)])


@pytest.mark.parametrize(("count", "words"), [(1, 1), (64, 1), (65, 2), (128, 2)])
def test_fault_bits_are_one_per_field(count: int, words: int) -> None:
    layout = _layout("p f " + " ".join(f"a{n}=+0($arg1):u8" for n in range(count)))

    assert layout.fields[0].offset == 40 + 8 * words
    assert [field.index for field in layout.fields] == list(range(count))


def test_strings_bring_the_record_s_size_and_no_fault_bits() -> None:
    layout = _layout("p f s=+0($arg1):string n=$arg2:u8")

    assert (layout.is_dynamic, layout.size_offset, layout.faults_offset) == (True, 40, None)
    assert _places(layout) == [(48, 4), (52, 1)]
    assert layout.size == 56


def test_the_size_comes_before_the_fault_bits() -> None:
    layout = _layout("p f s=+0($arg1):ustring n=+0($arg2):u8")

    assert (layout.size_offset, layout.faults_offset) == (40, 48)
    assert _places(layout) == [(56, 4), (60, 1)]


def test_comm_takes_no_room() -> None:
    layout = _layout("p f a=$arg1:u8 c=$comm b=$arg1:u8")

    assert [field.storage for field in layout.fields][1] is Storage.COMM
    assert layout.fields[1].type == "string"
    assert layout.size == 48
    assert [layout.fields[n].offset for n in (0, 2)] == [40, 41]


def test_a_field_without_a_type_is_a_long_in_hexadecimal() -> None:
    (field,) = _layout("p f $arg1").fields

    assert field == Field(
        name="arg1", type="x64", storage=Storage.NUMBER, offset=40, size=8, index=0
    )


@given(st.lists(st.tuples(st.sampled_from(FORMS), st.sampled_from(WORDS)), max_size=20))
def test_no_two_fields_overlap_and_all_are_inside(args: list[tuple[str, str]]) -> None:
    text = " ".join(f"a{n}={form}:{word}" for n, (form, word) in enumerate(args))

    layout = _layout(f"p f {text}".strip())

    at = HEADER + (8 if layout.faults_offset is not None else 0)
    for field in layout.fields:
        assert at <= field.offset < at + field.size
        assert field.offset % field.size == 0
        at = field.offset + field.size
    assert at <= layout.size < at + ALIGN
    assert layout.size % ALIGN == 0


@pytest.mark.parametrize(
    ("function", "ip", "where"),
    [
        (symbol("f", 0x1000, size=0x170), 0x1000, "f+0x0/0x170"),
        (symbol("f", 0x1000, size=0x170), 0x1004, "f+0x4/0x170"),
        (symbol("f", 0x1000, size=0x20, module="ext4"), 0x1000, "f+0x0/0x20 [ext4]"),
    ],
)
def test_the_place_is_spelt_as_the_kernel_spells_it(function: Symbol, ip: int, where: str) -> None:
    probe = resolve(
        read("p f"), make_kernel([function]), X86_64, event_id=1, locate=lambda _: Addr(ip)
    )

    assert (probe.layout.where, probe.layout.ip) == (where, ip)


def test_an_alias_is_named_as_the_kernel_names_it() -> None:
    kernel = make_kernel([symbol("__do_sys_x", 0x1000), symbol("__x64_sys_x", 0x1000)])

    probe = resolve(
        read("p __x64_sys_x"), kernel, X86_64, event_id=1, locate=lambda function: function.addr
    )

    assert (probe.layout.where, probe.layout.function) == ("__do_sys_x+0x0/0x40", "__do_sys_x")
    assert probe.layout.ip == Addr(0x1000)


def test_a_return_probe_s_record_has_its_caller_before_everything_else() -> None:
    layout = _layout("r f s=+0($retval):string n=+0($retval):u8")

    assert (layout.caller_offset, layout.size_offset, layout.faults_offset) == (40, 48, 56)
    assert _places(layout) == [(64, 4), (68, 1)]
    assert _layout("p f").caller_offset is None
    assert (_layout("r f").caller_offset, _layout("r f").size) == (HEADER, HEADER + 8)


def test_records_with_and_without_a_caller_have_other_code() -> None:
    entry, at_return = make_probe("p f a=$arg1:u8"), make_probe("r f a=$arg1:u8")

    assert replace(entry, fetches=()).shape != replace(at_return, fetches=()).shape
