"""Fixtures of all tests: targets and journals that are nobody's own, time, and second tries."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

os.environ.setdefault("KPROBES_TARGET", "guest")
# A background job of a shell, or nohup, has them ignored: here they are sent, and must arrive.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
# How long one example takes is told by whatever else this machine does.
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")


@pytest.fixture(scope="session", autouse=True)
def own_journals(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the tests' journals apart from those that this user's tracers have left."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(params=["few", "many"], scope="module")
def few_and_many(request: pytest.FixtureRequest) -> Iterator[None]:
    """Have tests run twice: all rows count as few, which Python does, then as many, for C."""
    # This file is also copied to where there is nothing else: test_second_tries.py.
    from tests.build.native import count_as_few, count_as_many

    with pytest.MonkeyPatch.context() as patch:
        (count_as_few if request.param == "few" else count_as_many)(patch)
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the file of second tries, which is what a run with --last-failed is."""
    parser.addoption("--second-tries", type=Path, help="tests that passed then, to show at the end")


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Note what passed at the second try, and count it: each is a defect."""
    file: Path | None = config.getoption("second_tries")
    if file is None:
        return
    names = file.read_text().splitlines() if file.exists() else []
    if config.getoption("lf"):
        passed = terminalreporter.getreports("passed")
        names += [report.nodeid for report in passed if report.when == "call"]
        file.write_text("".join(f"{name}\n" for name in names))
    for name in names:
        terminalreporter.write_line(f"passed at the second try: {name}")
    if names:
        terminalreporter.write_line(f"defects, passed at the second try only: {len(names)}")
