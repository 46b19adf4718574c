"""One term of a filter, ``FIELD OPERATOR VALUE``, to a test; parse_pred() in the kernel."""

from kprobes.lang import filter_value
from kprobes.lang.filter_scan import Scan
from kprobes.lang.filter_value import Subject
from kprobes.model.filter import FieldKind, FilterField, Test
from kprobes.model.filter_codes import FilterCode

# What another one begins with stands behind it.
_OPERATORS = ("~", "!=", "==", "<=", "<", ">=", ">", "&")
_TERM = "a term is FIELD OPERATOR VALUE, such as: count > 100"
_OPERATORS_HINT = "== != < <= > >= & and, for strings, ~"
_NEAREST = 5


def read_term(scan: Scan) -> tuple[Test, bool]:
    """Read the term that comes next, and pass it.

    Returns:
        The test, and whether it must hold: ``!=`` of a string is a test that must not.

    Raises:
        DefinitionError: it is wrong.
    """
    start = scan.at
    name = scan.name()
    if not name:
        raise scan.error(FilterCode.ERRNO, 0, _TERM)
    field = _field(scan, name, start)
    # Of strings that are read while filtering, which no probe has.
    scan.take(".ustring")
    is_function = scan.take(".function")
    scan.skip_blanks()
    operator = next((op for op in _OPERATORS if scan.take(op)), None)
    if operator is None:
        raise scan.error(FilterCode.INVALID_OP, hint=_OPERATORS_HINT)
    scan.skip_blanks()
    subject = Subject(field=field, operator=operator, start=start)
    if is_function:
        return filter_value.read_function(scan, subject)
    if scan.has("CPUS"):
        return filter_value.read_cpu_list(scan, subject)
    if scan.peek() in ("'", '"'):
        return filter_value.read_string(scan, subject)
    if scan.peek().isdecimal() or scan.has("-"):
        return filter_value.read_number(scan, subject), True
    hint = "a number, or a string in quotes"
    raise scan.error(FilterCode.INVALID_VALUE, hint=hint)


def _field(scan: Scan, name: str, start: int) -> FilterField:
    field = scan.known.fields.get(name)
    if field is None:
        names = ", ".join(list(scan.known.fields)[:_NEAREST])
        raise scan.error(FilterCode.FIELD_NOT_FOUND, hint=f"there are {names}, ...")
    if field.kind is FieldKind.TIME:
        hint = "in the guest it is a counter, which the host makes a time"
        raise scan.error(FilterCode.NO_TIME_IN_GUEST, start, hint)
    return field
