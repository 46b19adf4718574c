"""Options that several commands share, and the words that their values are written in.

Which kernel a command works on, before any is touched: this machine's, a guest's, or a new one.

``--target auto``, the default, is this machine's own kernel where that can be probed and nothing is
asked for that only guests have; else a guest that is booted.
"""

import argparse
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kprobes.cli import actions
from kprobes.cli.terminal import print_message
from kprobes.errors import NotSupportedError, UsageError

if TYPE_CHECKING:
    from kprobes.model.options import Limits
    from kprobes.model.plan import ReturnMethod, Strategy

_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h|)")
_PERCENT = re.compile(r"([0-9]+(?:\.[0-9]+)?)%?")
_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "": 1.0}
_SIZE = re.compile(r"([0-9]+)([KMG]?)(?:i?B)?", re.IGNORECASE)
_UNITS = {"": 0, "K": 10, "M": 20, "G": 30}
_LEAST_RING, _LARGEST_RING = 1 << 16, 1 << 30
_MIB = 1 << 20
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_CPUS = re.compile(rf"{_RANGE.pattern}(?:,{_RANGE.pattern})*")
TARGET_HELP = (
    "a running guest: qemu:HOST:PORT or qemu:/path.sock of its gdb stub or monitor, pid:N or "
    "name:NAME of its QEMU, vng or vng:NAME of virtme-ng, libvirt:DOMAIN, running for the only "
    "one (`kprobe targets` lists them)"
)
_TARGETS = (
    f"host: this machine's own kernel; guest, guest:SUITE:ARCH: one that is booted; {TARGET_HELP}; "
    "auto (default): the host where it can be probed, else a guest"
)


def duration(text: str) -> float:
    """Return the seconds in ``10s``, ``500ms``, ``2m``, ``1h`` or ``10``."""
    found = _DURATION.fullmatch(text.strip())
    seconds = 0.0 if found is None else float(found[1]) * _SECONDS[found[2]]
    if not seconds:
        raise argparse.ArgumentTypeError(
            f"invalid duration: {text.strip()!r} (use 10s, 500ms or 2m)"
        )
    return seconds


def pause(text: str) -> float:
    """Return the seconds in ``5ms``, ``1s``, or ``5``: ms, if nothing else is said."""
    bare = text.strip()
    try:
        return duration(f"{bare}ms" if bare[-1:].isdigit() else bare)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"invalid duration: {bare!r} (use 50, 50ms or 1s)"
        ) from None


def percent(text: str) -> float:
    """Return the share in ``5``, ``0.5`` or ``5%``."""
    found = _PERCENT.fullmatch(text)
    share = 0.0 if found is None else float(found[1]) / 100
    if not 0 < share <= 1:
        raise argparse.ArgumentTypeError(f"invalid percentage: {text!r} (must be above 0, to 100)")
    return share


def size(text: str) -> int:
    """Return the bytes in ``8M``, ``512K``, ``1G`` or ``4096``."""
    found = _SIZE.fullmatch(text)
    if found is None:
        raise argparse.ArgumentTypeError(f"invalid size: {text!r} (use 512K, 8M or 1G)")
    return int(found[1]) << _UNITS[found[2].upper()]


def ring_size(text: str) -> int:
    """Return a ring's bytes: a size, made a power of two by rounding up."""
    wanted = size(text)
    if not _LEAST_RING <= wanted <= _LARGEST_RING:
        raise argparse.ArgumentTypeError(f"invalid size: {text!r} (must be 64K to 1G)")
    return 1 << (wanted - 1).bit_length()


def memory_mib(text: str) -> int:
    """Return a guest's memory in MiB: ``512M``, ``2G``, or a number of MiB."""
    return int(text) if text.isdigit() else size(text) // _MIB


def arch(text: str) -> str:
    """Return the name of an architecture whose guests we can boot."""
    from kprobes.transport.qemu_command import MACHINE_TYPES

    if text not in MACHINE_TYPES:
        known = " or ".join(MACHINE_TYPES)
        raise argparse.ArgumentTypeError(f"invalid architecture: {text!r} (must be {known})")
    return text


def count(text: str) -> int:
    """Return a whole number from 1 on."""
    if not (text.isascii() and text.isdigit()) or int(text) == 0:
        raise argparse.ArgumentTypeError(f"invalid number: {text!r} (must be a positive integer)")
    return int(text)


def guest_file(text: str) -> tuple[str, Path]:
    """Return the guest's path and ours in ``/GUEST=HOST``."""
    guest, _, host = text.partition("=")
    if not guest.startswith("/") or not host:
        raise argparse.ArgumentTypeError(f"invalid file: {text!r} (use /GUEST/PATH=PATH)")
    return guest, Path(host)


def cpus(text: str) -> list[range]:
    """Return the CPUs in a list such as ``0-2,5``."""
    found = [range(int(first), int(last or first) + 1) for first, last in _RANGE.findall(text)]
    if _CPUS.fullmatch(text) is None or not all(found):
        raise argparse.ArgumentTypeError(f"invalid list of CPUs: {text!r} (use 0-2,5)")
    return found


def add_exit_status(parser: argparse.ArgumentParser) -> None:
    """Add the option that says what a command's own exit status is for."""
    parser.add_argument(
        "--exit-status",
        choices=("command", "ignore"),
        default="command",
        help="when all went well: what COMMAND ended with (default), or 0",
    )


def add_definitions(parser: argparse.ArgumentParser) -> None:
    """Add definitions, and deletions, which are options by their form."""
    parser.add_argument(
        "definitions",
        action=actions.DefinitionAction,
        metavar="DEFINITION",
        help="a probe, @FILE with one per line, or - for standard input; options may stand between",
    )
    parser.add_argument(
        "-:",
        dest="definitions",
        action=actions.DeletionAction,
        default=(),
        metavar="[GROUP/]EVENT",
        help="a definition, too: take away an event that those before it have made",
    )


def add_target(parser: argparse.ArgumentParser, *, can_boot: bool = True) -> None:
    """Add the option that says which kernel is meant."""
    known = _TARGETS if can_boot else f"host: this machine's own kernel; {TARGET_HELP}"
    parser.add_argument("-t", "--target", metavar="TARGET", help=known)


def add_kernel_files(parser: argparse.ArgumentParser) -> None:
    """Add the options that name files of the kernel."""
    parser.add_argument(
        "--vmlinux",
        type=Path,
        metavar="PATH",
        help="the kernel's file: another build is refused; a guest's types are taken from it if "
        "need be",
    )
    parser.add_argument(
        "--symbols",
        type=Path,
        metavar="FILE",
        help="the System.map or vmlinux of a guest's kernel that has no symbols itself",
    )
    parser.add_argument(
        "--module",
        action="append",
        type=Path,
        metavar="FILE",
        help="NAME.ko of one of its modules, with debug information; can be given again",
    )
    parser.add_argument(
        "--source", type=Path, metavar="DIR", help="the kernel's source, for the text of its lines"
    )


def add_symfs(parser: argparse.ArgumentParser) -> None:
    """Add where the files of a guest's programs are."""
    parser.add_argument(
        "--symfs",
        type=Path,
        metavar="DIR",
        help="a directory that is as the guest's root: in stacks of programs their functions are "
        "named, by the files there",
    )


def check_symfs(args: argparse.Namespace) -> None:
    """Raise UsageError where what ``--symfs`` names is no directory."""
    if args.symfs is not None and not args.symfs.is_dir():
        raise UsageError(f"--symfs {args.symfs}: no such directory")


def add_guest(parser: argparse.ArgumentParser) -> None:
    """Add the options of a command that shows something of a guest."""
    add_output(parser)
    add_target(parser)
    add_kernel_files(parser)
    add_quiet(parser)
    add_boot(parser)


def add_recording(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how definitions are armed, and what they record besides."""
    add_strategy(parser)
    add_returns(parser)
    parser.add_argument(
        "--exits",
        action="store_true",
        help="tell by which instruction a function was left: a field `exit` of every return",
    )
    parser.add_argument(
        "--call-duration",
        action="store_true",
        help="tell how long calls took: a field `duration` of every return",
    )


def add_trace_options(
    parser: argparse.ArgumentParser, *, records: bool = False, prints: bool = False
) -> None:
    """Add the kernel's trace options.

    Args:
        parser: of a command.
        records: whether it records.
        prints: whether it prints events.
    """
    of_records = "of records stacktrace (the kernel's), userstacktrace (the program's), "
    of_records += "record-tgid (the task's process)"
    of_text = "of text sym-offset, sym-addr, sym-userobj, record-tgid, fields, raw, hex, bin, "
    of_text += "verbose, noirq-info, nocontext-info, noprint-parent"
    what = [of_records] * records + [of_text] * prints
    parser.add_argument(
        "-O",
        "--option",
        action=actions.TraceOptionAction,
        records=records,
        prints=prints,
        metavar="NAME",
        help=f"the kernel's trace option NAME: {'; '.join(what)}; can be given again",
    )
    defaults = {name.replace("-", "_"): False for name in actions.OF_RECORDS}
    parser.set_defaults(**defaults, text_options=())


def check_text_options(args: argparse.Namespace) -> None:
    """Check that what changes the text, and nothing else, is not given for another format.

    Raises:
        UsageError: it is.
    """
    of_records = {"record-tgid"} if args.record_tgid else set[str]()
    names = [name for name in args.text_options if name not in of_records]
    if names and args.format != "text":
        raise UsageError(f"-O {names[0]} is for text, not for --format {args.format}")


def add_limits(parser: argparse.ArgumentParser) -> None:
    """Add the options that say what probes may take of a kernel."""
    group = parser.add_argument_group("limits")
    group.add_argument(
        "--max-rate",
        type=count,
        metavar="N",
        help="disable an event that is hit more than N times a second, and tell",
    )
    group.add_argument(
        "--max-overhead",
        type=percent,
        metavar="PERCENT",
        help="when hits take more of the CPUs' time, disable the dearest events, and tell",
    )
    group.add_argument(
        "--max-pause",
        type=pause,
        metavar="MS",
        help="pause a guest no longer at once to arm or disarm, but more often (default: 50)",
    )


def limits(args: argparse.Namespace) -> "Limits":
    """Return what probes may take."""
    from kprobes.model.options import MAX_PAUSE_S, Limits

    return Limits(
        max_rate=args.max_rate or math.inf,
        max_overhead=args.max_overhead or math.inf,
        max_pause_s=args.max_pause or MAX_PAUSE_S,
    )


def add_output(parser: argparse.ArgumentParser, *, forms: Sequence[str] = ("text", "json")) -> None:
    """Add the options that say where results go, and in which of some forms."""
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument(
        "--format", choices=forms, default="text", help="of the results (default: text)"
    )


def add_format(parser: argparse.ArgumentParser) -> None:
    """Add the form of what is said of a recording."""
    parser.add_argument(
        "--format", choices=("text", "json"), default="text", help="of the output (default: text)"
    )


def add_strategy(parser: argparse.ArgumentParser) -> None:
    """Add the option that says how sites are patched."""
    parser.add_argument(
        "--strategy",
        choices=("auto", "ftrace", "jump", "breakpoint"),
        default="auto",
        help="how sites are patched (default: the cheapest that is safe at each)",
    )


def add_returns(parser: argparse.ArgumentParser) -> None:
    """Add the option that says how returns are probed."""
    parser.add_argument(
        "--returns",
        choices=("auto", "retinsn", "tail", "rethook"),
        default="auto",
        help="how returns are probed (default: the cheapest that is proven for each function)",
    )


def return_method(args: argparse.Namespace) -> "ReturnMethod | None":
    """Return the way to probe returns that is forced, or None."""
    from kprobes.model.plan import ReturnMethod

    return None if args.returns == "auto" else ReturnMethod(args.returns)


def strategy(args: argparse.Namespace) -> "Strategy | None":
    """Return the strategy that is forced, or None."""
    from kprobes.model.plan import Strategy

    return None if args.strategy == "auto" else Strategy(args.strategy)


def add_quiet(parser: argparse.ArgumentParser) -> None:
    """Add the option that keeps standard error quiet."""
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress, no summary")


def add_boot(parser: argparse.ArgumentParser) -> None:
    """Add the options of a guest that we boot."""
    # No defaults here: what is given can so be told from what is not.
    group = parser.add_argument_group("the guest that is booted")
    group.add_argument(
        "--arch",
        type=arch,
        metavar="NAME",
        help="of the guest, in Debian's words: amd64 (the default), arm64",
    )
    group.add_argument("--kernel", type=Path, metavar="PATH", help="boot this kernel image")
    group.add_argument(
        "--suite", metavar="NAME", help="boot the kernel of this Debian suite (default: bookworm)"
    )
    group.add_argument(
        "--mirror",
        metavar="URL",
        help="of Debian's archive (default: $KPROBES_DEBIAN_MIRROR, else this machine's own)",
    )
    group.add_argument(
        "--memory", type=memory_mib, metavar="SIZE", help="of the guest (default: 512M)"
    )
    group.add_argument("--cpus", type=count, metavar="N", help="of the guest (default: 2)")
    group.add_argument("--append", metavar="WORDS", help="add to the kernel's command line")
    group.add_argument(
        "--file",
        type=guest_file,
        action="append",
        metavar="GUEST=HOST",
        help="put a file or directory into the guest; can be given again",
    )
    group.add_argument(
        "--accel", choices=("auto", "kvm", "tcg"), help="how QEMU runs it (default: auto)"
    )


def check_image(args: argparse.Namespace) -> None:
    """Refuse options of a guest beside ``--image``.

    Raises:
        UsageError: there are some.
    """
    if args.image is None:
        return
    given = [name for name in ("target", *BOOT_OPTIONS) if getattr(args, name) is not None]
    if given:
        raise UsageError(f"--{given[0]} is for a guest; with --image there is none")


BOOT_OPTIONS = ("arch", "kernel", "suite", "mirror", "memory", "cpus", "append", "file", "accel")
"""What ``add_boot`` sets; None when it is not given."""


AUTO, HOST, GUEST = "auto", "host", "guest"

_VARIABLE = "KPROBES_TARGET"
"""In the environment: the target when none is given."""
_GUESTS: Mapping[str, tuple[object, str]] = {
    "vmlinux": (None, "--vmlinux"),
    "symbols": (None, "--symbols"),
    "module": (None, "--module"),
    "python": (None, "--python"),
    "arm": (None, "--arm"),
    "tgid": (None, "--tgid"),
    "strategy": ("auto", "--strategy"),
    "returns": ("auto", "--returns"),
    "exits": (False, "--exits"),
    "call_duration": (False, "--call-duration"),
    "stacktrace": (False, "-O stacktrace"),
    "userstacktrace": (False, "-O userstacktrace"),
    "record_tgid": (False, "-O record-tgid"),
    "boot": (False, "--boot"),
    "until_panic": (None, "--until-panic"),
    "wait": (False, "--wait"),
    "rearm": (False, "--rearm"),
}
"""What only guests have: by attribute, its value when it is not asked for, and its name."""
_OF_ANY = ("--vmlinux", "--module")
"""Of these, what this machine's own kernel has, too, where it is asked for by name."""
_OF_RETURNS = ("--returns", "--exits", "--call-duration")
"""Of these, what only return probes mind."""
_FIELDS = {
    _GUESTS["exits"][1]: "exit",
    _GUESTS["call_duration"][1]: "duration",
    _GUESTS["stacktrace"][1]: "common_stacktrace",
    _GUESTS["userstacktrace"][1]: "common_userstacktrace",
    _GUESTS["record_tgid"][1]: "common_tgid",
}
"""The names of those that add a field, and the field."""


def choose_target(args: argparse.Namespace) -> None:
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
    elif wanted.startswith(f"{GUEST}:"):
        _choose_guest(args, wanted)
    elif wanted != GUEST:
        args.target = wanted


def is_host(args: argparse.Namespace) -> bool:
    """Whether the target is this machine's own kernel; ``choose_target`` was called."""
    return args.target == HOST


def check_command(args: argparse.Namespace) -> None:
    """Check that a command has a guest that is booted for it; ``choose_target`` was called.

    Raises:
        UsageError: the target runs already.
    """
    if args.target is not None and args.command:
        only = "a command can be run only in a guest that kprobe boots (-t guest)"
        raise UsageError(f"{only}, not in {args.target}")


def _choose_guest(args: argparse.Namespace, target: str) -> None:
    # guest[:SUITE][:ARCH], in any order: the same as --suite and --arch.
    from kprobes.transport.qemu_command import MACHINE_TYPES

    for word in target.split(":")[1:]:
        name = "arch" if word in MACHINE_TYPES else "suite"
        if not word or not hasattr(args, name):
            raise UsageError(f"{target!r} is not a target here: use guest, or guest:SUITE:ARCH")
        if getattr(args, name) not in (None, word):
            raise UsageError(f"{target} and --{name} {getattr(args, name)} are two guests")
        setattr(args, name, word)


def _usual(args: argparse.Namespace) -> str:
    # A file is not a target.
    return AUTO if _has_image(args) else os.environ.get(_VARIABLE) or AUTO


def _has_image(args: argparse.Namespace) -> bool:
    return getattr(args, "image", None) is not None


def _auto(args: argparse.Namespace) -> str | None:
    if _has_image(args) or _of_guests(args) or _has_guest_trigger(args):
        return None
    from kprobes.host.obstacles import obstacles

    found = obstacles()
    if not found:
        return HOST
    args.why_guest = found[0].found
    return None


def _has_guest_trigger(args: argparse.Namespace) -> bool:
    given = [text for texts in getattr(args, "triggers", {}).values() for text in texts]
    if not given:
        return False
    from kprobes.lang.trigger import parse_trigger
    from kprobes.model.kernel import version_of
    from kprobes.model.trigger import of_hosts

    known = of_hosts(version_of(os.uname().release))
    # There they see the hits of every task.
    return args.follow or any(parse_trigger(each).trigger.command not in known for each in given)


def print_reason(args: argparse.Namespace) -> None:
    """Say in a line why a guest is booted, unless one was asked for."""
    why = getattr(args, "why_guest", "")
    if why and not getattr(args, "quiet", False):
        print_message(f"kprobe: booting a guest: {why} (kprobe doctor says more)\n")


def _refuse_guests(args: argparse.Namespace) -> None:
    name = next((each for each in _of_guests(args) if each not in _OF_ANY), None)
    if name == "--python":
        from kprobes.session import NO_HANDLERS

        raise NotSupportedError(NO_HANDLERS)
    if name is not None:
        from kprobes.model.definition import INSTEAD

        way_out = f": {INSTEAD[_FIELDS[name]]}" if name in _FIELDS else ""
        raise UsageError(f"{name} is for guests, not for this machine's own kernel{way_out}")


def _of_guests(args: argparse.Namespace) -> list[str]:
    boot = (f"--{name}" for name in BOOT_OPTIONS if getattr(args, name, None) is not None)
    return [*boot, *_given(args)]


def return_option(args: argparse.Namespace) -> str | None:
    """Return the first option that was given and that only return probes mind, or None."""
    return next((name for name in _given(args) if name in _OF_RETURNS), None)


def _given(args: argparse.Namespace) -> list[str]:
    found = _GUESTS.items()
    return [name for key, (usual, name) in found if getattr(args, key, usual) != usual]
