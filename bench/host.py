"""This machine's own kernel: its pages to columns, beside ``trace-cmd report`` and ``perf script``.

All of it runs in a guest that carries them, on the same records of the guest's kernel (perf keeps
its own, of as many hits); what is compared is seconds of CPU in that guest.
"""

import json
import tempfile
from pathlib import Path

import bench.in_host_guest
from bench.elf_program import Loop
from bench.isa import Isa
from bench.table import Row, seconds, times, verdict_of
from kprobes.transport.qemu import Machine
from kprobes.transport.qemu_command import MachineOptions
from tests.build import host_reading
from tests.build.host_image import host_files

TITLE = "host: the kernel's own records to columns, in a guest"

_STEPS, _REPEATS, _QUICK_REPEATS = 10_000, 52, 10
_MEMORY_MIB = 3072
_SUITE_OF_MAPPED = "sid"
"""Where a kernel is had whose rings can be mapped."""
_GOAL = 15.0
"""Of decoding, beside trace-cmd's report."""


def run(isa: Isa, *, quick: bool = False) -> list[Row]:
    """Boot a guest and measure in it."""
    repeats = _QUICK_REPEATS if quick else _REPEATS
    loop = Loop(isa=isa, step=isa.programs.getppid, steps=_STEPS, repeats=repeats, cpus=2)
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "loop")
        program.write_bytes(loop.program())
        program.chmod(0o755)
        tools: dict[str, Path | bytes] = {
            "/root/loop": program,
            "/root/bench/in_host_guest.py": Path(bench.in_host_guest.__file__),
            "/root/tests/build/host_reading.py": Path(host_reading.__file__),
        }
        told = _measured(host_files("trace-cmd", "perf") | tools, f"{loop.total}")
        mapped = _measured(host_files() | tools, f"{loop.total} mapped", suite=_SUITE_OF_MAPPED)
    return [*_rows(told), *_rows_of_mapped(mapped)]


def _measured(
    files: dict[str, Path | bytes], arguments: str, suite: str = "bookworm"
) -> dict[str, float]:
    options = MachineOptions(suite=suite, memory_mib=_MEMORY_MIB, files=files)
    with Machine.boot(options) as guest:
        command = f"cd /root && python3 -m bench.in_host_guest /root/loop {arguments}"
        finished = guest.run(command, timeout_s=1800)
    text = finished.output.decode(errors="replace")
    if finished.status:
        raise RuntimeError(f"the guest's benchmark ended with {finished.status}: {text[-600:]}")
    return json.loads(text.splitlines()[-1])


def _rows(told: dict[str, float]) -> list[Row]:
    ours, kept = told["decode_s"], told["kept"]
    return [
        _beside(
            f"{kept:,.0f} events to columns, trace-cmd report", ours, told["trace_cmd_s"], _GOAL
        ),
        _beside("the same, perf script of as many", ours, told["perf_s"]),
        _beside("columns and text, trace-cmd report", told["text_s"], told["trace_cmd_s"]),
        _drained(told, "drained", "drained while 2 CPUs make"),
    ]


def _rows_of_mapped(told: dict[str, float]) -> list[Row]:
    return [
        _drained(told, "drained", "7.x, by splice:"),
        _drained(told, "mapped", "7.x, rings mapped:"),
    ]


def _drained(told: dict[str, float], how: str, name: str) -> Row:
    lost = told[f"{how}_lost"]
    rate, cpu = told["hits"] / told[f"{how}_s"], told[f"{how}_cpu_s"]
    return Row(
        name=f"{name} {told['hits']:,.0f} hits",
        figure=f"{rate / 1e3:,.0f} k/s, {lost:,.0f} lost, CPU {seconds(cpu)}",
        goal="none lost",
        verdict=verdict_of(told[how] == told["hits"] and lost == 0),
    )


def _beside(name: str, ours: float, theirs: float, goal: float | None = None) -> Row:
    return Row(
        name=name,
        figure=seconds(ours),
        goal="" if goal is None else f"{goal:g}x",
        peer=seconds(theirs),
        ratio=times(theirs / ours),
        verdict=verdict_of(None if goal is None else theirs / ours >= goal),
    )
