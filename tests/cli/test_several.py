"""Names and clocks of several recordings."""

from pathlib import Path

import pytest

from kprobes.cli.several import named, shifts_of
from kprobes.cli.terminal import Stop
from kprobes.errors import UsageError
from tests.build.recorded import Recorded
from tests.cli.test_report_several import MS, keep


def test_recordings_are_named_as_their_files_unless_two_have_one_name() -> None:
    short, long = [Path("a/x.rec"), Path("y.rec")], [Path("a/x.rec"), Path("b/x.rec")]

    assert named(short) == {"x.rec": Path("a/x.rec"), "y.rec": Path("y.rec")}
    assert named(long) == {str(path): path for path in long}


@pytest.mark.parametrize("paths", [["a.rec", "-"], ["a.rec", "a.rec"]])
def test_what_cannot_be_read_twice_or_is_there_twice_is_refused(paths: list[str]) -> None:
    with pytest.raises(UsageError):
        named(list(map(Path, paths)))


def test_clocks_are_related_to_the_first_that_is_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "none.rec").write_bytes(Recorded().end())
    recordings = {
        "none": tmp_path / "none.rec",
        "first": keep(tmp_path / "first.rec", ahead=0, moments=range(0, 300, 3)),
        "same": keep(tmp_path / "same.rec", ahead=0, moments=range(1, 300, 3)),
        "ahead": keep(tmp_path / "ahead.rec", ahead=5000 * MS, moments=range(2, 300, 3)),
    }

    with Stop() as stop:
        shifts = shifts_of(recordings, stop)

    assert [name for name, shift in shifts.items() if shift is not None] == ["ahead"]
    shift = shifts["ahead"]
    assert shift is not None
    assert abs(shift.ns + 5000 * MS) <= shift.error < 3 * MS
    assert capsys.readouterr().err.startswith("kprobe: ahead: times are shifted by -")


def test_where_one_was_recorded_before_the_first_was_booted_its_clock_is_that_of_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recordings = {
        "young": keep(tmp_path / "young.rec", ahead=-200 * MS, moments=range(200, 300)),
        "old": keep(tmp_path / "old.rec", ahead=5000 * MS, moments=range(300)),
    }

    with Stop() as stop:
        shifts = shifts_of(recordings, stop)

    young = shifts["young"]
    assert shifts["old"] is None
    assert young is not None
    assert abs(young.ns - 5200 * MS) <= young.error < 3 * MS
    assert capsys.readouterr().err.startswith("kprobe: young: times are shifted by +5.2")
