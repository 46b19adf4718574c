"""Typed values: members, elements and numbers as C has them."""

import pytest

from kprobes.errors import MemoryFault, UnknownTypeError
from kprobes.handlers.memory import Enumerator, cut, pattern
from kprobes.handlers.values import Pointer, Struct, TextPointer
from tests.build.handled import DENTRY, FILE, NAME, Handled, make_handled
from tests.build.kernel import TEXT


@pytest.fixture
def made() -> Handled:
    return make_handled()


@pytest.fixture
def file(made: Handled) -> Struct:
    found = made.live.object("struct file", FILE)
    assert isinstance(found, Struct)
    return found


def test_members_are_followed_through_structs_and_pointers(file: Struct) -> None:
    assert file.f_path.dentry.d_name.name.string() == "hosts"
    assert file["f_path"]["dentry"].d_name["len"] == 5
    assert file.f_mode == 0x1D


def test_members_of_anonymous_structs_are_the_outer_ones(made: Handled, file: Struct) -> None:
    made.put(FILE + 8, 0xFFFF_FFFE_0000_0007)

    assert (file.low, file.high, file.whole) == (7, -2, 0xFFFF_FFFE_0000_0007)


def test_numbers_have_their_sign_and_size(made: Handled, file: Struct) -> None:
    made.put(FILE + 136, b"\xff\x02\x80\x7f")
    made.put(FILE + 64, b"\x01" + bytes(15))
    made.put(FILE + 80, b"\xfd")

    assert [*file.f_bytes] == [-1, 2, -128, 127]
    assert file.f_wide == 1
    assert file.f_odd == 5


def test_bit_fields_are_read_and_written_alone(made: Handled, file: Struct) -> None:
    made.put(FILE + 32, 0b1010_1010_0000_1011, 2)
    made.put(FILE + 34, 0xAB, 1)
    bits = file.f_bits

    assert (bits.one, bits.three, bits.byte) == (1, -3, 0xAB)
    bits.three = 2
    bits.byte = 0x12
    bits.one = 0
    assert (bits.one, bits.three, bits.byte) == (0, 2, 0x12)
    assert made.memory.read(FILE + 32, 3) == bytes([0b0000_1010, 0b1010_0100, 0x12])
    with pytest.raises(OverflowError):
        bits.three = 8


def test_enums_are_numbers_with_names(made: Handled, file: Struct) -> None:
    made.put(FILE + 40, 1, 4)
    made.put(FILE + 48, 1 << 40)

    assert file.f_enum == 1
    assert isinstance(file.f_enum, Enumerator)
    assert (file.f_enum.name, repr(file.f_enum)) == ("WRITE", "<WRITE: 1>")
    assert file.f_big.name == "HUGE"
    made.put(FILE + 40, 9, 4)
    assert (file.f_enum, file.f_enum.name, repr(file.f_enum)) == (9, "", "9")


def test_pointers_are_addresses_with_a_type(made: Handled, file: Struct) -> None:
    dentry = file.f_path.dentry

    assert isinstance(dentry, Pointer)
    assert (int(dentry), bool(dentry), hex(dentry)) == (DENTRY, True, hex(DENTRY))
    assert dentry == DENTRY
    assert dentry == dentry[0].address_of_()
    assert len({dentry, file.f_path.dentry}) == 1
    assert dentry[0].d_flags == dentry.d_flags == 0
    assert int(dentry + 1) - DENTRY == DENTRY - int(dentry - 1) == 64
    assert not file.f_void
    assert made.memory.string(dentry.d_name.name) == "hosts"


def test_pointers_to_pointers_and_arrays_of_them_are_indexed(made: Handled, file: Struct) -> None:
    made.put(FILE + 96, FILE + 0x300)
    made.put(FILE + 0x308, FILE + 0x380)
    made.put(FILE + 0x380, 0xFFFF_FFFF, 4)
    made.put(FILE + 112, NAME)

    assert file.f_next[1][0] == -1
    assert file.f_names[1].string() == file.f_names[-3].string() == "hosts"
    assert isinstance(file.f_names[1], TextPointer)
    assert (len(file.f_names), [bool(each) for each in file.f_names].count(True)) == (4, 1)
    with pytest.raises(IndexError, match=r"4 in const char \*\[4\]"):
        file.f_names[4]


def test_an_array_of_chars_is_a_text(made: Handled, file: Struct) -> None:
    made.put(DENTRY + 48, b"etc\0junk")
    name = file.f_path.dentry.d_iname

    assert (str(name), repr(name), name.string()) == ("etc", "'etc'", "etc")
    assert name.bytes_() == b"etc\0junk"
    assert name != "etcjunk"
    assert name == "etc"
    with pytest.raises(UnknownTypeError, match="is not a string"):
        file.f_names.string()


def test_assigning_writes_memory(made: Handled, file: Struct) -> None:
    file.f_mode = 0xFFFF_FFFF
    file.f_path.dentry.d_name.len = 3
    file["high"] = -2
    file.f_bytes[1] = -5
    file.f_void = file.f_path.dentry

    assert made.memory.read_u32(FILE) == 0xFFFF_FFFF
    assert made.memory.read_u32(DENTRY + 36) == 3
    assert (file.high, file.f_bytes[1], int(file.f_void)) == (-2, -5, DENTRY)


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("f_mode", 1 << 32, OverflowError),
        ("f_mode", -(1 << 31) - 1, OverflowError),
        ("f_mode", 1.5, TypeError),
        ("f_mode", "1", TypeError),
        ("f_path", 0, UnknownTypeError),
        ("f_nothing", 0, AttributeError),
    ],
)
def test_what_does_not_fit_is_not_written(
    made: Handled, file: Struct, name: str, value: object, error: type[Exception]
) -> None:
    before = bytes(made.ram.data)

    with pytest.raises(error):
        setattr(file, name, value)

    assert bytes(made.ram.data) == before


def test_an_unknown_member_is_an_attribute_error_with_near_names(file: Struct) -> None:
    with pytest.raises(AttributeError) as caught:
        _ = file.f_mod

    assert str(caught.value).startswith("struct file has no member f_mod; did you mean f_mode")
    assert not hasattr(file.f_path.dentry, "d_nam")
    with pytest.raises(AttributeError, match="points to nothing with members"):
        _ = file.f_void.member
    assert {"f_mode", "low"} <= set(dir(file))
    assert "d_name" in dir(file.f_path.dentry)


def test_a_null_pointer_is_a_fault_when_it_is_followed(made: Handled, file: Struct) -> None:
    made.put(FILE + 24, 0)

    name = file.f_path.dentry.d_name
    with pytest.raises(MemoryFault, match="0x28"):
        _ = name.name
    with pytest.raises(UnknownTypeError, match="void has no size"):
        _ = file.f_void[0]


def test_values_are_shown_as_c_writes_them(made: Handled, file: Struct) -> None:
    qstr = file.f_path.dentry.d_name

    assert repr(file) == f"*(struct file *){FILE:#x}"
    assert repr(qstr.name) == f"(const char *){NAME:#x}"
    assert str(qstr) == f"(struct qstr){{.hash = 0, .len = 5, .name = (const char *){NAME:#x}}}"
    assert repr(file.f_names) == f"*(const char *[4] *){FILE + 104:#x}"
    assert made.live.symbol(TEXT + 3) == "vfs_read+0x3/0x40"


def test_a_type_is_found_with_or_without_its_tag(made: Handled) -> None:
    for name in ("struct file", "file"):
        assert made.live.object(name, FILE).f_mode == 0x1D
    assert made.live.object("unsigned int", FILE) == 0x1D
    with pytest.raises(UnknownTypeError, match="no type union file"):
        made.live.object("union file", FILE)


def test_values_compare_by_place_and_type(made: Handled, file: Struct) -> None:
    assert file == made.live.object("file", FILE)
    assert file != made.live.object("dentry", FILE)
    assert file.f_names == file.f_names
    assert file.f_names != file.f_bytes
    assert len({file, file.f_names, file.f_names}) == 2


@pytest.mark.parametrize(
    ("raw", "bits", "is_signed", "value"),
    [(0x1FF, 8, False, 0xFF), (0x1FF, 8, True, -1), (0x80, 8, True, -128), (0x7F, 8, True, 127)],
)
def test_bits_are_cut_to_a_number(raw: int, bits: int, is_signed: bool, value: int) -> None:
    assert cut(raw, bits, is_signed=is_signed) == value


@pytest.mark.parametrize(("value", "found"), [(-1, 0xFF), (255, 255), (-128, 128), (0, 0)])
def test_a_number_becomes_its_bits(value: int, found: int) -> None:
    assert pattern(value, 8) == found
