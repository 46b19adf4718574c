"""Programs of docs/howto/recipes.md, and what the page says that they print."""

import re
from pathlib import Path

from msgspec import Struct

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "howto" / "recipes.md"

_SECTION = re.compile(r"^## (.*?)\n(.*?)(?=^## |\Z)", re.DOTALL | re.MULTILINE)
_BLOCK = re.compile(r"^```(python|printed|alike)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_NUMBER = re.compile(r"0x[0-9a-f]+|\d+(?:\.\d+)*")
_ZERO = re.compile(r"(?:0x)?[0.]+")


class Recipe(Struct, frozen=True, kw_only=True):
    """One section of the page.

    Attributes:
        title: of the section.
        program: as it stands there.
        printed: what it prints.
        is_exact: whether it always prints just that; else other numbers may stand there.
    """

    title: str
    program: str
    printed: str
    is_exact: bool

    @property
    def name(self) -> str:
        """The title as a file's name without its suffix."""
        return "_".join(re.findall(r"\w+", self.title.lower()))

    def matches(self, printed: str) -> bool:
        """Whether a program that has printed this did what the page says."""
        return printed == self.printed if self.is_exact else alike(printed) == alike(self.printed)


def recipes() -> list[Recipe]:
    """Return all of the page; each has one program and one block of what it prints."""
    return [_recipe(*found) for found in _SECTION.findall(PAGE.read_text())]


def _recipe(title: str, text: str) -> Recipe:
    (_, program), (kind, printed) = _BLOCK.findall(text)
    return Recipe(title=title, program=program, printed=printed, is_exact=kind == "printed")


def alike(text: str) -> str:
    """Return a text with N for every number but 0, and one blank for several."""
    named = _NUMBER.sub(lambda number: "0" if _ZERO.fullmatch(number[0]) else "N", text)
    return re.sub(" +", " ", named)
