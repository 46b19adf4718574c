"""Pages of recordings in a browser: drawn, with nothing of a guest's that runs, nothing loaded."""

import re
import shutil
import subprocess
from collections.abc import Callable
from html import unescape
from pathlib import Path

import pytest

from kprobes.cli.main import main
from tests.build.command import WAIT_S
from tests.export.test_html import IMAGE, SCRIPT, Page, busy, hostile_page

# Not for a guest: `make test` installs the browser, `make check` does not.
pytestmark = pytest.mark.guest

_OPTIONS = (
    "--headless",
    # As root it has none.
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--no-first-run",
    "--enable-logging=stderr",
    "--virtual-time-budget=10000",
)
_POLICY = re.compile('<meta http-equiv="Content-Security-Policy"[^>]*>')
_GONE = "document.title = 'gone'"

Shown = tuple[str, list[str]]
"""The document after its scripts have run, and what the browser's console has."""
Show = Callable[[str], Shown]


@pytest.fixture
def show(tmp_path: Path) -> Show:
    """Open a page's text in Chromium."""
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("chromium is not installed: `make test` does that")

    def open_(text: str) -> Shown:
        file = tmp_path / "shown.html"
        file.write_text(text, "utf-8")
        done = subprocess.run(
            [
                chromium,
                *_OPTIONS,
                f"--user-data-dir={tmp_path / 'profile'}",
                "--window-size=1280,1600",
                "--dump-dom",
                file.as_uri(),
            ],
            capture_output=True,
            timeout=WAIT_S,
            check=True,
        )
        told = done.stderr.decode(errors="replace").splitlines()
        return done.stdout.decode(), [line for line in told if "CONSOLE" in line]

    return open_


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A page of events of all kinds."""
    path = tmp_path_factory.mktemp("html") / "x.rec"
    path.write_bytes(busy())
    assert main(["convert", str(path), str(path.with_name("out.html"))]) == 0
    return path.with_name("out.html").read_text("utf-8")


def test_charts_are_drawn_and_nothing_else_is_wanted(show: Show, text: str) -> None:
    shown, told = show(text)

    page = Page(shown)
    charts = [
        a for tag, a in page.tags if tag == "div" and "js-plotly-plot" in (a.get("class") or "")
    ]
    assert len(charts) == len(page.figures) == 3
    # Four rows and, of two events, calls; an area of each histogram.
    assert shown.count('class="trace scatter') == 4 + 2 + 2
    points = sum(len(t["x"]) for t in page.figures[0]["data"] if t.get("mode") == "markers")
    assert len(re.findall('class="point[ "]', shown)) == points > 150
    for name in ("read", "open", "work", "lost", "the slowest calls", "p99"):
        assert re.search(f"<text[^>]*>{name}</text>", shown)
    # What the policy forbids is told, and so are the scripts' own mistakes.
    assert told == []


def test_the_policy_stops_what_is_not_the_pages_own(show: Show, text: str) -> None:
    added = f"<script>{_GONE}</script><img src=x onerror=\"{_GONE}\"><img src='http://[::1]/'>"

    shown, told = show(text.replace("</main>", f"{added}</main>"))

    assert "<title>Kernel events" in shown
    assert sum("Content Security Policy" in line for line in told) >= 3


def test_nothing_of_a_guests_text_becomes_markup_or_runs(show: Show, tmp_path: Path) -> None:
    text = hostile_page(tmp_path)
    # Without its policy, so that only what is written counts.
    bare, count = _POLICY.subn("", text)

    shown, told = show(bare)

    page = Page(shown)
    assert count == 1
    assert "<title>Kernel events" in shown
    assert not {"img", "b"} & {tag for tag, _ in page.tags}
    # Plotly's own buttons are no links to anywhere.
    assert [a["href"] for tag, a in page.tags if tag == "a" and "href" in a] == []
    assert told == []
    labels = [unescape(each) for each in re.findall("<text[^>]*>([^<]*)</text>", shown)]
    assert any(SCRIPT.decode() in each for each in labels)


def test_what_is_shown_at_the_pointer_is_text_too(show: Show, tmp_path: Path) -> None:
    page = hostile_page(tmp_path)
    figure = Page(page).figures[0]["data"][1]
    point = next(i for i, each in enumerate(figure["customdata"]) if "onerror" in each[3])
    # The calls' row is the second one.
    where = f'[{{curveNumber: 1, pointNumber: {point}}}], ["xy2"]'
    hover = f'<script>Plotly.Fx.hover("figure0", {where})</script>'
    bare = _POLICY.sub("", page).replace("</body>", f"{hover}</body>")

    shown, told = show(bare)

    (layer,) = re.findall('<g class="hovertext".*?</g>', shown, re.DOTALL)
    words = unescape(re.sub("<[^>]*>", "", layer))
    assert IMAGE.decode() in words
    assert "returned at" in words
    assert "<img" not in layer
    assert "<a " not in layer
    assert "<title>Kernel events" in shown
    assert told == []
