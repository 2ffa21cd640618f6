"""`job=replay replay.path=…`: the captured run's config beneath what is typed, mistakes at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from runner.captures.manifest import FOLDER, CapturedWeights, CaptureManifest
from runner.checkpoint.manifest import MODEL, STATE, sealed
from runner.cli.arguments import read_arguments
from runner.cli.preflight import check
from runner.composing import compose, compose_raw
from runner.config import RunConfig, plain
from runner.errors import CheckpointError, ConfigError, SecurityError, UsageError

CAPTURE = f"run/{FOLDER}/step_00000012"
TRUSTED = "security.trusted=[my_package]"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def make_capture(*overrides: str, where: str = CAPTURE, config: Any = None) -> Path:
    """A capture, as far as a command line looks into it."""
    files: Any = {name: {"size": 1, "sha256": ""} for name in (STATE, MODEL)}
    manifest = CaptureManifest(
        step=int(where[-8:]), kind="non_finite", message="", weights=CapturedWeights.then,
        checkpoint=None,
        seed=0, name="run", config_hash="", config=config or plain(compose(overrides)), given=[],
        choices={}, micro_batch=1, threads=1, device={}, versions={}, loss="", grad_norm="",
        files=files,
    )  # fmt: skip
    Path(where).mkdir(parents=True)
    body = {**vars(manifest), "weights": manifest.weights.value}
    (Path(where) / "manifest.json").write_bytes(sealed(body))
    return Path(where)


def ask(*typed: str, path: str = CAPTURE) -> list[str]:
    return check(read_arguments(["job=replay", f"replay.path={path}", *typed])).arguments


def composed(*typed: str, path: str = CAPTURE) -> RunConfig:
    return compose(ask(*typed, path=path))


@pytest.mark.parametrize(
    "overrides",
    [
        ["experiment=digits_cnn", "optimization=ultra", "debug=anomaly", "schedule=onecycle"],
        ["data=stdlib_text", "model=gpt", "model.width=32", "optimization.amp.dtype=bf16"],
        ["data._target_=my_package.Noisy", "+data.poison=[3,17]", "model._target_=my_package.Net",
         "+model.width=6", "name=it-s.mine", TRUSTED],
    ],
    ids=["recipe", "text", "own classes"],
)  # fmt: skip
def test_the_captured_config_comes_back_whole(overrides: list[str]) -> None:
    make_capture(*overrides)
    mine = [o for o in overrides if o.startswith("security")]
    assert plain(composed(*mine)) == plain(compose(overrides))


def test_what_is_typed_wins() -> None:
    make_capture("optimizer=sgd", "optimizer.lr=0.3", "optimization=ultra", "training.epochs=3")
    found = composed("optimizer=adam", "optimization_level=none", "training.steps=5", "seed=3")
    assert (found.optimizer.name, found.optimizer.lr) == (
        "Adam",
        compose(["optimizer=adam"]).optimizer.lr,
    )
    assert found.optimization == compose(["optimization=none"]).optimization
    assert (found.training.steps, found.training.epochs, found.seed) == (5, None, 3)


def test_an_argument_of_an_own_class_can_be_typed_anew() -> None:
    make_capture("model._target_=my_package.Net", "+model.width=6", TRUSTED)
    assert composed("+model.width=7", TRUSTED).model.arguments == {"width": 7}


@pytest.mark.parametrize("path", ["run/", f"run/{FOLDER}", f"{CAPTURE}/manifest.json"])
def test_a_runs_folder_means_its_first_capture(path: str) -> None:
    make_capture("seed=4")
    make_capture("seed=5", where=f"run/{FOLDER}/step_00000020")
    Path("run/checkpoints").mkdir()
    assert composed(path=path).seed == 4


def test_a_replays_folder_means_what_it_is_a_replay_of() -> None:
    capture = make_capture("seed=4")
    Path("replay/.hydra").mkdir(parents=True)
    page = Path("replay/replay.json")
    page.write_text(json.dumps({"capture": str(capture.absolute())}))
    assert composed(path="replay").seed == 4 == composed(path=str(page)).seed
    page.write_text(json.dumps({"capture": "/gone"}))
    with pytest.raises(CheckpointError, match="a replay of /gone, which is gone"):
        ask(path="replay")
    page.write_text("[]")
    with pytest.raises(CheckpointError, match="does not say what it is a replay of"):
        ask(path="replay")


def test_replays_lie_beside_the_runs_not_among_them() -> None:
    make_capture("name=mine")
    place = compose_raw(ask()[:], hydra_too=True).hydra.run.dir
    assert place.startswith("outputs/replays/mine/")
    assert compose_raw(["name=mine"], hydra_too=True).hydra.run.dir.startswith("outputs/runs/mine/")


def test_from_inside_the_folder_a_path_is_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    capture = make_capture("seed=4").absolute()
    monkeypatch.chdir(capture)
    assert composed(path=".").seed == 4
    monkeypatch.chdir(capture.parent)
    assert composed(path=".").seed == 4 == composed(path=capture.name).seed


def test_mistakes_are_answered_with_the_way_out() -> None:
    with pytest.raises(CheckpointError, match="no folder nowhere"):
        ask(path="nowhere")
    with pytest.raises(ConfigError, match=r"replay\.path: job=replay needs to know which step"):
        check(read_arguments(["job=replay"]))
    with pytest.raises(ConfigError, match=r"replay\.path: job=replay needs to know which step"):
        ask(path="")
    capture = make_capture()
    with pytest.raises(ConfigError, match="add job=replay"):
        check(read_arguments([f"replay.path={capture}"]))
    with pytest.raises(ConfigError, match=r"replay\.timeout_s"):
        ask("replay.timeout_s=0")
    with pytest.raises(ConfigError, match="did you mean"):
        ask("optimizer.lrr=1")
    with pytest.raises(ConfigError, match="one at a time"):
        check(read_arguments(["-m", "job=replay", "replay.path=a,b"]))
    Path("healthy/checkpoints/step_00000003").mkdir(parents=True)
    with pytest.raises(UsageError, match="captured no step"):
        ask(path="healthy")
    (Path("healthy/checkpoints/step_00000003") / "manifest.json").touch()
    (Path("healthy/checkpoints/step_00000003") / "state.pt").touch()
    with pytest.raises(UsageError, match="is a checkpoint; name a run"):
        ask(path="healthy/checkpoints/step_00000003")
    Path("photos").mkdir()
    with pytest.raises(UsageError, match="photos is no capture"):
        ask(path="photos")
    text = (capture / "manifest.json").read_text()
    (capture / "manifest.json").write_text(text.replace("run", "ruin", 1))
    with pytest.raises(CheckpointError, match=r"manifest\.json: damaged"):
        ask()


def test_a_capture_brings_no_trust_and_no_key_of_hydras() -> None:
    config = plain(compose(["model._target_=theirs.Net", "security.trusted=[theirs]"]))
    config["security"] = {"trusted": ["theirs"]}
    config["hydra"] = {"run": {"dir": "elsewhere"}}
    make_capture(config=config)
    with pytest.raises(SecurityError, match=r"theirs\.Net is refused"):
        ask()
    assert not [line for line in ask("security.trusted=[theirs]") if line.startswith("hydra")]


@pytest.mark.parametrize(
    "forged",
    [
        {" hydra.callbacks.x": {"_target_": "os.mkdir", "path": "ran"}},
        {" security.trusted": ["theirs"]},
        {"model": {"kind": "../../theirs"}},
        {"model": {"kind": "mlp", "arguments": {"a=1,b": 2}}},
        {"name": "${oc.env:HOME}"},
    ],
    ids=["hydra", "trust", "path", "argument", "interpolation"],
)
def test_a_capture_has_no_word_in_hydras_language(forged: dict[str, Any]) -> None:
    make_capture(config={**plain(compose([])), **forged})
    with pytest.raises(SecurityError, match="is refused"):
        ask()


def test_a_config_of_another_version_is_said_to_be_one() -> None:
    config = plain(compose([]))
    config["data"]["kind"] = "gone"
    make_capture(config=config)
    with pytest.raises(CheckpointError, match="not one of this version's"):
        ask()
