"""What can be wrong with an event's filter: the kernel's names and texts, and two of our own.

Where the kernel counts from one it does so here: inside a term its marks stand one column late.
"""

from enum import Enum, unique

from kprobes.errors import DefinitionError


@unique
class FilterCode(Enum):
    """One error; the member's name is the kernel's, its value the kernel's text."""

    INVALID_OP = "Invalid operator"
    TOO_MANY_OPEN = "Too many '('"
    TOO_MANY_CLOSE = "Too few '('"
    MISSING_QUOTE = "Missing matching quote"
    MISSING_BRACE_OPEN = "Missing '{'"
    MISSING_BRACE_CLOSE = "Missing '}'"
    OPERAND_TOO_LONG = "Operand too long"
    EXPECT_STRING = "Expecting string field"
    EXPECT_DIGIT = "Expecting numeric field"
    ILLEGAL_FIELD_OP = "Illegal operation for field type"
    FIELD_NOT_FOUND = "Field not found"
    ILLEGAL_INTVAL = "Illegal integer value"
    TOO_MANY_PREDS = "Too many terms in predicate expression"
    INVALID_FILTER = "Meaningless filter expression"
    INVALID_CPULIST = "Invalid cpulist"
    INVALID_VALUE = "Invalid value (did you forget quotes)?"
    NO_FUNCTION = "Function not found"
    ERRNO = "Error"
    NO_FILTER = "No filter found"

    # Ours: where the kernel refuses without a word, and what only the host could do.
    FILTER_TOO_LONG = "Filter is too long: Should be less than 4096"
    NOT_IN_GUEST = "A symstr cannot be filtered"
    NO_TIME_IN_GUEST = "A duration cannot be filtered"


def filter_error(code: FilterCode, *, text: str, column: int, hint: str = "") -> DefinitionError:
    """Return the error for a filter's text, with the mark at a column of it."""
    return DefinitionError(code.name, code.value, command=text, column=column, hint=hint)
