"""Terms of filters: fields, operators, and what they become."""

import pytest

from kprobes.errors import DefinitionError
from kprobes.lang.filter import parse_filter
from kprobes.model.definition import SyntheticFields
from kprobes.model.filter import REJECT, Always, Compare, Header, Matches, Relation, Test, Within
from tests.build.filtered import FUNCTION, known_of
from tests.build.kernel import make_extra, make_probe

KNOWN = known_of(
    make_probe(
        "p f n=$arg1:u8 i=$arg2:s16 w=$arg3 x=+0($arg1):x8[4] y=+0($arg1):u8[3] "
        's=+0($arg2):string t=\\"text" c=$comm cpu=$arg4:u32 k=$arg5:symstr'
    )
)


def _one(text: str) -> tuple[Test, bool]:
    """The only test of a filter, and whether it must hold."""
    found = parse_filter(text, KNOWN)
    assert found is not None
    (step,) = found.steps
    return step.test, step.no == REJECT


def _compare(source: int | Header, size: int, value: int, **more: object) -> Compare:
    relation = Relation(str(more.get("relation", "==")))
    is_signed = bool(more.get("is_signed"))
    return Compare(source=source, size=size, is_signed=is_signed, relation=relation, value=value)


@pytest.mark.parametrize(
    ("text", "test"),
    [
        ("n == 5", _compare(0, 1, 5)),
        ("n==0x105", _compare(0, 1, 5)),
        ("n & 010", _compare(0, 1, 8, relation="&")),
        ("i >= -1", _compare(1, 2, 0xFFFF, is_signed=True, relation=">=")),
        ("i != 0xffff", _compare(1, 2, 0xFFFF, is_signed=True, relation="!=")),
        ("x < 0x01020304", _compare(3, 4, 0x1020304, relation="<")),
        ("y == 1", Always(holds=False)),
        ("y != 1", Always(holds=False)),
        ("n.ustring == 5", _compare(0, 1, 5)),
        ("common_pid == -1", _compare(Header.PID, 4, 0xFFFFFFFF, is_signed=True)),
        ("common_type == 3", _compare(Header.TYPE, 2, 3)),
        ("CPU == 1", _compare(Header.CPU, 4, 1, is_signed=True)),
        ("common_cpu & 1", Always(holds=False)),
        ("cpu == 1", _compare(8, 4, 1)),
        ("stacktrace == 1", Always(holds=False)),
        ("__probe_ip > 1", _compare(Header.IP, 8, 1, relation=">")),
        ('t == "text"', Always(holds=True)),
        ('t ~ "?e*"', Always(holds=True)),
        ('t ~ "x*"', Always(holds=False)),
        ("n & CPUS{0-1}", Within(source=0, size=1, ranges=((0, 1),))),
        ("n & CPUS{1}", _compare(0, 1, 1)),
        ("n == CPUS{0-1}", Always(holds=False)),
        ("n != CPUS{0-1}", Within(source=0, size=1, ranges=((0, 1),))),
        ("n & CPUS{,}", Always(holds=False)),
        ("CPU & CPUS{1}", _compare(Header.CPU, 4, 1, is_signed=True)),
        ("y & CPUS{1}", Always(holds=False)),
        ("w.function == g", Within(source=2, size=8, ranges=((FUNCTION[0], FUNCTION[1] - 1),))),
    ],
)
def test_a_term_becomes_a_test(text: str, test: Test) -> None:
    assert _one(text) == (test, True)


@pytest.mark.parametrize(
    ("text", "source", "is_wanted"),
    [
        ('s == "x"', 5, True),
        ("s != 'x'", 5, False),
        ('s ~ "x*"', 5, True),
        ('s ~ "!x*"', 5, False),
        ('comm == "x"', Header.COMM, True),
        ('COMM ~ "!x"', Header.COMM, False),
        ('c == "x"', Header.COMM, True),
    ],
)
def test_a_string_becomes_a_match(text: str, source: int | Header, is_wanted: bool) -> None:
    test, wanted = _one(text)

    assert isinstance(test, Matches)
    assert (test.source, wanted) == (source, is_wanted)


def test_the_negation_of_a_function_and_of_one_cpu_must_not_hold() -> None:
    assert [_one(text)[1] for text in ("w.function != g", "n != CPUS{1}")] == [False, False]


@pytest.mark.parametrize(
    ("same", "other"),
    [
        ('s ~ "1*"', 's == "1*"'),
        ('s ~ "x"', 's == "x"'),
        ("s == 'x\"'", "s == 'x\"'"),
        ("w.function == 0xffffffff81000010", "w.function == g"),
    ],
)
def test_what_is_said_twice_is_the_same(same: str, other: str) -> None:
    assert _one(same) == _one(other)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ("m == 1", "Field not found"),
        ("m", "Field not found"),
        ("n == 1 && m == 1", "Field not found"),
        ("n = 1", "Invalid operator"),
        ("n ", "Invalid operator"),
        ("n == x", "Invalid value (did you forget quotes)?"),
        ("n == 08", "Illegal integer value"),
        ("n == -1", "Illegal integer value"),
        ("s == 5", "Expecting string field"),
        ('n == "x"', "Expecting numeric field"),
        ('s < "x"', "Illegal operation for field type"),
        ("n ~ 1", "Illegal operation for field type"),
        ('k == "x"', "A symstr cannot be filtered"),
        ("n & CPUS{2}", "Invalid cpulist"),
        ("n & CPUS 0", "Missing '{'"),
        ("n & CPUS{0 ", "Missing '}'"),
        ("s & CPUS{0}", "Illegal operation for field type"),
        ("n < CPUS{0}", "Illegal operation for field type"),
        ("n.function == g", "Illegal operation for field type"),
        ("w.function < g", "Invalid operator"),
        ("w.function == nowhere ", "Function not found"),
        ("w.function == g&&", "Function not found"),
    ],
)
def test_every_error_has_the_kernel_s_text(wrong: str, text: str) -> None:
    with pytest.raises(DefinitionError) as caught:
        parse_filter(wrong, KNOWN)

    assert caught.value.text == text


@pytest.mark.parametrize(
    ("text", "message", "column"),
    [
        ("m == 1", "Field not found", 2),
        ("n == 1 && m == 1", "Field not found", 12),
        ("n == 08", "Illegal integer value", 6),
        ("n == x", "Invalid value (did you forget quotes)?", 6),
        ("n = 1", "Invalid operator", 3),
        ("n == " + "1" * 24, "Operand too long", 30),
        ('s == "' + "x" * 256 + '"', "Operand too long", 263),
        ("n & CPUS{2}", "Invalid cpulist", 11),
        ("n & CPUS", "Missing '{'", 10),
        ("w.function == nowhere", "Function not found", 22),
        ('k == "x"', "A symstr cannot be filtered", 0),
    ],
)
def test_columns_are_the_kernel_s(text: str, message: str, column: int) -> None:
    with pytest.raises(DefinitionError) as caught:
        parse_filter(text, KNOWN)

    assert (caught.value.text, caught.value.column) == (message, column)


def test_bytes_count_and_characters_are_shown() -> None:
    with pytest.raises(DefinitionError) as caught:
        parse_filter('s == "\N{EURO SIGN}\N{EURO SIGN}" && m == 1', KNOWN)

    assert caught.value.command[caught.value.column - 2] == "m"
    with pytest.raises(DefinitionError, match="Operand too long"):
        parse_filter('s == "' + "\N{EURO SIGN}" * 86 + '"', KNOWN)


@pytest.mark.parametrize("term", ["duration > 5", 'duration == "x"', "duration.function == f"])
def test_a_duration_is_refused_where_it_is_named(term: str) -> None:
    known = known_of(make_extra("r f", SyntheticFields(duration=True)))

    with pytest.raises(DefinitionError, match="A duration cannot be filtered") as caught:
        parse_filter(term, known)

    assert caught.value.column == 0
