r"""The C of a ``print fmt``: text to the values that it prints.

They are what the preprocessor has left of an event's TP_printk (include/trace/stages,
stage3_trace_output.h and stage7_class_define.h): expressions of the record's fields, and calls of
the few functions that print several numbers as one string. All else that C has is not known, as
are functions of the kernel: ``UnknownPrint`` names it.
"""

import re
from collections.abc import Iterator

from msgspec import Struct

from kprobes.errors import FormatError

_OPERANDS_MAX = 160
"""Of one value, those in the names of __print_flags apart: 126 in what kernels have, of 7.2."""

_DEPTH_MAX = 50
"""Of values in brackets, or in calls, in each other: 16 in what kernels have."""


class UnknownPrint(FormatError):  # noqa: N818 - it is not wrong, but beyond what is known here
    """A ``print fmt`` with something that only its kernel can print; the message names it."""


class PrintType(Struct, frozen=True, kw_only=True):
    """A type of C.

    Attributes:
        bits: of a number, or of what is pointed to; 0 where that is not a number.
        is_signed: likewise.
        is_pointer: whether it is a pointer.
        is_bool: whether every number but 0 becomes 1.
    """

    bits: int
    is_signed: bool = False
    is_pointer: bool = False
    is_bool: bool = False


class Integer(Struct, frozen=True, kw_only=True):
    """A number, of the type that C gives it."""

    value: int
    type: PrintType


class Literal(Struct, frozen=True, kw_only=True):
    """A string."""

    text: bytes


class RecordField(Struct, frozen=True, kw_only=True):
    """A field, or where it is in the record when it is an array."""

    name: str


class KernelAddress(Struct, frozen=True, kw_only=True):
    """A variable of the kernel's that addresses of its structures are computed from."""

    name: str


class LengthOf(Struct, frozen=True, kw_only=True):
    """How many bytes a field has: of one with a place of its own, those of its data."""

    name: str
    is_dynamic: bool


class ElementOf(Struct, frozen=True, kw_only=True):
    """An element of an array."""

    base: "PrintExpression"
    index: "PrintExpression"


class UnaryOperation(Struct, frozen=True, kw_only=True):
    """One of ``- + ! ~ & *`` and its operand."""

    operator: str
    operand: "PrintExpression"


class BinaryOperation(Struct, frozen=True, kw_only=True):
    """An operator between its operands."""

    operator: str
    left: "PrintExpression"
    right: "PrintExpression"


class Conditional(Struct, frozen=True, kw_only=True):
    """``condition ? yes : no``."""

    condition: "PrintExpression"
    yes: "PrintExpression"
    no: "PrintExpression"


class Converted(Struct, frozen=True, kw_only=True):
    """A cast."""

    type: PrintType
    operand: "PrintExpression"


class NamesOf(Struct, frozen=True, kw_only=True):
    """A number as names: ``__print_flags``, or ``__print_symbolic`` where there is no delimiter.

    Attributes:
        value: the number.
        names: constants, and what is printed for them.
        delimiter: between the names of several bits.
    """

    value: "PrintExpression"
    names: "tuple[tuple[PrintExpression, bytes], ...]"
    delimiter: bytes | None = None


class HelperCall(Struct, frozen=True, kw_only=True):
    """A call of another function of ``HELPERS``."""

    name: str
    arguments: "tuple[PrintExpression, ...]"


PrintExpression = (
    Integer
    | Literal
    | RecordField
    | KernelAddress
    | LengthOf
    | ElementOf
    | UnaryOperation
    | BinaryOperation
    | Conditional
    | Converted
    | NamesOf
    | HelperCall
)


HELPERS = {
    "__get_bitmask": 1,
    "__print_hex": 2,
    "__print_hex_str": 2,
    "__print_array": 3,
    "__print_ns_to_secs": 1,
    "__print_ns_without_secs": 1,
    "__builtin_expect": 2,
    "__builtin_constant_p": 1,
    "__fswab16": 1,
    "__fswab32": 1,
    "__fswab64": 1,
    "bstr_printf": 2,
}
"""Functions, and how many arguments they have. No file has the last: it is trace_printk()'s."""


def parse_values(text: str) -> list[PrintExpression]:
    """Read values with commas between them.

    Raises:
        UnknownPrint: one has what is not known here.
        FormatError: it is no C.
    """
    return _Parser(text).values()


_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{1,2})|([0-7]{1,3})|(.))", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v"}


def unescaped(text: str) -> bytes:
    """Return what a string of C is, without its quotation marks."""

    def one(found: re.Match[str]) -> str:
        if found[3] is not None:
            return _ESCAPES.get(found[3], found[3])
        return chr((int(found[1], 16) if found[1] else int(found[2], 8)) & 0xFF)

    return _ESCAPE.sub(one, text).encode(errors="surrogateescape")


_TOKEN = re.compile(
    r'\s*(?P<token>"(?:\\.|[^"\\])*"|\'(?:\\[^\']+|\\\'|[^\'\\])\'|'
    r"0[xX][0-9a-fA-F]+[uUlL]*|\d+[uUlL]*|[A-Za-z_]\w*|"
    r"<<|>>|<=|>=|==|!=|&&|\|\||->|[-+*/%&|^~!<>=?:()\[\]{},.;])",
    re.DOTALL,
)
_LEVELS = "|| && | ^ & ==,!= <,>,<=,>= <<,>> +,- *,/,%"
_RANKS = {op: rank for rank, ops in enumerate(_LEVELS.split()) for op in ops.split(",")}
_CHAR, _INT, _LONG = (PrintType(bits=bits, is_signed=True) for bits in (8, 32, 64))
_UNSIGNED, _UNSIGNED_LONG = PrintType(bits=32), PrintType(bits=64)
_BOOL = PrintType(bits=8, is_bool=True)
_NOTHING = PrintType(bits=0)
_CONSTANTS = {"NULL": 0, "false": 0, "true": 1}
_ADDRESSES = frozenset({"vmemmap_base", "mem_map"})
"""What pfn_to_page() counts from."""
_INTEGER_WORDS = frozenset({"unsigned", "signed", "char", "short", "int", "long", "__signed__"})
_QUALIFIERS = frozenset({"const", "volatile", "struct", "union", "enum"})
_NAMED_TYPES = {
    **{
        f"{before}{sign}{bits}{after}": PrintType(bits=bits, is_signed=sign in ("s", "int"))
        for bits in (8, 16, 32, 64)
        for before, sign, after in (
            ("", "u", ""), ("", "s", ""), ("__", "u", ""), ("__", "s", ""), ("", "uint", "_t"),
            ("", "int", "_t"), ("__", "le", ""), ("__", "be", ""),
        )
    },
    **dict.fromkeys(("gfp_t", "dev_t", "uid_t", "fmode_t", "uint", "blk_opf_t"), _UNSIGNED),
    **dict.fromkeys(("pid_t", "__kernel_rwf_t"), _INT),
    **dict.fromkeys(("umode_t", "ushort", "sa_family_t"), PrintType(bits=16)),
    **dict.fromkeys(
        ("size_t", "sector_t", "blkcnt_t", "dma_addr_t", "phys_addr_t", "resource_size_t", "ulong",
         "uintptr_t", "pgoff_t", "ino_t", "pteval_t", "pmdval_t", "pudval_t", "p4dval_t"),
        _UNSIGNED_LONG,
    ),
    **dict.fromkeys(("loff_t", "ssize_t", "ktime_t", "time64_t", "ptrdiff_t", "off_t"), _LONG),
    "bool": _BOOL, "_Bool": _BOOL, "void": _NOTHING,
}  # fmt: skip
_DATA = re.compile(r"__get_(?:rel_)?(?:str|dynamic_array|sockaddr|buf)")
_DATA_LENGTH = re.compile(r"__get_(?:rel_)?dynamic_array_len")
_BITMASK = re.compile(r"__get_(?:rel_)?(?:bitmask|cpumask)")
_NAMES = re.compile(r"__print_(flags|symbolic)(?:_u64)?")
_SWAP = re.compile(r"__(?:fswab|builtin_bswap|swab)(16|32|64)")


class _Parser:
    # The tokens, and the place in them.

    def __init__(self, text: str) -> None:
        self._tokens = list(_tokens(text))
        self._at = 0
        self._operands = self._depth = 0
        self._is_apart = False

    def values(self) -> list[PrintExpression]:
        """Return all values."""
        found: list[PrintExpression] = []
        while self._token:
            self._operands = 0
            found.append(self._conditional())
            if self._token:
                self._expect(",")
        return found

    @property
    def _token(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def _next(self) -> str:
        token = self._token
        self._at += 1
        return token

    def _accept(self, token: str) -> bool:
        is_there = self._token == token
        self._at += is_there
        return is_there

    def _expect(self, token: str) -> None:
        if not self._accept(token):
            raise UnknownPrint(f"{self._token or 'the end'!r} where {token!r} is expected")

    def _count(self) -> None:
        # Bounds the depth of what is read here, and of what others make of it.
        self._operands += 1
        if self._operands > _OPERANDS_MAX:
            raise UnknownPrint(f"a value of more than {_OPERANDS_MAX} operands")

    def _apart(self) -> PrintExpression:
        # A value, what is in which is not counted among what is around it.
        if self._is_apart:
            raise UnknownPrint("names of names")
        outer, self._operands, self._is_apart = self._operands, 0, True
        found = self._conditional()
        self._operands, self._is_apart = outer, False
        return found

    def _conditional(self) -> PrintExpression:
        self._depth += 1
        if self._depth > _DEPTH_MAX:
            raise UnknownPrint(f"more than {_DEPTH_MAX} values in each other")
        found = self._binary(0)
        if self._accept("?"):
            self._count()
            yes = found if self._token == ":" else self._conditional()
            self._expect(":")
            found = Conditional(condition=found, yes=yes, no=self._conditional())
        self._depth -= 1
        return found

    def _binary(self, least: int) -> PrintExpression:
        left = self._unary()
        while (rank := _RANKS.get(self._token, -1)) >= least:
            operator = self._next()
            left = BinaryOperation(operator=operator, left=left, right=self._binary(rank + 1))
        return left

    def _unary(self) -> PrintExpression:
        self._count()
        token = self._token
        if token and token in "-+!~&*":
            return UnaryOperation(operator=self._next(), operand=self._unary())
        if token == "sizeof":
            return self._size()
        if token == "(":
            self._next()
            type_ = self._type()
            if type_ is not None:
                self._expect(")")
                return Converted(type=type_, operand=self._unary())
            found = self._conditional()
            self._expect(")")
            return self._elements(found)
        return self._elements(self._primary())

    def _elements(self, found: PrintExpression) -> PrintExpression:
        while self._accept("["):
            self._count()
            found = ElementOf(base=found, index=self._conditional())
            self._expect("]")
        if self._token in (".", "->"):
            raise UnknownPrint("a member of a structure")
        return found

    def _size(self) -> PrintExpression:
        self._next()
        self._expect("(")
        type_ = self._type()
        if type_ is None:
            found = self._conditional()
            if not isinstance(found, RecordField):
                raise UnknownPrint("sizeof a value")
            size = LengthOf(name=found.name, is_dynamic=False)
        elif not type_.bits and not type_.is_pointer:
            raise UnknownPrint("sizeof a structure")
        else:
            bits = 64 if type_.is_pointer else type_.bits
            size = Integer(value=bits // 8, type=_UNSIGNED_LONG)
        self._expect(")")
        return size

    def _type(self) -> PrintType | None:
        # A type, if the next tokens are one.
        start, words = self._at, list[str]()
        while self._token in _QUALIFIERS or self._token in _INTEGER_WORDS:
            is_tag = self._token in ("struct", "union", "enum")
            words.append(self._next())
            self._at += is_tag
        if not words or words == ["const"]:
            words.append(self._token)
            named = _NAMED_TYPES.get(self._next())
            is_pointer = self._token == "*" and self._tokens[self._at + 1 : self._at + 2] == [")"]
            if named is None and not (is_pointer and words[-1].isidentifier()):
                self._at = start
                return None
        found = _type_of(words)
        pointers = 0
        while self._accept("*") or self._accept("const"):
            pointers += self._tokens[self._at - 1] == "*"
        if not pointers:
            return found
        # GNU C counts a pointer to void in bytes.
        bits = 64 if pointers > 1 else 8 if words[-1] == "void" else found.bits
        return PrintType(bits=bits, is_signed=found.is_signed, is_pointer=True)

    def _primary(self) -> PrintExpression:
        token = self._next()
        if token.startswith('"'):
            self._at -= 1
            return Literal(text=self._string())
        if token.startswith("'"):
            code = unescaped(token[1:-1])
            return Integer(value=code[0] if code else 0, type=_INT)
        if token[:1].isdecimal():
            return _integer(token)
        if token == "REC":
            self._expect("->")
            return RecordField(name=self._next())
        if token in _CONSTANTS:
            return Integer(value=_CONSTANTS[token], type=_LONG if token == "NULL" else _INT)
        if token in _ADDRESSES:
            return KernelAddress(name=token)
        if self._token == "(":
            return self._call(token)
        raise UnknownPrint(f"{token or 'the end'!r} in a print fmt")

    def _string(self) -> bytes:
        found = b""
        if not self._token.startswith('"'):
            raise UnknownPrint(f"{self._token!r} where a string is expected")
        while self._token.startswith('"'):
            found += unescaped(self._next()[1:-1])
        return found

    def _call(self, name: str) -> PrintExpression:
        names = _NAMES.fullmatch(name)
        if names is not None:
            return self._names(is_flags=names[1] == "flags")
        self._expect("(")
        is_length = _DATA_LENGTH.fullmatch(name)
        is_mask = _BITMASK.fullmatch(name)
        if is_length or is_mask or _DATA.fullmatch(name):
            found: PrintExpression = RecordField(name=self._next())
            if is_length:
                found = LengthOf(name=found.name, is_dynamic=True)
            elif is_mask:
                found = HelperCall(name="__get_bitmask", arguments=(found,))
        elif name == "__print_dynamic_array":
            found = self._dynamic_array()
        else:
            found = self._helper(name)
        self._expect(")")
        return found

    def _dynamic_array(self) -> PrintExpression:
        field = self._next()
        self._expect(",")
        size = self._conditional()
        length = LengthOf(name=field, is_dynamic=True)
        count = BinaryOperation(operator="/", left=length, right=size)
        arguments = (RecordField(name=field), count, size)
        return HelperCall(name="__print_array", arguments=arguments)

    def _helper(self, name: str) -> PrintExpression:
        swap = _SWAP.fullmatch(name)
        name = name if swap is None else f"__fswab{swap[1]}"
        if name not in HELPERS:
            raise UnknownPrint(f"the function {name}()")
        arguments = [self._conditional()]
        while self._accept(","):
            arguments.append(self._conditional())
        if len(arguments) != HELPERS[name]:
            raise FormatError(f"{name}() of {len(arguments)} arguments")
        return HelperCall(name=name, arguments=tuple(arguments))

    def _names(self, *, is_flags: bool) -> PrintExpression:
        self._expect("(")
        value = self._conditional()
        delimiter = None
        if is_flags:
            self._expect(",")
            delimiter = self._string()
        names: list[tuple[PrintExpression, bytes]] = []
        is_ended = False
        while self._accept(","):
            self._expect("{")
            number = self._apart()
            self._expect(",")
            name = self._name()
            if name is None:
                is_ended = True
            elif not is_ended:
                names.append((number, name))
            self._expect("}")
        self._expect(")")
        return NamesOf(value=value, names=tuple(names), delimiter=delimiter)

    def _name(self) -> bytes | None:
        # Of a null pointer, which ends the names, None.
        found = self._apart()
        while isinstance(found, Converted):
            found = found.operand
        match found:
            case Literal(text=text):
                return text
            case Integer(value=0):
                return None
            case _:
                raise UnknownPrint("a name that is no string")


def _tokens(text: str) -> Iterator[str]:
    at, end = 0, len(text.rstrip())
    while at < end:
        found = _TOKEN.match(text, at)
        if found is None:
            raise FormatError(f"no C of a print fmt: {text[at : at + 20]!r}")
        yield found["token"]
        at = found.end()


def _type_of(words: list[str]) -> PrintType:
    if "struct" in words or "union" in words:
        return _NOTHING
    if words[-1] not in _INTEGER_WORDS and words[-1] not in _QUALIFIERS:
        return _NAMED_TYPES.get(words[-1], _NOTHING)
    # GCC's enums are unsigned as long as no enumerator is negative.
    is_signed = not {"unsigned", "enum"} & set(words)
    for word, bits in (("char", 8), ("short", 16), ("long", 64)):
        if word in words:
            return PrintType(bits=bits, is_signed=is_signed)
    return PrintType(bits=32, is_signed=is_signed)


def _integer(token: str) -> Integer:
    # C11, 6.4.4.1: the first type that has it, of those that its base and suffix allow.
    digits = token.rstrip("uUlL")
    suffix = token[len(digits) :].lower()
    is_octal = digits.startswith("0") and digits.isdecimal()
    if len(digits) > 24 or (is_octal and not set(digits) <= set("01234567")):
        raise FormatError(f"no number of C: {token[:30]}")
    value = int(digits, 8 if is_octal else 0)
    is_decimal = digits.isdecimal() and not is_octal
    for type_ in (_INT, _UNSIGNED, _LONG, _UNSIGNED_LONG):
        is_allowed = (
            type_.is_signed != ("u" in suffix)
            if is_decimal
            else (not type_.is_signed or "u" not in suffix)
        )
        if (
            is_allowed
            and not ("l" in suffix and type_.bits == 32)
            and (value < 1 << (type_.bits - type_.is_signed))
        ):
            return Integer(value=value, type=type_)
    return Integer(value=value & ((1 << 64) - 1), type=_UNSIGNED_LONG)
