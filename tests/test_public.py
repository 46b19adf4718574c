"""Names in ``import kprobes`` and ``python -m kprobes``."""

import inspect
import pydoc
import subprocess
import sys
from rlcompleter import Completer

import pytest

import kprobes

CLASSES = [name for name in kprobes.__all__ if inspect.isclass(getattr(kprobes, name))]


def test_the_public_names_are_seen_by_completion_and_help() -> None:
    shown = [name for name in dir(kprobes) if not name.startswith("_")]
    text = pydoc.plain(pydoc.render_doc(kprobes))

    assert shown == sorted(kprobes.__all__)
    assert {"MachineOptions", "attach", "boot", "host"} <= {*shown}
    assert all(name in text for name in shown)


def test_errors_and_types_are_there_after_the_import_alone() -> None:
    program = (
        "import kprobes; print(kprobes.errors.RefusedError.__name__, kprobes.GuestSession.__name__)"
    )

    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)

    assert printed.stdout.split() == [b"RefusedError", b"Session"]


def test_host_is_the_function_whatever_was_imported() -> None:
    program = "import kprobes; kprobes.HostOptions(); print(kprobes.host.__module__, dir(kprobes))"

    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)

    assert printed.stdout.startswith(b"kprobes.open ")
    assert b"'host'" in printed.stdout


def test_completion_offers_what_there_is() -> None:
    found = Completer({"kprobes": kprobes}).attr_matches("kprobes.")  # pyright: ignore[reportAttributeAccessIssue] - not in its stub

    assert {each.split("(")[0] for each in found} == {f"kprobes.{n}" for n in kprobes.__all__}


@pytest.mark.parametrize("name", CLASSES)
def test_every_public_name_of_a_class_is_documented(name: str) -> None:
    documented = getattr(kprobes, name)
    own = [each for each in dir(documented) if not each.startswith("_")]
    # Attributes are in the docstring of their class.
    texts = " ".join(each.__doc__ or "" for each in documented.__mro__)

    assert [
        each
        for each in own
        if f"{each}:" not in texts
        and f"{each}," not in texts
        and not _has_docstring(inspect.getattr_static(documented, each))
    ] == []


@pytest.mark.parametrize(
    ("prefix", "owner", "names"),
    [
        ("kprobes", kprobes, "boot attach host"),
        (
            "kernel",
            kprobes.Session,
            "probe select choose_tasks record events run start entry returns call fail override",
        ),
    ],
)
def test_what_programs_begin_with_has_an_example(prefix: str, owner: object, names: str) -> None:
    documented = {name: inspect.getdoc(getattr(owner, name)) or "" for name in names.split()}

    assert [name for name, text in documented.items() if f"{prefix}.{name}(" not in text] == []


def _has_docstring(member: object) -> bool:
    is_code = inspect.isroutine(member) or isinstance(member, property)
    return is_code and bool(member.__doc__)


def test_python_m_kprobes_is_kprobe() -> None:
    command = [sys.executable, "-m", "kprobes", "--version"]

    assert subprocess.run(command, capture_output=True, check=True).stdout.startswith(b"kprobe ")
