"""``kprobe targets``: the kernels on this machine that could be probed."""

import argparse
import os
from typing import TYPE_CHECKING, Any, BinaryIO

from kprobes.cli import options
from kprobes.cli.terminal import aligned, counted, json_lines, write_text
from kprobes.units import MIB

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kprobes.errors import KprobesError
    from kprobes.guest.journal import Entry
    from kprobes.host.obstacles import Obstacle
    from kprobes.inspect.targets import LocalGuest

NAME = "targets"
HELP = "list the guests and the kernel of this machine that could be probed"
EPILOG = """\
examples:
  kprobe targets
  kprobe targets --format json
  kprobe trace -t running 'p:open do_sys_openat2' --max-events 5   # the only guest that runs

No guest is connected to or stands still for it. Guests are the QEMU processes that this user may
look at; more is known of those whose memory this user may read.

Exit status: 0 done, 1 a journal cannot be read, 2 usage."""
HEAD = ("TARGET", "PID", "GUEST", "STATE", "KERNEL", "STUB", "MONITOR", "MEMORY BY", "PROBES")
_UNKNOWN = "?"
_STATES = {True: "paused", False: "running", None: _UNKNOWN}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    options.add_output(parser)


def run(args: argparse.Namespace, out: BinaryIO) -> int:
    """List; return the exit code."""
    from kprobes.cli.words import print_broken
    from kprobes.guest.journal import entries
    from kprobes.host.obstacles import obstacles
    from kprobes.inspect.targets import local_guests

    broken: list[KprobesError] = []
    found = local_guests(entries(broken.append))
    in_the_way = obstacles()
    print_broken(broken)
    show = _as_json if args.format == "json" else _as_text
    write_text(out, show(found, in_the_way))
    return 1 if broken else 0


def _as_text(found: "Sequence[LocalGuest]", obstacles: "Sequence[Obstacle]") -> str:
    rows = [HEAD, *map(_row, found), _host_row(obstacles)]
    lines = [
        f"{each.name}: {each.qemu.command.advice}\n" for each in found if each.qemu.command.advice
    ]
    return aligned(rows) + "".join(lines)


def _row(target: "LocalGuest") -> tuple[str, ...]:
    command, stub = target.qemu.command, target.qemu.command.stub
    cpus = counted(command.cpus, "CPU")
    return (
        target.name,
        str(target.qemu.pid),
        f"{command.arch or _UNKNOWN}, {cpus}, {command.memory // MIB:,} MiB, {target.qemu.accel}",
        _STATES[target.is_paused],
        target.release or _UNKNOWN,
        f"{stub}{'' if target.is_stub_free else ' (in use)'}" if stub else "-",
        command.monitor or "-",
        target.ram,
        ", ".join(map(_tracer, target.tracers)) or "-",
    )


def _host_row(obstacles: "Sequence[Obstacle]") -> tuple[str, ...]:
    system = os.uname()
    state = f"cannot be probed: {obstacles[0].found}" if obstacles else "can be probed"
    return options.HOST, "-", system.machine, "running", system.release, "-", "-", "-", state


def _tracer(entry: "Entry") -> str:
    from kprobes.cli.words import patches

    count = counted(len(patches(entry)), "site")
    return f"{count} by process {entry.pid}{' (ended)' if entry.is_abandoned else ''}"


def _as_json(found: "Sequence[LocalGuest]", obstacles: "Sequence[Obstacle]") -> str:
    from kprobes.cli.words import patches

    rows: list[dict[str, Any]] = [
        {
            "target": each.name,
            "pid": each.qemu.pid,
            "name": each.qemu.command.name,
            "arch": each.qemu.command.arch,
            "cpus": each.qemu.command.cpus,
            "memory": each.qemu.command.memory,
            "accel": each.qemu.accel,
            "machine": each.qemu.command.machine,
            "kernel": each.qemu.command.kernel,
            "is_paused": each.is_paused,
            "release": each.release,
            "build_id": each.build_id,
            "stub": each.qemu.command.stub,
            "is_stub_free": each.is_stub_free,
            "monitor": each.qemu.command.monitor,
            "memory_by": each.ram,
            "advice": each.qemu.command.advice,
            "tracers": [
                {"pid": it.pid, "is_at_work": not it.is_abandoned, "sites": len(patches(it))}
                for it in each.tracers
            ],
        }
        for each in found
    ]
    system = os.uname()
    why = [each.found for each in obstacles]
    rows.append({"target": options.HOST, "release": system.release, "obstacles": why})
    return json_lines(rows)
