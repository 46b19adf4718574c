"""This machine's files to its kernel."""

import pytest

from kprobes.errors import TargetError
from kprobes.image.host import HostFiles, host_kernel, parse_kallsyms
from tests.build.typed import builder

KALLSYMS = b"""\
0000000000000000 A fixed_percpu_data
ffffffff81000000 T _stext
ffffffff81000000 T _text
ffffffff81000100 t vfs_read
ffffffff81000140 T vfs_write
ffffffff81001000 T _etext
ffffffff82000000 D jiffies
ffffffff83000000 B _end
ffffffffc0001000 t ext4_sync\t[ext4]
ffffffffc0001040 T ext4_open\t[ext4]
ffffffffc0900000 d ext4_data\t[ext4]
ffffffffc1000000 t bpf_prog_1\t[bpf]
ffffffffc2000000 t ftrace_trampoline\t[__builtin__ftrace]
"""


def files(kallsyms: bytes = KALLSYMS, *, btf: bytes = b"") -> HostFiles:
    return HostFiles(
        release="6.1.0-1-amd64",
        machine="x86_64",
        banner="Linux version 6.1.0-1-amd64",
        kallsyms=kallsyms,
        btf=btf,
        module_btf={"broken": b"no types"},
    )


def test_symbols_have_their_addresses_kinds_and_sizes() -> None:
    symbols = host_kernel(files()).symbols

    read = symbols.named("vfs_read")
    assert (read.addr, read.type, read.size, read.module) == (0xFFFF_FFFF_8100_0100, "t", 0x40, "")
    assert symbols.named("jiffies").type == "D"
    found = symbols.at(0xFFFF_FFFF_8100_0001)
    # Of two names the first, as the kernel prints it.
    assert found is not None
    assert found.name == "_stext"


def test_modules_own_whole_pages_and_what_is_none_is_left_out() -> None:
    kernel = host_kernel(files())

    last = kernel.symbols.at(0xFFFF_FFFF_C000_1050)
    assert last is not None
    assert last.place(last.addr + 0x10) == "ext4_open+0x10/0xfc0 [ext4]"
    assert kernel.symbols.at(0xFFFF_FFFF_C000_3000) is None
    assert kernel.symbols.find("bpf_prog_1") is None
    assert kernel.symbols.find("ftrace_trampoline") is None


def test_the_text_is_where_the_symbols_say() -> None:
    kernel = host_kernel(files())

    assert kernel.text == (0xFFFF_FFFF_8100_0000, 0xFFFF_FFFF_8100_1000)
    assert (kernel.version, kernel.arch, kernel.types) == ((6, 1), "x86_64", None)


def test_types_are_the_kernels_and_those_of_modules_come_when_asked_for() -> None:
    kernel = host_kernel(files(btf=builder().build()))

    assert kernel.types is not None
    assert kernel.types.function("vfs_read") is not None
    assert list(kernel.module_types) == ["broken"]
    # Damaged ones are none.
    assert kernel.types_for("broken") is kernel.types
    assert list(kernel.module_types) == []


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (KALLSYMS.replace(b"ffffffff8", b"000000000").replace(b"ffffffffc", b"000000000"), "hides"),
        (b"0000000000000000 T a\n" * 3, "hides"),
        (b"ffffffff81000000 T other\n", "where the kernel's text is"),
        (b"nonsense\n", "not symbols"),
    ],
)
def test_symbols_that_help_nobody_are_told(text: bytes, what: str) -> None:
    if what == "hides":
        text = b"".join(b"0" * 16 + line[16:] + b"\n" for line in text.splitlines())

    with pytest.raises(TargetError, match=what):
        host_kernel(files(text))


def test_the_kernels_own_may_stand_behind_a_modules() -> None:
    table, modules = parse_kallsyms(
        b"ffffffff81000000 T one\nffffffffc0000000 t mine\t[mod]\nffffffff81000100 T two\n"
    )

    assert [hex(addr) for addr in table.addrs.tolist()] == [
        "0xffffffff81000000", "0xffffffff81000100",
    ]  # fmt: skip
    assert table.blob == b"\0one\0two\0"
    assert [module.name for module in modules] == ["mod"]


def test_an_empty_table_has_nothing() -> None:
    table, modules = parse_kallsyms(b"")

    assert (len(table.addrs), modules) == (0, ())
