"""Parser of a hist trigger: text to a trigger, with the kernel's errors and marks.

    hist:keys=FIELD[.MOD],...[:vals=FIELD[.MOD],...][:VAR=FIELD[.MOD],...]
        [:sort=FIELD[.descending],...][:size=N]
        [:name=NAME][:clock=CLOCK][:pause|cont|clear][:nohitcount][:ACTION] [if FILTER]

In place of a field of a number there may be an expression, see ``lang.hist_expression``; actions
are in ``lang.hist_action``.

As event_hist_trigger_parse() in kernel/trace/trace_events_hist.c reads it: first its parts from
left to right, then values, keys, and what they are sorted by.
"""

import re
from collections.abc import Sequence

from msgspec import Struct, field
from msgspec.structs import replace

from kprobes.errors import DefinitionError
from kprobes.lang.hist_action import ACTIONS, WrittenAction, read_action, split_action
from kprobes.lang.hist_expression import ExpressionReader
from kprobes.lang.lexer import read_unsigned
from kprobes.model.codes import HistCode, hist_error
from kprobes.model.definition import STACKTRACE, USER_STACKTRACE
from kprobes.model.hist import (
    DEFAULT_SIZE,
    LARGEST_SIZE,
    LEAST_SIZE,
    MAX_FIELDS,
    MAX_KEYS,
    MAX_SORT_KEYS,
    MAX_VALS,
    MAX_VARIABLES,
    OWN_MODIFIERS,
    PERCENT,
    STACK,
    USER_STACK,
    HistAction,
    HistField,
    HistKind,
    HistTrigger,
    HistVariable,
    KnownFields,
    Modifier,
    SortKey,
)

_PREFIX = "hist:"
_IF = re.compile(r"[ \t](if)(?=[ \t])")
_OF_KEYS = frozenset(Modifier) - OWN_MODIFIERS - {Modifier.PERCENT, Modifier.GRAPH}
_OF_VALS = OWN_MODIFIERS | {
    Modifier.HEX,
    Modifier.EXECNAME,
    Modifier.USECS,
    Modifier.PERCENT,
    Modifier.GRAPH,
}
_OF_VARIABLES = frozenset(
    {
        Modifier.HEX,
        Modifier.SYM,
        Modifier.SYM_OFFSET,
        Modifier.EXECNAME,
        Modifier.SYSCALL,
        Modifier.USECS,
    }
)
_OF_OPERANDS = _OF_VARIABLES | {Modifier.LOG2, Modifier.BUCKETS}
_SIZES = f"a number of entries from {LEAST_SIZE} to {LARGEST_SIZE}"
_NEAREST = 8
_PERCENTILE = re.compile(r"p(\d{1,2}(?:\.\d{1,2})?)", re.ASCII)
_PERCENTILES = "there are p1 to p99, and p99.9 and the like"
_WITH_NUMBER = {Modifier.BUCKETS, Modifier.PERCENTILE}
_NOT_NUMBERS = (HistKind.TEXT, HistKind.STACK)


class _Parts(Struct, kw_only=True):
    # The parts of a trigger, as they stand in it.
    keys: str | None = None
    vals: str | None = None
    variables: list[str] = field(default_factory=list[str])
    actions: list[str] = field(default_factory=list[str])
    sort: str | None = None
    size: int = DEFAULT_SIZE
    name: str = ""
    clock: str = "global"
    is_paused: bool = False
    is_continued: bool = False
    is_cleared: bool = False
    has_hitcount: bool = True


def parse_hist(text: str, known: KnownFields, *, may_be_there: bool = False) -> HistTrigger:
    """Read a hist trigger.

    Args:
        text: as written to the event's ``trigger`` file; ``hist:`` may be left out.
        known: what it may name.
        may_be_there: whether it may say something of one that is there, ``cont`` or ``clear``.

    Raises:
        DefinitionError: what is wrong, in the kernel's words, and where.
    """
    command = _PREFIX + text.strip().removeprefix(_PREFIX)
    found = _Reader(command, known).read()
    if found.is_change and not may_be_there:
        raise hist_error(HistCode.TRIGGER_ENOENT_CLEAR, text=command, token="")
    return found


class _Reader:
    def __init__(self, command: str, known: KnownFields) -> None:
        self._command = command
        self._known = known
        # Of each variable, by its name.
        self._named: dict[str, str] = {}

    def read(self) -> HistTrigger:
        body, filter_text = self._split()
        parts = self._parts(body)
        written = [*map(self._written, parts.actions)]
        if parts.keys is None:
            hint = "hist:keys=FIELD, by which hits are counted"
            raise self._error(HistCode.NO_KEYS, "", hint)
        words = self._assignments(parts.variables)
        vals = self._vals(parts)
        variables = self._variables(words)
        keys = self._keys(parts.keys)
        trigger = HistTrigger(
            keys=keys,
            vals=vals,
            variables=variables,
            size=parts.size,
            name=parts.name,
            clock=parts.clock,
            is_paused=parts.is_paused,
            is_continued=parts.is_continued,
            is_cleared=parts.is_cleared,
            has_hitcount=parts.has_hitcount,
            filter=filter_text,
        )
        sort = self._sort(parts.sort, trigger.fields)
        return replace(trigger, sort=sort, action=self._action(written, variables))

    def _written(self, text: str) -> WrittenAction:
        found = split_action(text, self._error)
        why = self._known.missing.get(f"{found.handler}(")
        if why is not None:
            raise self._error(HistCode.NO_ACTIONS, text, why)
        return found

    def _action(
        self, written: Sequence[WrittenAction], variables: Sequence[HistVariable]
    ) -> HistAction | None:
        named = {each.name: each for each in variables}
        return read_action(
            written, named, lambda name: self._plain(name, allowed=_OF_VARIABLES), self._error
        )

    def _error(self, code: HistCode, token: str, hint: str = "") -> DefinitionError:
        return hist_error(code, text=self._command, token=token, hint=hint)

    def _split(self) -> tuple[str, str]:
        # The kernel takes the first ``if`` with blanks around it, which nothing but a filter has.
        body = self._command.removeprefix(_PREFIX)
        found = _IF.search(body)
        if found is None:
            if re.search(r"[ \t]if$|^if\b", body):
                raise self._error(HistCode.BAD_IF, "if")
            return body.strip(), ""
        filter_text = body[found.end(1) :].strip()
        if not filter_text:
            raise self._error(HistCode.BAD_IF, "if")
        return body[: found.start()].strip(), filter_text

    def _parts(self, body: str) -> _Parts:
        parts = _Parts()
        for word in body.split(":"):
            name, has_value, value = word.partition("=")
            if has_value and not value:
                raise self._error(HistCode.EMPTY_ASSIGNMENT, word)
            if has_value:
                self._assign(parts, word, name, value)
            else:
                self._note(parts, word)
        return parts

    def _assign(self, parts: _Parts, word: str, name: str, value: str) -> None:
        match name:
            case "key" | "keys":
                parts.keys = value
            case "val" | "vals" | "values":
                parts.vals = value
            case "sort":
                parts.sort = value
            case "name":
                parts.name = value
            case "clock":
                parts.clock = value.strip()
            case "size":
                parts.size = self._size(value)
            case _:
                parts.variables.append(word)

    def _note(self, parts: _Parts, word: str) -> None:
        match word:
            case "nohitcount" | "NOHC":
                parts.has_hitcount = False
            case "pause":
                parts.is_paused = True
            case "cont" | "continue":
                parts.is_continued = True
            case "clear":
                parts.is_cleared = True
            case _ if word.startswith(ACTIONS):
                parts.actions.append(word)
            case _:
                hint = "there are keys=, vals=, sort=, size=, name=, clock=, pause, cont, clear, "
                hint += "nohitcount, onmax(), onchange()"
                raise self._error(HistCode.BAD_WORD, word, hint)

    def _size(self, text: str) -> int:
        number = read_unsigned(text)
        size = 1 << max(number - 1, 0).bit_length() if number else 0
        if not LEAST_SIZE <= size <= LARGEST_SIZE:
            raise self._error(HistCode.BAD_SIZE, text, _SIZES)
        return size

    def _assignments(self, words: Sequence[str]) -> list[tuple[str, str]]:
        found = [word.partition("=") for each in words for word in each.split(",")]
        for at, (name, equals, text) in enumerate(found):
            if not equals:
                raise self._error(HistCode.MALFORMED_ASSIGNMENT, name, "VARIABLE=FIELD")
            if at == MAX_VARIABLES:
                raise self._error(HistCode.TOO_MANY_VARS, name)
            self._named.setdefault(name, text)
        return [(name, text) for name, _, text in found]

    def _variables(self, words: Sequence[tuple[str, str]]) -> tuple[HistVariable, ...]:
        found: dict[str, HistVariable] = {}
        for name, text in words:
            if name in found:
                raise self._error(HistCode.DUPLICATE_VAR, name)
            found[name] = HistVariable(name=name, field=self._field(text, allowed=_OF_VARIABLES))
        return (*found.values(),)

    def _vals(self, parts: _Parts) -> tuple[HistField, ...]:
        words = parts.vals.split(",") if parts.vals is not None else []
        # The first plain hitcount stands for what is there anyway.
        if "hitcount" in words:
            words.remove("hitcount")
        vals = tuple(self._field(word, allowed=_OF_VALS) for word in words)
        for word, val in zip(words, vals, strict=True):
            if val.kind in _NOT_NUMBERS:
                raise self._error(HistCode.BAD_VAL, word, "only numbers can be summed up")
        own = [val for val in vals if val.modifier not in OWN_MODIFIERS]
        if len(own) > MAX_VALS:
            raise self._error(HistCode.TOO_MANY_VALS, words[vals.index(own[MAX_VALS])])
        if len(vals) > MAX_FIELDS - MAX_KEYS:
            raise self._error(HistCode.TOO_MANY_VALS, words[MAX_FIELDS - MAX_KEYS])
        if not vals and not parts.has_hitcount:
            raise self._error(HistCode.NEED_NOHC_VAL, "")
        return vals

    def _keys(self, text: str) -> tuple[HistField, ...]:
        words = text.split(",")
        keys = tuple(self._field(word, allowed=_OF_KEYS) for word in words[:MAX_KEYS])
        if len(words) > MAX_KEYS:
            raise self._error(HistCode.TOO_MANY_KEYS, words[MAX_KEYS])
        for word, key in zip(words, keys, strict=True):
            if key.kind is HistKind.STACK:
                self._check_stack(word, key)
            elif key.modifier is Modifier.STACKTRACE:
                raise self._error(HistCode.BAD_KEY, word, "it is no stack")
            elif key.kind is HistKind.TEXT and key.modifier is not None:
                raise self._error(HistCode.BAD_KEY, word, "a text has no such modifier")
        return keys

    def _check_stack(self, word: str, key: HistField) -> None:
        plain = (STACKTRACE, STACK, USER_STACKTRACE, USER_STACK)
        wanted = None if key.name in plain else Modifier.STACKTRACE
        if key.modifier is not wanted:
            hint = f"a stack is written {key.name}{'.stacktrace' if wanted else ''}"
            raise self._error(HistCode.BAD_KEY, word, hint)

    def _field(self, word: str, *, allowed: frozenset[Modifier]) -> HistField:
        def atom(text: str) -> HistField:
            return self._plain(text, allowed=allowed if text == word else _OF_OPERANDS)

        return ExpressionReader(self._named, atom, self._error).read(word)

    def _plain(self, word: str, *, allowed: frozenset[Modifier]) -> HistField:
        name, has_modifier, modifier = word.partition(".")
        chosen, width = self._modifier(name, modifier) if has_modifier else (None, 0)
        if chosen in (Modifier.PERCENT, Modifier.GRAPH) and chosen not in allowed:
            raise self._error(HistCode.BAD_FIELD_MODIFIER, modifier, "it is for values")
        field = self._find(name)
        if chosen is not None and chosen not in allowed:
            hint = f"there are {', '.join(sorted(allowed))}"
            raise self._error(HistCode.BAD_FIELD_MODIFIER, word, hint)
        wide = width or field.width
        return field if chosen is None else replace(field, modifier=chosen, width=wide)

    def _modifier(self, name: str, text: str) -> tuple[Modifier, int]:
        if (numbered := self._numbered(text)) is not None:
            return numbered
        for prefixed in (Modifier.PERCENT, Modifier.GRAPH):
            if text.startswith(prefixed):
                return prefixed, 0
        if f".{text}" in self._known.missing:
            raise self._error(HistCode.NOT_RECORDED, text, self._known.missing[f".{text}"])
        if text not in {*Modifier} - _WITH_NUMBER:
            hint = f"there are {', '.join(sorted(Modifier))}"
            raise self._error(HistCode.BAD_FIELD_MODIFIER, text, hint)
        if text == Modifier.EXECNAME and name not in ("common_pid", "pid"):
            raise self._error(HistCode.BAD_FIELD_MODIFIER, text, "it is for common_pid")
        return Modifier(text), 0

    def _numbered(self, text: str) -> tuple[Modifier, int] | None:
        if text.startswith("bucket"):
            rest = text.removeprefix("bucket").removeprefix("s")
            width = read_unsigned(rest[1:]) if rest[:1] == "=" else None
            if not width:
                raise self._error(HistCode.BAD_FIELD_MODIFIER, rest, "use buckets=WIDTH")
            return Modifier.BUCKETS, width
        if found := _PERCENTILE.fullmatch(text):
            hundredths = round(float(found[1]) * PERCENT)
            if not hundredths:
                raise self._error(HistCode.BAD_FIELD_MODIFIER, text, _PERCENTILES)
            return Modifier.PERCENTILE, hundredths
        return None

    def _find(self, name: str) -> HistField:
        field = self._known.fields.get(name)
        if field is None and name in self._known.missing:
            raise self._error(HistCode.NOT_RECORDED, name, self._known.missing[name])
        if field is None:
            names = ", ".join([*self._known.fields][:_NEAREST])
            raise self._error(HistCode.FIELD_NOT_FOUND, name, f"there are {names}, ...")
        return field

    def _sort(self, text: str | None, fields: tuple[HistField, ...]) -> tuple[SortKey, ...]:
        if text is None:
            return (SortKey(),)
        words = text.split(",")
        keys: list[SortKey] = []
        for at, word in enumerate(words):
            if not word.partition(".")[0]:
                raise self._error(HistCode.EMPTY_SORT_FIELD, "sort=")
            if at == MAX_SORT_KEYS - 1 and len(words) > MAX_SORT_KEYS:
                raise self._error(HistCode.TOO_MANY_SORT_FIELDS, "sort=")
            keys.append(_sort_of_own(word, fields) or self._sort_key(word, fields))
        return tuple(keys)

    def _sort_key(self, word: str, fields: tuple[HistField, ...]) -> SortKey:
        name, has_order, order = word.partition(".")
        names = ["hitcount", *(field.name for field in fields)]
        alias = self._known.fields.get(name)
        known = name if alias is None else alias.name
        if known not in names:
            raise self._error(HistCode.INVALID_SORT_FIELD, name)
        if has_order and order not in ("ascending", "descending"):
            raise self._error(HistCode.INVALID_SORT_MODIFIER, order)
        # With a modifier that no kernel has it is named by that.
        found = [index for index, each in enumerate(names) if each == known]
        plain = (n for n in found if not n or fields[n - 1].modifier not in OWN_MODIFIERS)
        return SortKey(index=next(plain, found[0]), is_descending=order == "descending")


def _sort_of_own(word: str, fields: tuple[HistField, ...]) -> SortKey | None:
    # A value that no kernel has is named with its modifier: a field may have several.
    for index, each in enumerate(fields, 1):
        if each.modifier not in OWN_MODIFIERS or not word.startswith(each.text):
            continue
        order = word.removeprefix(each.text)
        if order in ("", ".ascending", ".descending"):
            return SortKey(index=index, is_descending=order == ".descending")
    return None
