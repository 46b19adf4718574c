"""Guest-side runtime: parts of the code of probes that are written in C.

The C of each is in runtime/, with the LLVM IR that `make runtime` makes of it. That is a piece of a
module's text, beside what it declares: only the module knows the architecture, the kernel and the
plan. docs/internals/guest-runtime.md tells how to change a part.
"""

import pkgutil
import re
from collections.abc import Mapping
from functools import cache

from kprobes.codegen.ir import Function, Value, const

INTRINSICS = "declare i64 @llvm.expect.i64(i64, i64)\ndeclare void @llvm.assume(i1)"
"""What every module with a part declares."""

_FUNCTION = re.compile(r"^(define .*?@(\w+)\(.*?^\})$", re.MULTILINE | re.DOTALL)
_NAME = re.compile(r"@(\w+)")


def called(name: str, text: str) -> str:
    """Return those functions of a part that some IR calls, and what these call.

    Args:
        name: of the part.
        text: the IR.
    """
    functions, wanted = _functions(name), _NAME.findall(text)
    found: set[str] = set()
    while wanted:
        each = wanted.pop()
        if each in functions and each not in found:
            found.add(each)
            wanted += _NAME.findall(functions[each])
    return "\n".join(text for each, text in functions.items() if each in found)


@cache
def part(name: str) -> str:
    """Return the IR of a part."""
    data = pkgutil.get_data("kprobes.codegen", f"runtime/{name}.ll")
    if data is None:
        raise ValueError(f"{name}.ll is not in the package")
    return data.decode()


@cache
def _functions(name: str) -> Mapping[str, str]:
    return {found[2]: found[1] for found in _FUNCTION.finditer(part(name))}


def constants(values: Mapping[str, int]) -> str:
    """Return the definitions of ``extern const u64``."""
    lines = (f"@{name} = internal constant {const(value)}" for name, value in values.items())
    return "\n".join(lines)


def inlined(name: str, out: Function, result: Value | None = None, parameters: str = "") -> str:
    """Return the definition of a function that the C of a part calls.

    Args:
        name: of it.
        out: its code, which begins with a block.
        result: what it returns.
        parameters: in IR.
    """
    type_, back = ("void", "void") if result is None else (result.type, str(result))
    lines = "\n".join((*out.lines, f"  ret {back}"))
    return f"define internal {type_} @{name}({parameters}) alwaysinline nounwind {{\n{lines}\n}}"
