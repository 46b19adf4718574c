"""Compiler of our C: what runs in guests, codegen/runtime/, and on many rows here, native/.

Each *.c to the .ll beside it. Run by `make runtime` when one has been changed; needs clang 15 or
later (Debian 12: clang-19).
clang only reads the C. Helpers are inlined and variables put into registers by llvmlite's LLVM, the
one that parses the result; everything else waits until the target is known.
"""

import hashlib
import re
import subprocess
import sys
from pathlib import Path

import llvmlite.binding as llvm

# pyright: reportUnknownMemberType=false, reportMissingTypeStubs=false
# pyright: reportUnknownVariableType=false

_SOURCES = Path(__file__).parent.parent / "src" / "kprobes"
RUNTIME, NATIVE = _SOURCES / "codegen" / "runtime", _SOURCES / "native"
"""Where the parts are: NAME.c, NAME.ll and headers."""

_TARGET = "x86_64-unknown-none-elf"
"""Only for the C's type sizes, which are all architectures': the result names no target."""
_FLAGS = [
    f"--target={_TARGET}",
    *("-std=gnu2x", "-Wall", "-Wextra", "-Werror"),
    *("-ffreestanding", "-fno-builtin", "-fno-strict-aliasing", "-fno-discard-value-names"),
    # What it would optimise, but optimised by none of its passes.
    *("-O1", "-Xclang", "-disable-llvm-passes", "-Xclang", "-disable-lifetime-markers"),
    *("-S", "-emit-llvm", "-o", "-"),
]
_KEPT = ("alwaysinline", "noinline", "nounwind")
"""Attributes of functions; the module that a part becomes a piece of has the target's."""
_ATTRIBUTES = re.compile(r"^attributes #(\d+) = \{(.*)\}$", re.MULTILINE)


def main() -> None:
    """Compile every part."""
    clang = sys.argv[1]
    llvm.initialize_all_targets()
    for source in sorted(path for each in (RUNTIME, NATIVE) for path in each.glob("*.c")):
        command = [clang, *_FLAGS, str(source)]
        text = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        body = _finished(_inlined(_without_target(text)))
        header = f"; Generated from {source.name} by `make runtime`.\n; {digest(source)}\n"
        source.with_suffix(".ll").write_text(header + body)


def digest(source: Path) -> str:
    """Return the digest of what a part is compiled from, which its IR has in its second line."""
    sources = (source, *sorted(source.parent.glob("*.h")))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()


def _without_target(text: str) -> str:
    groups = dict(_ATTRIBUTES.findall(text))

    def kept(found: re.Match[str]) -> str:
        return "".join(f" {word}" for word in groups[found[1]].split() if word in _KEPT)

    text = re.sub(r"^(attributes|target|source_filename|!llvm).*\n", "", text, flags=re.MULTILINE)
    text = re.sub(r", !(llvm\.loop|srcloc) !\d+", "", text)
    return re.sub(r" #(\d+)", kept, text)


def _inlined(text: str) -> str:
    module = llvm.parse_assembly(text)
    machine = llvm.Target.from_triple(_TARGET).create_target_machine()
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options())
    passes = llvm.create_new_module_pass_manager()
    passes.add_always_inliner_pass()
    passes.add_sroa_pass()
    passes.add_instruction_combine_pass()
    passes.add_simplify_cfg_pass()
    passes.add_global_dead_code_eliminate_pass()
    passes.run(module, builder)
    return str(module)


def _finished(text: str) -> str:
    # Pieces are internal to the module, so that it keeps those that it calls; what is declared is
    # defined by the module. Functions of attributes #0 are none that are inlined: see
    # kprobes/codegen/compile.py.
    groups = dict(_ATTRIBUTES.findall(text))

    def header(found: re.Match[str]) -> str:
        kind = groups[found[2]].split()
        rest = found[1].replace("noundef ", "")
        if "alwaysinline" in kind:
            return f"define internal {rest} alwaysinline nounwind {{"
        return f"define {'internal ' if 'noinline' in kind else 'dso_local '}{rest} #0 {{"

    text = re.sub(r"^( .*) #\d+$", r"\1", text, flags=re.MULTILINE)
    text = re.sub(r"^define (?:dso_local )?(.*\)).*? #(\d+) \{$", header, text, flags=re.MULTILINE)
    text = re.sub(r" *;.*", "", text)
    removed = r"^(source_filename|target |declare|attributes|!\d|@\w+ = external).*\n"
    text = re.sub(removed, "", text, flags=re.MULTILINE)
    text = re.sub(r"\b(noundef|zeroext) ", "", text)
    return re.sub(r"\n{2,}", "\n", text).lstrip()


if __name__ == "__main__":
    main()
