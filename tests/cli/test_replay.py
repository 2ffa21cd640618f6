"""`job=replay replay.path=…`: which capture is meant, mistakes at once, and nothing taken over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from runner.core.captures.manifest import FOLDER, CapturedWeights, CaptureManifest, read_manifest
from runner.core.checkpoint.manifest import MODEL, STATE, to_checksummed_json
from runner.core.config.composing import compose, config_from_plain
from runner.core.config.run_config import WrittenConfig
from runner.core.errors import CheckpointError, ConfigError, RunnerError, SecurityError, UsageError
from tests import runs

pytestmark = pytest.mark.usefixtures("folder")
CAPTURE = f"run/{FOLDER}/step_00000012"


def make_capture(name: str = "mine", where: str = CAPTURE, config: Any = None) -> Path:
    """A capture, as far as a command line looks into it."""
    files: Any = {name: {"size": 1, "sha256": ""} for name in (STATE, MODEL)}
    manifest = CaptureManifest(
        step=int(where[-8:]), kind="non_finite", message="", weights=CapturedWeights.then,
        name=name, config=config or WrittenConfig(runs.config()).plain(), given=[], micro_batch=1,
        threads=1, device={}, versions={}, loss="", grad_norm="", files=files,
    )  # fmt: skip
    Path(where).mkdir(parents=True)
    body = {**vars(manifest), "weights": manifest.weights.value}
    (Path(where) / "manifest.json").write_bytes(to_checksummed_json(body))
    return Path(where)


def ask(*typed: str, path: str = CAPTURE) -> list[str]:
    return runs.checked("job=replay", f"replay.path={path}", *typed).arguments


@pytest.mark.parametrize(
    "key", ["optimizer.lr=1", "optimizer.lrr=1", "optimization=ultra", "+model.width=7"]
)
def test_what_would_change_the_captured_step_is_refused(key: str) -> None:
    make_capture()
    with pytest.raises(ConfigError, match="has no effect: .* the config of its run; leave it out"):
        ask(key)


@pytest.mark.parametrize("path", ["run/", f"run/{FOLDER}", f"{CAPTURE}/manifest.json"])
def test_a_runs_folder_means_its_first_capture(path: str) -> None:
    make_capture("first")
    make_capture("second", where=f"run/{FOLDER}/step_00000020")
    Path("run/checkpoints").mkdir()
    assert "name=first" in ask(path=path)


def test_from_inside_the_folder_a_path_is_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    capture = make_capture("mine").absolute()
    for folder, path in ((capture, "."), (capture.parent, "."), (capture.parent, capture.name)):
        monkeypatch.chdir(folder)
        assert "name=mine" in ask(path=path)


WITHOUT_PATH = r"replay\.path: job=replay needs to know which step"


@pytest.mark.parametrize(
    ("path", "error", "message"),
    [
        ("nowhere", CheckpointError, "no such folder: nowhere"),
        ("", ConfigError, WITHOUT_PATH),
        ("healthy", UsageError, "contains no captured step"),
        ("healthy/checkpoints/step_00000003", UsageError, "is a checkpoint; name a run"),
        ("photos", UsageError, "photos contains no captured step"),
        (f"{CAPTURE}0", CheckpointError, r"manifest\.json: damaged"),
    ],
)
def test_mistakes_are_answered_with_the_way_out(
    path: str, error: type[RunnerError], message: str
) -> None:
    make_capture()
    damaged = make_capture(where=f"{CAPTURE}0") / "manifest.json"
    damaged.write_text(damaged.read_text().replace("mine", "mime", 1))
    Path("healthy/checkpoints/step_00000003").mkdir(parents=True)
    (Path("healthy/checkpoints/step_00000003") / "manifest.json").touch()
    Path("photos").mkdir()
    with pytest.raises(error, match=message):
        ask(path=path)


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["job=replay"], WITHOUT_PATH),
        ([f"replay.path={CAPTURE}"], "add job=replay"),
        (["job=replay", f"replay.path={CAPTURE}", "replay.timeout_s=0"], r"replay\.timeout_s"),
        (["-m", "job=replay", "replay.path=a,b"], "one at a time"),
    ],
)
def test_a_replay_is_of_one_named_capture(typed: list[str], message: str) -> None:
    make_capture()
    with pytest.raises(ConfigError, match=message):
        runs.checked(*typed)


def test_a_capture_brings_no_trust() -> None:
    config = WrittenConfig(
        runs.config("model._target_=theirs.Net", "security.trusted=[theirs]")
    ).plain()
    config["security"] = {"trusted": ["theirs"]}
    make_capture(config=config)
    with pytest.raises(SecurityError, match=r"theirs\.Net is refused"):
        ask()


@pytest.mark.parametrize(
    ("forged", "error", "message"),
    [
        ({" hydra.callbacks.x": {"_target_": "os.mkdir", "path": "ran"}}, ConfigError, "hydra"),
        ({" security.trusted": ["theirs"]}, ConfigError, r"security\.trusted"),
        ({"model": {"kind": "../../theirs"}}, ConfigError, "theirs"),
        ({"model": {"kind": "mlp", "arguments": {"a=1,b": 2}}}, SecurityError, "is refused"),
        ({"name": "${oc.env:HOME}"}, SecurityError, "is refused"),
        ({"data": {"kind": "gone"}}, ConfigError, "does not fit this version's"),
    ],
    ids=["hydra", "trust", "path", "argument", "interpolation", "version"],
)
def test_a_forged_config_is_refused(
    forged: dict[str, Any], error: type[RunnerError], message: str
) -> None:
    make_capture(config={**WrittenConfig(runs.config()).plain(), **forged})
    with pytest.raises(error, match=message):
        ask()


@pytest.mark.parametrize(
    "overrides",
    [
        ["experiment=digits_cnn", "optimization=ultra", "debug=anomaly", "schedule=onecycle"],
        ["data=stdlib_text", "model=gpt", "model.width=32", "optimization.amp.dtype=bf16"],
        ["data._target_=my_package.Noisy", "+data.poison=[3,17]", "model._target_=my_package.Net",
         "+model.width=6", "name=it-s.mine", "security.trusted=[my_package]"],
    ],
    ids=["recipe", "text", "own classes"],
)  # fmt: skip
def test_the_captured_config_comes_back_whole(overrides: list[str]) -> None:
    config = compose(overrides)
    capture = make_capture(config=WrittenConfig(config).plain())
    trusted = config.security.trusted
    assert (
        WrittenConfig(config_from_plain(read_manifest(capture).config, trusted)).plain()
        == WrittenConfig(config).plain()
    )


@pytest.mark.parametrize("name", ["${oc.env:HOME}", "a,hydra.run.dir=x", "../../up"])
def test_a_forged_name_is_left_out(name: str) -> None:
    make_capture(name)
    assert ask() == ["job=replay", f"replay.path={CAPTURE}"]
