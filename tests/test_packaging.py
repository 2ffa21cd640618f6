"""The runner starts from a checkout, from any folder, and from an installed wheel."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).resolve().parents[1]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]


def output(command: list[str], cwd: Path) -> str:
    """What a command prints; the test fails, showing all it said, when the command does."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@dataclass
class Installation:
    """A fresh environment with one installation of the runner in it."""

    python: Path
    package: Path  # where `import runner` must come from

    @property
    def script(self) -> Path:
        return self.python.with_name("runner")


def install(folder: Path, *what: str) -> Path:
    """A new environment with that installed; what it depends on is shared with this one.

    A .pth file that names our site-packages gives it torch and the rest, but follows none of
    the .pth files in there, so a runner that is installed editable here stays out of sight.
    """
    venv.create(folder, with_pip=False)
    python = folder / "bin/python"
    paths = {"base": str(folder), "platbase": str(folder)}
    purelib = Path(sysconfig.get_path("purelib", "venv", vars=paths))
    (purelib / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
    output(
        [*PIP, "--python", str(python), "install", "--no-deps", "--no-index"]
        + ["--no-build-isolation", *what],
        cwd=folder,
    )
    return python


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = [*PIP, "wheel", "--no-deps", "--no-index", "--no-build-isolation", "-w", str(folder)]
    output([*build, str(ROOT)], cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installation:
    folder = tmp_path_factory.mktemp("installed")
    python = install(folder, str(wheel))
    (package,) = folder.glob("lib/python*/site-packages/runner")
    return Installation(python, package)


@pytest.fixture(scope="module")
def editable(tmp_path_factory: pytest.TempPathFactory) -> Installation:
    python = install(tmp_path_factory.mktemp("editable"), "--editable", str(ROOT))
    return Installation(python, ROOT / "runner")


@pytest.fixture(scope="module")
def composed() -> str:
    """The default job's config, as a checkout prints it."""
    return output([sys.executable, "-m", "runner", "--cfg", "job"], cwd=ROOT)


def test_the_wheel_holds_every_module_data_file_and_config_file(wheel: Path) -> None:
    package = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "runner").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    conf = {
        f"runner/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / "conf").rglob("*.yaml")
    }
    assert "runner/conf/config.yaml" in conf
    with ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == package | conf


def test_a_checkout_needs_no_installation(composed: str) -> None:
    assert "optimization" in output([sys.executable, "-m", "runner", "--help"], cwd=ROOT)
    assert "training:" in composed


@pytest.mark.parametrize("kind", ["installed", "editable"])
def test_an_installation_works_from_any_folder(
    kind: str, composed: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    here: Installation = request.getfixturevalue(kind)
    python, script = str(here.python), str(here.script)

    where = output([python, "-c", "import runner; print(runner.__file__)"], cwd=tmp_path)
    assert Path(where.strip()).parent.resolve() == here.package.resolve()

    helped = output([python, "-m", "runner", "--help"], cwd=tmp_path)
    assert "optimization" in helped
    assert output([script, "--help"], cwd=tmp_path) == helped.replace("python -m runner", "runner")

    assert output([python, "-m", "runner", "--cfg", "job"], cwd=tmp_path) == composed
    assert output([script, "--cfg", "job"], cwd=tmp_path) == composed
    assert list(tmp_path.iterdir()) == []  # looking writes nothing


def test_the_installed_wheel_trains(installed: Installation, tmp_path: Path) -> None:
    output([str(installed.script), "-m", "training.steps=2"], cwd=tmp_path)  # finds its launcher
    assert list(tmp_path.glob("outputs/sweeps/*/*/0/summary.json"))
