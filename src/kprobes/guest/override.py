"""Overrides of one guest: which functions may be skipped, what they may return, and which calls.

The kernel's own list of functions whose callers expect that they fail (lib/error-inject.c):

    LIST_HEAD(error_injection_list);
    struct ei_entry { struct list_head list; unsigned long start_addr, end_addr; int etype;
                      void *priv; };

It has what ALLOW_ERROR_INJECTION() names, of the kernel and of its loaded modules. The guest may
run, and may be hostile: what does not read ends the list, and a ring that does not close ends
somewhere.
"""

import re
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from msgspec import Struct
from msgspec.structs import replace

from kprobes.errors import (
    DefinitionError,
    MemoryFault,
    RefusedError,
    UnknownTypeError,
    UsageError,
)
from kprobes.guest.arena import Arena
from kprobes.guest.guest import Guest, GuestMemory
from kprobes.guest.kernel_abi import per_cpu_bases
from kprobes.guest.places import Places
from kprobes.guest.text import Prover, check_text
from kprobes.lang.filter import parse_filter
from kprobes.lang.filter_value import Known
from kprobes.lang.parser import parse
from kprobes.model.kernel import Kernel, Prototype, Symbol, TypeKind, Types, span_of, value_range
from kprobes.model.override import (
    ALWAYS,
    MAX_OVERRIDES,
    OVERRIDE_HITS,
    OVERRIDE_MISSED,
    OVERRIDE_SIZE,
    OVERRIDE_SKIPPED,
    ErrorType,
    Override,
    OverrideCounts,
    OverrideOptions,
)
from kprobes.model.resolved import Resolved
from kprobes.ports import Memory, Text
from kprobes.resolve.resolve import filter_fields
from kprobes.units import U64, Addr

_EVENT = "p:overrides/override"
_LIST, _USER = "error_injection_list", "within_error_injection_list"
_MAX_ENTRIES = 1 << 16
_START, _STOP, _TYPE, _SIZE = 16, 24, 32, 36


class Injectable(Struct, frozen=True, kw_only=True):
    """A function whose callers expect that it fails.

    Attributes:
        start, stop: its addresses.
        error_type: what they expect.
    """

    start: Addr
    stop: Addr
    error_type: ErrorType


def read_injectable(memory: Memory, kernel: Kernel) -> list[Injectable] | None:
    """Return the functions that a running kernel lists, or None where it has no list."""
    head = kernel.symbols.find(_LIST)
    if head is None:
        return None
    return list(_walk(memory, head.addr, _error_types(kernel)))


def _error_types(kernel: Kernel) -> dict[int, ErrorType]:
    try:
        if kernel.types is not None:
            find = kernel.types.enumerator
            return {find(f"EI_ETYPE_{each}"): each for each in ErrorType}
    except UnknownTypeError:
        pass
    # EI_ETYPE_NONE was the first, and went in 6.2.
    first = 1 if kernel.version < (6, 2) else 0
    return dict(enumerate(ErrorType, first))


def _walk(memory: Memory, head: Addr, types: dict[int, ErrorType]) -> Iterator[Injectable]:
    seen = {int(head)}
    try:
        at = _word(memory.read(head, 8), 0)
        while at not in seen and len(seen) <= _MAX_ENTRIES:
            seen.add(at)
            data = memory.read(at, _SIZE)
            error_type = types.get(_word(data, _TYPE, 4))
            if error_type is not None:
                start, stop = Addr(_word(data, _START)), Addr(_word(data, _STOP))
                yield Injectable(start=start, stop=stop, error_type=error_type)
            at = _word(data, 0)
    except MemoryFault:
        return


def _word(data: bytes, at: int, size: int = 8) -> int:
    return int.from_bytes(data[at : at + size], "little")


def read_counts(memory: GuestMemory, arena: Arena | None, number: int) -> OverrideCounts | None:
    """Return what an override has counted; the guest may run.

    Args:
        memory: of the guest.
        arena: of the session; None before there is one, and nothing was counted.
        number: of the override.
    """
    if arena is None:
        return None
    words = memory.read(arena.overrides + OVERRIDE_SIZE * number, OVERRIDE_SIZE)
    return OverrideCounts(
        hits=_word(words, OVERRIDE_HITS),
        skipped=_word(words, OVERRIDE_SKIPPED),
        missed=_word(words, OVERRIDE_MISSED),
    )


class OverrideResolver:
    """Resolves overrides in one guest; touches nothing."""

    def __init__(self, guest: Guest, places: Places) -> None:
        self._guest = guest
        self._kernel = guest.kernel
        self._places = places

    def resolve(self, place: str, value: int, options: OverrideOptions, *, number: int) -> Override:
        """Return what skips calls of a function.

        Args:
            place: ``FUNCTION``, or ``MODULE:FUNCTION``.
            value: what they return then.
            options: which calls.
            number: of the override in the session.

        Raises:
            DefinitionError: there is no such function, or the filter is wrong.
            RefusedError: the function cannot be probed, or must not be skipped; or the value is
                none that it may return.
            UsageError: there were too many overrides.
        """
        if number >= MAX_OVERRIDES:
            raise UsageError(f"too many overrides: at most {MAX_OVERRIDES} in a session")
        probe = self._probe(place, options)
        function = self._kernel.symbols.at(probe.function)
        if function is None or self._places.locate(function) != probe.addr:
            raise RefusedError(f"{place} is not where a function begins: only there it is skipped")
        check_text(self._kernel, function.addr)
        # Of the names that the function has the one that was given is meant.
        function = replace(function, name=probe.definition.place.symbol or function.name)
        self._check_value(function, value)
        self._check_listed(function, value, is_forced=options.force)
        chance = ALWAYS if options.probability is None else int(options.probability * ALWAYS)
        return Override(
            number=number,
            probe=probe,
            value=value & U64,
            every=options.every,
            times=options.times,
            chance=chance,
            seed=0 if chance == ALWAYS else secrets.randbits(64),
        )

    def _probe(self, place: str, options: OverrideOptions) -> Resolved:
        if re.search(r"[\s+*?@%\[]", place) or not place:
            raise UsageError(f"{place!r} is not a function: FUNCTION or MODULE:FUNCTION")
        text, variables = _named_variables(options.filter)
        arguments = [*variables, *self._named_parameters(place, text)]
        command = " ".join([_EVENT, place, *arguments])
        definition = parse(command, registers=self._guest.arch.registers)
        try:
            probe = self._places.resolve(definition, event_id=1)
        except DefinitionError as error:
            raise _about(place, error) from error
        if not text:
            return probe
        fields = filter_fields(probe, of_guest=True)
        fields = {"pid": fields["common_pid"], **fields}
        # There is no event of which this would be the number.
        del fields["common_type"]
        known = Known(
            fields=fields,
            cpus=len(per_cpu_bases(self._guest.memory, self._kernel)),
            function=partial(span_of, self._kernel.symbols),
        )
        return replace(probe, filter=parse_filter(text, known))

    def _named_parameters(self, place: str, text: str) -> Iterator[str]:
        # Only those: a parameter that no probe can fetch must not be in the way of others.
        module, _, name = place.rpartition(":")
        prototype = self._prototype(name, module)
        words = set(re.findall(r"[A-Za-z_]\w*", _without_strings(text)))
        for parameter in () if prototype is None else prototype.parameters:
            if parameter.name in words:
                yield parameter.name

    def _prototype(self, name: str, module: str) -> Prototype | None:
        types = self._kernel.types_for(module)
        return None if types is None else types.function(name)

    def _check_value(self, function: Symbol, value: int) -> None:
        types = self._kernel.types_for(function.module)
        prototype = self._prototype(function.name, function.module)
        if types is None or prototype is None:
            if not -(1 << 63) <= value < 1 << 64:
                raise RefusedError(f"{value} does not fit into a register")
            return
        check_value(function.name, types, prototype, value)

    def _check_listed(self, function: Symbol, value: int, *, is_forced: bool) -> None:
        listed = read_injectable(self._guest.memory, self._kernel)
        found = [e for e in listed or () if e.start <= function.addr < e.stop]
        if found and all(each.error_type.allows(value) for each in found):
            return
        self._check_returns(function)
        if is_forced or self._is_system_call(function):
            return
        by_force = "by force (force=True, --force) it is done all the same"
        if found:
            allowed = _ALLOWED[found[0].error_type]
            raise RefusedError(
                f"{function.name} must not return {value}: its callers expect {allowed} when it "
                f"fails ({found[0].error_type}); {by_force}"
            )
        if listed is None:
            raise RefusedError(
                f"whether {function.name} is safe to skip is not known: {self._no_list()}; "
                f"{by_force}"
            )
        raise RefusedError(
            f"{function.name} is not on the kernel's list of functions that are safe to skip, "
            f"ALLOW_ERROR_INJECTION: what it does may be needed by its callers; {by_force}"
        )

    def _is_system_call(self, function: Symbol) -> bool:
        # arch/{x86,arm64}/include/asm/syscall_wrapper.h lists each of them (ERRNO) in every kernel
        # that has a list. What it returns is its user's: nobody in the kernel looks at it.
        return function.name.startswith(self._guest.arch.machine.inject_ops.system_call)

    def _no_list(self) -> str:
        if self._kernel.symbols.find(_USER) is not None:
            return (
                "this kernel's list of such functions has no name (CONFIG_KALLSYMS_ALL is not set)"
            )
        return (
            "this kernel has no list of such functions; one that is built with "
            "CONFIG_FUNCTION_ERROR_INJECTION=y has"
        )

    def _check_returns(self, function: Symbol) -> None:
        exits = Prover(self._places.text, self._guest.arch.patch).classify(function).exits
        if exits.is_endless or function.name in self._guest.arch.machine.text.no_return:
            raise RefusedError(
                f"{function.name} never returns: what comes after its calls is not code to go on "
                "with, so they cannot be skipped"
            )


class Overrides:
    """All overrides of one guest. Every method may be called by any thread.

    Attributes:
        armed: of one function the newest is asked first, as the kernel's kprobes are.
    """

    def __init__(
        self,
        *,
        find: Callable[[], OverrideResolver],
        read: Callable[[int], OverrideCounts | None],
        arm: Callable[[Sequence[Override]], None],
        lock: threading.RLock,
    ) -> None:
        """Have none yet.

        Args:
            find: returns what resolves them in the guest as it is now.
            read: returns what was counted under a number; None while nothing is counted.
            arm: arms these in the place of those that are armed; all, or nothing changes.
            lock: of whoever arms, and calls this while it does.
        """
        self.armed: Sequence[Override] = ()
        self._counts: list[OverrideCounts] = []
        self._find, self._read, self._arm = find, read, arm
        self._lock = lock

    def add(self, place: str, value: int, options: OverrideOptions) -> "ActiveOverride":
        """Have calls of a function skipped from now on; on an error nothing has changed.

        Args:
            place: ``FUNCTION``, or ``MODULE:FUNCTION``.
            value: what they return then.
            options: which calls.

        Raises:
            DefinitionError, RefusedError, UsageError: as of ``OverrideResolver.resolve``.
            TargetError: the guest changed a site, or has no memory.
        """
        with self._lock:
            override = self._find().resolve(place, value, options, number=len(self._counts))
            # No number is used twice: a task may still be in the code of one that is gone.
            self._counts.append(OverrideCounts())
            self._set([override, *self.armed])
        return ActiveOverride(self, override)

    def delete(self, override: Override) -> None:
        """Have a function's calls run again; what was counted stays."""
        with self._lock:
            if override in self.armed:
                self._set([each for each in self.armed if each != override])
                self.counts(override)

    def counts(self, override: Override) -> OverrideCounts:
        """Return what an override has counted until now, or until the guest was let go of."""
        number = override.number
        self._counts[number] = self._read(number) or self._counts[number]
        return self._counts[number]

    def keep_counts(self) -> None:
        """Have counts stay when the memory goes in which they are."""
        with self._lock:
            self._counts = [self._read(n) or known for n, known in enumerate(self._counts)]

    def forget(self, ranges: Sequence[Text]) -> None:
        """Have none any more in text that is going."""
        with self._lock:
            self.armed = [
                each
                for each in self.armed
                if not any(start <= each.probe.function < stop for start, stop in ranges)
            ]

    def _set(self, overrides: Sequence[Override]) -> None:
        self._arm(overrides)
        self.armed = overrides


class ActiveOverride:
    """An override that was armed, and its counts."""

    def __init__(self, overrides: Overrides, override: Override) -> None:
        self._overrides = overrides
        self._override = override

    def __repr__(self) -> str:
        """Return what it skips, and how often it has."""
        name, counts = self._override.probe.definition.place.symbol, self.counts
        return f"<override of {name}: {counts.skipped} of {counts.hits} calls skipped>"

    @property
    def counts(self) -> OverrideCounts:
        """What it has counted until now, or until the guest was let go of."""
        return self._overrides.counts(self._override)

    @property
    def hits(self) -> int:
        """How many calls came to it."""
        return self.counts.hits

    @property
    def skipped(self) -> int:
        """How many of them returned its value."""
        return self.counts.skipped

    def delete(self) -> None:
        """Have the function's calls run again; the counts stay."""
        self._overrides.delete(self._override)


_ALLOWED = {
    ErrorType.NULL: "NULL (0)",
    ErrorType.ERRNO: "a negative errno (-1 to -4095)",
    ErrorType.ERRNO_NULL: "a negative errno (-1 to -4095) or NULL (0)",
    ErrorType.TRUE: "true (1)",
}
_STRING = re.compile(r"""'[^']*'?|"[^"]*"?""")
_VARIABLE = re.compile(r"\$arg(\d+)")


def _about(place: str, error: DefinitionError) -> DefinitionError:
    # Nobody has written the definition around the place.
    column = error.column - len(_EVENT) - 1
    if not 0 <= column < len(place):
        return error
    return DefinitionError(error.code, error.text, command=place, column=column, hint=error.hint)


def _without_strings(text: str) -> str:
    return _STRING.sub("", text)


def _named_variables(text: str) -> tuple[str, Sequence[str]]:
    # A filter names fields: $arg2 becomes the field arg2, which fetches it.
    found = sorted({int(n) for n in _VARIABLE.findall(_without_strings(text))})
    parts = re.split(f"({_STRING.pattern})", text)
    renamed = (part if part[:1] in ("'", '"') else _VARIABLE.sub(r"arg\1", part) for part in parts)
    return "".join(renamed), [f"arg{n}=$arg{n}" for n in found]


def check_value(name: str, types: Types, prototype: Prototype, value: int) -> None:
    """Check that a function can return a value.

    Args:
        name: of the function.
        types: that it has.
        prototype: of the function.
        value: as a number with a sign.

    Raises:
        RefusedError: its type has no such value, or is returned in more than a register.
    """
    returned = types.describe(prototype.returned)
    if returned.kind is TypeKind.VOID:
        if value != 0:
            raise RefusedError(f"{name} returns nothing (void): its value must be 0")
        return
    allowed = value_range(returned)
    if allowed is None:
        raise RefusedError(
            f"{name} returns {prototype.returns}, which is not a number or a pointer: it cannot be "
            "skipped"
        )
    if value not in allowed:
        raise RefusedError(
            f"{name} returns {prototype.returns}, and {value} is not from {allowed.start} to "
            f"{allowed.stop - 1}"
        )
