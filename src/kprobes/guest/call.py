"""Calls of a guest's functions for a user: typed by the kernel's own types, with a deadline.

The function runs in a task that was about to begin a system call, or in a kernel worker: with no
lock held, and it may sleep. ``current`` is that task. Its state is the function's to change, so
what it does to its caller it does to that task.

A function that has not come back at its deadline goes on: nobody can take it back. Its task returns
from it, by the kernel's own code, to what it was doing; see ``guest.inject``.
"""

import operator
from collections.abc import Callable, Sequence
from typing import SupportsIndex

from msgspec import Struct

from kprobes.errors import (
    AmbiguousSymbolError,
    GuestReplacedError,
    RefusedError,
    TargetError,
    UnknownSymbolError,
    UsageError,
)
from kprobes.guest.allocations import AllocationLog
from kprobes.guest.guest import Guest
from kprobes.guest.inject import CallInjector, Task
from kprobes.guest.override import Overrides
from kprobes.guest.places import Places
from kprobes.guest.text import Prover
from kprobes.model.kernel import CType, Parameter, Prototype, Symbol, TypeKind, Types, value_range
from kprobes.units import U64

_NOT_A_NUMBER = "a struct, a union or a number of another kind cannot be passed"


class Callee:
    """A function that may be called: its address, and what it takes and returns."""

    def __init__(self, guest: Guest, places: Places, name: str) -> None:
        """Find a function.

        Args:
            guest: that has it.
            places: of the guest.
            name: ``FUNCTION``, or ``MODULE:FUNCTION``.

        Raises:
            UnknownSymbolError, AmbiguousSymbolError: none, or several, have the name.
            RefusedError: it must not be called, or cannot be.
        """
        self._guest, self._places = guest, places
        self.symbol = self._find(name)
        types = guest.kernel.types_for(self.symbol.module)
        prototype = None if types is None else types.function(self.symbol.name)
        if types is None or prototype is None:
            raise RefusedError(
                f"{name} cannot be called: the kernel's types (BTF) do not say what it takes"
            )
        self._types: Types = types
        self.prototype: Prototype = prototype
        self._returned = types.describe(prototype.returned)
        self._check_text()

    def arguments(self, given: Sequence[SupportsIndex]) -> list[int]:
        """Return the numbers that registers get.

        Raises:
            UsageError: they are too few or too many, or one does not fit its parameter.
            RefusedError: the function takes what cannot be passed.
        """
        name, parameters = self.symbol.name, self.prototype.parameters
        if len(given) != len(parameters):
            takes = ", ".join(f"{each.type} {each.name}" for each in parameters)
            arguments = "1 argument" if len(parameters) == 1 else f"{len(parameters)} arguments"
            raise UsageError(f"{name}({takes}) takes {arguments}, not {len(given)}")
        return [self._argument(*pair) for pair in zip(parameters, given, strict=True)]

    def result(self, register: int) -> int | bool | None:
        """Return what the function returned: None for void, a bool, or a number with its sign."""
        type_ = self._returned
        allowed = value_range(type_)
        if allowed is None:
            return None
        if type_.kind is TypeKind.INT and type_.name == "_Bool":
            # The psABIs: the lowest byte is 0 or 1, the rest means nothing.
            return bool(register & 0xFF)
        value = register & (1 << 8 * type_.size) - 1
        is_signed = type_.is_signed or self._is_signed_enum(type_)
        return value - (1 << 8 * type_.size) if is_signed and value >> 8 * type_.size - 1 else value

    def _find(self, name: str) -> Symbol:
        module, _, own = name.rpartition(":")
        symbols = self._guest.kernel.symbols
        if not module:
            found = symbols.named(own)
        else:
            every = {s.addr: s for s in symbols.all_named(own) if s.module == module}
            if not every:
                raise UnknownSymbolError(name, ())
            if len(every) > 1:
                raise AmbiguousSymbolError(name, tuple(every))
            (found,) = every.values()
        if not found.is_text:
            raise RefusedError(f"{name} cannot be called: it is data, no function")
        return found

    def _check_text(self) -> None:
        name, addr, symbols = self.symbol.name, self.symbol.addr, self._guest.kernel.symbols
        first, last = symbols.find("_sinittext"), symbols.find("_einittext")
        is_boot = first is not None and last is not None and first.addr <= addr < last.addr
        if is_boot or symbols.is_fleeting(addr):
            raise RefusedError(
                f"{name} cannot be called: it is init text, which is gone after boot"
            )
        for area in self._places.text.tables.forbidden:
            if area.start <= addr < area.stop:
                raise RefusedError(f"{name} cannot be called like a function: {area.why}")
        exits = Prover(self._places.text, self._guest.arch.patch).classify(self.symbol).exits
        if exits.is_endless or name in self._guest.arch.machine.text.no_return:
            raise RefusedError(f"{name} cannot be called: it never returns")
        self._check_registers()

    def _check_registers(self) -> None:
        name, parameters = self.symbol.name, self.prototype.parameters
        room = len(self._guest.arch.arguments)
        if len(parameters) > room:
            raise RefusedError(
                f"{name} cannot be called: it takes {len(parameters)} arguments, and {room} fit "
                "into registers"
            )
        for each in parameters:
            if each.type == "...":
                raise RefusedError(f"{name} cannot be called: it takes any number of arguments")
            if value_range(self._types.describe(each.number)) is None:
                raise RefusedError(
                    f"{name} cannot be called: {each.name} is {each.type}: {_NOT_A_NUMBER}"
                )
        if self._returned.kind is not TypeKind.VOID and value_range(self._returned) is None:
            raise RefusedError(f"{name} cannot be called: it returns {self.prototype.returns}")

    def _argument(self, parameter: Parameter, given: SupportsIndex) -> int:
        try:
            value = operator.index(given)
        except TypeError as e:
            raise UsageError(
                f"{parameter.name} of {self.symbol.name} is {parameter.type}: give a number"
                f"{' (an address)' if parameter.type.endswith('*') else ''}, not {given!r}"
            ) from e
        allowed = value_range(self._types.describe(parameter.number))
        if allowed is None or value not in allowed:
            raise UsageError(
                f"{parameter.name} of {self.symbol.name} is {parameter.type}: {value} does not fit"
            )
        return value & U64

    def _is_signed_enum(self, type_: CType) -> bool:
        if type_.kind is not TypeKind.ENUM:
            return False
        return any(value < 0 for value, _ in self._types.enumerators(type_.number))


class Functions(Struct, frozen=True, kw_only=True):
    """What is done to functions of a kernel besides probing them.

    Attributes:
        overrides: what skips calls.
        call: (function, arguments, seconds that it may take) to what that returns. It raises
            UsageError when the arguments are not its, or a handler asks, while a vCPU waits for it;
            RefusedError when it must not be called; TargetError when there is none, or it is late.
    """

    overrides: Overrides
    call: Callable[[str, Sequence[SupportsIndex], float], int | bool | None]


def call_function(
    guest: Guest,
    allocations: AllocationLog,
    callee: Callee,
    arguments: Sequence[int],
    *,
    timeout_s: float,
) -> int | bool | None:
    """Call a function in a task of a guest, which runs, and runs on.

    Args:
        guest: whose function.
        allocations: where its call is noted, so that who comes after a killed tracer waits for it.
        callee: the function.
        arguments: for its registers.
        timeout_s: how long it may take.

    Raises:
        TargetError: it did not come back in time, or no task could make the call.
    """
    if not timeout_s > 0:
        raise UsageError(f"a deadline of {timeout_s:g} s: must be more than 0")
    injector = CallInjector(guest.stub, guest.memory, guest.kernel, allocations)
    with guest.stub.paused(), injector.task() as task:
        return callee.result(_called(task, callee, arguments, timeout_s))


def _called(task: Task, callee: Callee, arguments: Sequence[int], timeout_s: float) -> int:
    try:
        return task.call(callee.symbol.addr, *arguments, timeout_s=timeout_s)
    except GuestReplacedError:
        raise
    except (TargetError, KeyboardInterrupt) as error:
        if not task.is_calling:
            raise
        # It has allocated nothing of ours: nobody need wait for it.
        task.allocations.end(0)
        if isinstance(error, KeyboardInterrupt):
            raise
        raise TargetError(
            f"{callee.symbol.name} did not return within {timeout_s:g} s; its task goes on with "
            "it, and then with what it was doing before"
        ) from error
