"""`scripts/release` builds nothing without a tag; `scripts/screenshots` draws what was printed."""

import os
import shutil
import subprocess
import sys
import tomllib
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import hydra
import pytest

from runner import __version__

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
GIT = ["git", "-c", "user.name=n", "-c", "user.email=e@x"]


def release(root: Path, *typed: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHON": sys.executable} | variables
    command = ["bash", root / "scripts/release", *typed]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with one commit: the script, a version, a CHANGELOG that does not have it."""
    root = tmp_path / "checkout"
    project = (ROOT / "pyproject.toml").read_text()
    for name in ("scripts/release", tomllib.loads(project)["tool"]["hatch"]["version"]["path"]):
        (root / name).parent.mkdir(parents=True)
        shutil.copy(ROOT / name, root / name)
    (root / "pyproject.toml").write_text(project)
    (root / "CHANGELOG.md").write_text("# Changelog\n\n## Unreleased\n")
    git(root, "init", "-q")
    commit(root)
    return root


def git(root: Path, *typed: str) -> None:
    subprocess.run([*GIT, *typed], cwd=root, check=True, capture_output=True)


def commit(root: Path) -> None:
    git(root, "add", "-A")
    git(root, "commit", "-qm", "x", "--no-gpg-sign")


def test_a_release_needs_a_clean_tree_the_tag_of_its_version_and_a_heading(checkout: Path) -> None:
    git(checkout, "tag", "v0.0.1")
    assert f"no tag v{__version__}" in release(checkout).stderr
    git(checkout, "tag", f"v{__version__}")
    assert f"no heading '## {__version__}'" in release(checkout).stderr
    (checkout / "CHANGELOG.md").write_text(f"# Changelog\n\n## {__version__}\n")
    assert "differs from its commit" in release(checkout).stderr
    commit(checkout)
    assert "no tag" in release(checkout).stderr  # it names the commit before
    git(checkout, "tag", "-f", f"v{__version__}")
    done = release(checkout)
    assert "== sdist and wheel" in done.stdout and "the sdist was not built" in done.stderr
    assert done.returncode == release(checkout, "--force").returncode == 2
    assert not (checkout / "dist").exists()


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["", "conf/schedule/cosine.yaml"])
def test_a_rehearsal_proves_the_wheel_by_the_demo_in_an_empty_folder(
    tmp_path: Path, missing: str
) -> None:
    root = tmp_path / "checkout"
    for name in ("runner", "conf", "scripts"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "constraints.txt", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, root)
    if missing:
        (root / missing).unlink()
    # what the wheel depends on is shared with this environment, which PYTHONPATH names
    shared = {"PIP_NO_DEPS": "1", "PIP_NO_INDEX": "1"}
    shared["PYTHONPATH"] = str(Path(hydra.__file__).parents[1])
    done = release(root, "--rehearse", **shared)
    if missing:
        assert (done.returncode, "the demo failed" in done.stderr) == (2, True), done.stderr
        return
    assert done.returncode == 0, done.stdout + done.stderr
    for kind in ("py3-none-any.whl", ".tar.gz"):
        assert list((root / "dist").glob(f"hydra_torch_runner-{__version__}*{kind}"))
    assert done.stdout.count("sha256 ") == 2 and "val/accuracy" in done.stdout


@pytest.fixture(scope="module")
def screenshots() -> ModuleType:
    loader = SourceFileLoader("screenshots", str(ROOT / "scripts/screenshots"))
    spec = spec_from_loader("screenshots", loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_the_picture_of_a_run_is_its_end_table_with_colours(screenshots: ModuleType) -> None:
    printed = (
        "\x1b[?25lstep 5\r\n\x1b[1A\x1b[2Kresult of a check\r\n\x1b[1;36mresult\x1b[0m\r\n"
        "  val/accuracy  \x1b[32m0.9875\x1b[0m\r\n\r\n"
    )
    end = screenshots.end_of_run(printed)
    assert end == "\x1b[1;36mresult\x1b[0m\n  val/accuracy  \x1b[32m0.9875\x1b[0m"
    svg = screenshots.to_svg(end, "a title")
    assert "0.9875" in svg and "title" in svg and "step" not in svg
    assert "font-face" not in svg and "\x1b" not in svg  # nothing from the net


def test_the_readme_begins_with_pictures_of_at_most_300_kb_in_all(screenshots: ModuleType) -> None:
    head = "\n".join((ROOT / "README.md").read_text().splitlines()[:8])
    pictures = list(IMAGES.iterdir())
    assert {path.name for path in pictures} == {"end-of-run.svg", "comparison.png"}
    assert all(f"](docs/images/{path.name})" in head for path in pictures)
    sizes = [path.stat().st_size for path in pictures]
    assert 10_000 < sum(sizes) <= screenshots.MOST_BYTES == 300_000
    assert "val/accuracy" in (IMAGES / "end-of-run.svg").read_text().replace("&#160;", " ")
