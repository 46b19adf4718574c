"""``kprobe sites``: what is prepared at functions' entries, in a file and in a kernel's memory."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from kprobes.cli import options
from kprobes.cli.terminal import aligned, counted, json_lines, print_message, write_text
from kprobes.errors import TargetError, UsageError

if TYPE_CHECKING:
    from kprobes.arch.entry import EntryPart
    from kprobes.arch.insn import Disassembled
    from kprobes.inspect.sites import EntrySide, FunctionEntry

NAME = "sites"
HELP = "show what is prepared at functions' entries: calls of profilers, nops, landing pads"
USAGE = "kprobe sites [options] [FILE] [FUNC]"
EPILOG = """\
examples:
  kprobe sites prog.o                        # what gcc -pg, -mfentry or clang wrote into it
  kprobe sites -t qemu:localhost:1234 vfs_read
  kprobe sites /boot/vmlinuz 'vfs_*' --format json

FILE is an object, a program, a module, a vmlinux or a boot image: a word with a slash in it, or the
name of a file here. FUNC is a name, or a shell pattern; one function is shown instruction by
instruction, several in a line each. Of a running kernel that is what its file has and what is in
memory now. docs/howto/sites.md explains what is shown.

Exit status: 0 done, 1 nothing matches, 2 usage, 3 target unreachable."""
_MOST = 4
"""Functions that are shown in full where FUNC is a name."""
_MORE = 4
"""Instructions that are shown after what is prepared."""
_SHORT = {
    "padding": "padding",
    "kcfi": "kCFI hash",
    "fineibt": "FineIBT",
    "call_ops": "ops pointer",
    "patchable_before": "nops before",
    "sealed": "sealed",
    "patchable": "nops",
    "nop": "nop",
    "jump": "jump",
    "breakpoint": "breakpoint",
}
_LONG = {
    "padding": "padding: the kernel's own",
    "kcfi": "kCFI: hash of the function's type",
    "fineibt": "FineIBT: compares the caller's hash",
    "call_ops": "pointer to the site's struct ftrace_ops",
    "patchable_before": "nops before the function",
    "landing_pad": "landing pad",
    "sealed": "landing pad, sealed: a nop",
    "signing": "signs the return address",
    "patchable": "nops",
    "saved_link": "keeps the return address",
    "nop": "site: nop",
    "call": "site: call",
    "jump": "site: jump",
    "breakpoint": "site: breakpoint",
    "prologue": "prologue",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument("words", nargs="*", metavar="FILE FUNC", help="see below")
    parser.set_defaults(image=None, arm=None, command=())
    options.add_guest(parser)


def run(args: argparse.Namespace, out: BinaryIO) -> int:
    """Show; return the exit code."""
    from kprobes.collector import without_collector
    from kprobes.inspect.sites import counted as kinds

    path, pattern = _asked(args)
    with without_collector():
        entries = list(_entries(args, path, pattern))
    if not entries:
        where = args.target or "the guest" if path is None else str(path)
        raise TargetError(f"no function matches {pattern!r} in {where}")
    if args.format == "json":
        write_text(out, json_lines(map(_as_object, entries)))
    elif _is_name(pattern) and len(entries) <= _MOST:
        write_text(out, "\n".join(map(_in_full, entries)))
    else:
        write_text(out, aligned(_rows(entries)))
        if not args.quiet:
            print_message(_sum_up(kinds(entries)))
    return 0


def _asked(args: argparse.Namespace) -> tuple[Path | None, str]:
    words: list[str] = list(args.words)
    path = None
    if words and args.target is None and ("/" in words[0] or Path(words[0]).is_file()):
        path = Path(words.pop(0))
    if len(words) > 1:
        if args.target is not None:
            raise UsageError("with a target there is no FILE: name one function, or a pattern")
        raise UsageError(f"no such file: {words[0]}")
    if path is not None:
        names = ("vmlinux", "symbols", "module", *options.BOOT_OPTIONS)
        given = [name for name in names if getattr(args, name) is not None]
        if given:
            raise UsageError(f"--{given[0]} is for a guest; with a FILE there is none")
    return path, words[0] if words else "*"


def _is_name(pattern: str) -> bool:
    return not set(pattern) & set("*?[")


def _entries(
    args: argparse.Namespace, path: Path | None, pattern: str
) -> "Iterator[FunctionEntry]":
    from kprobes.cli.target import check_options
    from kprobes.cli.xray import opened_snapshot
    from kprobes.inspect.sites import is_kernel, sites_of_file, sites_of_kernel

    if path is None:
        check_options(args)
    elif not is_kernel(path):
        yield from sites_of_file(path, pattern)
        return
    args.image = path
    with opened_snapshot(args) as snapshot:
        yield from sites_of_kernel(snapshot, pattern)


def _rows(entries: "list[FunctionEntry]") -> "Iterator[tuple[str, ...]]":
    has_file = any(entry.file is not None for entry in entries)
    has_memory = any(entry.memory is not None for entry in entries)
    sides = [*(["IN FILE"] if has_file else []), *(["IN MEMORY"] if has_memory else [])]
    yield ("FUNCTION", "ADDRESS", *sides)
    for entry in entries:
        file = [_words(entry.file)] if has_file else []
        memory = [_words(entry.memory)] if has_memory else []
        yield (_name(entry), f"{entry.addr:#x}", *file, *memory)


def _name(entry: "FunctionEntry") -> str:
    return f"{entry.name} [{entry.owner}]" if entry.owner not in ("", ".text") else entry.name


def _words(side: "EntrySide | None") -> str:
    if side is None:
        return "?"
    words = [_short(part) for part in side.parts if part.kind != "prologue"]
    return ", ".join(words) or "-"


def _short(part: "EntryPart") -> str:
    words = _SHORT.get(part.kind, part.text)
    if part.kind == "call":
        words = f"call {part.callee}" if part.callee else "call"
    if part.kind in ("patchable", "patchable_before"):
        words = f"{len(part.code)} bytes of {words}"
    is_site = part.kind in ("call", "nop", "jump", "breakpoint")
    return f"{words} {part.offset:+#x}" if is_site else words


def _sum_up(kinds: dict[str, int]) -> str:
    words = {"": "without a site", "patchable": "with nops"}
    found = (f"{n:,} {words.get(kind, f'with a {kind}')}" for kind, n in sorted(kinds.items()))
    return f"{counted(sum(kinds.values()), 'function')}: {', '.join(found)}"


def _in_full(entry: "FunctionEntry") -> str:
    where = f"  {entry.addr:#x}, {entry.size:,} bytes"
    owner = f", {entry.owner}" if entry.owner else ""
    sides = [side for side in (entry.file, entry.memory) if side is not None]
    stop = max(side.stop for side in sides)
    rows: list[tuple[str, ...]] = [row for side in sides for row in _lines(side, stop)]
    if len(sides) > 1:
        rows = list(_compared(*(_lines(side, stop) for side in sides)))
    return f"{entry.name}{where}{owner}\n{aligned(rows, indent='  ')}"


_Row = tuple[str, str, str, str]


def _lines(side: "EntrySide", stop: int) -> list[_Row]:
    parts = {part.offset: part for part in side.parts}
    start = side.lines[0].addr if side.lines else 0
    before = [part for part in side.parts if part.offset < 0]
    rows = [(f"{part.offset:+#x}", part.code.hex(" "), "", _long(part)) for part in before]
    count = sum(line.addr - start < stop for line in side.lines) + _MORE
    return [*rows, *(_line(line, line.addr - start, parts) for line in side.lines[:count])]


def _line(line: "Disassembled", offset: int, parts: "dict[int, EntryPart]") -> _Row:
    part = parts.get(offset)
    text = line.text
    if part is not None and part.callee:
        text = f"{line.mnemonic} {part.callee}"
    return f"{offset:+#x}", line.code.hex(" "), text, "" if part is None else _long(part)


def _long(part: "EntryPart") -> str:
    tables = f", in {' and '.join(part.tables)}" if part.tables else ""
    return f"# {_LONG[part.kind]}{tables}"


def _compared(file: list[_Row], memory: list[_Row]) -> "Iterator[tuple[str, ...]]":
    # By offset, the file's first where they differ, as in an x-ray.
    offsets = sorted({int(row[0], 16) for row in (*file, *memory)})
    were, are = ({int(row[0], 16): row for row in rows} for rows in (file, memory))
    for offset in offsets:
        was, now = were.get(offset), are.get(offset)
        if was is not None and now is not None and was[1:3] == now[1:3]:
            yield (" ", *now)
            continue
        if was is not None:
            yield ("-", *was)
        if now is not None:
            yield ("+", *now)


def _as_object(entry: "FunctionEntry") -> dict[str, object]:
    return {
        "function": entry.name,
        "address": f"{entry.addr:#x}",
        "size": entry.size,
        "owner": entry.owner,
        "file": _parts(entry.file),
        "memory": _parts(entry.memory),
    }


def _parts(side: "EntrySide | None") -> list[dict[str, object]] | None:
    return None if side is None else list(map(_part, side.parts))


def _part(part: "EntryPart") -> dict[str, object]:
    return {
        "kind": part.kind.value,
        "offset": part.offset,
        "bytes": part.code.hex(),
        "text": part.text,
        "callee": part.callee,
        "tables": list(part.tables),
    }
