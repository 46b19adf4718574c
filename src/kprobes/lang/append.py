"""Several definitions on one event, and the deletion of some: what the kernel allows of it."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import count

from kprobes.lang.listing import show_arguments, show_place
from kprobes.lang.types import is_string_alone
from kprobes.model.codes import Code, rejection
from kprobes.model.definition import (
    AllMembers,
    AllParameters,
    AllVariables,
    Definition,
    Deletion,
    EventType,
    FetchArg,
    Member,
    Parameter,
    ReturnValue,
    Statement,
)

Name = tuple[str, str]
"""Group and event."""
_Identity = tuple[object, ...]


class Definitions:
    """The definitions that are there, oldest first; those of one event are found by its name."""

    def __init__(self, existing: Iterable[Definition] = ()) -> None:
        self._next = count()
        self._all: dict[int, Definition] = {}
        # By event, by group: the place and arguments of each, and its number.
        self._events: dict[str, dict[str, dict[_Identity, int]]] = {}
        for definition in existing:
            self._add(definition, next(self._next))

    def __iter__(self) -> Iterator[Definition]:
        """Yield them, oldest first."""
        return iter(self._all.values())

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._all)

    def __contains__(self, name: Name) -> bool:
        """Whether an event of this group and name is there."""
        group, event = name
        return bool(self._same(group, event))

    @property
    def last(self) -> int:
        """The number of the newest definition, or -1; what comes has higher ones."""
        return next(reversed(self._all), -1)

    def check(self, new: Definition) -> None:
        """Refuse a definition that cannot be added; errors as for ``append``."""
        # A pattern without an event name makes an event of its own for each function.
        same: Mapping[tuple[object, ...], int] = (
            self._same(new.group, new.event) if new.event else {}
        )
        if same:
            _check_alike(self._all[next(iter(same.values()))], new)
        if _identity(new) in same:
            hint = f"for a second one give it a name of its own: {_with_name(new)}"
            raise rejection(Code.SAME_PROBE, command=new.command, column=0, hint=hint)

    def append(self, new: Definition) -> int:
        """Add a definition, and return its number.

        Definitions of one event probe several places, and must agree in all that its records have.

        Raises:
            DefinitionError: DIFF_PROBE_TYPE, DIFF_ARG_TYPE or SAME_PROBE.
        """
        self.check(new)
        return self._add(new, next(self._next))

    def delete(self, deletion: Deletion) -> dict[int, Definition]:
        """Take away the definitions that match, and return them by their numbers.

        Raises:
            DefinitionError: NO_EVENT, when none does.
        """
        gone = [at for at in self._candidates(deletion) if _matches(self._all[at], deletion)]
        if not gone:
            raise rejection(Code.NO_EVENT, command=deletion.command, column=0)
        return {number: self._remove(number) for number in sorted(gone)}

    def apply(
        self,
        statements: Iterable[Statement],
        release: Callable[[dict[int, Definition]], None] | None = None,
    ) -> tuple[list[int], dict[int, Definition]]:
        """Add and delete; all of it, or nothing.

        Args:
            statements: in their order.
            release: is called after each deletion with what it has deleted; what it raises ends
                this, too.

        Returns:
            The numbers of what was added and is there, and what was deleted by its numbers.

        Raises:
            DefinitionError: from ``append`` and ``delete``, for the first that is wrong.
        """
        added: list[int] = []
        deleted: dict[int, Definition] = {}
        try:
            for statement in statements:
                if isinstance(statement, Deletion):
                    gone = self.delete(statement)
                    deleted |= gone
                    if release is not None:
                        release(gone)
                else:
                    added.append(self.append(statement))
        except BaseException:
            self.undo(added, deleted)
            raise
        left = [number for number in added if number not in deleted]
        return left, {n: each for n, each in deleted.items() if n not in added}

    def undo(self, added: Iterable[int], deleted: Mapping[int, Definition]) -> None:
        """Have everything as it was before ``apply``."""
        new = set(added)
        for number in new & self._all.keys():
            self._remove(number)
        for number, definition in deleted.items():
            if number not in new:
                self._add(definition, number)
        self._all = dict(sorted(self._all.items()))

    def get(self, number: int) -> Definition | None:
        """Return the definition that has a number, or None when it was deleted."""
        return self._all.get(number)

    def of_event(self, name: Name) -> Collection[int]:
        """Return the numbers of an event's definitions."""
        return self._same(*name).values()

    def items(self) -> Iterator[tuple[int, Definition]]:
        """Yield numbers and definitions, oldest first."""
        return iter(self._all.items())

    def replace(self, number: int, definition: Definition) -> Definition:
        """Have another filter for a definition; return what was there."""
        before, self._all[number] = self._all[number], definition
        return before

    def _same(self, group: str, event: str) -> Mapping[_Identity, int]:
        return self._events.get(event, {}).get(group, {})

    def _candidates(self, deletion: Deletion) -> Iterable[int]:
        if not deletion.event:
            return self._all
        groups = self._events.get(deletion.event, {})
        chosen = groups.values() if deletion.group is None else [groups.get(deletion.group, {})]
        return [at for same in chosen for at in same.values()]

    def _add(self, new: Definition, number: int) -> int:
        self._all[number] = new
        groups = self._events.setdefault(new.event, {})
        groups.setdefault(new.group, {})[_key(new, number)] = number
        return number

    def _remove(self, number: int) -> Definition:
        gone = self._all.pop(number)
        groups = self._events[gone.event]
        same = groups[gone.group]
        del same[_key(gone, number)]
        if not same:
            del groups[gone.group]
        return gone


def apply(
    statements: Iterable[Statement], *, existing: Iterable[Definition] = ()
) -> tuple[Definition, ...]:
    """Return the definitions that are there after all statements, in order.

    Args:
        statements: definitions and deletions.
        existing: what was there before them.

    Raises:
        DefinitionError: from ``Definitions``, for the first that is wrong.
    """
    found = Definitions(existing)
    found.apply(statements)
    return tuple(found)


def _with_name(definition: Definition) -> str:
    head, _, rest = definition.command.partition(" ")
    return f"{head.partition(':')[0]}:NAME {rest}"


def _check_alike(old: Definition, new: Definition) -> None:
    if (old.type is EventType.KPROBE) != (new.type is EventType.KPROBE):
        raise rejection(Code.EVENT_EXIST, command=new.command, column=0)
    if (old.kind, old.type) != (new.kind, new.type):
        raise rejection(Code.DIFF_PROBE_TYPE, command=new.command, column=0)
    at = _first_difference(old.args, new.args)
    if at is not None:
        # After the last word, when the old one has more arguments.
        end = len(new.command) + 1
        column = new.args[at].span.start if at < len(new.args) else end
        raise rejection(Code.DIFF_ARG_TYPE, command=new.command, column=column)


def _first_difference(old: Sequence[FetchArg], new: Sequence[FetchArg]) -> int | None:
    if len(old) != len(new):
        return min(len(old), len(new))
    pairs = enumerate(zip(old, new, strict=True))
    return next((at for at, (a, b) in pairs if not _is_alike(a, b)), None)


def _is_alike(old: FetchArg, new: FetchArg) -> bool:
    types = (_stored(old), _stored(new))
    # What only the kernel's types know may turn out to be the same.
    return old.name == new.name and (None in types or types[0] == types[1])


_TYPED = Parameter | Member | ReturnValue | AllParameters | AllVariables | AllMembers
"""What has types only in a kernel."""


def _stored(arg: FetchArg) -> tuple[str, int | None] | None:
    if arg.spec is None:
        if isinstance(arg.fetch, _TYPED):
            return None
        return ("string" if is_string_alone(arg.text) else "x64"), None
    if arg.spec.base == "bits":
        return f"u{8 * arg.spec.size}", arg.spec.count
    return ("string" if arg.type.startswith("%") else arg.spec.base), arg.spec.count


def _identity(definition: Definition) -> _Identity:
    return show_place(definition.place), *(arg.text for arg in definition.args)


def _key(definition: Definition, number: int) -> _Identity:
    # A pattern may be there twice.
    return _identity(definition) if definition.event else (number,)


def _matches(definition: Definition, deletion: Deletion) -> bool:
    if deletion.event and deletion.event != definition.event:
        return False
    if deletion.group is not None and deletion.group != definition.group:
        return False
    words = (show_place(definition.place), *show_arguments(definition))
    return words[: len(deletion.words)] == deletion.words
