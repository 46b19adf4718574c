"""``python -m bench [--arch A] [--append WORDS] [--quick] [NAME...]``: measure, beside others."""

import argparse
import importlib
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import cast

from msgspec.structs import replace

from bench.amd64 import AMD64
from bench.arm64 import ARM64
from bench.isa import Isa
from bench.table import Row, render

ISAS = {isa.name: isa for isa in (AMD64, ARM64)}
"""Every architecture of guests, by Debian's name."""
NAMES = (
    "cost",
    "anywhere",
    "returns",
    "hist",
    "triggers",
    "python",
    "arming",
    "symbols",
    "source",
    "burst",
    "decode",
    "recordings",
    "host",
)
_HERE: Mapping[str, str] = {
    "decode": "it decodes rings that are made on this machine, whatever guest they would be of",
    "recordings": "it makes recordings on this machine, whatever guest they would be of",
    "source": "it reads the file of amd64's kernel",
    "host": "its guest carries this machine's own Python and tools",
}
"""Benchmarks that are no matter of a guest's architecture, and why; they run for the first one."""


def main(words: Sequence[str] | None = None) -> int:
    """Run benchmarks and print a table for each."""
    parser = _parser()
    args = parser.parse_args(words)
    isa = replace(ISAS[args.arch], append=args.append)
    known = names(isa)
    for name in args.names:
        if name not in NAMES:
            parser.error(f"no benchmark {name}; there are {', '.join(NAMES)}")
        if name not in known:
            parser.error(f"no {name} for {isa.name}: {_HERE[name]}")
    _warn_of_load()
    print(f"Guests are {isa.name}{isa.append and ', '}{isa.append}.\n")
    for name in args.names or known:
        _show(name, isa, is_quick=args.quick)
    return 0


def names(isa: Isa) -> tuple[str, ...]:
    """Return the benchmarks that there are for an architecture."""
    return tuple(name for name in NAMES if isa.name == AMD64.name or name not in _HERE)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--arch", choices=ISAS, default=AMD64.name, help="the guests' architecture")
    parser.add_argument("--append", default="", metavar="WORDS", help="for the guests' kernels")
    parser.add_argument("--quick", action="store_true", help="fewer rounds: rough figures, soon")
    return parser


def _show(name: str, isa: Isa, *, is_quick: bool) -> None:
    start, load = time.monotonic(), os.getloadavg()[0]
    module = importlib.import_module(f"bench.{name}")
    run = cast("Callable[..., list[Row]]", module.run)
    table = render(module.TITLE, run(isa, quick=is_quick))
    print(f"{table}\n  ({time.monotonic() - start:.0f} s; load before: {load:.1f})\n", flush=True)


def _warn_of_load() -> None:
    load, cpus = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load > cpus / 2:
        print(f"Other work runs here (load {load:.1f} on {cpus} CPUs): do not trust the figures.\n")


if __name__ == "__main__":
    sys.exit(main())
