"""Expressions in hist triggers: text to a field, as parse_expr() of the kernel reads it.

    got/1000        count-got+8        -(got)        $left*2

``*`` and ``/`` come before ``+`` and ``-``, and else what stands on the left; there are no
parentheses but those of a negated number, after which only ``-`` may come.
"""

from collections.abc import Callable, Mapping

from kprobes.errors import DefinitionError
from kprobes.lang.lexer import read_unsigned
from kprobes.model.codes import HistCode
from kprobes.model.hist import (
    DIVIDE_SHIFT,
    MAX_OPERATORS,
    Expression,
    HistField,
    HistKind,
    Modifier,
    NumericLiteral,
    Operator,
    multiplier_of,
)
from kprobes.units import U64

_SYM_OFFSET, _ONE_WORD = ".sym-offset", ".symXoffset"


class ExpressionReader:
    """Reads one expression of a trigger."""

    def __init__(
        self,
        variables: Mapping[str, str],
        atom: Callable[[str], HistField],
        error: Callable[[HistCode, str, str], DefinitionError],
    ) -> None:
        """Have read nothing yet.

        Args:
            variables: of the trigger, with their expressions.
            atom: returns the field of a name, with or without a modifier.
            error: returns an error, of what is wrong, where, and what would be right.
        """
        self._variables = variables
        self._atom = atom
        self._error = error
        self._operators = 0

    def read(self, text: str) -> HistField:
        """Return the field that an expression is.

        Raises:
            DefinitionError: what is wrong, in the kernel's words.
        """
        return self._read(_without_minus(text))

    def _read(self, text: str) -> HistField:
        if self._operators > MAX_OPERATORS:
            raise self._wrong(HistCode.TOO_MANY_SUBEXPR, text)
        at = _root(text)
        if at is None:
            return self._single(text)
        self._operators += 1
        if at == 0 and text[0] == "-":
            return self._negated(text)
        left, right = text[:at], text[at + 1 :]
        if not (left and right):
            raise self._wrong(HistCode.BAD_EXPRESSION, text)
        operands = tuple(map(self._operand, (left, right)))
        if len({*map(_is_in_usecs, operands)}) > 1:
            raise self._wrong(HistCode.TIMESTAMP_MISMATCH, "")
        return self._joined(Operator(text[at]), operands, right)

    def _wrong(self, code: HistCode, token: str, hint: str = "") -> DefinitionError:
        return self._error(code, token.replace(_ONE_WORD, _SYM_OFFSET), hint)

    def _negated(self, text: str) -> HistField:
        if self._operators > MAX_OPERATORS:
            raise self._wrong(HistCode.TOO_MANY_SUBEXPR, text)
        inner, closes, rest = text[2:].rpartition(")")
        if text[1:2] != "(" or not closes:
            raise self._wrong(HistCode.BAD_EXPRESSION, text)
        if rest:
            raise self._wrong(HistCode.UNARY_MINUS_SUBEXPR, text[2:])
        operand = self._operand(inner)
        return _field(Expression(operator=Operator.NEGATED, operands=(operand,)))

    def _operand(self, text: str) -> HistField:
        field = self._read(text)
        if field.kind in (HistKind.TEXT, HistKind.STACK):
            raise self._wrong(HistCode.INVALID_STR_OPERAND, text)
        return field

    def _joined(self, operator: Operator, operands: tuple[HistField, ...], right: str) -> HistField:
        first, second = (each.source for each in operands)
        if operator is Operator.OVER and second == NumericLiteral(0):
            raise self._wrong(HistCode.DIVISION_BY_ZERO, right)
        if isinstance(first, NumericLiteral) and isinstance(second, NumericLiteral):
            return _constant(_computed(operator, first.value, second.value))
        return _field(Expression(operator=operator, operands=operands))

    def _single(self, text: str) -> HistField:
        if text[:1].isdigit():
            number = read_unsigned(text)
            if number is None or number > U64:
                raise self._wrong(HistCode.EXPECT_NUMBER, text)
            return _constant(number)
        name = text.rpartition(".")[2] if text.count(".") > 1 else text
        if name[:1] != "$":
            return self._atom(text.replace(_ONE_WORD, _SYM_OFFSET))
        variable = self._variables.get(name[1:])
        plain = None if variable is None else _without_minus(variable)
        if plain is None or name != text or plain[:1] == "$" or _root(plain) is not None:
            hint = "those of this trigger that name one field; of a call and its return there is "
            raise self._wrong(HistCode.VAR_NOT_FOUND, name[1:], f"{hint}duration")
        return self._single(plain)


def _without_minus(text: str) -> str:
    # That of a modifier's name, as event_hist_trigger_parse() of the kernel.
    return text.replace(_SYM_OFFSET, _ONE_WORD)


def _root(text: str) -> int | None:
    # Where the operator is that is done last: contains_operator() of the kernel.
    if (minus := text.rfind("-")) == 0:
        return 0
    found = (max(pair) for pair in ((minus, text.rfind("+")), (text.rfind("*"), text.rfind("/"))))
    return next((at for at in found if at >= 0), None)


def _constant(value: int) -> HistField:
    # Kernels have no name for it.
    return HistField(name="", source=NumericLiteral(value))


def _is_in_usecs(field: HistField) -> bool:
    # An expression has the units of its first operand.
    return field.leaves[0].modifier is Modifier.USECS


def _field(expression: Expression) -> HistField:
    # Without the width of buckets.
    texts = [each.text.partition("=")[0] for each in expression.operands]
    negated = expression.operator is Operator.NEGATED
    name = f"-({texts[0]})" if negated else expression.operator.join(texts)
    return HistField(name=name, source=expression, is_signed=expression.operands[0].is_signed)


def _computed(operator: Operator, one: int, other: int) -> int:
    match operator:
        case Operator.PLUS:
            return one + other & U64
        case Operator.MINUS:
            return one - other & U64
        case Operator.TIMES:
            return one * other & U64
        case _:
            return divided(one, other)


def divided(number: int, constant: int) -> int:
    """Return a number that a kernel divides by a constant other than 0, both of 64 bits."""
    multiplier = multiplier_of(constant)
    if multiplier is None or number >> DIVIDE_SHIFT:
        return number // constant
    return (number * multiplier + (1 << DIVIDE_SHIFT) - 1) >> DIVIDE_SHIFT
