"""Errors of definitions, filters and hist triggers: the kernel's names and texts, and some of ours.

The texts are those of the newest release that has the error (``error_log`` shows nothing else
of it); older releases differ in a few words, which ``docs/reference/language.md`` lists.
Marks in a filter stand one column late inside a term, as the kernel counts from one there.
"""

from enum import Enum, unique

from kprobes.errors import DefinitionError


@unique
class Code(Enum):
    """One error; the member's name is the kernel's, its value the kernel's text."""

    # The statement and its place.
    BAD_MAXACT_TYPE = "Maxactive is only for function exit"
    BAD_MAXACT = "Invalid maxactive number"
    MAXACT_TOO_BIG = "Maxactive is too big"
    BAD_PROBE_ADDR = "Invalid probed address or symbol"
    NON_UNIQ_SYMBOL = "The symbol is not unique"
    BAD_RETPROBE = "Retprobe address must be an function entry"
    BAD_ADDR_SUFFIX = "Invalid probed address suffix"
    NO_TRACEPOINT = "Tracepoint is not found"
    BAD_TP_NAME = "Invalid character in tracepoint name"
    BAD_INSN_BNDRY = "Probe point is not an instruction boundary"
    FAIL_REG_PROBE = "Failed to register probe event"

    # Names of groups and events.
    NO_GROUP_NAME = "Group name is not specified"
    GROUP_TOO_LONG = "Group name is too long"
    BAD_GROUP_NAME = "Group name must follow the same rules as C identifiers"
    NO_EVENT_NAME = "Event name is not specified"
    EVENT_TOO_LONG = "Event name is too long"
    BAD_EVENT_NAME = "Event name must follow the same rules as C identifiers"
    EVENT_EXIST = "Given group/event name is already used by another event"
    DIFF_PROBE_TYPE = "Probe type is different from existing probe"
    DIFF_ARG_TYPE = "Argument type or name is different from existing probe"
    SAME_PROBE = "There is already the exact same probe event"

    # Argument words.
    TOO_MANY_ARGS = "Too many arguments are specified"
    TOO_MANY_EARGS = "Too many entry arguments specified"
    EVENT_TOO_BIG = "Event too big (too many fields?)"
    ARG_NAME_TOO_LONG = "Argument name is too long"
    NO_ARG_NAME = "Argument name is not specified"
    BAD_ARG_NAME = "Argument name must follow the same rules as C identifiers"
    USED_ARG_NAME = "This argument name is already used"
    ARG_TOO_LONG = "Argument expression is too long"
    NO_ARG_BODY = "No argument expression"

    # Types.
    BAD_TYPE = "Unknown type is specified"
    BAD_STRING = "String accepts only memory argument"
    BAD_SYMSTRING = "Symbol String doesn't accept data/userdata"
    BAD_BITFIELD = "Invalid bitfield"
    NEED_STRING_TYPE = "$comm and immediate-string only accepts string type"
    ARRAY_NO_CLOSE = "Array is not closed"
    BAD_ARRAY_SUFFIX = "Array has wrong suffix"
    BAD_ARRAY_NUM = "Invalid array size"
    ARRAY_TOO_BIG = "Array number is too big"

    # Fetch expressions.
    BAD_FETCH_ARG = "Invalid fetch argument"
    BAD_REG_NAME = "Invalid register name"
    BAD_VAR = "Invalid $-variable specified"
    RETVAL_ON_PROBE = "$retval is not available on probe"
    NO_RETVAL = "This function returns 'void' type"
    BAD_STACK_NUM = "Invalid stack number"
    BAD_ARG_NUM = "Invalid argument number"
    BAD_MEM_ADDR = "Invalid memory address"
    FILE_ON_KPROBE = "File offset is not available with kprobe"
    BAD_IMM = "Invalid immediate value"
    IMMSTR_NO_CLOSE = "String is not closed with '\"'"
    DEREF_NEED_BRACE = "Dereference needs a brace"
    BAD_DEREF_OFFS = "Invalid dereference offset"
    DEREF_OPEN_BRACE = "Dereference brace is not closed"
    COMM_CANT_DEREF = "$comm can not be dereferenced"
    TOO_MANY_OPS = "Dereference is too much nested"
    TOO_MANY_NESTED = "Too many nested typecasts/dereferences"

    # Types of the kernel.
    NOSUP_BTFARG = "BTF is not available or not supported"
    NO_BTFARG = "This variable is not found at this probe point"
    NO_BTF_ENTRY = "No BTF entry for this probe point"
    NO_BTF_FIELD = "This field is not found."
    BAD_BTF_TID = "Failed to get BTF type info."
    BAD_TYPE4STR = "This type does not fit for string."
    NO_PTR_STRCT = "This is not a pointer to union/structure."
    NOSUP_DAT_ARG = "Non pointer structure/union argument is not supported."
    BAD_HYPHEN = "Failed to parse single hyphen. Forgot '>'?"
    TYPECAST_REQ_FIELD = "Typecast requires a field access"
    TYPECAST_NOT_ALIGNED = "Typecast field option is not byte-aligned"
    TYPECAST_BAD_ARROW = "Typecast field option does not support -> operator"
    TYPECAST_SYM_OFFSET = "@SYM+/-OFFSET with typecast needs parentheses"
    NOFENTRY_ARGS = "$arg* can be used only on function entry or exit"
    BAD_VAR_ARGS = "$arg* must be an independent parameter without name etc."
    DOUBLE_ARGS = "$arg* can be used only once in the parameters"
    ARGS_2LONG = "$arg* failed because the argument list is too long"
    ARGIDX_2BIG = "$argN index is too big"

    # Ours: where the kernel refuses without a word, and what we cannot do yet.
    LINE_TOO_LONG = "Line length is too long: Should be less than 4094"
    NO_STATEMENT = "No definition is specified"
    MANY_STATEMENTS = "Only one definition is accepted here"
    BAD_STATEMENT = "A definition must start with p, r, f or t"
    IS_DELETION = "A definition is wanted here, not the deletion of an event"
    BAD_DELETION = "A deletion is written -:[GROUP/]EVENT"
    NO_EVENT = "No event of this name, place and arguments is defined"
    NO_PLACE = "No function to probe is specified"
    NOT_KPROBE = "This is not a kprobe event"
    NOT_YET = "This form is not supported yet"
    NOT_IN_RELEASE = "This kernel's release cannot record that"

    @property
    def text(self) -> str:
        """The wording."""
        return self.value


def text_of(code: str) -> str:
    """Return the wording of a code by its name."""
    return Code[code].text


def rejection(code: Code, *, command: str, column: int, hint: str = "") -> DefinitionError:
    """Return the error for a command, with the caret at a column of it.

    Args:
        code: what is wrong.
        command: the whole text.
        column: of the caret, from 0.
        hint: what would be right, or "".
    """
    return DefinitionError(code.name, code.text, command=command, column=column, hint=hint)


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
    """Return the error for a filter's text, with the mark at a column of it.

    Args:
        code: what is wrong.
        text: the whole filter.
        column: of the mark, from 0.
        hint: what would be right, or "".
    """
    return DefinitionError(code.name, code.value, command=text, column=column, hint=hint)


@unique
class HistCode(Enum):
    """One error; the member's name is the kernel's, its value the kernel's text."""

    DUPLICATE_VAR = "Variable already defined"
    TOO_MANY_VARS = "Too many variables defined"
    MALFORMED_ASSIGNMENT = "Malformed assignment"
    TOO_MANY_SUBEXPR = "Too many subexpressions (3 max)"
    TIMESTAMP_MISMATCH = "Timestamp units in expression don't match"
    VAR_NOT_FOUND = "Couldn't find variable"
    INVALID_STR_OPERAND = "String type can not be an operand in expression"
    EXPECT_NUMBER = "Expecting numeric literal"
    UNARY_MINUS_SUBEXPR = "Unary minus not supported in sub-expressions"
    DIVISION_BY_ZERO = "Division by zero"
    EMPTY_ASSIGNMENT = "Empty assignment"
    BAD_FIELD_MODIFIER = "Invalid field modifier"
    FIELD_NOT_FOUND = "Couldn't find field"
    INVALID_SORT_MODIFIER = "Invalid sort modifier"
    EMPTY_SORT_FIELD = "Empty sort field"
    TOO_MANY_SORT_FIELDS = "Too many sort fields (Max = 2)"
    INVALID_SORT_FIELD = "Sort field must be a key or a val"
    NEED_NOHC_VAL = "Non-hitcount value is required for 'nohitcount'"
    ONX_NOT_VAR = "For onmax(x) or onchange(x), x must be a variable"
    ONX_VAR_NOT_FOUND = "Couldn't find onmax or onchange variable"
    ONX_VAR_CREATE_FAIL = "Couldn't create onmax or onchange variable"
    ACTION_NOT_FOUND = "No action found"
    NO_CLOSING_PAREN = "No closing paren found"
    INVALID_PARAM = "Invalid action parameter"
    TOO_MANY_SAVE_ACTIONS = "Can't have more than one save() action per hist"
    FIELD_VAR_CREATE_FAIL = "Couldn't create field variable"
    TRIGGER_ENOENT_CLEAR = "Can't clear or continue a nonexistent hist trigger"
    TRIGGER_EEXIST = "Hist trigger already exists"
    NAMED_MISMATCH = "Named hist trigger doesn't match existing named trigger (includes variables)"

    # Ours: where the kernel refuses without a word, and what we cannot do.
    NO_KEYS = "A hist trigger needs keys"
    TOO_MANY_KEYS = "Too many keys (Max = 3)"
    TOO_MANY_VALS = "Too many values (Max = 2)"
    BAD_SIZE = "Invalid size of the table"
    BAD_WORD = "Unknown word in a hist trigger"
    BAD_IF = "A filter is written: if FIELD OPERATOR VALUE"
    BAD_KEY = "Field cannot be a key"
    BAD_VAL = "Field cannot be a value"
    NOT_RECORDED = "Field is not recorded"
    BAD_EXPRESSION = "An operator has an operand on either side, and - one in parentheses"
    NO_ACTIONS = "No such action here"


def hist_error(code: HistCode, *, text: str, token: str, hint: str = "") -> DefinitionError:
    """Return the error for a hist trigger's text, with the mark where a token first occurs in it.

    So does the kernel's err_pos(); what does not occur is marked at the beginning.

    Args:
        code: what is wrong.
        text: the whole trigger.
        token: what the mark stands at.
        hint: what would be right, or "".
    """
    column = max(text.find(token), 0)
    return DefinitionError(code.name, code.value, command=text, column=column, hint=hint)


@unique
class TriggerCode(Enum):
    """One error of a trigger, all ours: the kernel says EINVAL, or EEXIST, without a word."""

    UNKNOWN_COMMAND = "No such trigger"
    NO_TARGET = "Which event? A trigger that enables or disables one names it"
    NO_EVENT = "No such event"
    BAD_COUNT = "Invalid count"
    BAD_IF = "A filter is written: if FIELD OPERATOR VALUE"
    EXISTS = "The event has such a trigger already"
    TOO_MANY = "Too many triggers, or events that are switched"
    NO_STACK = "The trigger has no stack to give"


def trigger_error(code: TriggerCode, *, text: str, column: int, hint: str) -> DefinitionError:
    """Return the error for a trigger's text, with the mark at a column of it.

    Args:
        code: what is wrong.
        text: the whole trigger.
        column: of the mark, from 0.
        hint: what would be right.
    """
    return DefinitionError(code.name, code.value, command=text, column=column, hint=hint)
