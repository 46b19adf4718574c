import pytest

from kprobes.errors import FormatError
from kprobes.formats.target_xml import decode_registers, encode_registers, parse_description
from tests.build.stub import CORE, TARGET

FILES = {"target.xml": TARGET, "core.xml": CORE}


def described(**files: str) -> dict[str, bytes]:
    return {f"{name}.xml": text.encode() for name, text in files.items()}


def test_registers_lie_in_the_g_packet_by_number() -> None:
    description = parse_description(FILES.__getitem__)

    assert description.architecture == "i386:x86-64"
    assert [(slot.name, slot.number, slot.offset, slot.size) for slot in description.slots] == [
        ("rax", 0, 0, 8),
        ("rip", 1, 8, 8),
        ("eflags", 2, 16, 4),
        ("st0", 3, 20, 10),
        ("ttbr1", 90, 30, 8),
    ]


def test_an_included_file_is_numbered_where_it_stands() -> None:
    files = described(
        target='<t><reg name="a" bitsize="8"/><xi:include href="b.xml"/>'
        '<reg name="c" bitsize="8"/></t>',
        b='<f><reg name="b" bitsize="8"/></f>',
    )

    slots = parse_description(files.__getitem__).slots

    assert [(slot.name, slot.number) for slot in slots] == [("a", 0), ("b", 1), ("c", 2)]


def test_values_are_read_where_the_stub_has_them() -> None:
    description = parse_description(FILES.__getitem__)
    payload = b"0100000000000000" + b"x" * 16 + b"46020000" + b"00" * 10

    values = decode_registers(description, payload)

    assert values == {"rax": 1, "eflags": 0x246, "st0": 0}


def test_replaced_values_are_read_back_and_the_others_stay() -> None:
    description = parse_description(FILES.__getitem__)
    payload = b"11" * 30

    new = encode_registers(description, payload, {"rip": 0xFFFFFFFF81000000, "eflags": -1})

    assert decode_registers(description, new) == {
        **decode_registers(description, payload),
        "rip": 0xFFFFFFFF81000000,
        "eflags": 0xFFFFFFFF,
    }


@pytest.mark.parametrize(
    "target",
    [
        "",
        "<t>",
        "no xml",
        '<t><reg name="a"/></t>',
        '<t><reg name="a" bitsize="0"/></t>',
        '<t><reg name="a" bitsize="99999999999"/></t>',
        '<t><reg name="a" bitsize="8" regnum="-1"/></t>',
        '<t><xi:include href="target.xml"/></t>',
        '<!DOCTYPE t [<!ENTITY a "aaaa">]><t>&a;</t>',
        "<t>" + '<reg name="a" bitsize="8"/>' * 9000 + "</t>",
    ],
)
def test_a_senseless_description_is_refused(target: str) -> None:
    files = described(target=target)

    with pytest.raises(FormatError):
        parse_description(files.__getitem__)
