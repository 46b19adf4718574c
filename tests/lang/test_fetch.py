import pytest

from kprobes.model.definition import (
    Argument,
    Comm,
    Deref,
    Fetch,
    Immediate,
    MemoryAt,
    MemoryOf,
    Register,
    Span,
    StackPointer,
    StackSlot,
    Text,
)
from kprobes.units import Addr
from tests.build.definitions import Wrong, caret_of, read

AT = 13
"""The column of the expression in ``p vfs_read a=EXPR``."""


def fetch(text: str) -> Fetch:
    return read(f"p vfs_read a={text}").args[0].fetch


def whole(text: str) -> Span:
    return Span(AT, AT + len(text))


@pytest.mark.parametrize(
    ("text", "node"),
    [
        ("%di", Register(name="di", span=whole("%di"))),
        ("$arg1", Argument(number=1, span=whole("$arg1"))),
        ("$arg2048", Argument(number=2048, span=whole("$arg2048"))),
        ("$arg08", Argument(number=8, span=whole("$arg08"))),
        ("$stack", StackPointer(span=whole("$stack"))),
        ("$stack0", StackSlot(number=0, span=whole("$stack0"))),
        ("$stack2048", StackSlot(number=2048, span=whole("$stack2048"))),
        ("$comm", Comm(span=whole("$comm"))),
        ("$COMM", Comm(span=whole("$COMM"))),
        ("@0x10", MemoryAt(addr=Addr(16), span=whole("@0x10"))),
        ("@jiffies", MemoryOf(symbol="jiffies", offset=0, span=whole("@jiffies"))),
        ("@jiffies+8", MemoryOf(symbol="jiffies", offset=8, span=whole("@jiffies+8"))),
        ("@jiffies-0x8", MemoryOf(symbol="jiffies", offset=-8, span=whole("@jiffies-0x8"))),
    ],
)
def test_every_leaf_form_is_read(text: str, node: Fetch) -> None:
    assert fetch(text) == node


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("\\5", 5),
        ("\\-1", 2**64 - 1),
        ("\\+3", 3),
        ("\\++3", 3),
        ("\\+-3", 2**64 - 3),
        ("\\0x10", 16),
        ("\\010", 8),
        ("\\18446744073709551615", 2**64 - 1),
        ("\\-9223372036854775808", 2**63),
    ],
)
def test_immediates_are_64_bit_patterns(text: str, value: int) -> None:
    assert fetch(text) == Immediate(value=value, span=whole(text))


@pytest.mark.parametrize(
    ("text", "offset", "is_user"),
    [
        ("+8(%di)", 8, False),
        ("-8(%di)", -8, False),
        ("+0x10(%di)", 16, False),
        ("+u8(%di)", 8, True),
        ("-u8(%di)", -8, True),
        ("+-8(%di)", -8, False),
        ("++8(%di)", 8, False),
        ("+u-8(%di)", -8, True),
        ("-9223372036854775808(%di)", -(2**63), False),
    ],
)
def test_dereferences_are_read(text: str, offset: int, is_user: bool) -> None:
    register = Register(name="di", span=Span(AT + len(text) - 4, AT + len(text) - 1))

    assert fetch(text) == Deref(base=register, offset=offset, is_user=is_user, span=whole(text))


def test_dereferences_nest() -> None:
    node = fetch("+8(-u16(@jiffies))")

    assert node == Deref(
        offset=8,
        is_user=False,
        span=Span(13, 31),
        base=Deref(
            offset=-16,
            is_user=True,
            span=Span(16, 30),
            base=MemoryOf(symbol="jiffies", offset=0, span=Span(21, 29)),
        ),
    )


def test_what_follows_the_last_brace_is_dropped() -> None:
    assert fetch("+8(%di)x") == fetch("+8(%di)")


def nested(levels: int, base: str) -> str:
    return "+0(" * levels + base + ")" * levels


@pytest.mark.parametrize(("base", "levels"), [("%di", 14), ("@0", 13), ("@jiffies", 12)])
def test_nesting_ends_where_the_kernels_programs_end(base: str, levels: int) -> None:
    assert isinstance(fetch(nested(levels, base)), Deref)

    marked = f"p vfs_read a=+0(^{nested(levels, base)})"
    assert caret_of(Wrong(marked, "TOO_MANY_OPS")) == ("TOO_MANY_OPS", marked)


@pytest.mark.parametrize(
    ("marked", "code"),
    [
        ("p vfs_read ^%zz", "BAD_REG_NAME"),
        ("p vfs_read ^%", "BAD_REG_NAME"),
        ("p vfs_read ^%DI", "BAD_REG_NAME"),
        ("p vfs_read a=^%rdi:u8", "BAD_REG_NAME"),
        ("p vfs_read ^$", "BAD_VAR"),
        ("p vfs_read ^$foo", "BAD_VAR"),
        ("p vfs_read ^$comm2", "BAD_VAR"),
        ("p vfs_read ^$arg", "BAD_VAR"),
        ("p vfs_read ^$argX", "BAD_VAR"),
        ("p vfs_read ^$arg5x", "BAD_VAR"),
        ("p vfs_read ^$arg+3", "BAD_VAR"),
        ("p vfs_read a=^$arg18446744073709551616", "BAD_VAR"),
        ("p vfs_read ^$stackx", "BAD_VAR"),
        ("p vfs_read ^$stack5x", "BAD_VAR"),
        ("p vfs_read ^$stack18446744073709551616", "BAD_VAR"),
        ("p vfs_read ^$currently", "BAD_VAR"),
        ("p vfs_read ^$arg0", "BAD_ARG_NUM"),
        ("p vfs_read a=^$arg2049", "BAD_ARG_NUM"),
        ("p vfs_read ^$stack2049", "BAD_STACK_NUM"),
        ("p vfs_read ^$retval", "RETVAL_ON_PROBE"),
        ("p vfs_read ^@12zz", "BAD_MEM_ADDR"),
        ("p vfs_read ^@18446744073709551616", "BAD_MEM_ADDR"),
        ("p vfs_read ^@+3", "FILE_ON_KPROBE"),
        ("p vfs_read \\^x", "BAD_IMM"),
        ("p vfs_read \\^", "BAD_IMM"),
        ("p vfs_read \\^08", "BAD_IMM"),
        ("p vfs_read \\^-+3", "BAD_IMM"),
        ("p vfs_read \\^+9223372036854775808", "BAD_IMM"),
        ('p vfs_read a=\\"foo^', "IMMSTR_NO_CLOSE"),
        ('p vfs_read a=\\"foo^:string', "IMMSTR_NO_CLOSE"),
        ('p vfs_read a=\\"^', "IMMSTR_NO_CLOSE"),
        ('p vfs_read +0(\\"x^)', "IMMSTR_NO_CLOSE"),
        ('p vfs_read +0(^\\"x")', "COMM_CANT_DEREF"),
        ("p vfs_read ^+", "DEREF_NEED_BRACE"),
        ("p vfs_read ^+u8", "DEREF_NEED_BRACE"),
        ("p vfs_read ^+0)", "DEREF_NEED_BRACE"),
        ("p vfs_read ^+(%di)", "BAD_DEREF_OFFS"),
        ("p vfs_read ^+u(%di)", "BAD_DEREF_OFFS"),
        ("p vfs_read ^+uu8(%di)", "BAD_DEREF_OFFS"),
        ("p vfs_read ^-+8(%di)", "BAD_DEREF_OFFS"),
        ("p vfs_read ^-u-8(%di)", "BAD_DEREF_OFFS"),
        ("p vfs_read ^+9223372036854775808(%di)", "BAD_DEREF_OFFS"),
        ("p vfs_read +0(%di^", "DEREF_OPEN_BRACE"),
        ("p vfs_read +0(^", "DEREF_OPEN_BRACE"),
        ("p vfs_read +0(+0(%di^)", "DEREF_OPEN_BRACE"),
        ("p vfs_read +0(^$comm)", "COMM_CANT_DEREF"),
        ("p vfs_read +0(+0(^$COMM)):string", "COMM_CANT_DEREF"),
        ("p vfs_read +8(^)", "BAD_FETCH_ARG"),
        ("p vfs_read ^5", "BAD_FETCH_ARG"),
        ("p vfs_read ^,", "BAD_FETCH_ARG"),
        ("p vfs_read a=^=%di", "BAD_FETCH_ARG"),
        ("p vfs_read a=^é", "BAD_FETCH_ARG"),
        ("p vfs_read +8(+8(^%zz))", "BAD_REG_NAME"),
        ("p vfs_read +0(^%di)(%si)", "BAD_REG_NAME"),
        ("p vfs_read ++8(^%zz)", "BAD_REG_NAME"),
    ],
)
def test_the_caret_marks_the_wrong_expression(marked: str, code: str) -> None:
    assert caret_of(Wrong(marked, code)) == (code, marked)


@pytest.mark.parametrize(
    ("marked", "code"),
    [
        ("p vfs_read +u8^(%zz)", "BAD_REG_NAME"),
        ("p vfs_read -u8^(%zz)", "BAD_REG_NAME"),
        ("p vfs_read +-8^(%zz)", "BAD_REG_NAME"),
        ("p vfs_read +u-^8(%zz)", "BAD_REG_NAME"),
        ("p vfs_read +u8(%d^i", "DEREF_OPEN_BRACE"),
        ("p vfs_read +u0(+u^8($comm))", "COMM_CANT_DEREF"),
    ],
)
def test_carets_stand_where_the_kernel_miscounts_them(marked: str, code: str) -> None:
    assert caret_of(Wrong(marked, code)) == (code, marked)


@pytest.mark.parametrize(
    ("marked", "code"),
    [
        ("p ^vfs_read @jiffies+", "FAIL_REG_PROBE"),
        ("p ^vfs_read @jiffies+8-1", "FAIL_REG_PROBE"),
        ("p ^vfs_read +8(@jiffies-zz)", "FAIL_REG_PROBE"),
        ("p ^vfs_read @-", "FAIL_REG_PROBE"),
        ("p ^vfs_read @", "BAD_PROBE_ADDR"),
        ("p ^vfs_read @-3", "BAD_PROBE_ADDR"),
        ("p vfs_read @jiffies-zz ^%zz", "BAD_REG_NAME"),
        ("p ^vfs_read @ @jiffies-zz", "BAD_PROBE_ADDR"),
    ],
)
def test_bad_symbols_are_found_last_and_marked_at_the_place(marked: str, code: str) -> None:
    assert caret_of(Wrong(marked, code)) == (code, marked)


@pytest.mark.parametrize(
    ("text", "value"), [('\\"text"', "text"), ('\\""', ""), ('\\"it"s"', 'it"s')]
)
def test_immediate_strings_are_read(text: str, value: str) -> None:
    assert fetch(text) == Text(value=value, span=whole(text))
