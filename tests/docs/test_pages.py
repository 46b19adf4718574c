"""Names in docs/ and README, which must exist: pages, anchors, targets, options, files."""

import argparse
import re
import shlex
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from kprobes import errors
from kprobes.cli import main
from kprobes.errors import KprobesError

_ROOT = Path(__file__).parent.parent.parent
_DOCS = _ROOT / "docs"
_TOPS = (_ROOT, _ROOT / "src" / "kprobes", _DOCS)
_PAGES = (_ROOT / "README.md", *sorted(_DOCS.rglob("*.md")))
_FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_COMMAND = re.compile(r"^[$#] kprobe ((?:.*\\\n)*.*)$", re.MULTILINE)
_TARGET = re.compile(r"(?:^|[`$] *)make ([a-z]+)\b", re.MULTILINE)
_FILE = re.compile(r"`([\w./-]+/[\w.-]*\.(?:py|md|toml|yml))`")
_FOLDER = re.compile(r"`((?:[a-z0-9_]+/)+)`")
_NAMED_IN = re.compile(r"`(?P<name>\w+)` (?:in |\()`(?P<file>[\w/]+\.py)`")
_HOME_OF = re.compile(r"`(?P<file>[\w/]+\.py)` \(`(?P<name>\w+)`\)")
_OPTION = re.compile(r"`(--[a-z-]+)")
_OF_OTHERS = (
    "--hmp",
    "--qemu-opts",
    "--debug",
    "--disable-kvm",
    "--privileged",
    "--quick",
    "--help",
    "--version",
)
"""Options of other programs, and of the command as a whole."""
_ENDS = ("|", ">", "&", "...")
_FOREIGN = ("drivers/", "events/")
"""Folders of the kernel's source and of tracefs."""


def _parsers() -> dict[str, argparse.ArgumentParser]:
    found: dict[str, argparse.ArgumentParser] = {}
    for module in main.COMMANDS:
        found[module.NAME] = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
        module.add_arguments(found[module.NAME])
    return found


_PARSERS = _parsers()


def _text(page: Path) -> str:
    return _FENCED.sub("", page.read_text())


def _slugs(page: Path) -> set[str]:
    # As GitHub makes them. The site's differ where two blanks meet, which its strict build finds.
    titles = re.findall(r"^#+ (.*)$", _text(page), re.MULTILINE)
    plain = [re.sub(r"[^\w\s-]", "", re.sub(r"`", "", title)).strip().lower() for title in titles]
    return {re.sub(r"\s", "-", title) for title in plain}


def _commands(page: Path) -> Iterator[list[str]]:
    for block in _FENCED.findall(page.read_text()):
        for found in _COMMAND.finditer(block):
            line = found[1].replace("\\\n", " ").partition(" -- ")[0]
            words = shlex.split(line, comments=True)
            ends = [at for at, word in enumerate(words) if word in _ENDS]
            yield words[: min(ends, default=len(words))]


_COMMANDS = [(page.name, words) for page in _PAGES for words in _commands(page)]


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: page.stem)
def test_every_link_leads_to_a_page_and_an_anchor(page: Path) -> None:
    missing: list[str] = []
    for link in _LINK.findall(_text(page)):
        if "://" not in link:
            path, _, anchor = link.partition("#")
            other = (page.parent / path).resolve() if path else page
            if not other.exists() or (anchor and anchor not in _slugs(other)):
                missing.append(link)

    assert missing == []


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: page.stem)
def test_every_file_that_is_named_is_there(page: Path) -> None:
    names = [name for name in _FILE.findall(_text(page)) if not name.startswith(("~", "/"))]
    folders = [name for name in _FOLDER.findall(_text(page)) if not name.startswith(_FOREIGN)]

    assert [
        name for name in [*names, *folders] if not any((top / name).exists() for top in _TOPS)
    ] == []


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: page.stem)
def test_every_name_is_in_the_file_that_it_is_said_to_be_in(page: Path) -> None:
    text = _text(page)
    found = [*_NAMED_IN.finditer(text), *_HOME_OF.finditer(text)]

    assert [each[0] for each in found if not _has(each["file"], each["name"])] == []


def _has(file: str, name: str) -> bool:
    (text,) = (path.read_text() for top in _TOPS if (path := top / file).exists())
    return re.search(rf"\b{name}\b", text) is not None


def test_every_make_target_that_is_named_is_there() -> None:
    targets = set(re.findall(r"^([a-z]+):", (_ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {name for page in _PAGES for name in _TARGET.findall(page.read_text())}

    assert "demo" in named
    assert named - targets == set()


def test_every_option_in_prose_is_one_of_a_command() -> None:
    known = {name for parser in _PARSERS.values() for name in parser.format_help().split()}
    known = {re.sub(r"[^a-z-]", "", name) for name in known} | {*_OF_OTHERS}
    named = {name for page in _PAGES for name in _OPTION.findall(_text(page))}

    assert len(named) > 20
    assert named - known == set()


@pytest.mark.parametrize(("page", "words"), _COMMANDS, ids=[page for page, _ in _COMMANDS])
def test_every_command_is_understood(page: str, words: list[str]) -> None:
    del page
    name, *rest = words
    if rest == ["--help"] or name.startswith("-"):
        return

    _, unknown = _PARSERS[name].parse_known_args(rest)

    assert unknown == []


def test_there_are_commands_of_all_kinds() -> None:
    assert {words[0] for _, words in _COMMANDS} >= {*_PARSERS}
    assert len(_COMMANDS) > 60


def test_every_page_is_in_the_table_of_contents_once() -> None:
    listed = re.findall(r"^ +- ([\w/-]+\.md)$", (_ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = [str(page.relative_to(_DOCS)) for page in _PAGES[1:]]

    assert sorted(listed) == sorted(pages)


def test_everything_that_the_python_page_is_made_from_is_there() -> None:
    page = (_DOCS / "reference" / "python.md").read_text()
    names = re.findall(r"^::: (kprobes[\w.]*)$", page, re.MULTILINE)

    assert len(names) > 10
    for name in names:
        owner, _, last = name.rpartition(".")
        assert hasattr(import_module(owner), last), name


def test_the_exit_statuses_of_errors_are_documented() -> None:
    page = (_DOCS / "reference" / "exit-status.md").read_text()
    documented = {int(status) for status in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)}
    classes = [each for each in vars(errors).values() if isinstance(each, type)]
    raised = {each.exit_code for each in classes if issubclass(each, KprobesError)}

    assert documented == {0, *raised, 5, 6, 130}


@pytest.mark.parametrize(("page", "most"), [("README.md", 200), ("docs/design.md", 160)])
def test_the_front_door_and_the_map_stay_short(page: str, most: int) -> None:
    assert len((_ROOT / page).read_text().splitlines()) <= most
