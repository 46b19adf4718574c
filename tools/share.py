"""Manual pages and completion scripts, made from the command line's own parsers.

The build hook of the wheel, which brings them as share/man and so on; `make install` has them from
there. `python tools/share.py DIRECTORY` writes them for packagers.
"""

import sys
import tempfile
import tomllib
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from argcomplete.shell_integration import shellcode
from argparse_manpage.manpage import Manpage  # pyright: ignore[reportMissingTypeStubs] - has none
from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_TOP = Path(__file__).parent.parent
_SCRIPTS = {
    "bash": "bash-completion/completions/kprobe",
    "zsh": "zsh/site-functions/_kprobe",
    "fish": "fish/vendor_completions.d/kprobe.fish",
}
"""Where each shell looks for them, below share/."""


class ShareHook(BuildHookInterface[Any]):
    """Adds the files to a wheel. An editable one has none."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Make the files, and say where they go."""
        if version == "editable":
            return
        self._directory = tempfile.TemporaryDirectory()
        made = write_share(Path(self._directory.name))
        build_data["shared_data"] |= {str(path): f"share/{name}" for name, path in made.items()}

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what the wheel now has."""
        del build_data, artifact_path
        if version != "editable":
            self._directory.cleanup()


def write_share(directory: Path) -> dict[str, Path]:
    """Write all files below a directory, and return them by their name below share/."""
    made: dict[str, Path] = {}
    for name, text in {**_manual_pages(), **_scripts()}.items():
        made[name] = directory / name
        made[name].parent.mkdir(parents=True, exist_ok=True)
        made[name].write_text(text)
    return made


def _manual_pages() -> dict[str, str]:
    sys.path.insert(0, str(_TOP / "src"))
    from kprobes.cli.main import make_parsers

    sys.path.pop(0)
    version = tomllib.loads((_TOP / "pyproject.toml").read_text())["project"]["version"]
    whole, *commands = make_parsers()
    see = [parser.prog.replace(" ", "-") for parser in commands]
    pages = {f"{see[at]}.1": _page(each, version, ["kprobe"]) for at, each in enumerate(commands)}
    pages["kprobe.1"] = _page(whole, version, see)
    return {f"man/man1/{name}": text for name, text in pages.items()}


def _page(parser: ArgumentParser, version: str, see: list[str]) -> str:
    epilog, parser.epilog = parser.epilog or "", None
    examples, _, rest = epilog.removeprefix("examples:\n").partition("\n\n")
    notes, _, status = rest.rpartition("Exit status: ")
    page: Any = Manpage(parser, {"project_name": "kprobes", "version": version})
    summary = parser.description or ""
    page.manual = "kprobes"
    # Equal sources make equal files.
    page.date = ""
    page.description = summary[:1].lower() + summary[1:].rstrip(".")
    page.prog = parser.prog.replace(" ", "-")
    page.add_section("examples", "=", _literal(examples))
    if notes.strip():
        page.add_section("notes", "=", _literal(notes.strip()))
    page.add_section("exit status", "=", _literal(status))
    page.add_section("see also", "=", ",\n".join(f".BR {name} (1)" for name in see))
    return str(page)


def _literal(text: str) -> str:
    lines = (line.replace("\\", "\\e").replace("-", "\\-") for line in text.splitlines())
    # A line that begins with a dot or a quote would be a request.
    return "\n".join([".nf", *(f"\\&{line}" for line in lines), ".fi"])


def _scripts() -> dict[str, str]:
    made = {path: shellcode(["kprobe"], shell=shell) for shell, path in _SCRIPTS.items()}
    made[_SCRIPTS["zsh"]] = _with_quotes(made[_SCRIPTS["zsh"]])
    return made


def _with_quotes(script: str) -> str:
    # zsh takes the quote of an open word away from BUFFER, as in 'p vfs_<TAB>: it is in QIPREFIX.
    line = '"${(j: :)words[1,CURRENT-1]} $QIPREFIX$IPREFIX$PREFIX"'
    for old, new in (
        ("        local completions\n", f"        local completions line={line}\n"),
        ('COMP_LINE="$BUFFER"', 'COMP_LINE="$line"'),
        ('COMP_POINT="$CURSOR"', 'COMP_POINT="${#line}"'),
    ):
        if script.count(old) != 1:
            raise ValueError(f"argcomplete's script for zsh has changed: {old!r}")
        script = script.replace(old, new)
    return script


if __name__ == "__main__":
    write_share(Path(sys.argv[1]))
