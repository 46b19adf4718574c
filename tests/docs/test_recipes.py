"""Recipes of docs/howto/recipes.md: how many there are, and that type checkers accept them."""

import json
import subprocess
import sys
from pathlib import Path

from tests.build.recipes import ROOT, alike, recipes


def test_there_are_twenty_recipes_or_more_of_five_to_twenty_lines() -> None:
    found = recipes()
    sizes = {each.title: len(list(filter(None, each.program.split("\n")))) for each in found}

    assert len({each.name for each in found}) == len(found) >= 20
    assert {title: size for title, size in sizes.items() if not 5 <= size <= 20} == {}
    # What is compared without its numbers is the exception.
    assert sum(each.is_exact for each in found) >= 20


def test_numbers_that_differ_are_alike_but_for_zero() -> None:
    assert alike("ls-12  [001] 0xff 1.25 a0") == alike("ls-9 [002] 0x10 7 a0")
    assert alike("3 lost") != alike("0 lost")
    assert alike("3 lost") != alike("3 missed")


def test_a_strict_type_checker_accepts_every_program(tmp_path: Path) -> None:
    for recipe in recipes():
        (tmp_path / f"{recipe.name}.py").write_text(recipe.program)
    config = {"typeCheckingMode": "strict", "extraPaths": [str(ROOT / "src")]}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(config))

    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable]
    checked = subprocess.run(
        [*command, "-p", tmp_path], check=False, capture_output=True, text=True
    )

    assert checked.returncode == 0, checked.stdout
