"""A BTF type as C writes it: ``const char *``, ``struct file *``, ``int (*)(void *)``."""

from kprobes.errors import FormatError
from kprobes.formats.btf import Btf, Kind, Type

_MAX_CHAIN = 64
_MAX_PARAMETERS = 64
_QUALIFIERS = {Kind.CONST: "const", Kind.VOLATILE: "volatile", Kind.RESTRICT: "restrict"}
_TAGS = {Kind.STRUCT: "struct", Kind.UNION: "union", Kind.ENUM: "enum", Kind.ENUM64: "enum"}


def spell(btf: Btf, number: int, *, nested: bool = False) -> str:
    """Return how C writes a type without a name declared.

    Args:
        btf: the types.
        number: the type's id.
        nested: inside a function pointer's parameters, whose own function pointers are cut
            to ``(...)``: their types may refer to each other without end.

    Raises:
        FormatError: the type refers to itself or to one that does not exist.
    """
    # C reads declarators inside out: ``inner`` is what was read so far, the base comes last.
    inner, qualifiers = "", ""
    for _ in range(_MAX_CHAIN):
        found = btf.type(number)
        if found.kind in _QUALIFIERS:
            qualifiers += f"{_QUALIFIERS[found.kind]} "
        elif found.kind == Kind.PTR:
            inner = _pointer(inner, qualifiers)
            qualifiers = ""
        elif found.kind == Kind.ARRAY:
            inner = f"{_grouped(inner)}[{int(btf.extra(found)[2])}]"
        elif found.kind == Kind.FUNC_PROTO:
            inner = f"{_grouped(inner)}({_parameters(btf, found, nested=nested)})"
        elif found.kind not in (Kind.TYPE_TAG, Kind.DECL_TAG):
            return _joined(qualifiers + _base(found), inner)
        number = int(btf.extra(found)[0]) if found.kind == Kind.ARRAY else found.value
    raise FormatError(f"BTF: type {number} refers to itself")


def _pointer(inner: str, qualifiers: str) -> str:
    # The qualifiers read before a pointer are the pointer's own: ``*const``.
    star = f"*{qualifiers.rstrip()}"
    return f"{star} {inner}" if qualifiers and inner.startswith("*") else f"{star}{inner}"


def _grouped(inner: str) -> str:
    return f"({inner})" if inner.startswith("*") else inner


def _joined(base: str, inner: str) -> str:
    return base + inner if not inner or inner.startswith("[") else f"{base} {inner}"


def _base(found: Type) -> str:
    match found.kind:
        case Kind.VOID:
            return "void"
        case Kind.FWD:
            return f"{'union' if found.flag else 'struct'} {found.name}"
        case Kind.STRUCT | Kind.UNION | Kind.ENUM | Kind.ENUM64:
            return f"{_TAGS[found.kind]} {found.name or '{...}'}"
        case _:
            return found.name


def _parameters(btf: Btf, proto: Type, *, nested: bool) -> str:
    if nested or proto.vlen > _MAX_PARAMETERS:
        return "..."
    return ", ".join(parameter_types(btf, proto, nested=True)) or "void"


def parameter_types(btf: Btf, proto: Type, *, nested: bool = False) -> list[str]:
    """Return how C writes the type of each parameter; a final ``...`` for any number more."""
    if proto.vlen > _MAX_PARAMETERS:
        raise FormatError(f"BTF: a function of {proto.vlen} parameters")
    return [
        spell(btf, number, nested=nested) if number or name else "..."
        for name, number in btf.parameters(proto)
    ]
