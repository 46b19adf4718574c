"""Objects of the sources in tests/build/objects, as gcc 12 and clang 19 make them.

They are kept as they are, so that who reads them needs no compiler; `python -m tests.build.objects`
makes them anew where all are installed, gcc for arm64 among them.
"""

import os
import subprocess
from pathlib import Path

FOLDER = Path(__file__).parent / "objects"
SOURCE = FOLDER / "entries.c"
LINES = FOLDER / "source.c"
MODULE = FOLDER / "module.c"
EXTERNS = FOLDER / "externs.c"
CONSTANTS = FOLDER / "constants.c"
_GCC = "gcc -O2 -fcf-protection=none"
_CLANG = "clang-19 -O2 --target=x86_64-linux-gnu"
_ARM64 = "clang-19 -O2 --target=aarch64-linux-gnu"
_FENTRY = "-pg -mfentry -mrecord-mcount"
_LINKED = "-shared -nostdlib -Wl,-z,noseparate-code -Wl,--build-id=none -Wl,-z,lazy"
COMMANDS: dict[str, str] = {
    "gcc-pg.o": f"{_GCC} -pg -c",
    "gcc-fentry.o": f"{_GCC} {_FENTRY} -c",
    "gcc-nop.o": f"{_GCC} {_FENTRY} -mnop-mcount -fno-pic -c",
    "gcc-nop-unlisted.o": f"{_GCC} -pg -mfentry -mnop-mcount -fno-pic -c",
    "gcc-patchable.o": "gcc -O2 -fcf-protection -fpatchable-function-entry=5,2 -c",
    "gcc-linked.so": f"{_GCC} {_FENTRY} -fPIC {_LINKED}",
    "clang-pg.o": f"{_CLANG} -pg -c",
    "clang-fentry.o": f"{_CLANG} -pg -mfentry -c",
    "clang-patchable.o": f"{_CLANG} -fpatchable-function-entry=5,2 -c",
    "clang-kcfi.o": (
        f"{_CLANG} -fcf-protection=branch -fsanitize=kcfi -fpatchable-function-entry=11,11 -c"
    ),
    "clang-linked.so": f"{_CLANG} -pg -mfentry -fPIC {_LINKED}",
    "arm64-pg.o": f"{_ARM64} -pg -c",
    "arm64-patchable.o": f"{_ARM64} -fpatchable-function-entry=2 -c",
    "arm64-before.o": f"{_ARM64} -mbranch-protection=bti -fpatchable-function-entry=4,2 -c",
    "arm64-kcfi.o": (
        f"{_ARM64} -mbranch-protection=standard -fsanitize=kcfi -fpatchable-function-entry=4,2 -c"
    ),
    "arm64-linked.so": f"{_ARM64} -pg -fPIC -fuse-ld=/usr/lib/llvm-19/bin/ld.lld {_LINKED}",
}
"""By name: the compiler and its options."""
WITH_LINES: dict[str, str] = {
    "lines-4.so": f"gcc -O2 -g -gdwarf-4 -fPIC {_LINKED}",
    "lines-5.so": f"gcc -O2 -g -gdwarf-5 -fPIC {_LINKED}",
    "lines-split-4.so": f"gcc -O2 -g -gdwarf-4 -gsplit-dwarf -fPIC {_LINKED}",
    "lines-split-5.so": f"gcc -O2 -g -gdwarf-5 -gsplit-dwarf -fPIC {_LINKED}",
    "lines-clang.so": f"clang-19 -O2 -g -fPIC {_LINKED}",
    "lines-arm64.so": (
        "aarch64-linux-gnu-gcc -O2 -g -fPIC -mbranch-protection=bti -fpatchable-function-entry=2 "
        f"-Wl,-z,max-page-size=4096 {_LINKED}"
    ),
}
"""Likewise, of source.c, with debug information."""
_NO_TABLES = "-fno-asynchronous-unwind-tables -fno-unwind-tables"
_PARTS = f"-O2 -g -ffreestanding {_NO_TABLES} -fno-pic -r -nostdlib"
_BUILD_ID = "-Wl,--build-id=0x0102030405060708"
MODULES: dict[str, str] = {
    "module.ko": f"gcc {_PARTS} -mcmodel=kernel -fcf-protection=none {_BUILD_ID}",
    "module-arm64.ko": f"aarch64-linux-gnu-gcc {_PARTS} {_BUILD_ID}",
}
"""Likewise, of module.c, as modules are."""
WITH_EXTERNS: dict[str, str] = {
    "externs.so": f"gcc -O2 -g -fPIC {_LINKED}",
    "externs.ko": f"gcc {_PARTS} -mcmodel=kernel -fcf-protection=none {_BUILD_ID}",
}
"""Likewise, of externs.c, linked, and as modules are."""
WITH_CONSTANTS: dict[str, str] = {"constants.so": f"gcc -O2 -g -fPIC {_LINKED}"}
"""Likewise, of constants.c."""


def make(name: str, folder: Path) -> Path:
    """Compile one into a folder; return where it is."""
    path = folder / name
    known = {
        SOURCE: COMMANDS,
        LINES: WITH_LINES,
        MODULE: MODULES,
        EXTERNS: WITH_EXTERNS,
        CONSTANTS: WITH_CONSTANTS,
    }
    ((source, command),) = ((each, of[name]) for each, of in known.items() if name in of)
    # By a name of its own what is split off is found beside it, wherever that is.
    command = [*command.split(), source.name, "-o", os.path.relpath(path, FOLDER)]
    subprocess.run(command, check=True, cwd=FOLDER)
    return path


if __name__ == "__main__":
    for each in (*COMMANDS, *WITH_LINES, *MODULES, *WITH_EXTERNS, *WITH_CONSTANTS):
        make(each, FOLDER)
