"""Guest-side runtime: parts of the code of probes that are written in C.

The C of each is in runtime/, with the LLVM IR that `make runtime` makes of it. That is a piece of a
module's text, beside what it declares: only the module knows the architecture, the kernel and the
plan. docs/internals/guest-runtime.md tells how to change a part.
"""

import pkgutil
import re
from collections.abc import Callable, Mapping
from functools import cache

from msgspec.structs import replace

from kprobes.codegen.context import Context
from kprobes.codegen.ir import Function, Value, const

# The text of a module, in parts:
#
#     declare ... @llvm.expect.i64(...)            INTRINSICS
#     @instance_size = internal constant i64 40    definitions(): what the C only declares
#     define internal ptr @instance_table() ...
#     define internal ptr @instance_insert(...)    called(): of the C, what something calls
#     define i64 @probe(...)                       what codegen emits; it calls @instance_insert
#
# All but the last are internal: LLVM drops what it has inlined everywhere.
INTRINSICS = "declare i64 @llvm.expect.i64(i64, i64)\ndeclare void @llvm.assume(i1)"
"""What every module with a part declares."""

Write = Callable[[Context], Value | None]
"""What adds code, and returns what that returns."""

_FUNCTION = re.compile(r"^(define .*?@(\w+)\(.*?^\})$", re.MULTILINE | re.DOTALL)
_NAME = re.compile(r"@(\w+)")


def called(name: str, text: str) -> str:
    """Return those functions of a part that some IR calls, and what these call.

    Args:
        name: of the part.
        text: the IR.
    """
    # LLVM drops what is not called, too, but parses it first: 0.3 ms for all of instances.ll, of
    # the 27 that a module takes.
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


def definitions(context: Context, values: Mapping[str, int], functions: Mapping[str, Write]) -> str:
    """Return the IR of what the C of a part declares and does not define.

    Args:
        context: whose architecture and kernel it is for.
        values: of each ``extern const``.
        functions: what adds the code of each, and returns what that returns; by name, with the
            parameters, as in ``guard_set(i32 %bits)``. They are inlined.
    """
    inlined = (_inlined(context, *each) for each in functions.items())
    return "\n".join((constants(values), *inlined))


def constants(values: Mapping[str, int]) -> str:
    """Return the IR of what the C of a part declares as ``extern const``."""
    lines = (f"@{name} = internal constant {const(value)}" for name, value in values.items())
    return "\n".join(lines)


def _inlined(context: Context, signature: str, write: Write) -> str:
    out = Function()
    out.place("entry")
    result = write(replace(context, out=out))
    out.emit("ret void" if result is None else f"ret {result}")
    type_, lines = "void" if result is None else result.type, "\n".join(out.lines)
    return f"define internal {type_} @{signature} alwaysinline nounwind {{\n{lines}\n}}"
