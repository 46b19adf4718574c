"""Whether a QEMU runs its guest, by what its process has in memory: connecting would stop it.

QEMU keeps it in one variable, a RunState of qapi/run-state.json. ``runstate_is_running`` compares
that one, and is exported to QEMU's modules, also where everything else is stripped.

    Elf64_Sym: u32 name, u8 info, u8 other, u16 shndx, u64 value, u64 size
"""

import mmap
import struct
from pathlib import Path

import numpy as np

from kprobes.arch.machine import Machine
from kprobes.arch.registry import machine_of_elf
from kprobes.errors import FormatError, TargetError
from kprobes.formats.elf import MAGIC
from kprobes.transport.peer import listener_pid

_RUNNING, _STATES = 9, 16
_FUNCTION = b"\0runstate_is_running\0"
_SIZE = 16
_DYN, _DYNSYM = 3, 11
_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = np.dtype([("name", "<u4"), ("other", "<u4"), ("value", "<u8"), ("size", "<u8")])


def is_running(address: str) -> bool | None:
    """Return whether the guest of the QEMU that listens at an address runs.

    None where nothing tells: a QEMU on another machine, of another user, or without symbols.
    """
    pid = listener_pid(address)
    try:
        state = None if pid is None else _read_state(Path("/proc", str(pid)))
    except (OSError, ValueError, struct.error, FormatError, TargetError):
        return None
    return None if state is None or state >= _STATES else state == _RUNNING


def _read_state(process: Path) -> int:
    with (
        (process / "exe").open("rb") as file,
        mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as program,
    ):
        machine, function = _find(program)
    # A position-independent program lies below its libraries.
    base = int((process / "maps").read_text().split("-", 1)[0], 16)
    with (process / "mem").open("rb", buffering=0) as memory:
        memory.seek(base + function)
        named = machine.text.references(memory.read(_SIZE), base + function)
        memory.seek(next(iter(named), 0))
        return int.from_bytes(memory.read(4), "little")


def _find(program: mmap.mmap) -> tuple[Machine, int]:
    _, kind, machine, _, _, _, table, _, _, _, _, _, count, _ = _HEADER.unpack_from(program)
    if program[: len(MAGIC)] != MAGIC or kind != _DYN:
        raise FormatError("no position-independent program")
    sections: list[tuple[int, ...]] = [
        _SECTION.unpack_from(program, table + _SECTION.size * i) for i in range(count)
    ]
    for _, kind, _, _, offset, size, link, *_ in sections:
        if kind == _DYNSYM and link < count:
            start, length = sections[link][4:6]
            names = program[start : start + length]
            rows = np.frombuffer(program[offset : offset + size], _SYMBOL)
            found = rows["value"][rows["name"] == names.find(_FUNCTION) + 1]
            if len(found) == 1:
                return machine_of_elf(machine), int(found[0])
    raise FormatError("a program that is not QEMU, or exports nothing")
