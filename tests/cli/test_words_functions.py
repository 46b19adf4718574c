"""Functions as lines."""

import pytest

from kprobes.cli.words import (
    declare,
    functions_as_json,
    functions_as_names,
    functions_as_prototypes,
)
from kprobes.inspect.status import Function
from kprobes.model.kernel import Parameter, Prototype
from tests.build.json_lines import objects
from tests.build.kernel import TEXT, symbol

READ = Function(
    symbol=symbol("vfs_read", TEXT),
    prototype=Prototype(
        name="vfs_read",
        returns="ssize_t",
        parameters=(
            Parameter(name="file", type="struct file *"),
            Parameter(name="count", type="size_t"),
        ),
    ),
)
SYNC = Function(
    symbol=symbol("sync", TEXT + 64),
    prototype=Prototype(name="sync", returns="void", parameters=()),
)
OTHER = Function(symbol=symbol("other", TEXT + 128, module="ext4"), prototype=None)


@pytest.mark.parametrize(
    ("type_", "text"),
    [
        ("int", "int x"),
        ("const char *", "const char *x"),
        ("struct file **", "struct file **x"),
        ("char *const", "char *const x"),
        ("int (*)(void *)", "int (*x)(void *)"),
        ("u8[16]", "u8 x[16]"),
        ("...", "..."),
    ],
)
def test_a_parameter_is_declared_as_in_c(type_: str, text: str) -> None:
    assert declare(Parameter(name="x", type=type_)) == text


def test_a_parameter_without_a_name_is_its_type() -> None:
    assert declare(Parameter(name="", type="int")) == "int"


def test_names_stand_below_each_other() -> None:
    assert functions_as_names([READ, OTHER]) == "vfs_read\nother     [ext4]\n"


def test_prototypes_are_aligned() -> None:
    assert functions_as_prototypes([READ, SYNC, OTHER]) == (
        "vfs_read  (struct file *file, size_t count) -> ssize_t\n"
        "sync      (void) -> void\n"
        "other     (?)                                           [ext4]\n"
    )


def test_json_has_an_object_per_line() -> None:
    first, second = objects("list", functions_as_json([READ, OTHER]))

    assert first == {
        "function": "vfs_read",
        "address": f"{TEXT:#x}",
        "module": None,
        "args": [{"name": "file", "type": "struct file *"}, {"name": "count", "type": "size_t"}],
        "returns": "ssize_t",
    }
    assert (second["module"], "args" in second) == ("ext4", False)
