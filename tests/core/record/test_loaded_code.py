"""Digests of the user's modules: which are recorded, and what is compared with them later."""

import hashlib
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner import build, compose, train
from runner.core.record import digests, provenance
from runner.core.record.digests import (
    changed_files,
    digest_modules,
    find_module_file,
    user_packages,
)
from runner.core.record.summary import Summary
from runner.scale.sweep.identity import (
    MAX_ENTRIES,
    argument_paths,
    file_stamp,
    job_hash,
    unstamped_paths,
)
from runner.scale.sweep.plan import JobPlan, Planner
from runner.scale.sweep.state import Job
from tests.runs import QUICK

MINE = "import near_helper\nfrom torch import nn\n\n\nclass Net(nn.Module):\n" \
    "    def __init__(self, in_features, classes):\n        super().__init__()\n" \
    "        self.layer = nn.Linear(in_features, classes)\n\n" \
    "    def forward(self, x):\n        return near_helper.act(self.layer(x))\n"  # fmt: skip
HELPER = "def act(x):\n    return x.relu()\n"
MODULES = ("near_mine", "near_helper", "near_later", "deep_package")
TYPED = [*QUICK, "data=cancer", "model._target_=near_mine.Net", "security.trusted=[near_mine]",
         "optimization=none", "training.steps=4"]  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with a module of the user's and one that it imports."""
    (tmp_path / "near_mine.py").write_text(MINE)
    (tmp_path / "near_helper.py").write_text(HELPER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    importlib.invalidate_caches()
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] in MODULES]:
        del sys.modules[name]


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def record(run: Path, *sessions: dict[str, object]) -> Path:
    run.mkdir(exist_ok=True)
    (run / "provenance.json").write_text(json.dumps({"sessions": sessions}))
    return run


def test_a_run_records_the_modules_of_a_trusted_package_and_those_beside_it(folder: Path) -> None:
    with build(compose(TYPED), folder / "run") as run:
        train(run)
    (session,) = json.loads((folder / "run" / "provenance.json").read_text())["sessions"]
    files = {name: folder / f"{name}.py" for name in ("near_mine", "near_helper")}
    assert session["modules"] == {name: sha256(file) for name, file in files.items()}


def test_a_run_without_code_of_the_user_records_no_modules() -> None:
    assert digest_modules(user_packages({"security.trusted": [], "model._target_": None})) == {}
    assert user_packages({"model._target_": "torch.nn.Linear"}) == set()
    assert user_packages({"model._target_": "near_mine.Net"}) == {"near_mine"}  # security=off


def test_of_an_installed_package_its_own_modules_are_recorded_alone(folder: Path) -> None:
    importlib.import_module("near_mine")
    assert set(digest_modules({"omegaconf.errors"})) == {"omegaconf.errors"}
    package = folder / "deep_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "part.py").write_text("")
    importlib.import_module("deep_package.part")
    beside = {"deep_package", "deep_package.part", "near_mine", "near_helper"}
    assert set(digest_modules({"deep_package"})) == beside


def test_a_module_that_is_loaded_in_the_run_is_added_and_a_known_one_is_kept(folder: Path) -> None:
    importlib.import_module("near_mine")
    session = provenance.record(folder, None, {"near_mine"}, step=3)
    before = sha256(folder / "near_helper.py")
    (folder / "near_helper.py").write_text(HELPER + "# edited\n")
    (folder / "near_later.py").write_text("")
    importlib.import_module("near_later")
    provenance.add_loaded_modules(folder, session, {"near_mine"})
    (stored,) = json.loads((folder / "provenance.json").read_text())["sessions"]
    assert stored["modules"]["near_helper"] == before and "near_later" in stored["modules"]
    assert stored["step"] == 3


def test_beyond_the_limits_sizes_are_recorded_and_compared(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "MAX_FILES", 1)
    importlib.import_module("near_mine")
    modules = digest_modules({"near_mine"})
    assert modules == {"near_helper": sha256(folder / "near_helper.py"), "near_mine": len(MINE)}
    run = record(folder / "run", {"step": 0, "modules": modules})
    assert changed_files(run) == []
    (folder / "near_mine.py").write_text(MINE + "#\n")
    assert changed_files(run) == ["near_mine.py"]
    monkeypatch.setattr(digests, "MAX_BYTES", 3)
    assert set(map(type, digest_modules({"near_mine"}).values())) == {int}


def test_a_changed_file_is_found_without_importing_and_without_paths_of_the_record(
    folder: Path,
) -> None:
    then = sha256(folder / "near_helper.py")
    modules: dict[str, object] = {"near_helper": then, "gone": "0" * 64, "../near_mine": "0" * 64,
                                  "/etc/passwd": "0" * 64, "near_mine.x.y": "0" * 64,
                                  "near_mine": None}  # fmt: skip
    run = record(folder / "run", {"step": 0, "modules": modules})
    assert changed_files(run) == []
    (folder / "near_helper.py").write_text("def act(x):\n    return x.sin()\n")
    assert changed_files(run) == ["near_helper.py"]
    assert not {"near_helper", "near_mine"} & set(sys.modules)


@pytest.mark.parametrize("text", ["", "[]", '{"sessions": [{}]}', '{"sessions": [{"modules": 3}]}'])
def test_without_a_record_nothing_differs(text: str, folder: Path) -> None:
    assert changed_files(folder) == []
    (folder / "provenance.json").write_text(text)
    assert changed_files(folder) == []
    assert changed_files(folder, 7) == []


def test_a_checkpoint_is_compared_with_the_session_that_wrote_it(folder: Path) -> None:
    now, other = sha256(folder / "near_mine.py"), "0" * 64
    sessions = [{"step": s, "modules": {"near_mine": x}} for s, x in ((0, other), (160, now))]
    run = record(folder / "run", *sessions)
    assert changed_files(run, 152) == changed_files(run, 160) == ["near_mine.py"]
    assert changed_files(run, 168) == []
    assert changed_files(run) == ["near_mine.py"]  # the whole run


@pytest.mark.parametrize(
    "typed", [["training.steps=6"], ["job=evaluate"], ["job=evaluate", "weights"]], ids=" ".join
)
def test_a_resume_and_an_evaluation_with_other_code_name_the_file(
    typed: list[str], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_folder = Path("outputs/run")
    with build(compose(TYPED), run_folder) as run:
        train(run)
    key = "model.weights" if "weights" in typed else "checkpoint.resume"
    typed = [t for t in typed if t != "weights"]
    config = compose([*TYPED[:-1], f"{key}={run_folder}", *typed])
    target = None if "job=evaluate" in typed else run_folder
    with build(config, target):
        assert "the code differs" not in caplog.text
    (folder / "near_helper.py").write_text("def act(x):\n    return x.sin()\n")
    with build(config, target):
        assert "near_helper.py: the code differs from that of the run in" in caplog.text


def test_a_finished_job_runs_again_if_a_module_beside_a_trusted_one_changed(folder: Path) -> None:
    job_folder = folder / "0"
    record(job_folder, {"step": 0, "modules": {"near_helper": sha256(folder / "near_helper.py")}})
    Summary("done").write(job_folder)

    def plan() -> JobPlan:
        earlier = [Job(0, ["seed=0"], "0", "hash", "done", tries=1)]
        return Planner(folder, earlier, [["seed=0"]]).match(
            JobPlan(Job(0, ["seed=0"], "0", "hash"), trains=True)
        )

    assert (plan().done, plan().replaces) == (True, False)
    (folder / "near_helper.py").write_text("def act(x):\n    return x.sin()\n")
    assert (plan().done, plan().continues, plan().replaces) == (False, False, True)


def own_data(*typed: str) -> list[str]:
    return [*TYPED, "data._target_=near_mine.Table", *typed]


def test_files_that_a_user_s_data_set_names_are_in_the_hash_of_a_job(folder: Path) -> None:
    (folder / "d.npz").write_bytes(b"1")
    (folder / "parts").mkdir()
    (folder / "parts" / "a.txt").write_text("a")
    config = compose(own_data("+data.file=d.npz", "+data.many={x: [parts, nowhere]}"))
    assert argument_paths(config.data) == [Path("d.npz"), Path("parts")]

    def hash_now() -> str:
        file_stamp.cache_clear()
        return job_hash(config)

    before = hash_now()
    assert hash_now() == before
    (folder / "d.npz").write_bytes(b"12")
    changed = hash_now()
    (folder / "parts" / "b.txt").write_text("b")
    assert len({before, changed, hash_now()}) == 3


def test_outputs_and_caches_in_a_data_set_s_folder_do_not_count(folder: Path) -> None:
    stamp = file_stamp(folder, MAX_ENTRIES)
    for path in (folder / "outputs" / "x", folder / "__pycache__" / "y"):
        path.parent.mkdir()
        path.write_text("")
    file_stamp.cache_clear()
    assert file_stamp(folder, MAX_ENTRIES) == stamp != ""


def test_a_folder_with_too_many_entries_counts_as_not_stamped(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "parts").mkdir()
    for number in range(4):
        (folder / "parts" / str(number)).touch()
    config = compose(own_data("+data.root=parts"))
    assert unstamped_paths(config) == []
    monkeypatch.setattr("runner.scale.sweep.identity.MAX_ENTRIES", 3)
    assert unstamped_paths(config) == ["parts"]


def test_a_module_in_folders_without_init_is_found_though_they_are_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "outer" / "inner" / "code.py"
    place.parent.mkdir(parents=True)
    place.write_text("")
    monkeypatch.chdir(tmp_path)
    assert find_module_file("outer.inner.code") == str(place)
    assert find_module_file("outer.inner.other") is None
