"""Verdicts on definitions for this machine's kernel, in words and as objects."""

import pytest

from kprobes.cli.verdicts import as_json, as_text
from kprobes.errors import TargetError
from kprobes.host.check import checker_of_host, probeable_here
from kprobes.inspect.check import CheckResult, Terms
from kprobes.model.definition import SyntheticFields
from tests.build.host_machine import make_machine
from tests.build.json_lines import objects


def check(text: str, terms: Terms | None = None) -> list[tuple[str, CheckResult]]:
    return [("", each) for each in checker_of_host(make_machine(), terms or Terms()).check(text)]


def test_the_line_that_the_kernel_would_be_given_is_shown() -> None:
    shown = as_text(check("p:x vfs_read file->f_mode count"), has_format=False)

    assert "  spelled p:kprobes/x vfs_read arg1=+0(%di):u32 count=%dx:u64\n" in shown
    # How our own rings would have it says nothing here.
    assert "record:" not in shown
    assert " at 0x30" not in shown


def test_objects_have_it_too() -> None:
    (found,) = objects("check", as_json(check("r:x vfs_read $retval"), has_format=False))

    (place,) = found["places"]
    assert place["spelled"] == "r:kprobes/x vfs_read arg1=$retval:u64"
    assert "strategy" not in place


def test_a_function_that_the_tracer_does_not_know_is_refused() -> None:
    ((_, result),) = check("p untyped")

    assert not result.is_accepted
    assert "available_filter_functions" in str(result.error)


def test_extra_fields_are_for_guests() -> None:
    ((_, result),) = check("r vfs_read", Terms(synthetic_fields=SyntheticFields(duration=True)))

    assert not result.is_accepted


def test_what_comes_later_minds_what_was_accepted() -> None:
    results = check("p:x vfs_read a=%di\np:x many a=%si:u8\n-:x\np:x many")

    assert [result.is_accepted for _, result in results] == [True, False, True, True]


def test_functions_are_listed_with_their_prototypes() -> None:
    (found,) = probeable_here(make_machine(), pattern="vfs_*")

    assert found.symbol.name == "vfs_read"
    assert found.prototype is not None
    with pytest.raises(TargetError, match="function tracer knows none"):
        probeable_here(make_machine(), pattern="untyped")
