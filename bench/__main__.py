"""``python -m bench [--quick] [NAME...]``: measure, beside what others need for the same."""

import argparse
import importlib
import os
import sys
import time
from collections.abc import Callable
from typing import cast

from bench.table import Row, render

NAMES = ("cost", "anywhere", "returns", "python", "arming", "symbols", "burst", "decode", "host")


def main() -> int:
    """Run benchmarks and print a table for each."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--quick", action="store_true", help="fewer rounds: rough figures, soon")
    args = parser.parse_args()
    unknown = set(args.names) - set(NAMES)
    if unknown:
        parser.error(f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    _warn_of_load()
    for name in args.names or NAMES:
        start, load = time.monotonic(), os.getloadavg()[0]
        module = importlib.import_module(f"bench.{name}")
        run = cast("Callable[..., list[Row]]", module.run)
        table = render(module.TITLE, run(quick=args.quick))
        print(
            f"{table}\n  ({time.monotonic() - start:.0f} s; load before: {load:.1f})\n", flush=True
        )
    return 0


def _warn_of_load() -> None:
    load, cpus = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load > cpus / 2:
        print(f"Other work runs here (load {load:.1f} on {cpus} CPUs): do not trust the figures.\n")


if __name__ == "__main__":
    sys.exit(main())
