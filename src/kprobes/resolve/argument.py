"""An argument with its type: from what is fetched to what is kept in the record.

As traceprobe_parse_probe_arg_body() in the kernel, from where the expression is known.
"""

from msgspec import Struct

from kprobes.model.codes import Code
from kprobes.model.definition import FetchArg, Member, StackPointer, Text, TypeWord
from kprobes.model.kernel import CType, TypeKind, Types
from kprobes.model.resolved import (
    CommValue,
    Constant,
    Load,
    Operand,
    RegisterValue,
    ReturnedValue,
    StackTraceValue,
    StackValue,
    Storage,
    TextValue,
)
from kprobes.resolve.expression import ResolveContext, Value, evaluate

_WIDTHS = (8, 16, 32, 64)
_INTEGERS = frozenset(f"{sign}{width}" for sign in "usx" for width in _WIDTHS)
_STRINGS = ("string", "ustring")
_CHAR_BITS = 8


class Fetched(Struct, frozen=True, kw_only=True):
    """One argument, ready to be laid out. The names are those of ``Field`` and ``FieldFetch``."""

    name: str
    type: str
    storage: Storage
    size: int
    operand: Operand
    count: int | None = None
    bit_offset: int = 0
    bit_width: int = 0
    text: bytes = b""
    enumerators: tuple[tuple[int, str], ...] = ()

    @property
    def kernel_size(self) -> int:
        """Bytes that the kernel's own record has for it."""
        return (self.size if _is_plain(self) else 4) * (self.count or 1)


def fetch_argument(context: ResolveContext, arg: FetchArg) -> Fetched:
    """Resolve one argument.

    Raises:
        DefinitionError: a name in it means nothing here, or its type does not fit.
    """
    value = evaluate(context, arg.fetch)
    if isinstance(value.operand, CommValue):
        return Fetched(
            name=arg.name, type="string", storage=Storage.COMM, size=0, operand=value.operand
        )
    if isinstance(value.operand, StackTraceValue):
        return stack(arg.name, value.operand)
    if isinstance(value.operand, TextValue):
        return _text(arg, value.operand)
    spec = arg.spec
    if spec is None:
        return _inferred(context, arg, value)
    if spec.base in _STRINGS:
        return _string(context, arg, spec, value)
    if spec.base == "symstr":
        _check_symstr(context, arg, value)
    if spec.count is not None and not _is_kernel_memory(value.operand):
        raise context.error(Code.BAD_STRING, arg.type_span.start, "an array is read from memory")
    return _number(context, arg, spec, value)


def _is_plain(found: Fetched) -> bool:
    return found.storage in (Storage.NUMBER, Storage.DURATION) and found.type != "symstr"


def stack(name: str, operand: StackTraceValue) -> Fetched:
    """Return a stack, ready to be laid out."""
    type_ = "userstacktrace" if operand.is_user else "stacktrace"
    return Fetched(name=name, type=type_, storage=Storage.STACK, size=4, operand=operand)


def _text(arg: FetchArg, operand: Operand) -> Fetched:
    if not isinstance(arg.fetch, Text):
        raise TypeError(f"{arg.fetch} is not text")
    return Fetched(
        name=arg.name,
        type="string",
        storage=Storage.TEXT,
        size=0,
        operand=operand,
        text=arg.fetch.value.encode(errors="surrogateescape"),
    )


def _number(context: ResolveContext, arg: FetchArg, spec: TypeWord, value: Value) -> Fetched:
    is_bits, is_integer = spec.base == "bits", spec.base in _INTEGERS
    return Fetched(
        name=arg.name,
        type=f"u{8 * spec.size}" if is_bits else spec.base,
        storage=Storage.NUMBER,
        # An address, where the kernel has the string that it becomes.
        size=8 if spec.base == "symstr" else spec.size,
        operand=value.operand,
        count=spec.count,
        bit_offset=spec.bit_offset,
        bit_width=spec.bit_width if spec.bit_width < 8 * spec.size else 0,
        enumerators=_names(context, _type_of(context, arg, value)) if is_integer else (),
    )


def _type_of(context: ResolveContext, arg: FetchArg, value: Value) -> CType | None:
    number = context.types.named(f"enum {arg.enum}") if context.types and arg.enum else None
    if context.types is None or number is None:
        return value.ctype
    return context.types.describe(number)


def _inferred(context: ResolveContext, arg: FetchArg, value: Value) -> Fetched:
    type_ = inferred_type(value.ctype)
    size = int(type_[1:]) // 8
    offset, width = _bits(value, size)
    return Fetched(
        name=arg.name,
        type=type_,
        storage=Storage.NUMBER,
        size=size,
        operand=value.operand,
        bit_offset=offset,
        bit_width=width,
        enumerators=_names(context, value.ctype),
    )


def inferred_type(ctype: CType | None) -> str:
    """Return the type word that the kernel takes for an expression that has none.

    As fetch_type_from_btf_type(): what it has no word for is an x64, even a struct.
    """
    match ctype:
        case CType(kind=TypeKind.ENUM, size=size):
            return "s64" if size == 8 else "s32"
        case CType(kind=TypeKind.INT, bits=bits, is_signed=True) if bits in _WIDTHS:
            return f"s{bits}"
        case CType(kind=TypeKind.INT, bits=bits, is_signed=False):
            return f"u{bits}" if bits in _WIDTHS else "u64"
        case _:
            return "x64"


def _bits(value: Value, size: int) -> tuple[int, int]:
    # The kernel shifts a bit-field out of its container only if its width or place is not whole
    # bytes, and reads 4 bytes of every enum: a whole byte then comes with its neighbours. Here
    # the bits are exact.
    ctype = value.ctype
    offset, width = value.bit_offset, value.bit_size
    if ctype is not None and not width:
        is_old = ctype.kind is TypeKind.INT and ctype.bits not in _WIDTHS and not ctype.is_signed
        is_small = ctype.kind is TypeKind.ENUM and 0 < ctype.size < size
        width = ctype.bits if is_old else 8 * ctype.size if is_small else 0
        offset += ctype.bit_offset if is_old else 0
    return (offset, width) if 0 < width < 8 * size else (0, 0)


def _names(context: ResolveContext, ctype: CType | None) -> tuple[tuple[int, str], ...]:
    if ctype is None or context.types is None or ctype.kind is not TypeKind.ENUM:
        return ()
    return context.types.enumerators(ctype.number)


def _string(context: ResolveContext, arg: FetchArg, spec: TypeWord, value: Value) -> Fetched:
    operand = _string_memory(context, arg, spec, value)
    is_user = spec.base == "ustring"
    if isinstance(operand, Constant):
        # The number is the address itself.
        operand = Load(base=operand, offset=0, is_user=is_user)
    if not isinstance(operand, Load):
        hint = f"to read the string that it points to: +0({_expression(arg)}):{spec.base}"
        raise context.error(Code.BAD_STRING, arg.type_span.start, hint)
    if spec.count is not None:
        # What is read there is the first of several pointers.
        operand = Load(base=operand, offset=0, is_user=is_user)
    elif is_user:
        operand = Load(base=operand.base, offset=operand.offset, is_user=True)
    return Fetched(
        name=arg.name,
        type=spec.base,
        storage=Storage.STRING,
        size=spec.size,
        operand=operand,
        count=spec.count,
    )


def _string_memory(context: ResolveContext, arg: FetchArg, spec: TypeWord, value: Value) -> Operand:
    ctype, types = value.ctype, context.types
    if ctype is None or types is None:
        return value.operand
    if ctype.kind is TypeKind.ARRAY and _is_char(types, ctype):
        return value.operand
    if ctype.kind is TypeKind.POINTER and _is_char(types, ctype):
        return Load(base=value.operand, offset=0, is_user=spec.base == "ustring")
    hint = "only char * and char [] are strings"
    raise context.error(Code.BAD_TYPE4STR, _reached(arg), hint)


def _is_char(types: Types, ctype: CType) -> bool:
    # The kernel takes every unsigned byte for a char, and so bool too; before 6.2, when it had
    # no such types in its language, x86's char was signed.
    target = types.describe(ctype.target)
    is_byte = target.kind is TypeKind.INT and target.bits == _CHAR_BITS
    return is_byte and (not target.is_signed or target.name == "char")


def _reached(arg: FetchArg) -> int:
    # Where the kernel has come when it looks at the type: at the last member of a chain.
    fetch = arg.fetch
    return fetch.steps[-1].span.start if isinstance(fetch, Member) else fetch.span.start


def _check_symstr(context: ResolveContext, arg: FetchArg, value: Value) -> None:
    is_value = isinstance(value.operand, RegisterValue | StackValue | ReturnedValue)
    is_address = is_value and not isinstance(arg.fetch, StackPointer)
    if not is_address and not _is_kernel_memory(value.operand):
        hint = "of a register, an argument or kernel memory"
        raise context.error(Code.BAD_SYMSTRING, arg.type_span.start, hint)
    if arg.spec is not None and arg.spec.count is not None:
        raise context.error(Code.BAD_STRING, arg.type_span.start, "there are no arrays of symstr")


def _is_kernel_memory(operand: Operand) -> bool:
    return isinstance(operand, Load) and not operand.is_user


def _expression(arg: FetchArg) -> str:
    return arg.text.partition(":")[0]
