import pytest

from kprobes.errors import FormatError
from kprobes.formats.ftrace import PageFormat, parse_event, parse_page
from kprobes.model.events import Locator

COMMON = """\
	field:unsigned short common_type;	offset:0;	size:2;	signed:0;
	field:unsigned char common_flags;	offset:2;	size:1;	signed:0;
	field:unsigned char common_preempt_count;	offset:3;	size:1;	signed:0;
	field:int common_pid;	offset:4;	size:4;	signed:1;
"""
OPEN = f"""\
name: open
ID: 1740
format:
{COMMON}
	field:unsigned long __probe_ip;	offset:8;	size:8;	signed:0;
	field:s32 a;	offset:16;	size:4;	signed:1;
	field:u8 c[];	offset:20;	size:4;	signed:0;
	field:__data_loc char[] nm;	offset:24;	size:4;	signed:1;
	field:__data_loc char[][2] sa;	offset:28;	size:8;	signed:1;
	field:__rel_loc char[] r;	offset:36;	size:4;	signed:0;
	field:const char * p;	offset:40;	size:8;	signed:0;
	field:char comm[16];	offset:48;	size:16;	signed:0;

print fmt: "(%lx) a=%d c={{0x%x}} field:x y;", REC->__probe_ip, REC->a
"""
HEADER = """\
	field: u64 timestamp;	offset:0;	size:8;	signed:0;
	field: local_t commit;	offset:8;	size:8;	signed:1;
	field: int overwrite;	offset:8;	size:1;	signed:1;
	field: char data;	offset:16;	size:4080;	signed:0;
"""


def test_an_events_format_is_read() -> None:
    form = parse_event(OPEN)

    assert (form.name, form.number, form.size) == ("open", 1740, 64)
    assert [field.name for field in form.common] == [
        "common_type",
        "common_flags",
        "common_preempt_count",
        "common_pid",
    ]
    fields = {field.name: field for field in form.fields}
    assert list(fields) == ["__probe_ip", "a", "c", "nm", "sa", "r", "p", "comm"]
    assert (fields["a"].offset, fields["a"].size, fields["a"].is_signed) == (16, 4, True)
    assert fields["c"].type == "u8[]"
    assert fields["comm"].type == "char[16]"
    located = {name: field.locator for name, field in fields.items() if field.locator != "here"}
    assert located == {"nm": Locator.DATA, "sa": Locator.DATA, "r": Locator.RELATIVE}


def test_the_pages_own_format_is_read() -> None:
    assert parse_page(HEADER) == PageFormat(size=4096, data=16, commit=8)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "name: open\n",
        OPEN.replace("1740", "70000"),
        OPEN.replace("1740", "0"),
        OPEN.replace("offset:16", "offset:x"),
        OPEN.replace("offset:16", "offset:99999999"),
        OPEN.replace("field:s32 a;", "field:a;"),
        OPEN.replace("nm;	offset:24;	size:4", "nm;	offset:24;	size:3"),
        OPEN.replace("s32 a", ""),
    ],
)
def test_what_is_no_format_is_refused(text: str) -> None:
    with pytest.raises(FormatError):
        parse_event(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        HEADER.replace("commit", "committed"),
        HEADER.replace("offset:16", "offset:17"),
        HEADER.replace("timestamp;	offset:0", "timestamp;	offset:8"),
    ],
)
def test_a_page_of_another_kind_is_refused(text: str) -> None:
    with pytest.raises(FormatError):
        parse_page(text)
