"""The notebook of docs/howto: its cells run, and give what its file has."""

import base64
from typing import Any

from tests.build.notebook import Cell, Output, cells, run

_IMAGE = "image/png"


def _without_images(outputs: list[Output]) -> list[dict[str, Any]]:
    # Pixels are the machine's fonts'.
    return [
        {
            "type": output["output_type"],
            "text": output.get("text"),
            "data": {k: v for k, v in output.get("data", {}).items() if k != _IMAGE},
            "images": [k for k in output.get("data", {}) if k == _IMAGE],
        }
        for output in outputs
    ]


def test_every_cell_gives_what_the_file_has() -> None:
    coded: list[Cell] = [cell for cell in cells() if cell["cell_type"] == "code"]

    found = run(coded)

    for cell, outputs in zip(coded, found, strict=True):
        assert _without_images(outputs) == _without_images(cell["outputs"]), cell["source"]
    images = [
        output["data"].get(_IMAGE) for outputs in found for output in outputs if "data" in output
    ]
    drawn = [base64.b64decode(image) for image in images if image]
    assert len(drawn) == 2
    assert all(image.startswith(b"\x89PNG") and len(image) > 2000 for image in drawn)
