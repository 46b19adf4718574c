"""LLVM's object files to templates, and what a template may not have."""

import pytest

from kprobes import llvm
from kprobes.arch.x86_64.arch import CODE
from kprobes.codegen.object import read_template
from kprobes.errors import FormatError
from kprobes.model.abi import Field, Template

NUMBER = "@number = external dso_local global i8\n"


def _template(source: str) -> Template:
    found = llvm.compile_object(source, CODE)
    return read_template(found, CODE)


def test_code_without_numbers_has_no_relocations() -> None:
    template = _template("define i64 @probe() { ret i64 7 }")

    assert template.relocations == ()
    assert template.code.endswith(b"\xc3")


def test_numbers_to_come_are_told_by_symbol_and_place() -> None:
    template = _template(
        NUMBER + "define i64 @probe() { ret i64 add (i64 ptrtoint (ptr @number to i64), i64 5) }"
    )

    (found,) = template.relocations
    assert (found.symbol, found.addend, found.field) == ("number", 5, Field(size=4))
    assert template.code[found.offset : found.offset + 4] == bytes(4)


def test_calls_are_relative_to_their_own_end() -> None:
    template = _template(
        "declare dso_local i64 @reader()\n"
        "define i64 @probe() nounwind { %v = call i64 @reader() %w = add i64 %v, 1 ret i64 %w }"
    )

    (found,) = template.relocations
    assert (found.symbol, found.addend) == ("reader", -4)
    assert found.field.is_relative


@pytest.mark.parametrize(
    "data",
    [
        "@table = internal constant [2 x i64] [i64 3, i64 4]",
        "@table = internal global [2 x i64] [i64 3, i64 4]",
        "@table = internal global [2 x i64] zeroinitializer",
    ],
)
def test_data_beside_the_code_is_refused(data: str) -> None:
    source = f"""{data}
        define ptr @probe(i64 %i) {{
          %p = getelementptr i64, ptr @table, i64 %i
          store volatile i64 %i, ptr %p
          ret ptr %p
        }}"""

    with pytest.raises(FormatError, match="has a section"):
        _template(source)


def test_a_relocation_that_we_do_not_know_is_refused() -> None:
    source = (
        "@number = external thread_local global i8\n"
        "define ptr @probe() nounwind { ret ptr @number }"
    )

    with pytest.raises(FormatError, match="relocation of type"):
        _template(source)
