"""Many texts that are nearly definitions, fast and the same for the same seed."""

from collections.abc import Generator, Sequence
from pathlib import Path
from random import Random

GOLDEN = Path(__file__).parent.parent / "golden"
_PIECES = (
    *("p", "r", "r3", "-", ":", "/", ".", "p:ev", "r:g/e", "-:x", "f", "t:", "#", "\n", ";", ","),
    *(
        "vfs_read",
        "%return",
        "ext4:foo",
        "0x10",
        "+4",
        "*",
        "mod:",
        "a=",
        "file=",
        "=",
        "common_pid=",
    ),
    *("%di", "%zz", "$arg1", "$arg*", "$retval", "$comm", "$stack2", "$current", "$", "@jiffies"),
    *(
        "@0x10",
        "@sym+8",
        "\\1",
        "\\-1",
        '\\"x"',
        '"',
        "+8(",
        "-u16(",
        "+u0(",
        "(",
        ")",
        "))",
        "(s)",
    ),
    *("(s,f.g)", "this_cpu_ptr(", "this_cpu_read(", "->", "->f", ".g", "file", "file->f_op", "-"),
    *(":u8", ":x64", ":string", ":ustring", ":symstr", ":symbol", ":char", ":%pd", ":%pD", "[4]"),
    *("[", "]", "[65]", ":b4@0/8", "b1@", "/32", "0x", "08", "18446744073709551616", "4294967295"),
    *("é", "\x00", "\u2003", "\udc80", " ", "  ", "\t", "\\", "%", "9", "_", "x" * 70),
)


def corpus() -> tuple[str, ...]:
    """Return the lines of all golden definitions."""
    texts = [path.read_text() for path in sorted(GOLDEN.glob("*definitions.txt"))]
    return tuple(line for text in texts for line in text.split("\n") if line[:2] != "##")


def texts(seed: int, count: int, lines: Sequence[str]) -> Generator[str]:
    """Yield texts: golden lines with some edits, joined pieces, and noise."""
    random = Random(seed)
    makers = (_edited, _edited, _edited, _joined, _crossed, _noise)
    for _ in range(count):
        yield random.choice(makers)(random, lines)


def _edited(random: Random, lines: Sequence[str]) -> str:
    text = random.choice(lines)
    for _ in range(random.randint(1, 4)):
        at = random.randint(0, len(text))
        text = (
            text[:at]
            + random.choice(("", random.choice(_PIECES)))
            + text[at + random.randint(0, 3) :]
        )
    return text


def _joined(random: Random, lines: Sequence[str]) -> str:
    del lines
    words = ("".join(random.choices(_PIECES, k=random.randint(1, 5))) for _ in range(3))
    return " ".join(("p vfs_read", *words))


def _crossed(random: Random, lines: Sequence[str]) -> str:
    one, other = random.choice(lines).split(" "), random.choice(lines).split(" ")
    return " ".join(one[: random.randint(0, len(one))] + other[random.randint(0, len(other)) :])


def _noise(random: Random, lines: Sequence[str]) -> str:
    del lines
    return "".join(chr(random.randint(1, 0x17F)) for _ in range(random.randint(0, 40)))
