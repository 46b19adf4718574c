"""Every example of docs/handlers.md runs, and prints what it says."""

import re
from collections.abc import Generator
from pathlib import Path

import pytest

import kprobes
from kprobes import Kprobe, Kretprobe
from kprobes.session import Session

pytestmark = pytest.mark.guest

_PAGE = (Path(__file__).parent.parent.parent / "docs" / "handlers.md").read_text()
_EXAMPLES = re.findall(
    r"^```python\n(.*?)^```$(?:\n\n```printed\n(.*?)^```$)?", _PAGE, re.DOTALL | re.MULTILINE
)


@pytest.fixture(scope="module")
def kernel() -> Generator[Session]:
    with kprobes.boot() as session:
        yield session


def test_the_page_has_examples() -> None:
    assert len(_EXAMPLES) == 9
    assert sum(bool(printed) for _, printed in _EXAMPLES) == 5


@pytest.mark.parametrize(("code", "printed"), _EXAMPLES)
def test_an_example_does_what_it_says(
    kernel: Session, code: str, printed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    told: list[str] = []
    kernel.handlers.report.tell = told.append

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
