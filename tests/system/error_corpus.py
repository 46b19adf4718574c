"""Definitions that are given to a kernel and to us.

The lines stand in ``tests/golden/*definitions.txt``, verbatim, comments and odd blanks included,
and in amd64's words: see ``tests.build.words``. ``## since X.Y: TITLE`` starts a section of what no
older kernel knows. A case of several lines has `` && `` between them; the last is judged.
"""

import re
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from kprobes.model.codes import Code
from tests.build.generated import drawn
from tests.build.words import WORDS

RELEASES = {"6.1": "bookworm", "6.12": "bookworm-backports", "7.2": "sid"}
"""Kernels to compare with, and the Debian suites that have them; the last has it or a later."""

OLD_TEXTS = {
    "6.1": {"Maxactive is not for kprobe": Code.BAD_MAXACT_TYPE.text},
    "6.12": {"Invalid $-valiable specified": Code.BAD_VAR.text},
    "7.2": {},
}
"""Texts of one release, and what the newest kernels say instead."""

_GOLDEN = Path(__file__).parent.parent / "golden"
_SECTION = re.compile(r"## (?:since (?P<since>[0-9.]+))?: .+")
_ARGS_MAX, _ARGS_SINCE = 128, (6, 15)
_BODY_MAX, _BODY_SINCE = 63, (7, 3)


class Case(Struct, frozen=True):
    """Some statements, the last of which is judged.

    Attributes:
        text: as it stands in the file.
        since: the first of ``RELEASES`` that knows all of it, or a later one.
    """

    text: str
    since: tuple[int, ...] = ()

    @property
    def lines(self) -> str:
        return self.text.replace(" && ", "\n")

    def in_words_of(self, arch: str) -> "Case":
        """Return the same in the words of an architecture."""
        return replace(self, text=WORDS[arch].of(self.text))

    def is_known_to(self, release: str) -> bool:
        return self.since <= tuple(map(int, release.split(".")))


def new_cases(number: int, count: int) -> list[Case]:
    """Return cases that are not in the file, the same ones for the same number."""
    known = {case.text for case in CORPUS}
    return [
        Case(text, max((6, 12) if is_newer else (), _limits_since(text)))
        for text, is_newer in drawn(number, count)
        if text not in known
    ]


def _cases() -> tuple[Case, ...]:
    return tuple(case for path in sorted(_GOLDEN.glob("*definitions.txt")) for case in _read(path))


def _read(path: Path) -> list[Case]:
    found: list[Case] = []
    since = ()
    for line in filter(None, path.read_text().split("\n")):
        if not line.startswith("## "):
            found.append(Case(line, max(since, _limits_since(line))))
            continue
        section = _SECTION.fullmatch(line)
        assert section is not None, line
        since = tuple(map(int, section["since"].split("."))) if section["since"] else ()
    return found


def _limits_since(line: str) -> tuple[int, ...]:
    # Before, the kernel took less, or said nothing.
    words = line.split()[2:]
    if any(len(word.partition("=")[2] or word) > _BODY_MAX for word in words):
        return _BODY_SINCE
    return _ARGS_SINCE if len(words) > _ARGS_MAX else ()


CORPUS = _cases()
