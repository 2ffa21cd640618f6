"""The page of a comparison, in a browser and as text; hostile names on it do nothing there."""

import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import pytest

from runner.measure import figures, page
from runner.measure.benchmark.result import BenchmarkResult
from runner.measure.comparison import compare_arms
from runner.measure.discover import compare_folders
from tests.core.security.test_injection import comparison, failed_comparison
from tests.measure.browser import look
from tests.measure.planted import arm, attribution, failed, levels, reference, result, run


def html_of(found: BenchmarkResult, folder: Path | None = None) -> str:
    return page.render_html(compare_arms(found, folder))


DRAWN = """
const bars = [...page.querySelectorAll(".bars")].map(list => [...list.querySelectorAll("li")].map(
  bar => {
    const box = bar.querySelector("svg").getBoundingClientRect();
    const fill = bar.querySelector(".fill").getBoundingClientRect();
    const ends = [...bar.querySelectorAll(".whisker")].map(x => x.getBoundingClientRect().left);
    const one = bar.querySelector(".one").getBoundingClientRect().left;
    return {label: bar.querySelector(".label").textContent, left: fill.left - box.left,
      right: fill.right - box.left, one: one - box.left,
      low: Math.min(...ends) - box.left, high: Math.max(...ends) - box.left};
  }));
const points = [...page.querySelectorAll(".plot .marker")].map(
  mark => mark.getBoundingClientRect()).map(
  box => ({x: box.left + box.width / 2, y: box.top + box.height / 2}));
return {bars, points};
"""


@pytest.mark.parametrize("width", [360, 1200])
def test_bars_whiskers_and_points_lie_where_the_numbers_say(tmp_path: Path, width: int) -> None:
    arms = [reference(), arm("two", 2.0), arm("three", 3.0)]
    for one, mib in zip(arms, (500, 1000, 750), strict=True):
        one.peak_process_bytes = mib * 2**20
    drawn = look(html_of(result(*arms, attribution=attribution())), tmp_path, DRAWN, width)
    speed, added, removed = drawn["bars"]
    assert [bar["label"] for bar in speed] == ["none", "two", "three"]
    unit = (speed[2]["right"] - speed[2]["one"]) / math.log(3)  # pixels of a ratio of e
    assert unit > 40
    for bar, one in zip(speed, arms, strict=True):
        assert bar["left"] == pytest.approx(bar["one"], abs=1.5)  # all begin at 1
        for place, ratio in (("right", one.speedup), ("low", None), ("high", None)):
            if place != "right" and one.speedup_interval:
                ratio = one.speedup_interval[place == "high"]
            if ratio is not None:
                assert bar[place] - bar["one"] == pytest.approx(unit * math.log(ratio), abs=2)
    gains = [bar["right"] - bar["one"] for bar in added]
    assert gains[0] / gains[1] == pytest.approx(math.log(1.3) / math.log(1.2), rel=0.05)
    assert removed[2]["right"] == pytest.approx(removed[2]["one"], abs=2)  # costs time
    assert removed[2]["left"] < removed[2]["one"] - 5
    a, b, c = drawn["points"]
    assert c["x"] - a["x"] == pytest.approx(2 * (b["x"] - a["x"]), rel=0.02)  # 1×, 2×, 3×
    assert a["y"] - b["y"] == pytest.approx(2 * (a["y"] - c["y"]), rel=0.02)  # 500, 1000, 750 MiB


def test_one_wide_interval_leaves_the_others_their_width_and_has_no_end_marks(
    tmp_path: Path,
) -> None:
    wide = arm("wide", 1.2, speedup_interval=(1e-4, 1e4))
    probe = DRAWN.replace("low:", "marks: ends.length - 1, low:")
    arms = [reference(), arm("two", 2.0), wide]
    _, two, drawn = look(html_of(result(*arms)), tmp_path, probe)["bars"][0]
    assert (two["marks"], drawn["marks"]) == (2, 0)
    assert two["right"] - two["one"] > 0.25 * (drawn["high"] - drawn["low"])


SIZES = """
const column = page.querySelector("main h2").getBoundingClientRect().width;
const wide = [...page.querySelectorAll(".plot .grid")].map(x => x.getBoundingClientRect().width);
const text = [...page.querySelectorAll(".plot text")].map(
  x => parseFloat(view.getComputedStyle(x).fontSize) * x.getScreenCTM().a);
return {column, wide: Math.min(...wide), text: Math.min(...text)};
"""


@pytest.mark.parametrize("width", [360, 1000])
def test_plots_are_as_wide_as_the_page_and_their_text_keeps_its_size(
    tmp_path: Path, width: int
) -> None:
    found = look(html_of(levels()), tmp_path, SIZES, width)
    assert found["wide"] == pytest.approx(found["column"] - 78, abs=1)  # less the margins
    assert found["text"] == 12


def test_each_row_leads_to_its_folder_which_is_relative_and_escaped(tmp_path: Path) -> None:
    names = ["javascript:alert(1)", "a b&c=1", 'x"><b>', "../out of it", "#?"]
    arms = [reference(), *(arm(f"arm{i}", 2.0, folder=x) for i, x in enumerate(names))]
    root = tmp_path / "page"
    for one in arms:
        (root / (one.folder or "")).mkdir(parents=True, exist_ok=True)
    forged = arm("forged", 3.0, folder=str(tmp_path))
    host = arm("host", 3.0, folder=f"//{tmp_path}")
    gone = arm("gone", 3.0, folder="removed")
    (written,) = (
        path
        for path in page.write_comparison(
            compare_arms(result(*arms, forged, host, gone), root), root
        )
        if path.suffix == ".html"
    )
    probe = "return [...page.querySelectorAll('tbody a')].map(x => x.getAttribute('href'));"
    links = look(written.read_text(), tmp_path, probe)
    assert [urljoin(written.as_uri(), link) for link in links] == [
        f"{(root / (one.folder or '')).resolve().as_uri()}/" for one in arms
    ]
    assert str(tmp_path) not in written.read_text()
    document = written.with_suffix(".md").read_text()
    assert re.search(r"^\| run .* \| folder \|$|^\| arm .* \| folder \|$", document, re.M)
    assert "../out of it |" in document and str(tmp_path) not in document


def test_a_diverged_arm_leaves_the_top_and_does_not_flatten_the_others(tmp_path: Path) -> None:
    wild = arm("wild", 1.1, losses=[2.3, 9.0, 5e28, 5e28, 2.0, 1.9])
    found = compare_arms(result(reference(), arm("basic", 1.2), wild), tmp_path)
    assert figures.loss_axis_limit(found, figures.read_losses(found)) == 2.3
    assert "off the axis: wild" in page.render_html(found)


OVERFLOW = """
const wide = page.documentElement.scrollWidth, inside = view.innerWidth;
const out = [...page.querySelectorAll("main *")].filter(x => !x.closest(".scroll, pre, svg")
  && x.getBoundingClientRect().right > inside + 0.5).map(x => x.tagName + " " + x.className);
const rows = [...page.querySelectorAll('table.numbers tbody tr')].map(row => row.innerText);
return {wide, inside, out, rows};
"""


def test_nothing_is_wider_than_a_phone_and_every_row_is_there(tmp_path: Path) -> None:
    long = "supercalifragilistic" * 8
    arms = [
        arm(f"width={i} a_rather_long_key.of_a_sweep=value_number_{i}", i) for i in range(1, 28)
    ]
    hostile = result(reference(long), arm(f"{long}2", 1.5), *arms, failed("x", reason=long))
    found = look(html_of(replace(hostile, attribution=attribution())), tmp_path, OVERFLOW, 360)
    assert (found["inside"], found["wide"], found["out"]) == (360, 360, [])
    assert len(found["rows"]) == 30


def test_the_policy_keeps_any_other_script_and_the_network_out(tmp_path: Path) -> None:
    text = html_of(levels())
    foreign = '<main><p style="color: red" id="p">x</p><script>window.owned = 1</script>'
    answer = look(
        text.replace("<main>", foreign, 1),
        tmp_path,
        """return {owned: view.owned ?? null, sorts: page.querySelectorAll("thead button").length,
          red: view.getComputedStyle(page.getElementById("p")).color,
          paper: view.getComputedStyle(page.querySelector("h2")).marginTop}""",
    )
    assert answer["owned"] is None and answer["red"] != "rgb(255, 0, 0)"
    assert answer["sorts"] > 5, "our own script does not run"
    assert answer["paper"] == "56px", "our own style does not apply"
    assert "default-src &#39;none&#39;" in text
    assert not re.findall(r"""src=|url\((?!#)|@import|https?://""", text)
    assert "href=" not in text  # of folders that are not there


CONTRAST = """
const channel = c => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
const light = text => { const [r, g, b] = text.match(/[0-9.]+/g).map(Number);
  return 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b); };
const paper = light(view.getComputedStyle(page.body).backgroundColor);
const ratio = text => { const l = light(text);
  return (Math.max(l, paper) + 0.05) / (Math.min(l, paper) + 0.05); };
const of = (what, key) => [...page.querySelectorAll(what)].map(
  x => ratio(view.getComputedStyle(x)[key]));
return {paper, text: Math.min(...of("p, h1, h2, td, th, li, dt, dd, code, button", "color"),
    ...of("svg text", "fill")),
  drawn: Math.min(...of(".fill, .whisker, .one, .curve", "stroke"), ...of(".marker", "fill"))};
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_and_charts_stand_out_in_light_and_dark(tmp_path: Path, scheme: str) -> None:
    bad = arm("wrong", 2.0, parity="FAIL", parity_reason="the gradient is off")
    found = result(*levels().arms, bad, failed("none2", "oom", "no memory"))
    answer = look(html_of(found), tmp_path, CONTRAST, scheme=scheme)
    assert (answer["paper"] < 0.1) == (scheme == "dark")
    assert answer["text"] >= 4.5 and answer["drawn"] >= 3.0  # WCAG AA


SORTED = """
const head = [...page.querySelectorAll("table.numbers thead th")].find(
  x => x.textContent.startsWith("speed-up"));
const rows = [...page.querySelectorAll("table.numbers tbody tr")];
const more = page.querySelector("button.more"), button = head.querySelector("button");
const count = () => [rows.filter(row => !row.hidden).length, more.hidden, more.textContent];
const names = () => [...page.querySelectorAll("table.numbers tbody th")].map(x => x.textContent);
const orders = [names()], first = count();
for (const click of [1, 2]) { button.click(); orders.push(names()); }
more.click();
return {orders, first, then: count(), bars: page.querySelectorAll(".bar").length};
"""


def test_a_click_sorts_by_number_and_shows_more_rows_and_bars_are_of_the_extremes(
    tmp_path: Path,
) -> None:
    arms = [arm("ten", 10.0), failed("gone", "killed"), arm("nine", 9.0)]
    found = result(reference(), *arms, *(arm(f"arm{i}", 2 + i / 100) for i in range(146)))
    answer = look(html_of(found), tmp_path, SORTED)
    before, down, up = answer["orders"]
    assert before[:5] == ["none", "ten", "gone", "nine", "arm0"]
    assert (down[:3], down[-2:]) == (["ten", "nine", "arm145"], ["none", "gone"])
    assert (up[:2], up[-3:]) == (["none", "arm0"], ["nine", "ten", "gone"])
    assert answer["first"] == [100, False, "show 50 more of 150"]
    assert answer["then"][:2] == [150, True] and answer["bars"] == 40


class Outline(HTMLParser):
    """What someone hears who does not see the page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, Any]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, Any]]) -> None:
        self.tags.append((tag, dict(attrs)))


def test_the_page_says_what_its_pictures_show_and_can_be_used_by_keyboard() -> None:
    text, outline = html_of(replace(levels(), attribution=attribution())), Outline()
    outline.feed(text)
    tags = outline.tags
    assert ("html", {"lang": "en"}) in tags and [name for name, _ in tags].count("h1") == 1
    for name, about in tags:
        if name == "svg":
            assert "aria-hidden" in about or "basic" in about["aria-label"]
        if name == "div" and about.get("class") == "scroll":
            assert about["tabindex"] == "0" and about["aria-label"]
        assert "style" not in about and not any(key.startswith("on") for key in about)
    assert text.count("the model has no 2-d convolution") == 1  # a reason is said once
    assert "(advanced, ultra)" in text


OWNED = "window.owned=1;window.top.owned=1;document.title='owned';window.top.document.title='owned'"
WAYS = (
    f"<script>{OWNED}</script>",
    f'"><img src=x onerror="{OWNED}">',
    f'\'><svg onload="{OWNED}"></svg>',
    f"</td></table></style></title></textarea></script><script>{OWNED}</script>",
    f"--><iframe srcdoc='<script>{OWNED}</script>'></iframe>",
    f'" onmouseover="{OWNED}" autofocus onfocus="{OWNED}" x="',
    f'<a href="javascript:{OWNED}">click</a><details open ontoggle="{OWNED}">',
    f"<style>body{{display:none}}</style><base href=http://evil.test/><meta http-equiv=refresh "
    f"content='0;url=javascript:{OWNED}'>",
    f"${{{OWNED}}}{{{{{OWNED}}}}}`{OWNED}`",
)
FOUND = """
for (const row of page.querySelectorAll("a")) if (row.protocol === "javascript:") row.click();
for (const one of page.querySelectorAll("*")) {
  one.dispatchEvent(new view.MouseEvent("mouseover", {bubbles: true}));
  if (one.focus) one.focus();
}
const count = name => page.getElementsByTagName(name).length;
return {owned: Boolean(view.owned || window.owned), title: page.title, top: document.title,
  hidden: view.getComputedStyle(page.body).display, text: page.body.textContent,
  counts: Object.fromEntries(["script", "img", "iframe", "base", "meta", "details", "style"]
    .map(name => [name, count(name)])),
  handlers: [...page.querySelectorAll("*")].filter(
    one => [...one.attributes].some(a => a.name.startsWith("on"))).length};
"""


def test_names_reasons_and_commands_of_runs_and_arms_do_nothing_in_a_browser(
    tmp_path: Path,
) -> None:
    folders, harmless = [], []
    for number, way in enumerate(WAYS):
        more = {"name": f"run {number} {way}", "reason": way, "command": f"python {way}",
                "monitor": f"val/{way}", "metrics": {f"val/{way}": 0.5}, "device": {"name": way},
                "config_hash": way, "versions": {way: way}}  # fmt: skip
        status, place = "failed" if number % 2 else "done", tmp_path / "runs" / str(number)
        folders.append(run(place, [f"+x={way}", f"seed={number}"], status=status, **more))
        honest = tmp_path / "runs" / f"h{number}"
        harmless.append(run(honest, [f"+x={number}", f"seed={number}"], status=status))
    expected = look(page.render_html(compare_folders(harmless)), tmp_path, FOUND)
    for made in (compare_folders(folders), comparison(), failed_comparison()):
        found = look(page.render_html(made), tmp_path, FOUND)
        assert not found["owned"] and "owned" not in (found["title"], found["top"])
        assert found["hidden"] == "block"
        assert found["counts"] == expected["counts"]
        assert found["handlers"] == expected["handlers"] == 0
        assert "onerror=" in found["text"]  # it is there to be read
