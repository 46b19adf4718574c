"""Values of a ``print fmt``: an expression of ``formats.print_c`` and columns, to a column.

Arrays, and what is pointed to in the record, are its bytes.
"""

from collections.abc import Callable, Mapping
from typing import Any, assert_never, cast

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from kprobes.formats.print_c import (
    BinaryOperation,
    Conditional,
    Converted,
    ElementOf,
    HelperCall,
    Integer,
    KernelAddress,
    LengthOf,
    Literal,
    NamesOf,
    PrintExpression,
    PrintType,
    RecordField,
    UnaryOperation,
    UnknownPrint,
)
from kprobes.formats.print_fmt import LINE_MAX
from kprobes.model.events import Column
from kprobes.model.resolved import Field, Storage
from kprobes.sinks.print_numbers import (
    INT,
    UNSIGNED,
    UNSIGNED_LONG,
    Compute,
    Dtype,
    Numbers,
    always,
    binary,
    common,
    computed,
    constant,
    dtype_of,
    unary,
)
from kprobes.units import U64


class CStrings(Struct, frozen=True, kw_only=True):
    """Strings without NUL, objects of ``bytes``; None for a null pointer."""

    column: Compute
    is_constant: bool = False


class RecordBytes(Struct, frozen=True, kw_only=True):
    """Where bytes of the record are: objects of ``bytes``.

    Attributes:
        column: computes them, up to the end of their field.
        element: of what they are an array of; None where that is not known.
        numbers: computes the same as numbers, of shape (n, count), where it is an array of them.
    """

    column: Compute
    element: Dtype | None
    numbers: Compute | None = None


class HashedAddresses(Struct, frozen=True, kw_only=True):
    """Addresses that are printed only by ``%p``, as no record has them: objects of ``bytes``."""

    column: Compute


PrintValue = Numbers | CStrings | RecordBytes | HashedAddresses

HASHED = b"(____ptrval____)"
"""What a kernel prints for an address before it can hash any: lib/vsprintf.c, default_pointer()."""
_REMEMBERED = 1 << 14
_NS_PER_S = 1_000_000_000
_WORD = 4


def number_of(value: PrintValue, where: str) -> Numbers:
    """Return a value that has to be a number, or raise UnknownPrint."""
    if not isinstance(value, Numbers):
        raise UnknownPrint(f"{where} of what is no number")
    return value


def bytes_of(value: PrintValue, where: str) -> Compute:
    """Return what computes bytes of the record, or raise UnknownPrint."""
    if not isinstance(value, RecordBytes):
        # Of a string the record may have more than its bytes up to the first NUL.
        raise UnknownPrint(f"{where} of what is no array of bytes")
    return value.column


def c_string(data: bytes) -> bytes:
    """Return bytes up to the first NUL."""
    return data.partition(b"\0")[0]


def objects(values: list[Any]) -> Column:
    """Return ``bytes`` and None as a new object array of shape (n,)."""
    return np.array(values, object)


class Values:
    """Makes values of expressions of one event's fields."""

    def __init__(self, fields: tuple[Field, ...]) -> None:
        self._fields: Mapping[str, tuple[int, Field]] = {
            field.name: (at, field) for at, field in enumerate(fields)
        }

    def of(self, expression: PrintExpression) -> PrintValue:
        """Return what an expression computes, or raise UnknownPrint."""
        match expression:
            case Integer(value=value, type=type_):
                return constant(value, dtype_of(type_))
            case Literal(text=text):
                return CStrings(column=always(objects([text])), is_constant=True)
            case RecordField(name=name):
                return self._field(name)
            case KernelAddress():
                return HashedAddresses(column=always(objects([HASHED])))
            case LengthOf(name=name, is_dynamic=is_dynamic):
                return self._length(name, is_dynamic=is_dynamic)
            case NamesOf() | HelperCall():
                return self._called(expression)
            case _:
                return self._operation(expression)

    def _operation(
        self, expression: ElementOf | UnaryOperation | BinaryOperation | Conditional | Converted
    ) -> PrintValue:
        match expression:
            case ElementOf(base=base, index=index):
                return _element(self.of(base), number_of(self.of(index), "an index"))
            case UnaryOperation(operator=operator, operand=operand):
                return self._unary(operator, operand)
            case BinaryOperation(operator=operator, left=left, right=right):
                return _binary(operator, self.of(left), self.of(right))
            case Conditional(condition=condition, yes=yes, no=no):
                chosen = number_of(self.of(condition), "a condition")
                return _conditional(chosen, self.of(yes), self.of(no))
            case Converted(type=type_, operand=operand):
                return _converted(self.of(operand), type_)
            case _:
                assert_never(expression)

    def _called(self, expression: NamesOf | HelperCall) -> PrintValue:
        if isinstance(expression, NamesOf):
            value = number_of(self.of(expression.value), "names")
            names = [(self._constant(number), text) for number, text in expression.names]
            delimiter = expression.delimiter
            texts = _SymbolicTexts(names) if delimiter is None else _FlagTexts(names, delimiter)
            return _named(value, texts)
        return _call(expression.name, [self.of(each) for each in expression.arguments])

    def _constant(self, expression: PrintExpression) -> int:
        number = number_of(self.of(expression), "a name")
        if not number.is_constant:
            raise UnknownPrint("a name of what is no constant")
        return int(number.column(())[0]) & U64

    def _place(self, name: str) -> tuple[int, Field]:
        if name not in self._fields:
            raise UnknownPrint(f"the field {name}, which the event does not have")
        return self._fields[name]

    def _field(self, name: str) -> PrintValue:
        at, field = self._place(name)
        if field.storage is Storage.NUMBER:
            letter = "i" if field.is_signed else "u"
            dtype = np.dtype(f"<{letter}{field.size}")
            if field.count is None:
                return Numbers(dtype=dtype, column=lambda columns: columns[at])
            return RecordBytes(
                column=lambda columns: _row_bytes(columns[at]),
                element=dtype,
                numbers=lambda columns: columns[at],
            )
        if field.count is not None:
            raise UnknownPrint(f"the field {name}, an array of {field.type}")
        if field.type == "bytes":
            return RecordBytes(column=lambda columns: columns[at], element=None)
        return CStrings(column=lambda columns: columns[at])

    def _length(self, name: str, *, is_dynamic: bool) -> PrintValue:
        at, field = self._place(name)
        is_here = not field.declared.startswith("__")
        if is_here and not is_dynamic:
            return constant(field.size * (field.count or 1), UNSIGNED_LONG)
        if is_here or not is_dynamic or field.type != "bytes":
            raise UnknownPrint(f"the length of {name}")

        def lengths(columns: tuple[Column, ...]) -> Column:
            return np.array(list(map(len, columns[at].tolist())), UNSIGNED)

        return Numbers(dtype=UNSIGNED, column=lengths)

    def _unary(self, operator: str, operand: PrintExpression) -> PrintValue:
        if operator == "&" and isinstance(operand, ElementOf):
            index = number_of(self.of(operand.index), "an index")
            return _from(self.of(operand.base), index)
        value = self.of(operand)
        if operator == "&":
            return _address(value)
        if operator == "*":
            return _element(value, constant(0, INT))
        return unary(operator, number_of(value, f"the operator {operator}"))


def _binary(operator: str, left: PrintValue, right: PrintValue) -> PrintValue:
    if operator in ("+", "-"):
        pointer = _moved(operator, left, right)
        if pointer is not None:
            return pointer
    where = f"the operator {operator}"
    return binary(operator, number_of(left, where), number_of(right, where))


def _moved(operator: str, left: PrintValue, right: PrintValue) -> PrintValue | None:
    # Of pointers, which count in what they point to.
    for pointer, other in ((left, right), (right, left)):
        if isinstance(pointer, HashedAddresses):
            return pointer
        if isinstance(pointer, Numbers) and pointer.pointee is not None:
            if pointer.pointee == 0:
                return HashedAddresses(column=always(objects([HASHED])))
            if pointer.pointee > 1:
                raise UnknownPrint("arithmetic of pointers")
        if isinstance(pointer, RecordBytes) and operator == "+":
            size = 1 if pointer.element is None else pointer.element.itemsize
            return _from(pointer, number_of(other, "a pointer plus"), size=size)
    return None


def _conditional(condition: Numbers, yes: PrintValue, no: PrintValue) -> PrintValue:
    if condition.is_constant and type(yes) is type(no) and not isinstance(yes, Numbers):
        return yes if condition.column(())[0] else no
    match yes, no:
        case Numbers(), Numbers():
            dtype = common(yes.dtype, no.dtype)
            return computed(
                dtype,
                lambda x: np.where(x[0] != 0, x[1].astype(dtype), x[2].astype(dtype)),
                condition,
                yes,
                no,
            )
        case (HashedAddresses(), _) | (_, HashedAddresses()):
            return HashedAddresses(column=_chosen(condition, _hashed(yes), _hashed(no)))
        case (RecordBytes(), RecordBytes()):
            element = yes.element if yes.element == no.element else None
            column = _chosen(condition, yes.column, no.column)
            return RecordBytes(column=column, element=element)
        case _:
            return CStrings(column=_chosen(condition, _strings(yes), _strings(no)))


def _chosen(condition: Numbers, yes: Compute, no: Compute) -> Compute:
    def column(columns: tuple[Column, ...]) -> Column:
        return np.where(condition.column(columns) != 0, yes(columns), no(columns))

    return column


def _hashed(value: PrintValue) -> Compute:
    if isinstance(value, HashedAddresses):
        return value.column
    number = number_of(value, "an address")
    return lambda columns: objects([b"%016x" % (a & U64) for a in number.column(columns).tolist()])


def _strings(value: PrintValue) -> Compute:
    if isinstance(value, CStrings):
        return value.column
    if isinstance(value, RecordBytes):
        return lambda columns: objects(list(map(c_string, value.column(columns).tolist())))
    if isinstance(value, Numbers) and value.is_constant and not value.column(())[0]:
        return always(objects([None]))
    raise UnknownPrint("a choice of a string and something else")


def _converted(value: PrintValue, type_: PrintType) -> PrintValue:
    pointee = type_.bits // 8 if type_.is_pointer else None
    match value:
        case Numbers():
            dtype = dtype_of(type_)
            if type_.is_bool and not type_.is_pointer:
                return computed(dtype, lambda x: x[0] != 0, value)
            found = computed(dtype, lambda x: x[0].astype(dtype), value)
            # Casts of pointers to numbers are for the format only.
            return Numbers(
                dtype=found.dtype,
                column=found.column,
                is_constant=found.is_constant,
                pointee=pointee,
            )
        case RecordBytes() if pointee:
            element = dtype_of(PrintType(bits=type_.bits, is_signed=type_.is_signed))
            is_same = element == value.element
            numbers = value.numbers if is_same else None
            return RecordBytes(column=value.column, element=element, numbers=numbers)
        case CStrings() | RecordBytes() if type_.is_pointer:
            return value
        case HashedAddresses() if type_.is_pointer or type_.bits == 64:
            return value
        case _:
            raise UnknownPrint("an address as a number")


def _row_bytes(column: Column) -> Column:
    # The bytes of each row of numbers, (n,) or (n, count).
    if not len(column):
        return objects([])
    table = np.ascontiguousarray(column).reshape(len(column), -1)
    width = table.dtype.itemsize * table.shape[1]
    whole = table.tobytes()
    return objects([whole[at : at + width] for at in range(0, len(whole), width)])


def _address(value: PrintValue) -> PrintValue:
    match value:
        case Numbers(is_constant=False):
            column = value.column
            return RecordBytes(
                column=lambda columns: _row_bytes(column(columns)), element=value.dtype
            )
        case RecordBytes() | CStrings():
            return value
        case _:
            raise UnknownPrint("the address of what is no field")


def _from(base: PrintValue, index: Numbers, *, size: int | None = None) -> PrintValue:
    # The address of an element.
    if not isinstance(base, RecordBytes) or (base.element is None and size is None):
        raise UnknownPrint("the address of an element")
    element = size or cast("Dtype", base.element).itemsize

    def column(columns: tuple[Column, ...]) -> Column:
        whole = base.column(columns)
        places = np.broadcast_to(index.column(columns), whole.shape).tolist()
        pairs = zip(whole.tolist(), places, strict=True)
        return objects([data[max(at * element, 0) :] for data, at in pairs])

    return RecordBytes(column=column, element=base.element)


def _element(base: PrintValue, index: Numbers) -> PrintValue:
    if isinstance(base, CStrings) and index.is_constant and index.column(())[0] == 0:
        return Numbers(
            dtype=INT,
            column=lambda columns: np.array(
                [text[0] if text else 0 for text in base.column(columns).tolist()], INT
            ),
        )
    if not isinstance(base, RecordBytes) or base.element is None:
        raise UnknownPrint("an element of what is no array of numbers")
    if base.numbers is not None:
        return _number_at(base.element, base.numbers, index)
    found = _from(base, index)
    element = base.element
    tail = bytes_of(found, "an element")
    return Numbers(dtype=element, column=lambda columns: _first_numbers(tail(columns), element))


def _number_at(element: Dtype, numbers: Compute, index: Numbers) -> Numbers:
    # Beyond the array the kernel would read what follows it.
    def column(columns: tuple[Column, ...]) -> Column:
        table = numbers(columns)
        at = index.column(columns).astype(np.int64)
        is_inside = (at >= 0) & (at < table.shape[1])
        if index.is_constant:
            return table[:, int(at[0])] if is_inside[0] else np.zeros(len(table), element)
        places = np.where(is_inside, at, 0)
        return np.where(is_inside, table[np.arange(len(table)), places], element.type(0))

    return Numbers(dtype=element, column=column)


def _first_numbers(tails: Column, element: Dtype) -> Column:
    size = element.itemsize
    whole = b"".join(data[:size].ljust(size, b"\0") for data in tails.tolist())
    return np.frombuffer(whole, element)


class _FlagTexts(dict[int, bytes]):
    # trace_print_flags_seq() of kernel/trace/trace_output.c.

    def __init__(self, names: list[tuple[int, bytes]], delimiter: bytes) -> None:
        super().__init__()
        self._names = names
        self._delimiter = delimiter

    def __missing__(self, number: int) -> bytes:
        left, found = number, list[bytes]()
        room = LINE_MAX
        for mask, name in self._names:
            if not left or room < 0:
                break
            if left & mask == mask:
                found.append(name)
                room -= len(name) + len(self._delimiter)
                left &= ~mask
        if left:
            found.append(b"%#x" % left)
        text = self[number] = self._delimiter.join(found)[:LINE_MAX]
        return text


class _SymbolicTexts(dict[int, bytes]):
    # trace_print_symbols_seq(): the first of several names counts, and an empty one does not.

    def __init__(self, names: list[tuple[int, bytes]]) -> None:
        super().__init__()
        self._names = dict(reversed(names))

    def __missing__(self, number: int) -> bytes:
        text = self[number] = self._names.get(number) or b"%#x" % number
        return text


def _named(value: Numbers, texts: dict[int, bytes]) -> CStrings:
    # Each number is looked up once.
    def column(columns: tuple[Column, ...]) -> Column:
        if len(texts) > _REMEMBERED:
            texts.clear()
        numbers = value.column(columns).astype(UNSIGNED_LONG, copy=False)
        return objects(list(map(texts.__getitem__, numbers.tolist())))

    return CStrings(column=column, is_constant=value.is_constant)


def _call(name: str, arguments: list[PrintValue]) -> PrintValue:
    if name in ("__print_hex", "__print_hex_str", "__print_array"):
        numbers = [number_of(each, name) for each in arguments[1:]]
        separator = " " if name == "__print_hex" else ""
        show = _array_text if name == "__print_array" else _hex_text(separator)
        return _shown_bytes(bytes_of(arguments[0], name), numbers, show)
    if name == "__get_bitmask":
        return _shown_bytes(bytes_of(arguments[0], name), [], mask_text)
    if name == "__builtin_expect":
        return arguments[0]
    number = number_of(arguments[0], name)
    if name == "__builtin_constant_p":
        return constant(number.is_constant, INT)
    if name == "__print_ns_to_secs":
        return computed(
            UNSIGNED_LONG, lambda x: x[0].astype(UNSIGNED_LONG) // np.uint64(_NS_PER_S), number
        )
    if name == "__print_ns_without_secs":
        return computed(
            UNSIGNED, lambda x: x[0].astype(UNSIGNED_LONG) % np.uint64(_NS_PER_S), number
        )
    dtype = np.dtype(f"<u{int(name.removeprefix('__fswab')) // 8}")
    return computed(dtype, lambda x: x[0].astype(dtype).byteswap(), number)


def _shown_bytes(data: Compute, numbers: list[Numbers], show: Callable[..., bytes]) -> CStrings:
    def column(columns: tuple[Column, ...]) -> Column:
        whole = data(columns)
        given = (np.broadcast_to(each.column(columns), whole.shape).tolist() for each in numbers)
        return objects(list(map(show, whole.tolist(), *given)))

    return CStrings(column=column)


def _hex_text(separator: str) -> Callable[[bytes, int], bytes]:
    # trace_print_hex_seq().
    def show(data: bytes, length: int) -> bytes:
        part = data[: max(length, 0)]
        return (part.hex(separator) if separator else part.hex()).encode()

    return show


def _array_text(data: bytes, count: int, size: int) -> bytes:
    # trace_print_array_seq().
    if size not in (1, 2, 4, 8) or count <= 0:
        return b"{}"
    part = data[: count * size]
    numbers = np.frombuffer(part[: len(part) // size * size], f"<u{size}").tolist()
    return b"{%b}" % b",".join([b"%#x" % number for number in numbers])


def mask_text(data: bytes) -> bytes:
    """Return a bitmask as ``%*pb`` prints all of it: words of 32 bits, the highest first."""
    words: NDArray[np.uint32] = np.frombuffer(data[: len(data) // _WORD * _WORD], "<u4")
    return b",".join([b"%08x" % word for word in words[::-1].tolist()])
