"""Words of each architecture for the same things in definitions.

What is for both is written in amd64's words, and goes into the other's: a register that has an
argument becomes the one that has this argument there.
"""

import re
from collections.abc import Mapping

from msgspec import Struct

from kprobes.arch.aarch64.arch import AARCH64
from kprobes.arch.arch import Arch
from kprobes.arch.x86_64.arch import X86_64
from tests.build.dialect import DIALECTS


class Words(Struct, frozen=True, kw_only=True):
    """The words of one architecture.

    Attributes:
        info: the architecture.
        registers: amd64's names of registers to its own.
        symbols: names of data that Debian's amd64 kernels know to names that its own know.
        syscall: what the functions of its system calls begin with.
    """

    info: Arch
    registers: Mapping[str, str]
    symbols: Mapping[str, str]
    syscall: str

    def of(self, text: str) -> str:
        """Return what is written in amd64's words in these."""
        text = _REGISTER.sub(lambda found: self.registers.get(found[0], found[0]), text)
        text = _SYMBOL.sub(lambda found: self.symbols.get(found[0], found[0]), text)
        return text.replace(_SYSCALL, self.syscall)


_REGISTER = re.compile(r"(?<=%)\w+")
_SYMBOL = re.compile(r"(?<=[@{])\w+\b(?!\.)")
_SYSCALL = DIALECTS["amd64"].syscall
_ARM64_REGISTERS = {
    **dict(zip(DIALECTS["amd64"].arguments, DIALECTS["arm64"].arguments, strict=False)),
    "ip": "pc",
    "flags": "pstate",
    "bp": "x29",
    # These have no counterparts: any others.
    "ax": "x8",
    "r10": "x9",
    "r11": "x10",
    "cs": "x11",
    "ss": "x12",
    "orig_ax": "x13",
    "bx": "x19",
    "r12": "x20",
    "r13": "x21",
    "r14": "x22",
    "r15": "lr",
}
_ARM64_SYMBOLS = {
    # Functions that nobody patches: no name of data is in a kernel without KALLSYMS_ALL.
    "jiffies": "strncat",
    "linux_banner": "strcasecmp",
    "linux_proc_banner": "strreplace",
    "saved_command_line": "strcspn",
    "init_task": "strspn",
    "init_uts_ns": "strnlen",
    "nr_cpu_ids": "strpbrk",
    "sys_call_table": "strsep",
}
_AMD64 = Words(info=X86_64, registers={}, symbols={}, syscall=_SYSCALL)
_ARM64 = Words(
    info=AARCH64,
    registers=_ARM64_REGISTERS,
    symbols=_ARM64_SYMBOLS,
    syscall=DIALECTS["arm64"].syscall,
)
WORDS = {"amd64": _AMD64, "arm64": _ARM64}
"""By Debian's name."""


def debian_name(arch: str) -> str:
    """Return Debian's name of an architecture that is named as in ``Kernel.arch``."""
    return next(name for name, words in WORDS.items() if words.info.name == arch)
