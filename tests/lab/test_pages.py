"""The pages opened in a browser: they work, they ask for nothing, and nothing in a response runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import browser
import pytest
from synthetic import HOSTILE, make_run, make_study

from tepo.lab.report import write_report, write_run_report
from tepo.lab.view import write_view

CHROMIUM = browser.find()
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")
WIDTHS = {"phone": 390, "desktop": 1280}
VOID = {"meta", "link", "br", "input", "img", "hr"}


class Structure(HTMLParser):
    """Checks that elements nest and collects the scripts and identifiers of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.scripts: list[dict[str, str | None]] = []
        self.ids: list[str] = []
        self.handlers: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "script":
            self.scripts.append(dict(attrs))
        self.ids += [str(value) for name, value in attrs if name == "id"]
        self.handlers += [name for name, _ in attrs if name.startswith("on")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def structure(path: Path) -> Structure:
    found = Structure()
    found.feed(path.read_text(encoding="utf-8"))
    found.close()
    assert found.open == []
    return found


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "hostile", texts=HOSTILE, steps=4)


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_study(tmp_path_factory.mktemp("studies") / "demo", seeds=2, failed=f"out of memory {HOSTILE[1]}")


@pytest.fixture
def page(tmp_path: Path) -> Iterator[browser.Page]:
    assert CHROMIUM is not None
    with browser.Page(CHROMIUM, tmp_path / "profile") as opened:
        yield opened


def clean(page: browser.Page) -> None:
    """Nothing was logged, nothing asked for, and no hostile text has run."""
    assert page.errors == []
    assert page.requests == []
    assert page.value("document.title") != "owned"
    assert page.value("document.querySelectorAll('img, iframe, object, embed').length") == 0


def test_pages_are_well_formed_and_hold_our_script_alone(hostile: Path, study: Path) -> None:
    for path in (write_view(hostile)[0], write_run_report(hostile), write_report(study)):
        found = structure(path)
        assert len(found.ids) == len(set(found.ids))
        assert found.handlers == []
        assert [one for one in found.scripts if one.get("type") != "text/plain"] == [{}]
        text = path.read_text(encoding="utf-8")
        assert "\x1b" not in text
        assert "\u202e" not in text
        assert all(raw not in text for raw in ("<script>document.title", "<img", 'onerror="'))


@needs_chromium
def test_hostile_text_is_shown_as_text(page: browser.Page, hostile: Path) -> None:
    page.open(write_view(hostile)[0])
    clean(page)
    shown = page.value("document.getElementById('responses').textContent")
    assert "<img src=x onerror=" in shown
    assert "␛[2J" in shown
    page.open(write_run_report(hostile))
    page.value("document.querySelectorAll('.flips button').forEach((button) => button.click())")
    clean(page)
    assert "</script><script>" in page.value("document.body.textContent")


@needs_chromium
def test_the_viewer_follows_its_controls(page: browser.Page, tmp_path: Path) -> None:
    page.open(write_view(make_run(tmp_path / "run", steps=6))[0])
    colours = "[...document.querySelectorAll('.token')].map((one) => one.style.backgroundColor).join()"
    seen = {page.value(colours)}
    for quantity in ("entropy", "advantage", "kl", "entropy-change", "mask"):
        page.choose("quantity", quantity)
        seen.add(page.value(colours))
    assert len(seen) == 6
    page.choose("quantity", "credit")
    before = page.value(colours)
    page.choose("objective", "dapo")
    assert page.value(colours) != before
    page.choose("reward", "wrong")
    assert page.value("document.querySelectorAll('.badge.right').length") == 0
    page.choose("reward", "")
    page.choose("step", "3")
    assert page.value("document.getElementById('count').textContent") == "8 of 48 responses"
    page.choose("layout", "sides")
    sides = "[...document.querySelectorAll('.side')].map((side) => side.querySelectorAll('.card').length).join()"
    assert page.value(sides) == "2,2,2,2"
    page.choose("versus", "gspo")
    assert page.value("document.querySelectorAll('.card .tokens').length") == 16
    page.choose("search", "no response says this")
    assert "No response fits" in page.value("document.getElementById('responses').textContent")
    clean(page)


@needs_chromium
def test_the_viewer_is_read_with_the_keyboard(page: browser.Page, tmp_path: Path) -> None:
    page.open(write_view(make_run(tmp_path / "run", steps=6))[0])
    page.value("document.querySelector('.tokens').focus()")
    page.press("ArrowRight")
    facts = page.value("document.getElementById('tip').textContent")
    assert all(name in facts for name in ("token 1 of", "credit", "entropy change", "KL to old", "marks"))
    page.press("Escape")
    assert page.value("document.getElementById('tip').hidden")
    page.value("document.activeElement.blur()")
    page.press("n")
    page.wait("document.querySelector('nav.pages').textContent.includes('page 2')")


@needs_chromium
@pytest.mark.slow
def test_ten_thousand_responses_are_paged(page: browser.Page, tmp_path: Path) -> None:
    path, words = write_view(make_run(tmp_path / "run", steps=10, responses=1000), names=["grpo"])
    assert words.startswith("10000 responses")
    page.open(path)
    assert page.value("document.querySelectorAll('.card').length") == 20
    assert page.value("document.getElementById('count').textContent") == "10000 of 10000 responses"
    page.choose("search", "the")
    assert page.value("document.querySelectorAll('.card').length") == 20
    clean(page)


@needs_chromium
def test_the_report_follows_its_controls(page: browser.Page, study: Path) -> None:
    page.open(write_report(study))
    lines = "[...document.querySelectorAll('#curves path.mean')].map((one) => one.getAttribute('d')).join()"
    labels = "[...document.querySelectorAll('#curves .x-label')].map((one) => one.textContent).join()"
    by_steps = page.value(lines)
    page.choose("axis", "seconds")
    assert page.value(lines) != by_steps
    assert set(page.value(labels).split(",")) == {"seconds of training"}
    page.choose("axis", "tokens")
    assert set(page.value(labels).split(",")) == {"response tokens"}
    maps = "[...document.querySelectorAll('#diff .token')].map((one) => one.style.backgroundColor).join()"
    before = page.value(maps)
    page.choose("right", "dr-grpo")
    other = page.value(maps)
    assert other != before
    page.choose("colour", "entropy")
    assert page.value(maps) != other
    page.value("document.querySelector('.flips button').click()")
    assert page.value("document.querySelectorAll('.flips .side').length") == 2
    assert page.value("document.querySelectorAll('.flips .side pre').length") >= 2
    assert "out of memory </script>" in page.value("document.getElementById('runs').textContent")
    clean(page)


@needs_chromium
def test_an_axis_has_few_ticks_however_small_its_range(page: browser.Page, study: Path) -> None:
    page.open(write_report(study))
    assert page.value("ticks(0, 10)") == [0, 5, 10]
    assert page.value("ticks(-0.01, -0.01 + 1e-18).length") <= 20
    steady = "[{name: 'a', place: 0, lines: [{label: 'a', points: [[0, 0.1], [1, 0.1 + 1e-17]]}], band: []}]"
    assert page.value(f"chart({{title: 't', series: {steady}, xLabel: 'x'}}).querySelectorAll('.seed').length") == 1
    clean(page)


@needs_chromium
def test_tables_and_curves_can_be_taken_away(page: browser.Page, study: Path) -> None:
    page.open(write_report(study))
    page.value("download = (name, text) => { (window.taken ||= {})[name] = text; }")
    page.value("document.querySelectorAll('button').forEach((one) => /CSV|LaTeX/.test(one.textContent) && one.click())")
    taken = page.value("window.taken")
    assert {"benchmark.csv", "benchmark.tex", "curves.csv", "objectives.csv"} <= set(taken)
    assert taken["benchmark.csv"].startswith(",seeds,questions,")
    assert taken["curves.csv"].count("\n") == 1 + 5 * 13 + 13
    assert "\\begin{tabular}{lrrrrr}" in taken["benchmark.tex"]
    assert page.value("csv([['=1+1', '-x', '-1.5', 'a,b', null]])") == "'=1+1,'-x,-1.5,\"a,b\",\n"
    assert page.value("latex([['a_b', '50 %'], ['{', '\\\\']])").splitlines()[2] == "a\\_b & 50 \\% \\\\"


@needs_chromium
@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", ["phone", "desktop"])
def test_pages_fit_their_window_and_have_readable_text(
    page: browser.Page, study: Path, tmp_path: Path, scheme: str, width: str
) -> None:
    kept = Path(os.environ.get("TEPO_SCREENSHOTS", tmp_path / "screenshots"))
    page.resize(WIDTHS[width], 900)
    page.scheme(scheme)
    view, _ = write_view(study / "runs" / "tepo-seed0")
    for name, path in (("report", write_report(study)), ("view", view)):
        page.open(path)
        assert page.value("document.documentElement.scrollWidth") <= WIDTHS[width]
        assert page.value(CONTRAST) >= 4.5
        page.screenshot(kept / f"{name}-{width}-{scheme}.png")
    clean(page)


@needs_chromium
def test_pages_print_light_unfolded_and_within_the_paper(page: browser.Page, study: Path) -> None:
    page.scheme("dark")
    page.open(write_report(study))
    folded = "document.querySelectorAll('details:not([open])').length"
    ink = "getComputedStyle(document.body).color"
    before = (page.value(folded), page.value(ink))
    page.paper()
    assert page.value(folded) == 0
    assert page.value(ink) == "rgb(20, 22, 26)"
    assert page.value("document.documentElement.scrollWidth") <= 718
    assert page.value("[...document.querySelectorAll('table')].every((one) => one.scrollWidth <= 718)")
    shown = "[...document.querySelectorAll({})].filter((one) => one.offsetHeight).length"
    assert page.value(shown.format("'.controls, nav.pages, p > button'")) == 0
    assert page.value(shown.format("'.flips button'")) > 0
    assert page.value("document.querySelector('#curves path.mean').getAttribute('stroke')") == "#0072b2"
    page.screen()
    page.scheme("dark")
    assert (page.value(folded), page.value(ink)) == before
    clean(page)


# The least contrast (WCAG) of a token's text on its colour, and of plain and dim text on the page.
CONTRAST = """(() => {
  const parse = (text) => text.match(/[\\d.]+/g).slice(0, 3).map(Number);
  const light = (colour) => colour.map((value) => value / 255)
    .map((value) => (value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4))
    .reduce((sum, value, index) => sum + value * [0.2126, 0.7152, 0.0722][index], 0);
  const ratio = (one, other) => {
    const [low, high] = [light(one), light(other)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };
  const ground = parse(getComputedStyle(document.body).backgroundColor);
  const found = [...document.querySelectorAll('.token, .dim, p, .badge')].slice(0, 400).map((one) => {
    const style = getComputedStyle(one);
    const own = one.style.backgroundColor ? parse(one.style.backgroundColor) : ground;
    return ratio(parse(style.color), own);
  });
  return Math.min(...found);
})()"""
