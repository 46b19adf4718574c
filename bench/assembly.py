"""Assembly text to machine code, through LLVM's own assembler: it needs no other tool."""

from kprobes import llvm
from kprobes.arch.x86_64.arch import CODE
from kprobes.codegen.object import read_template
from kprobes.model.abi import Template


def assemble(text: str) -> Template:
    """Return the x86-64 code of some lines in Intel's syntax; its symbols are left to linking."""
    lines = [".intel_syntax noprefix", *(line for line in text.splitlines() if line.strip())]
    # Quotes and backslashes in LLVM's strings are hexadecimal escapes.
    escaped = (line.strip().replace("\\", r"\5C").replace('"', r"\22") for line in lines)
    source = "\n".join(f'module asm "{line}"' for line in escaped)
    found = llvm.compile_object(source, CODE)
    return read_template(found, CODE)
