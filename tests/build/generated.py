"""Write ``tests/golden/generated_definitions.txt``: made up by a grammar, right and mutated.

``python -m tests.build.generated`` writes the same file every time, for the same Hypothesis.
"""

import re
from collections.abc import Callable
from random import Random

from hypothesis import HealthCheck, Phase, given, seed, settings

from kprobes.arch.x86_64.registers import NAMES
from kprobes.errors import DefinitionError
from kprobes.lang.parser import parse
from tests.build.definitions import Names, definitions
from tests.build.mutations import GOLDEN

_FUNCTIONS = ("vfs_read", "vfs_write", "vfs_open", "vfs_fsync", "vfs_statx", "do_sys_openat2")
_SYMBOLS = ("jiffies", "init_task", "linux_banner", "saved_command_line")
_ONLY = Names(functions=_FUNCTIONS, symbols=_SYMBOLS, knows_types=False, newest=False)
_EDITS = '+-u(:=%$@\\09xz"[]).>b/'
_RIGHT, _MUTATED = 300, 300
_TITLES = (
    "## : by a grammar",
    "## since 6.12: by a grammar",
    "## since 6.12, needs resolve: paths, which the kernel lists as it rewrites them",
)
_LONGEST_BODY = 50
_NEWER = re.compile(r"\bchar\b|:%p[dD]|^(?:r|.*%return).*\$arg")
_NAMED_BY_TYPES = re.compile(r"(?:^|[=(])[A-Za-z_]|\$retval[^ :)]|\$retval:u?string")
_SYMBOL = re.compile(r"@([^0-9+-][^+:)-]*)")


def write() -> None:
    """Make them all up, and write the file."""
    right = _collect(_RIGHT, lambda line: line)
    random = Random(7)
    mutated = _collect(_MUTATED, lambda line: _mutate(line, random))
    sections: dict[str, list[str]] = {title: [] for title in _TITLES}
    for line in dict.fromkeys((*right, *mutated)):
        sections[_title(line)].append(line)
    text = "\n\n".join("\n".join((title, *lines)) for title, lines in sections.items())
    (GOLDEN / "generated_definitions.txt").write_text(f"{text}\n")


def drawn(number: int, count: int) -> list[tuple[str, bool]]:
    """Return definitions that the grammar makes, and whether only newer kernels know them.

    Args:
        number: the same one gives the same, for the same Hypothesis.
        count: so many, but for those that come twice.
    """
    found: dict[str, None] = {}

    @seed(number)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
    @given(definitions(_ONLY))
    def collect(line: str) -> None:
        found[line] = None

    collect()
    return [(line, _NEWER.search(line) is not None) for line in found]


def _title(line: str) -> str:
    if ":%p" in line and _is_right(line):
        return _TITLES[2]
    return _TITLES[1 if _NEWER.search(line) else 0]


def _is_right(line: str) -> bool:
    try:
        parse(line, registers=NAMES)
    except DefinitionError:
        return False
    return True


def _collect(count: int, change: Callable[[str], str]) -> list[str]:
    found: dict[str, None] = {}

    @seed(20)
    @settings(
        max_examples=count * 6,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
    @given(definitions(_ONLY))
    def collect(line: str) -> None:
        changed = change(line) if len(found) < count else ""
        if changed and _is_decided_by_text(changed):
            found[changed] = None

    collect()
    return list(found)


def _is_decided_by_text(line: str) -> bool:
    words = line.split(" ")
    places = {f + suffix for f in _FUNCTIONS for suffix in ("", "+0", "%return")}
    if len(words) < 3 or words[1] not in places:
        return False
    bodies = [word.partition("=")[2] or word for word in words[2:]]
    is_short = all(len(body) <= _LONGEST_BODY for body in bodies)
    is_named = any(map(_NAMED_BY_TYPES.search, bodies)) or " $arg" in line
    symbols = set(_SYMBOL.findall(line))
    return is_short and not is_named and symbols <= set(_SYMBOLS)


def _mutate(line: str, random: Random) -> str:
    words = line.split(" ")
    for _ in range(random.randint(1, 2)):
        # The place stays: what it is called is the kernel's.
        at = random.choice([0, *range(2, len(words)), *range(2, len(words))])
        word = words[at]
        cut = random.randint(0 if at else 1, len(word))
        put = random.choice(("", "", random.choice(_EDITS), random.choice(_EDITS)))
        words[at] = word[:cut] + put + word[cut + random.randint(0, 2) :]
    return " ".join(word for word in words if word)


if __name__ == "__main__":
    write()
