"""Letters after %p, beside lib/test_printf.c of the kernel and Python's own libraries."""

import socket
import struct
import uuid
from ipaddress import IPv6Address

import numpy as np
import pytest

from tests.build.printed import of_values, one

SEED = 20261127
LOCAL = b"\1\2\3\4"


def shown(conversion: str, data: bytes) -> str:
    """Return what is printed of bytes that an event has as an array of its own."""
    column = np.frombuffer(data, np.uint8).reshape(1, -1)
    return of_values(f'"%{conversion}", REC->a', f"u8 a[{len(data)}]", column)[0].decode()


@pytest.mark.parametrize(
    ("conversion", "data", "text"),
    [
        ("pI4", bytes([127, 0, 0, 1]), "127.0.0.1"),
        ("pi4", bytes([127, 0, 0, 1]), "127.000.000.001"),
        ("pI4h", bytes([1, 0, 0, 127]), "127.0.0.1"),
        ("pI4n", bytes([127, 0, 0, 1]), "127.0.0.1"),
        ("pM", bytes([0x2D, 0x48, 0xD6, 0xFC, 0x7A, 5]), "2d:48:d6:fc:7a:05"),
        ("pMR", bytes([0x2D, 0x48, 0xD6, 0xFC, 0x7A, 5]), "05:7a:fc:d6:48:2d"),
        ("pMF", bytes([0x2D, 0x48, 0xD6, 0xFC, 0x7A, 5]), "2d-48-d6-fc-7a-05"),
        ("pm", bytes([0x2D, 0x48, 0xD6, 0xFC, 0x7A, 5]), "2d48d6fc7a05"),
        ("18pM", bytes(6), " 00:00:00:00:00:00"),
        ("pI6", bytes(range(16)), "0001:0203:0405:0607:0809:0a0b:0c0d:0e0f"),
        ("pi6", bytes(range(16)), bytes(range(16)).hex()),
        ("pI6c", bytes(10) + b"\xff\xff" + LOCAL, "::ffff:1.2.3.4"),
        ("pI6c", b"\xfe\x80" + bytes(6) + b"\0\0\x5e\xfe" + LOCAL, "fe80::5efe:1.2.3.4"),
        ("pa", struct.pack("<Q", 0x12345), "0x0000000000012345"),
        ("4ph", LOCAL, "01 02 03 04"),
        ("3phC", LOCAL, "01:02:03"),
        ("4phD", LOCAL, "01-02-03-04"),
        ("4phN", LOCAL, "01020304"),
        ("ph", LOCAL, "01"),
        ("12pb", b"\xab\x7f", "fab"),
        ("40pb", b"\1\2\3\4\5", "05,04030201"),
        ("16pbl", b"\xf3\x01", "0-1,4-8"),
        ("9pbl", b"\x01\xff", "0,8"),
        ("16pbl", bytes(2), ""),
    ],
)
def test_bytes_are_printed_as_by_the_kernel(conversion: str, data: bytes, text: str) -> None:
    # lib/test_printf.c has most of these.
    assert shown(conversion, data.ljust(8, b"\0") if "b" in conversion else data) == text


def test_addresses_are_compressed_as_by_ipaddress() -> None:
    rng = np.random.default_rng(SEED)
    for _ in range(300):
        words = rng.integers(0, 1 << 16, 8) * rng.integers(0, 2, 8) | 0x100 * rng.integers(0, 2, 8)
        words[2] |= 1
        data = struct.pack(">8H", *words.tolist())

        assert shown("pI6c", data) == str(IPv6Address(data))


def test_a_uuid_is_that_of_pythons_library() -> None:
    data = np.random.default_rng(SEED).bytes(16)

    assert shown("pUb", data) == shown("pU", data) == str(uuid.UUID(bytes=data))
    assert shown("pUl", data) == str(uuid.UUID(bytes_le=data))
    assert shown("pUB", data) == str(uuid.UUID(bytes=data)).upper()
    assert shown("pUL", data) == str(uuid.UUID(bytes_le=data)).upper()


def test_a_socket_address_is_of_its_family() -> None:
    v4 = struct.pack("<H", socket.AF_INET) + struct.pack(">H", 12345) + LOCAL + bytes(20)
    head = struct.pack("<H", socket.AF_INET6) + struct.pack(">HI", 12345, 20)
    v6 = head + struct.pack(">8H", *range(1, 9)) + struct.pack("<I", 1234567890)

    assert shown("pISpc", v4) == "1.2.3.4:12345"
    assert shown("pIS", v4) == "1.2.3.4"
    assert shown("piSp", v4) == "001.002.003.004:12345"
    assert shown("pISpc", v6) == "[1:2:3:4:5:6:7:8]:12345"
    assert shown("pISpfsc", v6) == "[1:2:3:4:5:6:7:8]:12345/20%1234567890"
    assert shown("pIS", v6) == "0001:0002:0003:0004:0005:0006:0007:0008"
    assert shown("pISpc", bytes(28)) == "(einval)"


def test_the_width_tells_how_much_there_is() -> None:
    fields = "int n; __data_loc u8[] a"
    columns = np.array([2, 0, 99]), np.array([b"\1\2\3"] * 3, object)

    assert of_values('"%*phN", REC->n, __get_dynamic_array(a)', fields, *columns) == [
        b"0102", b"", b"010203",
    ]  # fmt: skip
    assert of_values('"%*pbl", REC->n, __get_dynamic_array(a)', fields, *columns) == [
        b"0", b"", b"0,9,16-17",
    ]  # fmt: skip


def test_of_a_number_the_bytes_are_in_its_order() -> None:
    assert one('"%pI4", &REC->a', "u32 a", 0x0100007F) == "127.0.0.1"
