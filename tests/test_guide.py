"""The user guide, pasted: every program and command of it, in order, in an empty folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

GUIDE = Path(__file__).parent.parent / "docs" / "guide.md"
PAGES = (GUIDE, GUIDE.with_name("fine-tuning.md"))
BLOCK = re.compile(r"(?:Save as `([^`\n]+)`:\n\n)?```(\w+)\n(.*?)^```$", re.M | re.S)


def blocks(page: Path) -> list[tuple[str, str, str]]:
    """`(file name or "", language, text)` of each block, in order."""
    return BLOCK.findall(page.read_text())


def test_the_guide_is_short_and_every_program_has_a_name() -> None:
    assert len(GUIDE.read_text().splitlines()) <= 600
    programs = [block for page in PAGES for block in blocks(page)]
    assert all(name for name, language, _ in programs if language in ("python", "yaml"))


def test_prose_has_at_most_100_columns() -> None:
    wide = [
        f"{path.name}: {line}"
        for path in (*GUIDE.parent.glob("*.md"), GUIDE.parent.parent / "README.md")
        if path.name != "claims.md"  # as the job wrote it
        for line in re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.M | re.S).splitlines()
        if len(line) > 100 and not line.startswith(("|", "    "))
    ]
    assert not wide


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_of_the_guide_runs_as_it_is_pasted(tmp_path: Path, page: Path) -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    script = ["set -eu"]
    for name, language, text in blocks(page):
        if name:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        elif language == "bash":
            script.append(text)
    made = subprocess.run(
        ["bash", "-x", "-c", "\n".join(script)],
        cwd=tmp_path,
        env={**os.environ, "PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=3600,
        check=False,
    )
    assert made.returncode == 0, made.stdout[-3000:]
