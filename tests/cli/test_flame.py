"""``kprobe flame`` and its formats, on a recording and no guest."""

from pathlib import Path

import pytest

from kprobes.cli.main import main
from tests.build.recorded import Recorded
from tests.build.reference import packed
from tests.build.ring import Hit, make_layout

TEXT = 0xFFFF_FFFF_8100_0000
LAYOUT = make_layout(1, ("u8", "stacktrace"), names=("n", "common_stacktrace"), event="read")


def recorded(path: Path) -> Path:
    """Write a recording of five hits with two stacks."""
    found = Recorded(layouts=(LAYOUT,))
    for n in range(5):
        stack = packed([TEXT, TEXT + 256 + 8 * (n % 2)])
        hit = Hit(layout=LAYOUT, counter=n, pid=1, comm=b"sh", values=(n, stack))
        assert found.rings[0].write(hit)
    found.look()
    path.write_bytes(found.end())
    return path


def run(capsysbinary: pytest.CaptureFixture[bytes], *words: str | Path) -> tuple[int, str, str]:
    status = main(list(map(str, words)))
    out, err = capsysbinary.readouterr()
    return status, out.decode(), err.decode()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["p f", "-o", "x.png"], ".folded, .speedscope.json, .html, .svg"),
        (["p f", "--by", "comm,pid"], "--by takes one key"),
    ],
)
def test_what_cannot_be_drawn_is_refused(
    capsysbinary: pytest.CaptureFixture[bytes], words: list[str], says: str
) -> None:
    status, out, err = run(capsysbinary, "flame", *words)

    assert (status, out) == (2, "")
    assert says in err


@pytest.mark.parametrize("form", ["folded", "speedscope"])
def test_only_stacks_are_folded(
    capsysbinary: pytest.CaptureFixture[bytes], tmp_path: Path, form: str
) -> None:
    path = recorded(tmp_path / "x.rec")
    for words in (["--count", "comm"], []):
        status, out, err = run(capsysbinary, "report", path, *words, "--format", form)

        assert (status, out) == (2, "")
        assert "count --by stack" in err or "is for --count and --hist" in err


def test_the_stacks_of_a_recording_are_counted_by_its_own_names(
    capsysbinary: pytest.CaptureFixture[bytes], tmp_path: Path
) -> None:
    path = recorded(tmp_path / "x.rec")

    folded = run(capsysbinary, "report", path, "--count", "function,stack", "--format", "folded")
    table = run(capsysbinary, "report", path, "--count", "stack,n.buckets=9")[1]
    kernels = run(
        capsysbinary, "report", path, "--hist", "keys=common_stacktrace", "--format", "hist"
    )[1]

    assert folded == (0, "ext_read;_stext 5\n", "")
    assert "stack: _stext+0x0/0x100 <- ext_read+0x0/0x40\n" in table
    entry = "{ common_stacktrace:\n         _stext+0x0/0x100\n         ext_read+0x"
    assert kernels.count(entry) == 2
    assert "\n} hitcount:          3\n" in kernels


def test_a_stack_takes_a_line_for_each_frame(
    capsysbinary: pytest.CaptureFixture[bytes], tmp_path: Path
) -> None:
    path = recorded(tmp_path / "x.rec")

    lines = run(capsysbinary, "report", path, "--count", "stack,comm")[1].splitlines()

    assert [line.split() for line in lines[:3]] == [
        ["HITS", "SHARE", "STACK", "COMM"],
        ["3", "60.0", "%", "_stext+0x0/0x100", "sh"],
        ["ext_read+0x0/0x40"],
    ]


def test_what_was_recorded_without_stacks_says_how_to_have_them(
    capsysbinary: pytest.CaptureFixture[bytes], tmp_path: Path
) -> None:
    found = Recorded()
    path = tmp_path / "x.rec"
    path.write_bytes(found.end())
    hit = Hit(layout=found.layouts[0], counter=1, pid=1, comm=b"sh", values=(1,))
    again = Recorded()
    again.rings[0].write(hit)
    again.look()
    path.write_bytes(again.end())

    status, _, err = run(capsysbinary, "report", path, "--count", "stack")

    assert status == 4
    assert "-O stacktrace" in err
