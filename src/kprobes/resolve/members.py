"""Member chains: ``a->b.c->d`` to reads of memory, by the kernel's types.

As parse_btf_field() in the kernel: every arrow reads the pointer before it, dots add offsets.
"""

from dataclasses import dataclass

from kprobes.model.codes import Code
from kprobes.model.definition import Step
from kprobes.model.resolved import Load, Operand
from kprobes.model.types import CType, MemberPlace, TypeKind, Types
from kprobes.resolve.scope import Scope


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """An expression and what is known of it.

    Attributes:
        operand: how it is fetched.
        ctype: its type, or None where the language loses it, as behind an explicit dereference.
        bit_offset: where the value begins in the first byte fetched.
        bit_size: of a bit-field, else 0.
    """

    operand: Operand
    ctype: CType | None = None
    bit_offset: int = 0
    bit_size: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What a chain begins at.

    Attributes:
        operand: a pointer.
        ctype: its type; of a cast, None.
        aggregate: number of the struct that it is cast to; of other pointers, None.
        shift: bytes to be taken from the first member's offset: the pointer is to a member.
    """

    operand: Operand
    ctype: CType | None = None
    aggregate: int | None = None
    shift: int = 0


def walk(scope: Scope, types: Types, start: Start, steps: tuple[Step, ...]) -> Value:
    """Return the member at the end of a chain.

    Raises:
        DefinitionError: a step goes through no pointer, or to no member.
    """
    operand, shift, offset = start.operand, start.shift, 0
    ctype, place = start.ctype, None
    for number, step in enumerate(steps):
        if number == 0 or step.is_arrow:
            if place is not None:
                operand, shift = Load(base=operand, offset=offset // 8 - shift, is_user=False), 0
            aggregate = start.aggregate if number == 0 else None
            aggregate = _pointee(scope, step, ctype) if aggregate is None else aggregate
            offset = 0
        else:
            aggregate = ctype.number if ctype is not None else 0
        place = find_member(scope, types, aggregate, step)
        offset += place.bit_offset
        ctype = types.describe(place.number)
    return Value(
        operand=Load(base=operand, offset=offset // 8 - shift, is_user=False),
        ctype=ctype,
        bit_offset=offset % 8,
        bit_size=place.bit_size if place is not None else 0,
    )


def find_member(scope: Scope, types: Types, aggregate: int, step: Step) -> MemberPlace:
    """Return one member of a struct or union.

    Raises:
        DefinitionError: the type is neither, or has no such member.
    """
    outer = types.describe(aggregate)
    if outer.kind is not TypeKind.AGGREGATE:
        hint = f"{step.name} is wanted of what is neither a struct nor a union"
        raise scope.error(Code.BAD_BTF_TID, step.span.start, hint)
    place = types.member(aggregate, step.name)
    if place is None:
        hint = f"{outer.name or 'the type'} has no member {step.name or 'without a name'}"
        raise scope.error(Code.NO_BTF_FIELD, step.span.start, hint)
    return place


def _pointee(scope: Scope, step: Step, ctype: CType | None) -> int:
    if ctype is None or ctype.kind is not TypeKind.POINTER:
        raise scope.error(Code.NO_PTR_STRCT, step.span.start)
    return ctype.target
