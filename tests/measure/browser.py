"""A page in a real browser, at any width, in light or dark, and what a script finds on it."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")

AROUND = """<!doctype html><body style="margin:0">
<iframe id="page" style="border:0;color-scheme:{scheme}" width="{width}" height="900"
 srcdoc="{page}"></iframe><pre id="found"></pre>
<script>addEventListener("load", () => {{
  const view = document.getElementById("page").contentWindow, page = view.document;
  let found;
  try {{ found = (() => {{ {probe} }})(); }} catch (error) {{ found = {{error: String(error)}}; }}
  document.getElementById("found").textContent = JSON.stringify(found);
}});</script>"""


def look(page: str, folder: Path, probe: str, width: int = 1000, scheme: str = "light") -> Any:
    """What `probe` returns, a script that sees the page's `view` (window) and `page` (document).

    The page lies in a frame of that width: a window is never narrower than 500. Skips the test
    where there is no browser.
    """
    program = next((path for name in NAMES if (path := shutil.which(name))), None)
    if program is None:
        pytest.skip("no chromium")
    around = folder / "around.html"
    shown = html.escape(page, quote=True)
    around.write_text(
        AROUND.format(page=shown, width=width, scheme=scheme, probe=probe), encoding="utf-8"
    )
    command = [
        program, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
        f"--user-data-dir={folder / 'browser'}", "--window-size=1600,1200",
        f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}",
        "--dump-dom", around.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    found = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.S)
    assert found, done.stderr
    answer = json.loads(html.unescape(found[1]))
    assert not isinstance(answer, dict) or "error" not in answer, answer
    return answer
