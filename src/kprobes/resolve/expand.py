"""Words that the kernel rewrites before it reads any argument: ``$arg*``, ``$argN``, ``%pd``."""

from collections.abc import Iterator
from operator import is_
from typing import NamedTuple

from msgspec.structs import replace

from kprobes.errors import UnknownTypeError
from kprobes.model.codes import Code
from kprobes.model.definition import (
    AllMembers,
    AllParameters,
    AllVariables,
    Argument,
    Definition,
    Deref,
    Fetch,
    FetchArg,
    Member,
    Parameter,
    Span,
    Step,
    TypeWord,
)
from kprobes.model.kernel import Prototype, TypeKind, Types
from kprobes.resolve.expression import ResolveContext, start_of, types_of

_ARGS_MAX = 128
_TEXT_MAX = 128
"""Characters that all names of parameters may take together, each with its NUL."""
_PATHS = {"pd": (), "pD": (("file", "f_path.dentry"),)}
_PATHS_MAX = 256
_DENTRY_NAME = ("dentry", "d_name.name")


def expand(context: ResolveContext) -> Definition:
    """Return the definition as the kernel reads, and lists, it.

    Raises:
        DefinitionError: parameters are wanted where none are known, or there are too many.
    """
    definition = context.definition
    args = _paths(context, list(_numbered(_meta(context, definition.args))))
    if len(args) > _ARGS_MAX:
        hint = f"at most {_ARGS_MAX}"
        raise context.error(Code.TOO_MANY_ARGS, definition.args[0].span.start, hint)
    _check_names(context, args)
    is_same = len(args) == len(definition.args) and all(map(is_, args, definition.args))
    return definition if is_same else replace(definition, args=tuple(args))


def check_meta(context: ResolveContext) -> None:
    """Check the words that stand for parameters.

    Raises:
        DefinitionError: parameters are wanted where none are known, or there are too many.
    """
    for _ in _meta(context, context.definition.args):
        pass


def _meta(context: ResolveContext, args: tuple[FetchArg, ...]) -> Iterator[tuple[int, FetchArg]]:
    # Each with its number among the words.
    for arg in args:
        if isinstance(arg.fetch, AllVariables):
            hint = "which variables there are only debug information knows: docs/howto/source.md"
            raise context.error(Code.BAD_VAR, arg.span.start, hint)
    expanded = [
        (number, each)
        for number, arg in enumerate(args, start=1)
        for each in _all_members(context, arg)
    ]
    words = [arg for _, arg in expanded if _is_meta(arg)]
    prototype = _prototype(context, words) if words else None
    room = _TEXT_MAX
    for number, arg in expanded:
        if prototype is None or not _is_meta(arg):
            yield number, arg
            continue
        for found in _parameters(context, prototype, arg):
            room -= len(found.text) + 1
            # snprintf needs room for the NUL.
            if room < 0:
                raise context.error(Code.ARGS_2LONG, arg.span.start)
            yield number, found


def _is_meta(arg: FetchArg) -> bool:
    is_argument = isinstance(arg.fetch, Argument) and not arg.is_named
    return is_argument or isinstance(arg.fetch, AllParameters)


def _prototype(context: ResolveContext, words: list[FetchArg]) -> Prototype | None:
    if not context.is_entry:
        raise context.error(Code.NOFENTRY_ARGS, words[0].span.start)
    if context.types is not None and context.prototype is not None and context.prototype.parameters:
        return context.prototype
    if any(isinstance(arg.fetch, AllParameters) for arg in words):
        hint = "this kernel's types do not know the function's parameters"
        raise context.error(Code.NOSUP_BTFARG, words[-1].span.start, hint)
    return None


def _parameters(context: ResolveContext, prototype: Prototype, arg: FetchArg) -> Iterator[FetchArg]:
    names = [parameter.name for parameter in prototype.parameters]
    if isinstance(arg.fetch, Argument):
        if arg.fetch.number > len(names):
            hint = f"the function has {len(names)} parameters: {' '.join(names)}"
            raise context.error(Code.NO_BTFARG, arg.span.start, hint)
        names = [names[arg.fetch.number - 1]]
    suffix = f":{arg.type}" if arg.type else ""
    for name in names:
        yield replace(arg, name=name, fetch=Parameter(name=name, span=arg.body), text=name + suffix)


_TEXT_WORD = TypeWord(base="string", size=4)


def _all_members(context: ResolveContext, arg: FetchArg) -> Iterator[FetchArg]:
    # Those that are numbers or texts, of a word that asks for all.
    if not isinstance(arg.fetch, AllMembers):
        yield arg
        return
    base, types = arg.fetch.base, types_of(context, arg.span)
    struct, is_arrow = _struct(context, types, base)
    found = _Members(types, arg.body, arg.text.lstrip("*"), base, arg.fetch.depth)
    members = [*found.of(struct, (), is_arrow=is_arrow)]
    if not members:
        hint = "no member is a number or a text: name one of a struct inside"
        raise context.error(Code.NO_BTF_FIELD, arg.body.start, hint)
    for path, text, fetch, spec in members:
        name = "_".join([arg.name, *path] if arg.name else path)
        yield replace(arg, name=name, fetch=fetch, text=text, spec=spec)


def _struct(context: ResolveContext, types: Types, base: Fetch) -> tuple[int, bool]:
    # The number of the struct that is meant, and whether it is pointed to.
    start = start_of(context, types, base)
    if start.aggregate is not None:
        return start.aggregate, True
    ctype = start.ctype
    is_arrow = ctype is not None and ctype.kind is TypeKind.POINTER
    target = types.describe(ctype.target) if ctype is not None and is_arrow else ctype
    if target is None or target.kind is not TypeKind.AGGREGATE:
        hint = "it neither is nor points to a struct"
        raise context.error(Code.NO_PTR_STRCT, base.span.start, hint)
    return target.number, is_arrow


class _Members(NamedTuple):
    # As arguments: of what, how that is written, and how deep.
    types: Types
    span: Span
    text: str
    base: Fetch
    depth: int

    def of(
        self, number: int, before: tuple[Step, ...], *, is_arrow: bool
    ) -> Iterator[tuple[list[str], str, Fetch, TypeWord | None]]:
        for name in self.types.member_names(number):
            place = self.types.member(number, name)
            if place is None:
                continue
            steps = (*before, Step(name=name, is_arrow=is_arrow and not before, span=self.span))
            ctype = self.types.describe(place.number)
            is_text = ctype.kind is TypeKind.ARRAY and self._is_char(ctype.target)
            if is_text or ctype.kind in (TypeKind.INT, TypeKind.ENUM, TypeKind.POINTER):
                path = [step.name for step in steps]
                text = self.text + ("->" if is_arrow else ".") + ".".join(path)
                fetch = self._walked(steps)
                yield path, text + ":string" * is_text, fetch, _TEXT_WORD if is_text else None
            elif ctype.kind is TypeKind.AGGREGATE and len(steps) < self.depth:
                yield from self.of(place.number, steps, is_arrow=is_arrow)

    def _walked(self, steps: tuple[Step, ...]) -> Fetch:
        if isinstance(self.base, Member):
            return replace(self.base, steps=(*self.base.steps, *steps))
        return Member(base=self.base, steps=steps, span=self.span)

    def _is_char(self, number: int) -> bool:
        found = self.types.describe(number)
        return found.kind is TypeKind.INT and found.name == "char"


def _numbered(found: Iterator[tuple[int, FetchArg]]) -> Iterator[FetchArg]:
    # Default names count what the words have become.
    for number, (word, arg) in enumerate(found, start=1):
        is_path = arg.spec is not None and arg.spec.base in _PATHS
        has_default = not arg.is_named and (arg.name == f"arg{word}" != _expression(arg) or is_path)
        yield replace(arg, name=f"arg{number}") if has_default else arg


def _expression(arg: FetchArg) -> str:
    return arg.text.partition(":")[0]


def _paths(context: ResolveContext, args: list[FetchArg]) -> list[FetchArg]:
    room = _PATHS_MAX
    for index, arg in enumerate(args):
        if arg.spec is None or arg.spec.base not in _PATHS:
            continue
        args[index] = found = _path(context, arg, _PATHS[arg.spec.base])
        room -= len(found.text) + 1 + (len(found.name) + 1 if found.is_named else 0)
        if room < 0:
            raise context.error(Code.ARG_TOO_LONG, arg.body.start, "all %pd together")
    return args


def _path(context: ResolveContext, arg: FetchArg, through: tuple[tuple[str, str], ...]) -> FetchArg:
    fetch, text = arg.fetch, arg.text[: -len(":%pd")]
    for struct, path in (*through, _DENTRY_NAME):
        offset = _offset(context, arg, struct, path)
        fetch = Deref(base=fetch, offset=offset, is_user=False, span=arg.body)
        text = f"+{offset:#x}({text})"
    fetch = Deref(base=fetch, offset=0, is_user=False, span=arg.body)
    spec = TypeWord(base="string", size=4)
    return replace(arg, fetch=fetch, text=f"+0x0({text}):string", type="string", spec=spec)


def _offset(context: ResolveContext, arg: FetchArg, struct: str, path: str) -> int:
    try:
        if context.types is not None:
            return context.types.offset(struct, path)
    except UnknownTypeError as error:
        raise context.error(Code.NO_BTF_FIELD, arg.type_span.start, str(error)) from error
    hint = "this kernel carries no type information"
    raise context.error(Code.NOSUP_BTFARG, arg.type_span.start, hint)


def _check_names(context: ResolveContext, args: list[FetchArg]) -> None:
    seen: set[str] = set()
    for arg in args:
        if arg.name in seen:
            hint = f"{arg.name} comes twice"
            raise context.error(Code.USED_ARG_NAME, arg.span.start, hint)
        seen.add(arg.name)
