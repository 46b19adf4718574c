"""Calls that a walk counts."""

from typing import Any

from kprobes.lang.parser import parse
from tools.walk import follow


def test_modules_come_in_the_order_of_their_first_call() -> None:
    walk = follow(lambda: parse("p vfs_read", registers=()))

    names = [*walk.functions]
    assert names[0] == "kprobes.lang.parser"
    assert "kprobes.lang.lexer" in names
    assert all(name.startswith("kprobes.") for name in names)


def test_what_runs_while_a_module_is_imported_does_not_count() -> None:
    module: dict[str, Any] = {"__name__": "kprobes.made"}
    body = "def before(): pass\ndef after(): pass\nclass Made: before()\nbefore()"

    imported = follow(lambda: exec(body, module))
    called = follow(module["after"])

    assert imported.functions == {}
    assert [code.co_name for code in called.functions["kprobes.made"]] == ["after"]
