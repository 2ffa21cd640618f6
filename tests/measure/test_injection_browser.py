"""A page about hostile names, opened in a real browser: it says them, and does nothing."""

from __future__ import annotations

from pathlib import Path

from runner.measure import page
from runner.measure.discover import compare_folders
from tests.core.security.test_injection import comparison, failed_comparison
from tests.measure.browser import look
from tests.measure.planted import run

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
