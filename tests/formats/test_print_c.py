"""C of print fmts: what is read, what is not known, and what is bounded."""

import pytest

from kprobes.errors import FormatError
from kprobes.formats.print_c import (
    BinaryOperation,
    Conditional,
    Converted,
    ElementOf,
    HelperCall,
    Integer,
    LengthOf,
    Literal,
    NamesOf,
    PrintExpression,
    PrintType,
    RecordField,
    UnaryOperation,
    UnknownPrint,
    parse_values,
)

INT, UNSIGNED = PrintType(bits=32, is_signed=True), PrintType(bits=32)
LONG, UNSIGNED_LONG = PrintType(bits=64, is_signed=True), PrintType(bits=64)
A = RecordField(name="a")
ONE = Integer(value=1, type=INT)


def value(text: str) -> PrintExpression:
    (found,) = parse_values(text)
    return found


def converted(bits: int, *, is_signed: bool = False, is_pointer: bool = False) -> Converted:
    type_ = PrintType(bits=bits, is_signed=is_signed, is_pointer=is_pointer)
    return Converted(type=type_, operand=A)


@pytest.mark.parametrize(
    ("text", "number", "type_"),
    [
        ("0", 0, INT),
        ("2147483647", 0x7FFFFFFF, INT),
        ("2147483648", 0x80000000, LONG),
        ("0x80000000", 0x80000000, UNSIGNED),
        ("0x7fffffffffffffff", (1 << 63) - 1, LONG),
        ("0xffffffffffffffff", (1 << 64) - 1, UNSIGNED_LONG),
        ("017", 15, INT),
        ("1u", 1, UNSIGNED),
        ("1UL", 1, UNSIGNED_LONG),
        ("3LL", 3, LONG),
        ("4294967296U", 1 << 32, UNSIGNED_LONG),
        ("'A'", 65, INT),
        (r"'\n'", 10, INT),
        (r"'\''", 39, INT),
        (r"'\x41'", 65, INT),
        ("true", 1, INT),
        ("sizeof(unsigned short)", 2, UNSIGNED_LONG),
        ("sizeof(struct page *)", 8, UNSIGNED_LONG),
    ],
)
def test_a_number_has_the_type_that_c_gives_it(text: str, number: int, type_: PrintType) -> None:
    assert value(text) == Integer(value=number, type=type_)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("REC->a", A),
        ("(((REC->a)))", A),
        ("REC->a[1]", ElementOf(base=A, index=ONE)),
        ('"x" "y\\t\\"z"', Literal(text=b'xy\t"z')),
        ("__get_str(a)", A),
        ("__get_rel_str(a)", A),
        ("__get_sockaddr(a)", A),
        ("__get_rel_dynamic_array(a)", A),
        ("__get_dynamic_array_len(a)", LengthOf(name="a", is_dynamic=True)),
        ("sizeof(REC->a)", LengthOf(name="a", is_dynamic=False)),
        ("__get_cpumask(a)", HelperCall(name="__get_bitmask", arguments=(A,))),
        ("__builtin_bswap32(REC->a)", HelperCall(name="__fswab32", arguments=(A,))),
        ("-REC->a", UnaryOperation(operator="-", operand=A)),
        ("&REC->a", UnaryOperation(operator="&", operand=A)),
        ("REC->a ?: 1", Conditional(condition=A, yes=A, no=ONE)),
        ("(unsigned long long)REC->a", converted(64)),
        ("( unsigned long)REC->a", converted(64)),
        ("(short int)REC->a", converted(16, is_signed=True)),
        ("(enum zone_type)REC->a", converted(32)),
        ("(gfp_t)REC->a", converted(32)),
        ("(s64)REC->a", converted(64, is_signed=True)),
        ("(__be16)REC->a", converted(16)),
        ("(const u8 *)REC->a", converted(8, is_pointer=True)),
        ("(void *)REC->a", converted(8, is_pointer=True)),
        ("(struct page *)REC->a", converted(0, is_pointer=True)),
        ("(work_func_t *)REC->a", converted(0, is_pointer=True)),
        ("(char **)REC->a", converted(64, is_signed=True, is_pointer=True)),
    ],
)
def test_each_construct_is_read(text: str, found: PrintExpression) -> None:
    assert value(text) == found


def test_operators_bind_as_in_c() -> None:
    for loose, tight in [
        ("1 + 1 * 1", "1 + (1 * 1)"),
        ("1 - 1 - 1", "(1 - 1) - 1"),
        ("1 << 1 + 1", "1 << (1 + 1)"),
        ("1 & 1 == 1", "1 & (1 == 1)"),
        ("1 | 1 ^ 1 & 1", "1 | (1 ^ (1 & 1))"),
        ("1 || 1 && 1", "1 || (1 && 1)"),
        ("1 < 1 >> 1", "1 < (1 >> 1)"),
        ("1 ? 1 : 1 ? 1 : 1", "1 ? 1 : (1 ? 1 : 1)"),
        ("!1 + 1", "(!1) + 1"),
        ("(int)1 + 1", "((int)1) + 1"),
        ("1 | 1 ? 1 : 1", "(1 | 1) ? 1 : 1"),
    ]:
        assert value(loose) == value(tight)


def test_names_end_at_a_null_pointer() -> None:
    pairs = '{ 1, "A" }, { 1 << 1, ("B") }'
    names = ((ONE, b"A"), (BinaryOperation(operator="<<", left=ONE, right=ONE), b"B"))

    assert value(f'__print_flags(REC->a, "|", {pairs})') == NamesOf(
        value=A, names=names, delimiter=b"|"
    )
    for end in ("{ -1, NULL }", "{ 0, ((void *)0) }", "{ 0, 0 }"):
        text = f'__print_symbolic_u64(REC->a, {pairs}, {end}, {{ 7, "C" }})'
        assert value(text) == NamesOf(value=A, names=names)


def test_a_dynamic_array_is_its_data_with_their_count() -> None:
    whole = "__get_dynamic_array(a), __get_dynamic_array_len(a) / sizeof(u32), sizeof(u32)"

    assert value("__print_dynamic_array(a, sizeof(u32))") == value(f"__print_array({whole})")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("blk_op_str(REC->a)", "blk_op_str()"),
        ("__print_hex_dump(REC->a)", "__print_hex_dump()"),
        ("REC->a + HZ", "'HZ'"),
        ("REC->a->b", "a member of a structure"),
        ("REC->a.b", "a member of a structure"),
        ("sizeof(struct page)", "sizeof a structure"),
        ("({ int x; x; })", "'{'"),
        ("__print_symbolic(REC->a, { HI_SOFTIRQ, \"HI\" })", "'HI_SOFTIRQ'"),
        ("__print_flags(REC->a, delim, { 1, \"A\" })", "'delim'"),
    ],
)  # fmt: skip
def test_what_is_not_known_is_named(text: str, named: str) -> None:
    with pytest.raises(UnknownPrint, match=r".") as caught:
        parse_values(text)

    assert named in str(caught.value)


@pytest.mark.parametrize(
    "text", ["REC->a $ 1", '"open', "1 1", "(1", "089", "__print_hex(REC->a)", "1,,1", "REC", "0x"]
)
def test_what_is_no_c_is_an_error(text: str) -> None:
    with pytest.raises(FormatError):
        parse_values(text)


@pytest.mark.parametrize(
    "text",
    [
        "(" * 20000 + "1" + ")" * 20000,
        "-" * 20000 + "1",
        "1+" * 20000 + "1",
        "1?" * 20000 + "1",
        "1?1:" * 20000 + "1",
        "REC->a[" * 20000,
        "__print_hex(" * 20000,
        "(int)" * 20000 + "1",
        "__print_symbolic(1,{" * 20000,
        '__print_symbolic(1,{1,"a"},{' * 20000,
        "(" + "*" * 20000,
    ],
)
def test_no_depth_is_without_an_end(text: str) -> None:
    with pytest.raises(FormatError):
        parse_values(text)
