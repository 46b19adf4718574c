"""Functions that can be probed, as lines for people or programs."""

from collections.abc import Sequence

from kprobes.cli.words import aligned
from kprobes.drivers.functions import Function
from kprobes.model.types import Parameter, Prototype
from kprobes.sinks.json_fields import dumps


def as_names(functions: Sequence[Function]) -> str:
    """Return one name per line, with its module."""
    return aligned((f.symbol.name, _module(f)) for f in functions)


def as_prototypes(functions: Sequence[Function]) -> str:
    """Return names, arguments and result below each other."""
    return aligned((f.symbol.name, _prototype(f.prototype), _module(f)) for f in functions)


def as_json(functions: Sequence[Function]) -> str:
    """Return one JSON object per line."""
    return "".join(f"{dumps(_object(function))}\n" for function in functions)


def declare(parameter: Parameter) -> str:
    """Return a parameter as C declares it: its name may stand inside its type."""
    kind, name = parameter.type, parameter.name
    if kind == "..." or not name:
        return kind
    for inner in ("(*", "["):
        at = kind.find(inner)
        if at >= 0:
            at += len(inner) if inner == "(*" else 0
            return f"{kind[:at]}{'' if inner == '(*' else ' '}{name}{kind[at:]}"
    return f"{kind}{name}" if kind.endswith("*") else f"{kind} {name}"


def _prototype(prototype: Prototype | None) -> str:
    if prototype is None:
        return "(?)"
    parameters = ", ".join(declare(parameter) for parameter in prototype.parameters)
    return f"({parameters or 'void'}) -> {prototype.returns}"


def _module(function: Function) -> str:
    return f"[{function.symbol.module}]" if function.symbol.module else ""


def _object(function: Function) -> dict[str, object]:
    symbol, prototype = function.symbol, function.prototype
    found: dict[str, object] = {
        "function": symbol.name,
        "address": f"{symbol.addr:#x}",
        "module": symbol.module or None,
    }
    if prototype is not None:
        found["args"] = [{"name": p.name, "type": p.type} for p in prototype.parameters]
        found["returns"] = prototype.returns
    return found
