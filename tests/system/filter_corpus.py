"""Filters for the kernel and for us: every operator, every kind of field, every error.

An event with a field of every kind gets them all. Those that no rule makes stand in
``tests/golden/filters.txt``, verbatim, below titles that begin with ``##``.
"""

from pathlib import Path

from kprobes.model.abi import MAX_STRING

_GOLDEN = Path(__file__).parent.parent / "golden" / "filters.txt"

DEFINITION = (
    "p:all do_sys_openat2 n8=$arg4:u8 n16=$arg4:u16 n32=$arg4:u32 n64=$arg4:u64 x32=$arg4:x32 "
    "i8=$arg1:s8 i16=$arg1:s16 i32=$arg1:s32 i64=$arg1:s64 low=$arg4:b4@2/32 "
    "path=+0($arg2):ustring flags=+0($arg3):u64 bytes=+0($arg3):x8[4] three=+0($arg3):u8[3] "
    "words=+0($arg3):s32[2] caller=$stack0:symbol callers=$stack0:symstr "
    "names=+0($arg3):string[2] who=$comm "
    'said=\\"text"'
)

_OPERATORS = ["==", "!=", "<", "<=", ">", ">=", "&", "~"]
_FIELDS = [
    *("n8", "n16", "n32", "n64", "x32", "i8", "i16", "i32", "i64", "low", "path", "flags"),
    *("bytes", "three", "words", "caller", "callers", "names", "who", "said"),
    *("common_pid", "common_type", "common_flags", "common_preempt_count", "__probe_ip"),
    *("cpu", "CPU", "comm", "COMM", "common_cpu", "stacktrace", "STACKTRACE", "common_comm"),
    *("__probe_func", "common_tgid", "arg1", "n", "n888", "__data_loc", "ip"),
]
_LONG = "x" * 255
_MANY = " || ".join(["n8 == 1"] * 350)

_LIMITS = [
    f'path == "{_LONG}"',
    f'path == "{_LONG}x"',
    f'path ~ "{_LONG}*"',
    f"{_LONG}x == 1",
    f"n8 == {'1' * 30}",
    "(" * 200 + "n8 == 1" + ")" * 200,
    "!" * 300 + "n8 == 1",
    _MANY,
    f"{_MANY} ||",
    f"n8 == 1{' ' * 4000}",
    f'path == "x" && n8 == {"9" * (MAX_STRING - 25)}',
    f"n8 == 1{' ' * 4100}",
]


def _crossed() -> list[str]:
    plain = [f"{field} {operator} 1" for field in _FIELDS for operator in ("==", "&", "~")]
    text = [f'{field} {operator} "x*"' for field in _FIELDS for operator in ("!=", "<", "~")]
    every = [f"{field} {operator} 3" for field in ("n8", "i16", "cpu") for operator in _OPERATORS]
    return [*plain, *text, *every]


def _corpus() -> list[str]:
    lines = [line for line in _GOLDEN.read_text().splitlines() if not line.startswith("## ")]
    # An @ stands for a blank at a line's end.
    texts = [line.replace("@", " ") for line in lines]
    return list(dict.fromkeys([*texts, *_LIMITS, *_crossed()]))


CORPUS = _corpus()

SINCE = {
    "6.1": ("CPUS", ".function", "stacktrace", "STACKTRACE"),
    "6.12": (),
}
"""Words that a release does not know yet."""

DIFFERENCES = {
    # A fix that reached 6.1.y, and the 6.12.y after ours: "Fix handling of an incomplete filter".
    "n8 == 1 &&": "accepted by 6.12.95",
    "n8 == 1 ||": "accepted by 6.12.95",
    "n8 == 1 && !": "accepted by 6.12.95",
    f"{_MANY} ||": "accepted by 6.12.95",
    f"n8 == 1{' ' * 4100}": "refused without a text",
    'callers ~ "vfs_*"': "a symstr's text is known on the host only",
    'callers != "x*"': "a symstr's text is known on the host only",
    'callers ~ "x*"': "a symstr's text is known on the host only",
}
"""Filters that the kernel and we judge differently, and why."""
