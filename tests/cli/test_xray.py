"""``kprobe xray`` before it has a kernel."""

from pathlib import Path

import pytest

from kprobes.cli.main import main
from kprobes.inspect.subject import TextSnapshot
from tests.build.kernel import SITE
from tests.build.snapshot import make_snapshot


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--image", "k", "--target", "qemu:/s.sock", "f"], "--target is for a guest; with"),
        (["--image", "k", "--vmlinux", "v", "f"], "--vmlinux is for a guest; with --image"),
        (["--image", "k", "--arm", "p f", "f"], "--arm is for a guest; with --image"),
        (["--strategy", "jump", "f"], "nothing is armed"),
        (["--image", "k", "f", "--", "ls"], "a command is for a guest"),
        (["--target", "qemu:/s.sock", "f", "--", "ls"], "only in a guest that kprobe boots"),
        (["--target", "qemu:/s.sock", "--cpus", "1", "f"], "--cpus is for a guest that is booted"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    words: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["xray", *words]) == 2
    assert why in capsys.readouterr().err


def test_a_file_that_is_not_there_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["xray", "--image", "/nonexistent", "f"]) == 1
    assert "cannot read /nonexistent" in capsys.readouterr().err


def test_a_target_where_nothing_answers_is_unreachable(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["xray", "--target", "qemu:/nonexistent.sock", "f"]) == 3
    assert "kprobe: " in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--function", "--exits"])
def test_what_shows_a_function_takes_no_range(
    option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def read(path: Path) -> TextSnapshot:
        del path
        return make_snapshot()

    monkeypatch.setattr("kprobes.inspect.subject.snapshot_of_image", read)

    assert main(["xray", option, "--image", "k", f"{SITE:#x}:8"]) == 2
    assert f"{option} is for a place, not for a range" in capsys.readouterr().err
