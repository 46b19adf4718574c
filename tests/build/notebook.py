"""The notebook of docs/howto, its recording, and what its cells give.

``python -m tests.build.notebook`` runs it and writes what it gave into its file.
"""

import ast
import base64
import io
import json
import math
import random
import tempfile
from contextlib import chdir, redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Any

from kprobes.model.clock import Line
from tests.build.kernel import TEXT
from tests.build.recorded import CPUS, Recorded
from tests.build.ring import Hit, make_layout

NOTEBOOK = Path(__file__).parents[2] / "docs" / "howto" / "notebook.ipynb"
RECORDING = "reads.rec"
_OPEN = make_layout(1, ("ustring",), event="open", where="do_sys_openat2+0x0/0x80", names=("path",))
_READ = make_layout(
    2,
    ("u64", "s64", "duration"),
    event="read",
    where="ksys_read+0x0/0xa0",
    names=("count", "got", "duration"),
    has_caller=True,
)
_PATHS = (b"/etc/passwd", b"/usr/lib/libc.so.6", b"/proc/self/maps", b"/tmp/<b>\xff</b>")
_COMMS = (b"cat", b"ls", b"sshd")

Cell = dict[str, Any]
Output = dict[str, Any]


def make_recording(count: int = 600) -> bytes:
    """Return the recording that the notebook reads: tasks that open files and read them."""
    rng = random.Random(7)
    found = Recorded(clock=Line(ns_at=0, cycles=0, mult=1, shift=0), layouts=(_OPEN, _READ))
    now = 12_000_000_000
    for number in range(count):
        now += rng.randrange(10_000, 400_000)
        task = rng.randrange(len(_COMMS))
        hit = Hit(
            layout=_OPEN if number % 4 == 0 else _READ,
            counter=now,
            pid=100 + task,
            comm=_COMMS[task],
            values=(rng.choice(_PATHS),) if number % 4 == 0 else _read(rng, task, now),
            caller=TEXT + 64,
        )
        found.rings[rng.randrange(CPUS)].write(hit)
        if not number % 50:
            found.look()
    found.look()
    return found.end()


def _read(rng: random.Random, task: int, now: int) -> tuple[int, int, int]:
    size = 1 << rng.randrange(5, 14)
    took = int(math.exp(rng.gauss(9 + task, 0.8)))
    return size, rng.randrange(size), now - took


def cells() -> list[Cell]:
    """Return those of the notebook."""
    return json.loads(NOTEBOOK.read_text())["cells"]


def run(found: list[Cell]) -> list[list[Output]]:
    """Return what each cell of code gives, run one after the other beside the recording."""
    import_module("matplotlib").use("Agg")
    names: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory, chdir(directory):
        Path(RECORDING).write_bytes(make_recording())
        return [
            _run("".join(cell["source"]), names) for cell in found if cell["cell_type"] == "code"
        ]


def _run(source: str, names: dict[str, Any]) -> list[Output]:
    # As Jupyter does: what is printed, the value of a last expression, figures.
    body = ast.parse(source).body
    last = body.pop() if isinstance(body[-1], ast.Expr) else None
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(compile(ast.Module(body, []), "cell", "exec"), names)
        value = None
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
    found: list[Output] = []
    if printed.getvalue():
        text = printed.getvalue().splitlines(keepends=True)
        found.append({"name": "stdout", "output_type": "stream", "text": text})
    if value is not None:
        found.append(_result(value))
    return found + _figures()


def _result(value: Any) -> Output:
    data = {"text/plain": repr(value).splitlines(keepends=True)}
    if hasattr(value, "_repr_html_"):
        data["text/html"] = value._repr_html_().splitlines(keepends=True)
    return {"data": data, "metadata": {}, "output_type": "execute_result"}


def _figures() -> list[Output]:
    pyplot: Any = import_module("matplotlib.pyplot")
    found: list[Output] = []
    for number in pyplot.get_fignums():
        out = io.BytesIO()
        pyplot.figure(number).savefig(out, format="png", dpi=72)
        image = base64.b64encode(out.getvalue()).decode()
        found.append({"data": {"image/png": image}, "metadata": {}, "output_type": "display_data"})
    pyplot.close("all")
    return found


def _write() -> None:
    notebook = json.loads(NOTEBOOK.read_text())
    coded = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, (cell, outputs) in enumerate(zip(coded, run(coded), strict=True), 1):
        for output in outputs:
            if output["output_type"] == "execute_result":
                output["execution_count"] = number
        cell["execution_count"], cell["outputs"] = number, outputs
    partial = NOTEBOOK.with_suffix(".new")
    partial.write_text(json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n")
    partial.replace(NOTEBOOK)


if __name__ == "__main__":
    _write()
