"""Every example of docs/howto/handlers.md runs, and prints what it says."""

import re
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest

import kprobes
from kprobes import Kprobe, Kretprobe
from kprobes.open import GuestSession
from kprobes.transport.qemu_command import MachineOptions
from tests.build.dialect import DIALECTS

pytestmark = pytest.mark.guest

_PAGE = (Path(__file__).parent.parent.parent / "docs" / "howto" / "handlers.md").read_text()
_EXAMPLES = re.findall(
    r"^```python\n(.*?)^```$(?:\n\n```printed\n(.*?)^```$)?", _PAGE, re.DOTALL | re.MULTILINE
)


_DATA_SYMBOLS = "panic_timeout"
"""Data that has a name on amd64 only."""


def examples() -> Iterator[tuple[str, str, str]]:
    """Yield architecture, code and what it prints, in words of that architecture."""
    for arch, dialect in DIALECTS.items():
        others = [each.syscall for each in DIALECTS.values() if each is not dialect]
        without = [*others, *([_DATA_SYMBOLS] if arch == "arm64" else [])]
        for code, printed in _EXAMPLES:
            if not any(word in code for word in without):
                yield arch, code.replace("regs.ip", f"regs.{dialect.pc}"), printed


@pytest.fixture(scope="module")
def booted() -> Generator[Callable[[str], GuestSession]]:
    """Return a kernel of an architecture: one for all examples, which leave it as it was."""
    with ExitStack() as stack:

        @cache
        def boot(arch: str) -> GuestSession:
            return stack.enter_context(kprobes.boot(MachineOptions(arch=arch)))

        yield boot


def test_the_page_has_examples() -> None:
    assert len(_EXAMPLES) == 10
    assert sum(bool(printed) for _, printed in _EXAMPLES) == 6
    assert [each[0] for each in examples()] == ["amd64"] * 9 + ["arm64"] * 8


@pytest.mark.parametrize(
    ("arch", "code", "printed"), list(examples()), indirect=["arch"], scope="session"
)
def test_an_example_does_what_it_says(
    booted: Callable[[str], GuestSession],
    arch: str,
    code: str,
    printed: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    kernel = booted(arch)
    told: list[str] = []
    kernel.handlers.report.warn = told.append

    names = {"kernel": kernel, "Kprobe": Kprobe, "Kretprobe": Kretprobe}
    exec(compile(code, "handlers.md", "exec"), names)
    probes = kernel.handlers.probes
    kernel.run("cat /proc/version; ls / >/dev/null")
    kernel.unregister_kprobes(probes)

    shown = capsys.readouterr().out
    assert shown
    assert not printed or shown == printed
    assert all(probe.hits for probe in probes)
    # A page of a new process that is not there yet is the only fault that there may be.
    assert all("MemoryFault" in words for words in told)
