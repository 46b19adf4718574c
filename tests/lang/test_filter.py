"""Filters as trees of terms: precedence, nesting, and the errors of their shape."""

import itertools
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kprobes.errors import DefinitionError
from kprobes.lang.filter import parse_filter
from kprobes.model.filter import ACCEPT, REJECT, Compare, Filter
from tests.build.filtered import known_of
from tests.build.kernel import make_probe

KNOWN = known_of(make_probe("p f a=$arg1 b=$arg2 c=$arg3 d=$arg4 s=+0($arg1):string"))
NAMES = "abcd"


def _read(text: str) -> Filter:
    found = parse_filter(text, KNOWN)
    assert found is not None
    return found


def _holds(chosen: Filter, values: tuple[bool, ...]) -> bool:
    at = 0
    while at not in (ACCEPT, REJECT):
        step = chosen.steps[at]
        assert isinstance(step.test, Compare)
        assert isinstance(step.test.source, int)
        target = step.yes if values[step.test.source] else step.no
        assert target < 0 or target > at, "a filter has no loops"
        at = target
    return at == ACCEPT


def _check(text: str) -> None:
    """Compare with Python, whose operators bind as the kernel's."""
    chosen = _read("".join(f"{char} == 1" if char in NAMES else char for char in text))
    python = text.replace("&&", " and ").replace("||", " or ").replace("!", " not ")
    for values in itertools.product([False, True], repeat=len(NAMES)):
        wanted = eval(python, {}, dict(zip(NAMES, values, strict=True)))
        assert _holds(chosen, values) == wanted, (text, values)


@pytest.mark.parametrize(
    "text",
    [
        *("a", "!a", "!!a", "(a)", "!(a)", "((a))", "!(!(!a))"),
        *("a&&b", "a||b", "a&&b||c", "a||b&&c", "a||b||c&&d", "a&&b||c&&d", "a||b&&c||d"),
        *("(a||b)&&c", "a&&(b||c)", "(a||b)&&(c||d)", "!(a||b)&&c", "!a&&!b||!c", "!(a&&b)"),
        *("!(a||!(b&&!c))", "!(!(a||b)&&!(c||d))", "a&&(b||(c&&(d||a)))", "((a||b)||c)&&d"),
        *("a&&!(b||c)||d", "!(a&&(b||!(c&&!d)))", "a||!(b||c||d)", "(a&&b&&c)||(b&&c&&d)"),
    ],
)
def test_operators_bind_as_the_kernel_s(text: str) -> None:
    _check(text)


_trees = st.recursive(
    st.sampled_from(NAMES),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["&&", "||"]), inner).map("".join),
        inner.map(lambda text: f"!({text})"),
        inner.map(lambda text: f"({text})"),
    ),
    max_leaves=12,
)


@given(_trees)
def test_any_tree_means_what_it_says(text: str) -> None:
    _check(text)


@pytest.mark.parametrize(
    ("marked", "text"),
    [
        ("^(a == 1", "Too many '('"),
        ("a == 1 && ^(b == 1", "Too many '('"),
        ("(a == 1)^)", "Too few '('"),
        ("^)a == 1(", "Too few '('"),
        ("s == ^'x", "Missing matching quote"),
        ("s == ^\"x'", "Missing matching quote"),
        ("s == 'x' && s == ^'y", "Missing matching quote"),
        ("^()", "Error"),
        ("^  ", "Error"),
        ("^&&", "Error"),
        ("^a == 1 && ()", "Error"),
        ("^a == 1 && && b == 1", "Error"),
        ("!^", "No filter found"),
        ("a == 1 &&^", "Meaningless filter expression"),
        ("a == 1 && b == 1 ||^", "Meaningless filter expression"),
        ("a == 1 && !^", "Meaningless filter expression"),
        ("a == 1 ^b == 1", "Too many terms in predicate expression"),
        ("a == 1 ^& b == 1", "Too many terms in predicate expression"),
        ("(a == 1) ^| b == 1", "Too many terms in predicate expression"),
        ("a == 1^, b == 1", "Too many terms in predicate expression"),
    ],
)
def test_the_mark_is_where_the_kernel_s_is(marked: str, text: str) -> None:
    with pytest.raises(DefinitionError) as caught:
        parse_filter(marked.replace("^", "", 1), KNOWN)

    assert (caught.value.text, caught.value.column) == (text, marked.index("^"))


@pytest.mark.parametrize("text", ["", "0", " 0 ", "0\n"])
def test_nothing_and_zero_are_no_filter(text: str) -> None:
    assert parse_filter(text, KNOWN) is None


def test_neither_depth_nor_length_is_a_matter() -> None:
    deep = "a == 1 && (b == 1 || (" * 150 + "c == 1" + "))" * 150
    assert len(_read(deep).steps) == 301
    assert len(_read("(" * 2000 + "a == 1" + ")" * 2000).steps) == 1
    assert len(_read("!" * 3001 + "a == 1").steps) == 1


def test_more_than_a_page_is_refused() -> None:
    with pytest.raises(DefinitionError, match="Filter is too long"):
        parse_filter("a == 1" + " " * 4090, KNOWN)


@given(st.text(st.sampled_from("ab s=!~<>&|()'\"*.0x1-CPUS{},cpu\N{EURO SIGN}\n"), max_size=40))
def test_nothing_but_its_own_errors_is_raised(text: str) -> None:
    with suppress(DefinitionError):
        parse_filter(text, KNOWN)
