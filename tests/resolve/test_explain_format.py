"""The format file: as kernels wrote it (checked with a 6.1 and a 6.12 guest in tests/system)."""

from kprobes.resolve.explain import format_text
from tests.build.typed import resolved

_COMMON = """name: ev
ID: 1234
format:
	field:unsigned short common_type;	offset:0;	size:2;	signed:0;
	field:unsigned char common_flags;	offset:2;	size:1;	signed:0;
	field:unsigned char common_preempt_count;	offset:3;	size:1;	signed:0;
	field:int common_pid;	offset:4;	size:4;	signed:1;

"""


def test_the_sample_of_the_reference_comes_out() -> None:
    probe = resolved(
        "p:ev vfs_read a=%di:s32 b=%di:u16 c=+0(%di):x8[4] nm=+0(%di):string n=%di:s64 "
        "sa=+0(%di):string[1] ch=%di:char s=%di:symbol t=%di:symstr i=%di:b4@0/32 d=$comm x=%di"
    )

    assert format_text(probe.layout, number=1234) == _COMMON + (
        """	field:unsigned long __probe_ip;	offset:8;	size:8;	signed:0;
	field:s32 a;	offset:16;	size:4;	signed:1;
	field:u16 b;	offset:20;	size:2;	signed:0;
	field:u8 c[];	offset:22;	size:4;	signed:0;
	field:__data_loc char[] nm;	offset:26;	size:4;	signed:1;
	field:s64 n;	offset:30;	size:8;	signed:1;
	field:__data_loc char[][1] sa;	offset:38;	size:4;	signed:1;
	field:u8 ch;	offset:42;	size:1;	signed:0;
	field:u64 s;	offset:43;	size:8;	signed:0;
	field:__data_loc char[] t;	offset:51;	size:4;	signed:1;
	field:u32 i;	offset:55;	size:4;	signed:0;
	field:__data_loc char[] d;	offset:59;	size:4;	signed:1;
	field:u64 x;	offset:63;	size:8;	signed:0;

"""
        r'print fmt: "(%lx) a=%d b=%u c={0x%x,0x%x,0x%x,0x%x} nm=\"%s\" n=%Ld sa={\"%s\"} '
        r"ch='%c' s=%pS t=\"%s\" i=%u d=\"%s\" x=0x%Lx"
        '", REC->__probe_ip, REC->a, REC->b, REC->c[0], REC->c[1], REC->c[2], REC->c[3], '
        "__get_str(nm), REC->n, __get_str(sa[0]), REC->ch, REC->s, __get_str(t), REC->i, "
        "__get_str(d), REC->x\n"
    )


def test_a_return_has_two_addresses() -> None:
    text = format_text(resolved("r:ev vfs_read ret=$retval:s32").layout, number=1234)

    assert text == _COMMON + (
        """	field:unsigned long __probe_func;	offset:8;	size:8;	signed:0;
	field:unsigned long __probe_ret_ip;	offset:16;	size:8;	signed:0;
	field:s32 ret;	offset:24;	size:4;	signed:1;

"""
        'print fmt: "(%lx <- %lx) ret=%d", REC->__probe_func, REC->__probe_ret_ip, REC->ret\n'
    )


def test_an_event_without_arguments_has_its_address_alone() -> None:
    text = format_text(resolved("p:ev vfs_read").layout, number=1234)

    assert text.endswith('\n\nprint fmt: "(%lx)", REC->__probe_ip\n')
