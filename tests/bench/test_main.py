"""Choice of benchmarks for a guest."""

import pytest

from bench.__main__ import NAMES, main, names
from bench.amd64 import AMD64
from bench.arm64 import ARM64


def test_everything_but_what_no_guest_is_needed_for_is_measured_on_both() -> None:
    assert names(AMD64) == NAMES
    assert set(NAMES) - set(names(ARM64)) == {"source", "decode", "recordings", "host"}


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--arch", "arm64", "cost", "decode"], "no decode for arm64: it decodes rings"),
        (["--arch", "arm64", "host"], "no host for arm64: its guest carries"),
        (["costs"], "no benchmark costs; there are cost, anywhere"),
        (["--arch", "riscv64"], "invalid choice: 'riscv64'"),
    ],
)
def test_what_there_is_not_is_said(
    words: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)

    assert ended.value.code == 2
    assert why in capsys.readouterr().err
