"""``kprobe restore`` over several guests."""

from collections.abc import Iterator, Sequence

import pytest

from kprobes.cli import restore
from kprobes.cli.main import main


@pytest.mark.parametrize("codes", [(0, 4), (4, 0), (0, 4, 0)])
def test_one_guest_that_cannot_be_put_right_is_in_the_exit_code(
    codes: Sequence[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes = [(f"guest {n}", code) for n, code in enumerate(codes)]

    def guests(found: object) -> Iterator[tuple[str, int]]:
        del found
        return iter(outcomes)

    monkeypatch.setattr(restore, "_guests", guests)
    monkeypatch.setattr(restore, "_here", list[tuple[str, int]])

    code = main(["restore"])

    assert code == 4
    assert capsys.readouterr().out == "".join(f"{words}\n" for words, _ in outcomes)
