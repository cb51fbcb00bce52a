"""report.html in a real Chromium, from file://: at both widths, in both themes, by keyboard, without network.

Screenshots stay in the directory of the test: `pytest -m chromium --basetemp=DIR`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import Page, chromium, find_chromium
from report_cases import collapsing, prepared_run, straggling, write_many

from olmo_rl.report.writing import write_report

pytestmark = [pytest.mark.chromium, pytest.mark.timeout(600)]

MOST_SECONDS = 3.0  # until a page of 10,000 updates is drawn


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("pages")
    healthy = prepared_run(directory / "runs" / "healthy")
    other = collapsing(directory / "runs" / "collapsing")
    many = write_many(directory / "many", updates=10_000)
    return {
        "healthy": write_report(healthy),
        "straggling": write_report(straggling(directory / "straggling")),
        "compared": write_report(other, compare=healthy, path=directory / "compared.html"),
        "sweep": write_report(directory / "runs"),
        "many": write_report(many),
    }


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    assert find_chromium() is not None, "apt-get install chromium"
    with chromium(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.mark.parametrize("name", ["healthy", "straggling", "compared", "sweep"])
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("dark", [False, True])
def test_a_page_is_drawn_whole_at_every_width_in_both_themes(
    pages: dict[str, Path], page: Page, tmp_path: Path, name: str, width: int, dark: bool
) -> None:
    page.requests.clear()
    page.open(pages[name], width=width, dark=dark)
    page.screenshot(tmp_path / f"{name}-{width}-{'dark' if dark else 'light'}.png")
    assert page.errors == []
    assert page.requests == [pages[name].as_uri()], "nothing but the page itself is asked for"
    assert page.value("document.documentElement.dataset.drawn") == "true"
    assert page.value("document.documentElement.scrollWidth") <= width, "no sideways scrolling of the page"
    assert page.value("document.documentElement.dataset.theme") == ("dark" if dark else "light")
    background = page.value("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(17, 21, 28)" if dark else "rgb(255, 255, 255)")


def test_the_page_of_a_run_has_every_section_and_draws_what_the_data_hold(
    pages: dict[str, Path], page: Page
) -> None:
    page.open(pages["straggling"], width=1280)
    assert page.value("[...document.querySelectorAll('h2')].map((head) => head.textContent)") == [
        "Health", "Curves", "Time", "Packs", "Experts", "Engine agreement", "Generations", "Settings",
    ]  # fmt: skip
    assert page.value("document.querySelectorAll('.health li').length") == 10
    assert page.value("document.querySelectorAll('#main .pack').length") == 12, "three packs of four ranks"
    assert page.value("document.querySelectorAll('.pack .pad').length") == 12
    assert "rank 2 begins 0.5 s after" in page.value("document.querySelector('.callout.bad').textContent")
    assert page.value("document.querySelectorAll('.sample').length") == 8
    assert page.value("document.querySelectorAll('main script, main b > b').length") == 0


def test_everything_is_reached_and_read_by_keyboard(pages: dict[str, Path], page: Page) -> None:
    page.open(pages["healthy"], width=1280)
    reached = []
    for _ in range(24):
        page.press("Tab")
        reached.append(page.value("document.activeElement.outerHTML.slice(0, 30)"))
    assert reached[0].startswith('<a class="skip"')
    assert any(one.startswith("<button") for one in reached)
    assert any(one.startswith("<svg") for one in reached), "curves take the focus"
    assert any(one.startswith("<summary") for one in reached)
    page.value("document.querySelector('figure svg').focus()")
    label = "document.querySelector('figure .value').textContent"
    page.press("ArrowLeft")
    first = page.value(label)
    page.press("ArrowLeft")
    assert first.startswith("59: ")
    assert page.value(label).startswith("58: ")
    page.value("document.querySelector('header button').focus()")
    page.press("Enter")
    assert page.value("document.documentElement.dataset.theme") == "dark"
    page.value("document.querySelector('summary').focus()")
    page.press("Enter")
    assert page.value("document.querySelectorAll('details[open] figure').length") > 0


def test_ten_thousand_updates_are_drawn_in_time(pages: dict[str, Path], page: Page) -> None:
    page.open(pages["many"], width=1280)
    drawn = page.value("performance.getEntriesByType('navigation')[0].loadEventEnd / 1000")
    assert 0 < drawn < MOST_SECONDS
