"""The documents: pasted, every block of the tutorial and the how-to pages; links, length, index."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from runner import compose
from tests import forks

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
HOW_TO = sorted((DOCS / "how-to").glob("*.md"))
PAGES = [DOCS / "tutorial.md", *HOW_TO]  # what is pasted
GENERATED = {"config.md", "api.md", "host_waits.md"}
README = ROOT / "README.md"
PROSE = [README, *(p for p in sorted(DOCS.rglob("*.md")) if p.name not in GENERATED)]
COUNTED = [path for path in PROSE if path.parent.name != "measured"]
LINKING = [*PROSE, *(ROOT / name for name in ("CONTRIBUTING.md", "examples/README.md"))]
SAVED = r"(?:Save\s+(?:this\s+)?as\s+`([^`\n]+)`:\n\n)?"
BLOCK = re.compile(SAVED + r"^```(\w+)\n(.*?)^```$", re.M | re.S)
LINK = re.compile(r"(?<!`)!?\[[^\]]*\]\(([^)\s]+)\)")


def blocks(page: Path) -> list[tuple[str, str, str]]:
    """`(file name or "", language, text)` of each block, in order."""
    return BLOCK.findall(page.read_text())


def prose(page: Path) -> str:
    """The page without its blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)


def test_a_how_to_page_has_at_most_80_lines_and_something_to_paste() -> None:
    assert len(HOW_TO) > 20
    assert [p.name for p in HOW_TO if len(p.read_text().splitlines()) > 80] == []
    for page in PAGES:
        assert page.read_text().startswith("# "), page.name
        assert blocks(page) or typed_commands(page, "console"), page.name
        for name, language, text in blocks(page):
            assert language in ("bash", "console", "python", "text", "yaml"), page.name
            assert name or language != "yaml", f"{page.name}: {text[:80]}"
            assert not name or language in ("python", "yaml"), f"{page.name}: {name}"


def test_the_documents_have_at_most_18_000_words_without_what_is_generated_or_measured() -> None:
    words = {str(p.relative_to(ROOT)): len(p.read_text().split()) for p in COUNTED}
    assert sum(words.values()) <= 18_000, words
    assert len(README.read_text().splitlines()) <= 90  # a page


def test_the_index_lists_every_page() -> None:
    listed = {(DOCS / link).resolve() for link in LINK.findall((DOCS / "README.md").read_text())}
    missing = [str(p) for p in DOCS.rglob("*.md") if p.resolve() not in listed]
    assert set(missing) <= {str(DOCS / "README.md")}


def test_prose_has_at_most_100_columns_and_5_lines_a_paragraph() -> None:
    wrong = []
    for path in PROSE:
        if path.name == "claims.md":  # as its script wrote it
            continue
        for paragraph in re.split(r"\n\s*\n|\n(?=\s*- |\d\. |\|)", prose(path)):
            lines = [line for line in paragraph.splitlines() if line.strip()]
            if not lines or lines[0].startswith(("|", "    ", "  -", "#", "![")):
                continue
            if max(map(len, lines)) > 100 or len(lines) > 5 + ("measured" in path.parts):
                wrong.append(f"{path.relative_to(ROOT)}: {lines[0]}")
    assert wrong == []


def test_each_section_with_measurements_names_its_commit() -> None:
    nameless = []
    for page in (DOCS / "measured").glob("*.md"):
        for part in re.split(r"^## ", page.read_text(), flags=re.M):
            measured = re.search(r"\d (?:s|ms|µs|MB|MiB)\b|\d×|\d(?: %|%)|\d / \d", part)
            if part.startswith("Faults\n") or "There are no figures yet" in part:
                continue  # limits of waits, and what is to be measured
            if "\n|" in part and measured:
                if not re.search(r"(?:commit|dded\s+by)\s+(?:v\d|[0-9a-f]{7})", part):
                    nameless.append(f"{page.name}: {part.splitlines()[0]}")
    assert nameless == []


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", prose(page), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_link_leads_to_a_file_and_a_heading_that_exist() -> None:
    dead = []
    for page in LINKING:
        for link in LINK.findall(prose(page)):
            path, _, anchor = link.partition("#")
            if "://" in link:
                continue
            target = (page.parent / path).resolve() if path else page
            if not target.exists() or (anchor and anchor not in anchors(target)):
                dead.append(f"{page.relative_to(ROOT)}: {link}")
    assert dead == []


def test_every_document_that_code_names_exists() -> None:
    files = subprocess.run(
        ["git", "ls-files", "runner", "conf", "scripts", "tests", "examples", "*.toml", "*.md"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    ).stdout.split()  # fmt: skip
    found = set()
    for name in files:
        if name != "CHANGELOG.md" and (ROOT / name).is_file():
            text = (ROOT / name).read_text(errors="replace")
            found |= {(name, page) for page in re.findall(r"docs/[\w/-]+\.md", text)}
    assert found or not files  # none outside of a checkout
    assert [row for row in sorted(found) if not (ROOT / row[1]).is_file()] == []


def typed_commands(page: Path, language: str) -> list[list[str]]:
    """The overrides of each `-m runner` command in the blocks of a language, or indented."""
    text = "\n".join(text for _, kind, text in blocks(page) if kind == language)
    text += "\n".join(["", *re.findall(r"^    +(\S.*)$", prose(page), re.M)])
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    found = [re.search(r"-m runner (.+)", line) for line in lines]
    return [shlex.split(match[1], comments=True) for match in found if match]


@pytest.mark.parametrize("page", [README, *PAGES], ids=lambda page: page.stem)
def test_commands_that_are_shown_but_not_run_are_composed(page: Path) -> None:
    for words in typed_commands(page, "bash" if page == README else "console"):
        if any(word.startswith("checkpoint.resume=") for word in words):
            continue  # its options are those of a run that is not there
        typed = [word for word in words if "=" in word and not word.startswith(("hydra", "+hydra"))]
        single = [re.sub(r"=([^\[({\"]*?),.*", r"=\1", word) for word in typed]
        compose([word.replace("…", "x") for word in single])


# `python -m runner` in a process forked from one that has imported torch: half of the time
SHELL = """set -eu
python() {
    if [ "${1-} ${2-}" = "-m runner" ]; then shift 2; command python -S "$FORK" "$@"
    else command python "$@"; fi
}"""
CLIENT = """import json, os, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect(os.environ["FORK"] + ".socket")
server.sendall(json.dumps([os.getcwd(), sys.argv[1:], dict(os.environ)]).encode())
server.shutdown(socket.SHUT_WR)
code, out, err = json.loads(b"".join(iter(lambda: server.recv(65536), b"")))
print(out, end="", flush=True)
print(err, end="", file=sys.stderr)
sys.exit(code % 256)
"""


@pytest.fixture(scope="module")
def fork_client() -> Iterator[Path]:
    """A program that runs its arguments as `python -m runner`, by tests/forks.py."""
    with TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        client = Path(folder, "client.py")
        client.write_text(CLIENT)
        listener.bind(f"{client}.socket")
        listener.listen()
        threading.Thread(target=serve_forks, args=(listener,), daemon=True).start()
        yield client
        listener.shutdown(socket.SHUT_RDWR)


def serve_forks(listener: socket.socket) -> None:
    """Answer requests one after the other, until the socket is shut down."""
    with suppress(OSError):
        while True:
            client = listener.accept()[0]
            with client:
                request = b"".join(iter(lambda c=client: c.recv(65536), b""))
                place, typed, variables = json.loads(request)
                done = forks.run(Path(place), tuple(typed), variables, timeout_s=600)
                client.sendall(json.dumps([done.returncode, done.stdout, done.stderr]).encode())


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_runs_as_it_is_pasted(tmp_path: Path, page: Path, fork_client: Path) -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    script = [SHELL]
    for name, language, text in blocks(page):
        if name:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        elif language == "bash":
            script.append(text)
    cells = [text for name, language, text in blocks(page) if language == "python" and not name]
    if cells:  # of one program, as in a notebook
        (tmp_path / "cells.py").write_text("\n".join(cells))
        script.append("python cells.py")
    made = subprocess.run(
        ["bash", "-x", "-c", "\n".join(script)],
        cwd=tmp_path,
        env={**os.environ, "PATH": path, "FORK": str(fork_client)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=3600,
        check=False,
    )
    assert made.returncode == 0, made.stdout[-3000:]
