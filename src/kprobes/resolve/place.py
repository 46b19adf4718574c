"""The place of a definition's probe: the function, and the address in it."""

import re
from collections.abc import Callable

from msgspec import Struct

from kprobes.errors import (
    AmbiguousSymbolError,
    DefinitionError,
    NotLoadedError,
    RefusedError,
    UnknownSymbolError,
)
from kprobes.model.codes import Code, rejection
from kprobes.model.definition import ITERATOR, Definition, EventType, Kind
from kprobes.model.kernel import SYSTEM_CALLS, Kernel, Symbol
from kprobes.resolve.system_call import find_system_call
from kprobes.units import Addr

Locate = Callable[[Symbol], Addr]
"""A function to the address that a probe at its entry has."""

# cad6967ac108 ("fork: introduce kernel_clone()") (v5.10)
_RENAMED = {"_do_fork": "kernel_clone", "do_fork": "kernel_clone", "kernel_clone": "_do_fork"}
_IN_EVERY_MODULE = ("__this_module", "init_module", "cleanup_module")


class Target(Struct, frozen=True, kw_only=True):
    """Where a probe goes.

    Attributes:
        function: the symbol that the address lies in.
        addr: of the place, as it was written.
        is_entry: whether that is where the function begins.
    """

    function: Symbol
    addr: Addr
    is_entry: bool


def find_target(definition: Definition, kernel: Kernel, locate: Locate) -> Target:
    """Return the place that a definition names.

    Args:
        definition: as it was parsed.
        kernel: that it is for.
        locate: finds where a probe at a function's entry is.

    Raises:
        DefinitionError: there is no such place (with near names), or there are several.
        NotLoadedError: its module is not loaded.
        RefusedError: the address is in no function now.
    """
    target = _by_address(definition, kernel) or _by_symbol(definition, kernel, locate)
    is_return = definition.kind is Kind.RETURN
    if is_return and not target.is_entry and definition.place.addr is None:
        raise _error(definition, Code.BAD_RETPROBE, "a function's entry has no offset")
    return target


def ip_of(target: Target, locate: Locate) -> Addr:
    """Return the address that the probe will have: an entry's is where its ftrace site is."""
    entry = locate(target.function)
    return entry if target.addr == target.function.addr else target.addr


def find_function(definition: Definition, kernel: Kernel) -> Symbol:
    """Return the one function whose symbol a definition gives.

    Raises:
        DefinitionError: there is none (with near names), or there are several.
        NotLoadedError: its module is not loaded.
    """
    name = definition.function
    try:
        symbol = _in_module(definition, kernel) or kernel.symbols.named(name)
    except UnknownSymbolError as error:
        if definition.type is EventType.TRACEPOINT:
            raise _error(definition, Code.NO_TRACEPOINT, _near_tracepoints(error)) from error
        if (call := find_system_call(definition, kernel)) is not None:
            return call
        raise _error(definition, Code.BAD_PROBE_ADDR, _instead(error, kernel)) from error
    except AmbiguousSymbolError as error:
        where = ", ".join(f"{addr:#x}" for addr in error.addresses)
        hint = f"{len(error.addresses)} functions have this name: {where}"
        raise _error(definition, Code.NON_UNIQ_SYMBOL, hint) from error
    if not symbol.is_text:
        raise _error(definition, Code.BAD_PROBE_ADDR, f"{symbol.name} is data, not a function")
    return symbol


def find_tracepoint(definition: Definition, kernel: Kernel) -> Addr:
    """Return the address of the struct tracepoint that a definition names.

    Raises:
        RefusedError: the kernel does not tell where it is, or it is a module's.
    """
    name = definition.place.symbol
    symbol = kernel.symbols.find(f"__tracepoint_{name}")
    if symbol is None:
        raise RefusedError(
            f"where the tracepoint {name} is, this kernel does not tell: it has no names of data "
            "(CONFIG_KALLSYMS_ALL)"
        )
    if symbol.module:
        raise RefusedError(
            f"{name} is a tracepoint of the module {symbol.module}, which could not be unloaded "
            "while it is on: probe a function around it"
        )
    return symbol.addr


def _near_tracepoints(error: UnknownSymbolError) -> str:
    near = [each.removeprefix(ITERATOR) for each in error.near if each.startswith(ITERATOR)]
    return f"did you mean {', '.join(near)}?" if near else ""


_SYSTEM_CALL = re.compile(r"(?:__do_|__se_)?(?:sys|SyS)_(\w+)")


def _instead(error: UnknownSymbolError, kernel: Kernel) -> str:
    renamed = _RENAMED.get(error.name)
    if renamed is not None and kernel.symbols.find(renamed) is not None:
        return f"it is called {renamed} in this kernel"
    event = error.name.removeprefix("trace_")
    if kernel.symbols.find(f"{ITERATOR}{event}") is not None:
        return f"{event} is a tracepoint, not a function: t {event}"
    if (call := _SYSTEM_CALL.fullmatch(error.name)) is not None:
        for start in SYSTEM_CALLS:
            if kernel.symbols.find(name := start + call[1]) is not None:
                return f"it is called {name} in this kernel; sys_{call[1]} has the call's arguments"
    return f"did you mean {', '.join(error.near)}?" if error.near else ""


def _by_address(definition: Definition, kernel: Kernel) -> Target | None:
    addr = definition.place.addr
    if addr is None:
        return None
    symbol = kernel.symbols.at(addr)
    if addr == 0:
        raise _error(definition, Code.FAIL_REG_PROBE, "nothing can be at address 0")
    if symbol is None:
        # The kernel would wait for a module that has it.
        raise RefusedError(f"{addr:#x} is in no function that is there now")
    return Target(function=_code(definition, symbol), addr=addr, is_entry=False)


def _by_symbol(definition: Definition, kernel: Kernel, locate: Locate) -> Target:
    function, offset = find_function(definition, kernel), definition.place.offset
    if offset == 0:
        return Target(function=function, addr=function.addr, is_entry=True)
    addr = Addr(function.addr + offset)
    # As in the kernel, an offset may lead into another function.
    owner = kernel.symbols.at(addr)
    if owner is None:
        raise _error(definition, Code.BAD_PROBE_ADDR, f"{addr:#x} is in no function")
    is_entry = addr in (owner.addr, locate(owner))
    return Target(function=_code(definition, owner), addr=addr, is_entry=is_entry)


def _code(definition: Definition, symbol: Symbol) -> Symbol:
    if not symbol.is_text:
        hint = f"it lies in {symbol.name}, which is data"
        raise _error(definition, Code.FAIL_REG_PROBE, hint)
    return symbol


def _in_module(definition: Definition, kernel: Kernel) -> Symbol | None:
    place = definition.place
    if not place.module:
        return None
    found = [s for s in kernel.symbols.all_named(place.symbol) if s.module == place.module]
    if not found:
        if not module_is_loaded(place.module, kernel):
            raise NotLoadedError(place.module)
        raise UnknownSymbolError(place.symbol)
    if len({symbol.addr for symbol in found}) > 1:
        raise AmbiguousSymbolError(place.symbol, tuple(symbol.addr for symbol in found))
    return found[0]


def module_is_loaded(module: str, kernel: Kernel) -> bool:
    """Whether a module is there now."""
    return any(
        symbol.module == module
        for name in _IN_EVERY_MODULE
        for symbol in kernel.symbols.all_named(name)
    )


def _error(definition: Definition, code: Code, hint: str) -> DefinitionError:
    column = definition.place.span.start
    return rejection(code, command=definition.command, column=column, hint=hint)
