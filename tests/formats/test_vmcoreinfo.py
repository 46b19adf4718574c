"""VMCOREINFO text to facts."""

from kprobes.formats.vmcoreinfo import find, parse

TEXT = b"""OSRELEASE=6.1.0-56-cloud-amd64
BUILD-ID=3b43fad5
PAGESIZE=4096
SYMBOL(swapper_pg_dir)=ffffffffa0210000
SYMBOL(_stext)=ffffffff9e800000
SIZE(page)=64
OFFSET(page.lru)=8
NUMBER(phys_base)=-157286400
NUMBER(VMALLOC_START)=0xff735e0d40000000
KERNELOFFSET=1d800000
"""


def test_a_text_gives_symbols_numbers_and_the_slide() -> None:
    info = parse(TEXT + b"\0junk=1")

    assert (info.release, info.build_id) == ("6.1.0-56-cloud-amd64", b"\x3b\x43\xfa\xd5")
    assert info.slide == 0x1D80_0000
    assert info.symbols == {
        "swapper_pg_dir": 0xFFFF_FFFF_A021_0000,
        "_stext": 0xFFFF_FFFF_9E80_0000,
    }
    assert info.numbers == {"phys_base": -157286400, "VMALLOC_START": 0xFF73_5E0D_4000_0000}


def test_what_cannot_be_read_is_left_out() -> None:
    info = parse(b"OSRELEASE=5\nBUILD-ID=xyz\nSYMBOL(a)=zz\nKERNELOFFSET=?\nno line\n\xff\xfe=\n")

    assert (info.release, info.build_id, info.slide, info.symbols) == ("5", b"", None, {})


def test_a_text_is_found_and_its_format_string_is_not() -> None:
    memory = b"\0OSRELEASE=%s\nSYMBOL(x)=%lx\n\0" + b"OSRELEASE=6.1\nno symbols" + b"\0" * 9 + TEXT

    assert [info.release for info in find(memory)] == ["6.1.0-56-cloud-amd64"]
