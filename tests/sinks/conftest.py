"""Every test of a sink twice: its lines are made by Python, and by our C."""

import pytest

from tests.build.native import count_as_few, count_as_many


@pytest.fixture(autouse=True, params=[count_as_few, count_as_many], ids=["python", "c"])
def _made_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    request.param(monkeypatch)
