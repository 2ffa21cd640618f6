"""The runner starts from a checkout, from any folder, and from an installed wheel."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from zipfile import ZipFile

import hydra
import pytest

from runner.core.errors import DISTRIBUTION

ROOT = Path(__file__).resolve().parents[1]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]


def output(command: list[str], cwd: Path, env: Mapping[str, str] | None = None) -> str:
    """What a command prints; the test fails, showing all it said, when the command does."""
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=400)
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
    (purelib / "shared.pth").write_text(f"{Path(hydra.__file__).parents[1]}\n")
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


def test_messages_name_the_distribution_and_extras_that_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == DISTRIBUTION != "runner"  # which is somebody else's on the index
    sources = [*(ROOT / "runner").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    text = "\n".join(path.read_text() for path in sources)
    assert not re.findall(r"(?<!torch-)\brunner\[[a-z]+\]", text)
    named = {*re.findall(rf"{DISTRIBUTION}\[([a-z]+)\]", text)}
    named |= {*re.findall(r"""install_command\(["']([a-z]+)["']\)""", text)}
    assert named and named <= set(project["optional-dependencies"])


BACKEND = """
import zipfile
def build_editable(folder, config_settings=None, metadata_directory=None):
    name = "thing-1.0-py3-none-any.whl"
    with zipfile.ZipFile(f"{folder}/{name}", "w") as wheel:
        about = "Metadata-Version: 2.1\\nName: thing\\nVersion: 1.0\\nRequires-Dist: torch>=2.11\\n"
        wheel.writestr("thing-1.0.dist-info/METADATA", about)
        tag = "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n"
        wheel.writestr("thing-1.0.dist-info/WHEEL", tag)
        wheel.writestr("thing-1.0.dist-info/RECORD", "")
    return name
"""


def _torch_wheel(folder: Path, version: str) -> None:
    """A wheel of that name and version with nothing in it."""
    folder.mkdir(exist_ok=True)
    about = f"torch-{version}.dist-info"
    with ZipFile(folder / f"torch-{version}-py3-none-any.whl", "w") as wheel:
        for name, text in {
            "METADATA": f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n",
            "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            "RECORD": "",
        }.items():
            wheel.writestr(f"{about}/{name}", text)


@pytest.mark.slow
def test_set_up_takes_the_build_of_torch_that_pips_own_settings_lead_to(tmp_path: Path) -> None:
    _torch_wheel(tmp_path / "plain", "2.13.0")
    _torch_wheel(tmp_path / "cpu", "2.13.0+cpu")
    for name, settings, expected in (
        ("one", f"{tmp_path}/plain", "2.13.0"),
        ("both", f"{tmp_path}/plain {tmp_path}/cpu", "2.13.0+cpu"),
    ):
        root = tmp_path / name
        (root / "scripts").mkdir(parents=True)
        shutil.copy(ROOT / "scripts/setup.sh", root / "scripts")
        shutil.copy(ROOT / "constraints.txt", root)  # the pin of the project
        (root / "backend.py").write_text(BACKEND)
        (root / "pyproject.toml").write_text(
            '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
            '[project]\nname = "thing"\nversion = "1.0"\ndependencies = ["torch>=2.11"]\n'
        )
        script = f"set -eu; . {root}/scripts/setup.sh; set_up"
        variables = os.environ | {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": settings}
        said = output(["bash", "-c", script], ROOT, variables)
        assert f"setup: installed torch {expected}\n" in said
        assert "several GB" not in said  # pip has a place of its own to look at
        assert "setup: choosing versions" in said and "setup: unpacking 2 packages" in said


PIP_LINES = """\
Obtaining file:///here
  Installing build dependencies: started
Collecting torch>=2.11
  Downloading torch-2.13.0%2Bcpu-cp311-cp311-manylinux_2_28_x86_64.whl (190.4 MB)
     ------------------- 190.4/190.4 MB 9.1 MB/s eta 0:00:00
Collecting rich
  Downloading rich-14.1.0-py3-none-any.whl (243 kB)
  Using cached numpy-2.3.2-cp311-cp311-linux_x86_64.whl (16.6 MB)
Installing collected packages: torch, rich, numpy
Successfully installed torch-2.13.0
"""


def test_set_up_says_what_takes_time() -> None:
    script = f". {ROOT}/scripts/setup.sh; summarise_pip"
    done = subprocess.run(
        ["bash", "-c", script], input=PIP_LINES, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [
        "setup: downloading torch-2.13.0%2Bcpu-cp311-cp311-manylinux_2_28_x86_64.whl (190.4 MB)",
        "setup: taking from the cache numpy-2.3.2-cp311-cp311-linux_x86_64.whl (16.6 MB)",
        "setup: unpacking 3 packages, about a minute",
    ]


def test_a_failed_installation_is_an_error_although_its_lines_are_summarised(
    tmp_path: Path,
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'ERROR: no space' >&2\nexit 3\n")
    python.chmod(0o755)
    script = f". {ROOT}/scripts/setup.sh; python={python}; install_packages dev"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (3, "ERROR: no space\n")


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
    short = re.sub(r"python -m runner(?!\.)", "runner", helped)
    assert output([script, "--help"], cwd=tmp_path) == short

    assert output([python, "-m", "runner", "--cfg", "job"], cwd=tmp_path) == composed
    assert list(tmp_path.iterdir()) == []  # looking writes nothing


QUICK = "device=cpu device.threads=1 monitoring.progress=false training.steps=12 name=mine "
JOBS = (  # what is typed after `runner`, a file that it leaves, and what it says
    (QUICK + "data=tabular data.path=t.csv data.target=y hydra.run.dir=outputs/run",
     "run/report.md", "val/accuracy"),
    ("job=evaluate checkpoint.resume=outputs/run evaluate.export=export",
     "evaluations/*/*/exports/pipeline.pt2", "evaluated"),
    ("job=predict checkpoint.resume=outputs/run data.path=new.csv",
     "predictions/*/*/predictions.csv", "predictions.csv"),
    (QUICK + "job=verify optimization=basic verify.steps=3",
     "verifications/*/*/verify.json", "explained"),
    (QUICK + "optimizer=sgd optimizer.lr=1e30 schedule=constant hydra.run.dir=outputs/bad",
     "bad/debug/captures/step_*/manifest.json", "job=replay"),
    ("job=replay replay.path=outputs/bad", "replays/*/*/replay.json", "addmm"),
    (QUICK + "job=benchmark benchmark.arms=[none,basic] benchmark.budget_s=3 "
     "benchmark.parity=false", "benchmarks/*/*/benchmark.json", "comparison.html"),
    ("job=scan scan.path=outputs/run", "scans/*/*/scan.json", "outputs/run"),
    ("job=doctor device=cpu", "doctor/*/*/doctor.json", "fused_optimizer"),
    (QUICK + "-m optimizer.lr=0.01,0.1 seed=0,1", "sweeps/*/*/comparison.html", "2 seeds"),
)  # fmt: skip


@pytest.mark.slow
def test_the_installed_wheel_does_every_job_in_a_folder_of_its_own(
    installed: Installation, tmp_path: Path
) -> None:
    rows = [f"{i % 7},{i % 3},{'no' if i % 7 < 4 else 'yes'}\n" for i in range(120)]
    (tmp_path / "t.csv").write_text("a,b,y\n" + "".join(rows))
    (tmp_path / "new.csv").write_text("a,b\n1,2\n6,0\n")
    for typed, left, said in JOBS:
        told = output([str(installed.script), *typed.split()], cwd=tmp_path)
        assert said in told, f"{typed}\n{told}"
        assert list((tmp_path / "outputs").glob(left)), (typed, *tmp_path.glob("outputs/*/*/*"))
    shown = output([str(installed.python), "-m", "runner.report", "outputs/sweeps"], cwd=tmp_path)
    assert "lr=0.01" in shown and (tmp_path / "outputs/sweeps/comparison.json").is_file()
    assert {path.name for path in tmp_path.iterdir()} == {"t.csv", "new.csv", "outputs"}
