"""Time to read a running kernel's symbols and types from guest RAM, with no cache.

Beside it: ``vmlinux-to-elf`` (extra ``bench``) on the same kernel's image, dumped from that RAM.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from bench.guest import machine
from bench.isa import Isa
from bench.table import Row, seconds, times, verdict_of
from kprobes.arch.machine import Machine
from kprobes.arch.registry import machine_of_stub
from kprobes.guest.attach import registers_of
from kprobes.image.find import FoundKernel, Registers, find_spaces, read_kernel
from kprobes.ports import Ram
from kprobes.transport.connect import connect
from kprobes.transport.find_ram import open_ram

TITLE = "symbols: a kernel's names and types from its RAM"

_GOAL_S = 0.5
_PEER_TIMEOUT_S = 120.0


def run(isa: Isa, *, quick: bool = False) -> list[Row]:
    """Boot a guest and read its kernel."""
    with machine(isa, {}) as booted, connect(str(booted.stub_address), timeout_s=5.0) as stub:
        ram = open_ram(stub)
        info = machine_of_stub(stub.description.architecture)
        registers = registers_of(stub, info)
        found: list[tuple[float, FoundKernel]] = [
            _read(ram, info, registers) for _ in range(3 if quick else 9)
        ]
        kernel = found[-1][1]
        peer = None if quick else _vmlinux_to_elf(_image(kernel, info, ram))
    figures = [figure for figure, _ in found]
    ours, count = median(figures), len(kernel.kernel.symbols)
    return [
        Row(
            name=f"{kernel.kernel.release}: {count} symbols, and types",
            figure=f"{seconds(ours)} [{seconds(min(figures))} .. {seconds(max(figures))}]",
            goal=seconds(_GOAL_S),
            peer="vmlinux-to-elf not run" if peer is None else f"{seconds(peer)} vmlinux-to-elf",
            ratio="" if peer is None else times(peer / ours),
            verdict=verdict_of(ours <= _GOAL_S),
        )
    ]


def _read(ram: Ram, info: Machine, vcpus: Sequence[Registers]) -> tuple[float, FoundKernel]:
    start = time.perf_counter()
    found = read_kernel(find_spaces(ram, info, vcpus))
    # What every session asks for first; both are read lazily.
    found.kernel.symbols.named("do_sys_openat2")
    if found.kernel.types is not None:
        found.kernel.types.offset("task_struct", "comm")
    return time.perf_counter() - start, found


def _image(found: FoundKernel, info: Machine, ram: Ram) -> bytes:
    image, start = bytearray(), -1
    for run in found.tables.mapped_runs(*info.paging.window(found.tables)):
        start = run.virt if start < 0 else start
        image += bytes(run.virt - start - len(image)) + ram.read(run.phys, run.size)
    return bytes(image)


def _vmlinux_to_elf(image: bytes) -> float | None:
    program = Path(sys.executable).parent / "vmlinux-to-elf"
    if not program.exists():
        return None
    with tempfile.TemporaryDirectory() as folder:
        dump, out = Path(folder) / "image", Path(folder) / "elf"
        dump.write_bytes(image)
        start = time.perf_counter()
        subprocess.run(
            [program, dump, out], capture_output=True, check=True, timeout=_PEER_TIMEOUT_S
        )
        return time.perf_counter() - start
