"""Which kernel a command works on, before any is touched: this machine's, a guest's, or a new one.

``--target auto``, the default, is this machine's own kernel where that can be probed and nothing is
asked for that only guests have; else a guest that is booted.
"""

import argparse
import os
from collections.abc import Mapping

from kprobes.cli.options import BOOT_OPTIONS
from kprobes.cli.words import say
from kprobes.errors import UsageError

AUTO, HOST, GUEST = "auto", "host", "guest"

_VARIABLE = "KPROBES_TARGET"
"""In the environment: the target when none is given."""
_GUESTS: Mapping[str, tuple[object, str]] = {
    "vmlinux": (None, "--vmlinux"),
    "python": (None, "--python"),
    "arm": (None, "--arm"),
    "tgid": (None, "--tgid"),
    "strategy": ("auto", "--strategy"),
    "returns": ("auto", "--returns"),
    "exits": (False, "--exits"),
    "has_duration": (False, "--duration of calls"),
}
"""What only guests have: by attribute, its value when it is not asked for, and its name."""
_FIELDS = {_GUESTS["exits"][1]: "exit", _GUESTS["has_duration"][1]: "duration"}
"""The names of those that add a field, and the field."""


def settle_target(args: argparse.Namespace) -> None:
    """Turn what ``--target`` says into what it means: ``host``, a running guest, or None to boot.

    Raises:
        UsageError: this machine's kernel is asked for, and what only guests have.
    """
    if getattr(args, "has_settled", False):
        return
    args.has_settled = True
    wanted, args.target = args.target or _usual(args), None
    if wanted == HOST:
        _refuse_guests(args)
        args.target = HOST
    elif wanted == AUTO:
        args.target = _auto(args)
    elif wanted != GUEST:
        args.target = wanted


def is_host(args: argparse.Namespace) -> bool:
    """Whether the target is this machine's own kernel; ``settle_target`` was called."""
    return args.target == HOST


def _usual(args: argparse.Namespace) -> str:
    # A file is no target.
    return AUTO if _has_image(args) else os.environ.get(_VARIABLE) or AUTO


def _has_image(args: argparse.Namespace) -> bool:
    return getattr(args, "image", None) is not None


def _auto(args: argparse.Namespace) -> str | None:
    if _has_image(args) or _of_guests(args) is not None:
        return None
    from kprobes.drivers.host.obstacles import obstacles

    found = obstacles()
    if not found:
        return HOST
    args.why_guest = found[0].found
    return None


def say_why(args: argparse.Namespace) -> None:
    """Say in a line why a guest is booted, unless one was asked for."""
    why = getattr(args, "why_guest", "")
    if why and not getattr(args, "quiet", False):
        say(f"kprobe: booting a guest: {why} (kprobe doctor says more)\n")


def _refuse_guests(args: argparse.Namespace) -> None:
    name = _of_guests(args)
    if name == "--python":
        from kprobes.drivers.host.prepare import NO_HANDLERS

        raise UsageError(NO_HANDLERS)
    if name is not None:
        from kprobes.model.extras import INSTEAD

        way_out = f": {INSTEAD[_FIELDS[name]]}" if name in _FIELDS else ""
        raise UsageError(f"{name} is for guests, not for this machine's own kernel{way_out}")


def _of_guests(args: argparse.Namespace) -> str | None:
    boot = (f"--{name}" for name in BOOT_OPTIONS if getattr(args, name, None) is not None)
    others = (name for key, (usual, name) in _GUESTS.items() if getattr(args, key, usual) != usual)
    return next(iter((*boot, *others)), None)
