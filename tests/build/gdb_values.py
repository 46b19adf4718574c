"""Variables as gdb has them: at places of a kernel's file, with registers that a test makes up."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

TOP = Path(__file__).parent.parent.parent
GENERAL = {
    "amd64": {
        **dict(zip(("ax", "bx", "cx", "dx"), ("rax", "rbx", "rcx", "rdx"), strict=True)),
        **dict(zip(("si", "di", "bp", "sp"), ("rsi", "rdi", "rbp", "rsp"), strict=True)),
        **{f"r{n}": f"r{n}" for n in range(8, 16)},
    },
    "arm64": {f"x{n}": f"x{n}" for n in range(31)} | {"sp": "sp"},
}
"""gdb's names of the registers by pt_regs'."""
_PC = {"amd64": "rip", "arm64": "pc"}
_SCRIPT = """
import gdb, json
for command in ("pagination off", "confirm off", "print entry-values no", "backtrace limit 64"):
    gdb.execute(f"set {command}")
gdb.execute("target remote | STUB", to_string=True)
NUMBERS = (gdb.TYPE_CODE_INT, gdb.TYPE_CODE_PTR, gdb.TYPE_CODE_ENUM, gdb.TYPE_CODE_BOOL)

def number(symbol, frame):
    type_ = symbol.type.strip_typedefs()
    if type_.code not in NUMBERS:
        # Nor read: it may be a table of a megabyte.
        return None
    try:
        value = symbol.value(frame)
        is_there = not value.is_optimized_out
        return [int(value) % (1 << 8 * type_.sizeof), type_.sizeof] if is_there else None
    except gdb.error:
        return None

def variables():
    found, frame = {}, gdb.newest_frame()
    while True:
        try:
            block = frame.block()
        except RuntimeError:
            # Of assembly.
            return found
        while block is not None:
            for symbol in block:
                if (symbol.is_variable or symbol.is_argument) and symbol.name not in found:
                    found[symbol.name] = number(symbol, frame)
            block = None if block.function is not None else block.superblock
        if frame.type() != gdb.INLINE_FRAME:
            return found
        frame = frame.older()

def at(place):
    for name, value in place.items():
        gdb.execute(f"set ${name} = {value}", to_string=True)
    return variables()

with open("PLACES") as places:
    found = [at(place) for place in json.load(places)]
with open("FOUND", "w") as out:
    json.dump(found, out)
"""


def gdb_values(
    vmlinux: Path, arch: str, places: Sequence[tuple[int, Mapping[str, int]]], directory: Path
) -> list[dict[str, tuple[int, int] | None]]:
    """Return the variables at each place by name, the innermost: number and size, None for others.

    Args:
        vmlinux: with debug information.
        arch: its architecture.
        places: address and registers by pt_regs' names; memory is ``gdb_stub``'s.
        directory: for files.
    """
    general = GENERAL[arch]
    wanted = [
        {**{general[name]: value for name, value in registers.items()}, _PC[arch]: addr}
        for addr, registers in places
    ]
    script, given, found = (directory / name for name in ("gdb.py", "places", "found"))
    given.write_text(json.dumps(wanted))
    stub = f"{sys.executable} -m tests.build.gdb_stub {len(general) + 1}"
    text = _SCRIPT.replace("STUB", stub).replace("PLACES", str(given)).replace("FOUND", str(found))
    script.write_text(text)
    command = ["gdb-multiarch", "-q", "-nx", "-batch", str(vmlinux), "-x", str(script)]
    said = subprocess.run(command, cwd=TOP, capture_output=True, timeout=500, check=False)
    assert found.exists(), said.stderr.decode()
    return json.loads(found.read_text())
