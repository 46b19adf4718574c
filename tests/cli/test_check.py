"""``kprobe check`` before it has a kernel."""

from pathlib import Path

import pytest

from kprobes.cli.main import main


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--image", "k", "--target", "qemu:/s.sock", "p f"], "--target is for a guest; with"),
        (["--image", "k", "--suite", "sid", "p f"], "--suite is for a guest; with --image"),
        (
            ["--target", "qemu:/s.sock", "--cpus", "1", "p f"],
            "--cpus is for a guest that is booted",
        ),
        (["@/nonexistent/file"], "cannot read definitions from /nonexistent/file"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    words: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", *words]) == 2
    assert why in capsys.readouterr().err


def test_a_deletion_is_no_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = str(tmp_path / "absent")

    assert main(["check", "--image", image, "p:x f", "-:x"]) == 1
    assert f"cannot read {image}" in capsys.readouterr().err
    # Read as trace does, from the first word on.
    assert main(["trace", "--target", "qemu:/nonexistent.sock", "p:x f", "-:x"]) == 2
    assert "no definition was given" in capsys.readouterr().err
