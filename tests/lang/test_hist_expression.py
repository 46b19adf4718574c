"""Expressions and variables of hist triggers: how they are read, listed and refused."""

import pytest

from kprobes.errors import DefinitionError
from kprobes.lang.hist import parse_hist
from kprobes.lang.hist_expression import divided
from kprobes.model.hist import Expression, HistField, Operator
from tests.lang.test_hist import KNOWN, check_mark


def listed(text: str) -> str:
    return parse_hist(text, KNOWN).text.removesuffix(":sort=hitcount:size=2048")


@pytest.mark.parametrize(
    ("text", "as_listed"),
    [
        ("keys=count-got", "hist:keys=count-got:vals=hitcount"),
        ("keys=got.log2:vals=got/1000", "hist:keys=got.log2:vals=hitcount,got/1000"),
        ("keys=-(count+got)", "hist:keys=-(count+got):vals=hitcount"),
        ("keys=count:vals=10/3,0x10*got", "hist:keys=count:vals=hitcount,4,16*got"),
        ("keys=-(got)-1-2", "hist:keys=-(got)-1-2:vals=hitcount"),
        ("keys=count.log2-got.hex", "hist:keys=count.log2-got.hex:vals=hitcount"),
        ("keys=count.sym-offset-got", "hist:keys=count.sym-offset-got:vals=hitcount"),
        ("keys=count.buckets=10+got", "hist:keys=count.buckets+got:vals=hitcount"),
        ("keys=$x:x=count", "hist:keys=count:vals=hitcount:x=count"),
        (
            "keys=count:x=got,y=count-got:z=5:vals=$x,$z*$x",
            "hist:keys=count:vals=hitcount,got,5*got:x=got,y=count-got,z=5",
        ),
        (
            "keys=count:ts=common_timestamp.usecs",
            "hist:keys=count:vals=hitcount:ts=common_timestamp.usecs:sort=hitcount:size=2048:clock=global",
        ),
        (
            "keys=count:x=count.sym-offset:vals=got-$x",
            "hist:keys=count:vals=hitcount,got-count.sym-offset:x=count.sym-offset",
        ),
        ("keys=count:x=path", "hist:keys=count:vals=hitcount:x=path"),
    ],
)
def test_it_is_listed_as_the_kernel_lists_it(text: str, as_listed: str) -> None:
    assert listed(text) == as_listed


def shape(field: HistField) -> str:
    """Return an expression with all its parentheses."""
    source = field.source
    if not isinstance(source, Expression):
        return field.text
    first, *others = map(shape, source.operands)
    if source.operator is Operator.NEGATED:
        return f"-({first})"
    return f"({first}{source.operator}{others[0]})"


@pytest.mark.parametrize(
    ("text", "as_read"),
    [
        ("count-got-count", "((count-got)-count)"),
        ("count-got+count", "((count-got)+count)"),
        ("count+got*count", "(count+(got*count))"),
        ("count/got*count", "((count/got)*count)"),
        ("count*got/count", "((count*got)/count)"),
        ("count*got-count/got", "((count*got)-(count/got))"),
        ("2*3*count", "(6*count)"),
        ("count*2*3", "((count*2)*3)"),
        ("3-5+count", "(18446744073709551614+count)"),
        ("-(count*2)", "-((count*2))"),
    ],
)
def test_products_come_first_and_else_what_stands_on_the_left(text: str, as_read: str) -> None:
    (key,) = parse_hist(f"keys={text}", KNOWN).keys

    assert shape(key) == as_read


def test_an_expression_has_its_first_operands_sign() -> None:
    signs = {
        text: parse_hist(f"keys={text}", KNOWN).keys[0].is_signed for text in ("got-count", "1-got")
    }

    assert signs == {"got-count": True, "1-got": False}


@pytest.mark.parametrize(
    ("marked", "text"),
    [
        ("hist:keys=count:^x=1:x=2", "Variable already defined"),
        ("hist:keys=count:^junk,x=1", "Malformed assignment"),
        ("hist:keys=count:x=1,^zone", "Malformed assignment"),
        ("hist:keys=^got+got+got+got+count", "Too many subexpressions (3 max)"),
        ("hist:keys=^-(got)-1-2-3", "Too many subexpressions (3 max)"),
        ("hist:keys=^path+1", "String type can not be an operand in expression"),
        ("hist:keys=1-^path", "String type can not be an operand in expression"),
        ("hist:keys=got-^12x", "Expecting numeric literal"),
        ("hist:keys=^18446744073709551616", "Expecting numeric literal"),
        ("hist:keys=-(^got)+1", "Unary minus not supported in sub-expressions"),
        ("hist:keys=got/^0", "Division by zero"),
        ("^hist:keys=got.usecs-count", "Timestamp units in expression don't match"),
        ("hist:keys=got:vals=$^q", "Couldn't find variable"),
        ("hist:keys=got:vals=$^q:q=count+1", "Couldn't find variable"),
        ("hist:keys=got:vals=$^q:q=$p:p=got", "Couldn't find variable"),
        ("hist:keys=got:vals=sched.sched_switch.$^q", "Couldn't find variable"),
        ("hist:keys=got-^foo", "Couldn't find field"),
        ("hist:keys=count:vals=count-^got.max", "Invalid field modifier"),
        ("hist:keys=got:x=^got.log2", "Invalid field modifier"),
        # Ours: the kernel has no words for them.
        ("hist:keys=^got+", "An operator has an operand on either side, and - one in parentheses"),
        ("hist:keys=^-got", "An operator has an operand on either side, and - one in parentheses"),
    ],
)
def test_the_mark_stands_where_the_kernels_does(marked: str, text: str) -> None:
    check_mark(marked, text)


def test_sixteen_variables_are_enough() -> None:
    sixteen = ",".join(f"v{n}=got" for n in range(16))
    assert len(parse_hist(f"keys=got:{sixteen}", KNOWN).variables) == 16

    with pytest.raises(DefinitionError, match="Too many variables defined"):
        parse_hist(f"keys=got:{sixteen}:w=got", KNOWN)


def test_triggers_with_other_variables_are_two() -> None:
    texts = ("keys=got", "keys=got:x=count", "keys=got:x=count+1", "keys=got:y=count")

    assert len({parse_hist(text, KNOWN).identity for text in texts}) == len(texts)


@pytest.mark.parametrize(
    ("number", "constant", "quotient"),
    [(10, 3, 4), (9, 3, 3), (1 << 20, 3, 349_525), (7, 1, 7), (100, 64, 1), (5, 1_048_577, 0)],
)
def test_a_quotient_by_a_constant_is_the_kernels(number: int, constant: int, quotient: int) -> None:
    # A number below 2**20 is rounded up, and may be wrong by one: div_by_mult_and_shift().
    assert divided(number, constant) == quotient
