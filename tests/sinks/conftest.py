"""Every test of a sink twice: its lines are made by Python, and by our C."""

import pytest

from kprobes.native import library


@pytest.fixture(autouse=True, params=["python", "c"])
def _made_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "MANY", 0 if request.param == "c" else 1 << 60)
