"""System calls as a kernel tells of them, in whichever of the forms that releases have."""

import struct

import pytest

from kprobes.errors import MemoryFault
from kprobes.image.system_calls import SystemCall, read_system_call
from tests.build.kernel import TEXT, make_kernel, symbol

META = TEXT + 0x1000
KERNEL = make_kernel([symbol("__syscall_meta__openat", META, type="d")])


class Flat:
    """One page from META on."""

    def __init__(self) -> None:
        self.data = bytearray(0x1000)

    def read(self, addr: int, size: int) -> bytes:
        at = addr - META
        if not 0 <= at <= len(self.data) - size:
            raise MemoryFault(addr, size)
        return bytes(self.data[at : at + size])

    def write(self, at: int, data: bytes) -> None:
        self.data[at : at + len(data)] = data


def memory(*, number: int = 257, count: int = 2, more: int = 0) -> Flat:
    """Return one with a system call of two arguments, the last text at the end of the page."""
    flat = Flat()
    flat.write(0, struct.pack("<QiIQQ", 0, number, count | more, META + 0x40, META + 0x60))
    texts = {0x100: b"int\0", 0x110: b"const char *\0", 0x120: b"dfd\0", 0xFF7: b"filename\0"}
    for at, text in texts.items():
        flat.write(at, text)
    flat.write(0x40, struct.pack("<QQ", META + 0x100, META + 0x110))
    flat.write(0x60, struct.pack("<QQ", META + 0x120, META + 0xFF7))
    return flat


@pytest.mark.parametrize("more", [0, 0x80 | 0x0300])
def test_a_call_has_its_number_and_names_and_types(more: int) -> None:
    # Newer kernels have more beside the count.
    found = read_system_call(memory(more=more), KERNEL, "openat")

    parameters = (("dfd", "int"), ("filename", "const char *"))
    assert found == SystemCall(name="openat", number=257, parameters=parameters)


def test_before_its_number_is_known_it_has_none() -> None:
    assert read_system_call(memory(number=-1), KERNEL, "openat").number is None


@pytest.mark.parametrize("count", [7, 0x7F])
def test_a_count_that_no_call_has_is_not_believed(count: int) -> None:
    assert read_system_call(memory(count=count), KERNEL, "openat") == SystemCall(name="openat")


def test_what_lies_nowhere_is_not_known() -> None:
    flat = memory()
    flat.write(0x60, struct.pack("<Q", 8))

    assert read_system_call(flat, KERNEL, "openat") == SystemCall(name="openat")
    assert read_system_call(flat, KERNEL, "close") == SystemCall(name="close")


def test_a_name_may_lie_on_two_pages() -> None:
    flat = memory()
    flat.data += bytes(0x100)
    flat.write(0xFFC, b"filename\0")
    flat.write(0x60, struct.pack("<QQ", META + 0x120, META + 0xFFC))

    parameters = read_system_call(flat, KERNEL, "openat").parameters

    assert parameters is not None
    assert [name for name, _ in parameters] == ["dfd", "filename"]


def test_a_call_without_arguments_has_none() -> None:
    flat = memory(count=0)
    flat.write(16, bytes(16))

    assert read_system_call(flat, KERNEL, "openat").parameters == ()
