"""`model.weights`: what a run starts from, and that it starts from all of it or not at all."""

from __future__ import annotations

import hashlib
import json
import random
import re
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from runner import build, compose, train
from runner.core.errors import CheckpointError, ConfigError, SecurityError
from runner.core.findings import Trust
from runner.core.interfaces.run import Run
from runner.core.jobs.evaluate import main as evaluate
from runner.core.models.weights import KEY, Shard, StoredWeights, load_initial_weights, map_weights
from runner.core.record.summary import Summary
from runner.core.schemas.security import SecurityLevel
from runner.core.security.files.policy import FilePolicy
from runner.diagnose.replay.reopen import open_capture, reopen_run
from tests import runs

QUIET = """data=cancer model.width=8 optimization=none monitoring.progress=false training.steps=6
 schedule=constant device.threads=1""".split()


class Net(nn.Module):
    """A body with buffers, and a head."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5))
        self.head = nn.Linear(5, classes)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(7, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.tokens.weight


def trained(model: nn.Module) -> dict[str, Tensor]:
    """State that no fresh model has, buffers too."""
    for tensor in model.state_dict().values():
        tensor.copy_(torch.arange(tensor.numel()).reshape(tensor.shape) / 64 + 1)
    return copied(model)


def copied(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def saved(path: Path, content: Any) -> str:
    """Write it; its digest, to be pinned, so that no sandbox is started."""
    (save_file if path.suffix == ".safetensors" else torch.save)(content, str(path))
    return hashlib.sha256(path.read_bytes()).hexdigest()


def pinned(sha256: str) -> FilePolicy:
    return FilePolicy(pinned=(sha256,))


def fitted(model: nn.Module, held: dict[str, Any], *fresh: str) -> Any:
    return map_weights(model, StoredWeights(Path("x.pt"), held, "", Trust.PINNED), fresh)


def prefixed(prefix: str, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}{name}": value for name, value in weights.items()}


def as_parameters(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {k: nn.Parameter(v, v.is_floating_point()) for k, v in weights.items()}


SHAPES: dict[str, tuple[str, Callable[[dict[str, Tensor]], Any]]] = {
    "safetensors": ("w.safetensors", lambda w: w),
    "lightning, compiled": ("w.ckpt", lambda w: {"state_dict": prefixed("model._orig_mod.", w)}),
    "data parallel": ("w.pth", lambda w: {"model": prefixed("module.", w), "step": 7}),
    "parameters": ("w.bin", lambda w: {"model_state_dict": as_parameters(w)}),
}


@pytest.mark.parametrize("kind", SHAPES)
def test_weights_and_buffers_are_those_of_a_file_of_any_shape(kind: str, tmp_path: Path) -> None:
    name, shape = SHAPES[kind]
    wanted, model = trained(Net()), Net()
    digest = saved(tmp_path / name, shape(wanted))
    choice = load_initial_weights(model, tmp_path / name, [], pinned(digest))
    assert not runs.differences(model.state_dict(), wanted)
    assert choice.key == KEY and choice.value == f"{tmp_path / name}, sha256 {digest}"
    assert choice.reason.startswith("pinned; 9 tensors")


def test_what_does_not_fit_is_one_error_with_names_shapes_count_and_the_way_out() -> None:
    model = Net(classes=2)
    before = copied(model)
    held: dict[str, Any] = {**trained(Net(classes=3)), "fc.weight": torch.ones(2, 2)}
    del held["body.0.bias"]
    with pytest.raises(ConfigError, match=r"^model\.weights: x\.pt does not fit") as caught:
        fitted(model, held)
    said = str(caught.value)
    assert "in 4 tensors" in said and "\n" not in said
    assert "body.0.bias [5] is not in the file" in said
    assert "head.weight has shape [3, 5], expected [2, 5]" in said
    assert "model.weights_except=[body.0.bias,head,fc]" in said
    assert not runs.differences(model.state_dict(), before)
    with pytest.raises(ConfigError, match=r"and \d+ more.*set the matching model"):
        fitted(Net(), {"a.b": torch.ones(1)})
    with pytest.raises(ConfigError, match=r"^model\.weights_except: no parameter .* is named haed"):
        fitted(model, held, "haed")
    with pytest.raises(ConfigError, match=r"^model\.weights_except: leaves no weights"):
        fitted(model, held, "*")
    fit = fitted(model, held, *re.findall(r"except=\[(.*)\]", said)[0].split(","))
    assert fit.fresh == ["body.0.bias", "head.weight", "head.bias"]


def test_what_was_saved_besides_the_model_can_be_left_out_before_the_prefix_is_looked_for() -> None:
    held = prefixed("model.", trained(Net()))
    held["criterion.weight"] = torch.ones(3)
    fit = fitted(Net(), held, "criterion", "head.*")
    assert fit.prefix == "model." and fit.fresh == ["head.weight", "head.bias"]
    assert fit.unused == ["criterion.weight", "head.weight", "head.bias"]


def test_floats_are_converted_and_said_and_nothing_else_is() -> None:
    held = trained(Net())
    half = {k: v.bfloat16() if v.is_floating_point() else v for k, v in held.items()}
    fit = fitted(Net(), half)
    assert fit.converted == {"bfloat16 to float32": 8}
    assert torch.equal(fit.select(half)["head.weight"], half["head.weight"].float())
    with pytest.raises(ConfigError, match="head.bias is int64, expected float32"):
        fitted(Net(), {**held, "head.bias": torch.ones(3, dtype=torch.long)})
    with pytest.raises(ConfigError, match="head.bias has values that are too large for float16"):
        large = {**held, "head.bias": torch.full((3,), 1e6)}
        fitted(Net().half(), large).select(large)


def test_tied_weights_are_loaded_by_either_name_and_are_tied_still() -> None:
    wanted = trained(Tied())
    for gone in ("tokens.weight", "head.weight"):
        model = Tied()
        held = {k: v for k, v in wanted.items() if k != gone}
        model.load_state_dict(fitted(model, held).select(held))
        assert not runs.differences(model.state_dict(), wanted)
        assert model.head.weight is model.tokens.weight
    with pytest.raises(ConfigError, match="head.weight differs from tokens.weight"):
        fitted(Tied(), {**wanted, "head.weight": torch.zeros(7, 4)})
    with pytest.raises(ConfigError, match="same tensor as tokens.weight.*name both"):
        fitted(Tied(), wanted, "head")


def test_what_holds_no_weights_is_refused_by_what_it_is(tmp_path: Path) -> None:
    digest = saved(tmp_path / "x.pt", {"epoch": 3})
    with pytest.raises(ConfigError, match=r"with epoch holds no named tensors.*state_dict\(\)"):
        load_initial_weights(Net(), tmp_path / "x.pt", [], pinned(digest))
    with pytest.raises(ConfigError, match="has no checkpoint and none of model.safetensors.*x.pt"):
        load_initial_weights(Net(), tmp_path, [], FilePolicy())
    with pytest.raises(SecurityError, match="security=strict"):
        load_initial_weights(Net(), tmp_path / "x.pt", [], FilePolicy(SecurityLevel.strict))


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights") / "run"
    runs.trained(*QUIET, "seed=1", folder=folder)
    return folder


@pytest.fixture
def first(once: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that was trained, in the run tree of the current folder."""
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(once, "outputs/runs/first/one", symlinks=True))


def told(run: Run) -> Any:
    return next(choice for choice in run.choices if choice.key == KEY)


def drawn() -> list[Any]:
    return [torch.rand(2).tolist(), random.random(), np.random.rand()]


def test_a_fresh_head_has_its_usual_values_and_no_random_state_moves(first: Path) -> None:
    with build(compose(QUIET)) as run:
        plain = runs.weights(run)
        with run.own_random_state():
            numbers = drawn()
    config = [*QUIET, f"model.weights={first}", "model.weights_except=[layers.4]"]
    with build(compose([*config, "optimizer.ema=0.9"])) as run:
        with run.own_random_state():
            assert drawn() == numbers
        state = run.model.state_dict()
        for parameter, average in zip(run.update.parameters, run.update.average, strict=True):
            assert torch.equal(parameter, average)
        loaded = "checked; 4 tensors; fresh: layers.4.weight and layers.4.bias"
        assert told(run).reason == f"{loaded}; of step 6 (best, last)"
    with build(compose([*QUIET, f"checkpoint.resume={first}"])) as run:
        before = run.model.state_dict()
    for name, value in state.items():
        assert torch.equal(value, (plain if name.startswith("layers.4") else before)[name])


def test_a_resumed_run_ends_in_the_same_bits_without_reading_the_weights(first: Path) -> None:
    config = [*QUIET, f"model.weights={first}", "checkpoint.resume=auto"]
    with build(compose(config), Path("outputs/runs/second/whole")) as run:
        train(run)
        whole, origin = run.model.state_dict(), told(run)
    cut = Path("outputs/runs/second/cut")
    runs.trained(*config, "training.steps=3", folder=cut)
    first.rename("gone")
    with build(compose(config), cut) as run:
        assert told(run).value == origin.value
        assert train(run).choices.count(told(run)) == 1
        assert not runs.differences(run.model.state_dict(), whole)


def test_checkpoint_resume_wins_and_weights_alone_are_evaluated(
    first: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "runner")
    config = [*QUIET, "model.weights=nowhere.pt", f"checkpoint.resume={first}"]
    with build(compose(config)) as run:
        assert run.progress.step == 6
    assert "model.weights: not read: weights come from checkpoint.resume" in caplog.text
    asked = compose([*QUIET, "job=evaluate", f"model.weights={first}"])
    metrics = evaluate(asked, Path("outputs/runs/eval")).metrics
    assert metrics["val/loss"] == Summary.read(first).metrics["val/loss"]


def test_a_bad_step_is_opened_again_without_the_weights(first: Path, my_package: None) -> None:
    noisy = ["data._target_=my_package.Noisy", "+data.poison=[50,90]"]
    ours = [*QUIET, *noisy, "security.trusted=[my_package]", "checks=off"]
    with build(compose(ours)) as run:
        digest = saved(Path("w.pt"), run.model.state_dict())
    config = [*ours, "model.weights=w.pt", f"security.pinned=[{digest}]"]
    runs.trained(*config, folder=Path("outputs/runs/bad"))
    Path("w.pt").unlink()
    capture = open_capture(next(Path("outputs/runs/bad/debug/captures").glob("step_*")))
    with reopen_run(capture, trusted=["my_package"]) as (run, _):
        assert run.progress.step == capture.step - 1


def test_a_run_of_another_tree_is_looked_at_and_a_damaged_one_refused(
    first: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    step = first / "checkpoints" / "step_00000006"
    first.rename("theirs")
    config = [*QUIET, "model.weights=theirs/checkpoints/step_00000006"]
    with build(compose(config)) as run:
        assert told(run).reason == "untrusted; 6 tensors; of step 6 (best, last)"
    assert "not below outputs/ here" in caplog.text
    Path("theirs").rename(first)
    data = bytearray((step / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (step / "model.safetensors").write_bytes(data)
    for path in (step, step / "model.safetensors"):  # the file alone has the same manifest
        with pytest.raises(CheckpointError, match="damaged"):
            build(compose([*QUIET, f"model.weights={path}"]))


def test_a_file_that_is_not_there_and_exceptions_without_weights_name_their_keys() -> None:
    with pytest.raises(ConfigError, match=r"^model\.weights: .*w\.pt does not exist"):
        build(compose([*QUIET, "model.weights=w.pt"]))
    with pytest.raises(ConfigError, match=r"^model\.weights_except: .*add model\.weights="):
        compose(["model.weights_except=[head]"])


def cached(folder: Path, files: dict[str, bytes]) -> Path:
    """A snapshot folder: its files are links to blobs, which are called by their digests."""
    snapshot = folder / "models--a--b/snapshots/0123"
    (folder / "models--a--b/blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for name, data in files.items():
        digest = hashlib.sha256(data).hexdigest()
        (folder / "models--a--b/blobs" / digest).write_bytes(data)
        (snapshot / name).symlink_to(f"../../blobs/{digest}")
    return snapshot


def test_a_snapshot_is_read_through_its_links(tmp_path: Path) -> None:
    wanted, model = trained(Net()), Net()
    digest = saved(tmp_path / "w.safetensors", wanted)
    snapshot = cached(tmp_path, {"model.safetensors": (tmp_path / "w.safetensors").read_bytes()})
    load_initial_weights(model, snapshot, [], pinned(digest))
    assert not runs.differences(model.state_dict(), wanted)


def sharded(folder: Path, kind: str = "safetensors") -> tuple[Path, dict[str, Tensor], list[str]]:
    """A snapshot of three shards and an index, its weights, and the digests of the shards."""
    wanted = trained(Net())
    stem = "model" if kind == "safetensors" else "pytorch_model"
    parts = [{n: wanted[n] for n in list(wanted)[i::3]} for i in range(3)]
    names = [f"{stem}-{i + 1:05}-of-00003.{kind}" for i in range(3)]
    files, digests = {}, []
    for name, part in zip(names, parts, strict=True):
        shard = folder / f"made.{kind}"
        digests.append(saved(shard, part))
        files[name] = shard.read_bytes()
    by_name = {n: names[i] for i, part in enumerate(parts) for n in part}
    index = json.dumps({"metadata": {"total_size": 1}, "weight_map": by_name}).encode()
    return cached(folder, {**files, f"{stem}.{kind}.index.json": index}), wanted, digests


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_the_shards_of_a_snapshot_are_loaded_one_at_a_time(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot, wanted, digests = sharded(tmp_path, kind)
    alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
    most, read = 0, Shard.read

    def counted(shard: Shard, policy: FilePolicy) -> dict[str, Any]:
        nonlocal most
        part = read(shard, policy)
        alive.update(part.values())
        most = max(most, len(alive))
        return part

    monkeypatch.setattr(Shard, "read", counted)
    model = Net()
    choice = load_initial_weights(model, snapshot, [], FilePolicy(pinned=tuple(digests)))
    assert not runs.differences(model.state_dict(), wanted)
    assert "pinned; 9 tensors; in 3 shards" in choice.reason
    assert most == 3  # of the nine
    other = Net(classes=2)
    before = copied(other)
    with pytest.raises(ConfigError, match=r"head.weight has shape \[3, 5\], expected \[2, 5\]"):
        load_initial_weights(other, snapshot, [], FilePolicy(pinned=tuple(digests)))
    assert not runs.differences(other.state_dict(), before)


def test_an_index_that_does_not_fit_its_shards_is_refused(tmp_path: Path) -> None:
    snapshot, _, digests = sharded(tmp_path)
    path = snapshot / "model.safetensors.index.json"
    by_name = json.loads(path.read_text())["weight_map"]
    path.unlink()
    for index, says in (
        ("[", "is not a shard index"),
        ('{"weight_map": {}}', "lists no files in its folder"),
        (json.dumps({"weight_map": by_name | {"z": min(by_name.values())}}), "no shard has z"),
    ):
        path.write_text(index)
        with pytest.raises(ConfigError, match=rf"^model\.weights: .*{says}"):
            load_initial_weights(Net(), snapshot, [], FilePolicy(pinned=tuple(digests)))
    path.write_text('{"weight_map": {"a": "../../secret.pt"}}')
    with pytest.raises(SecurityError, match="names '../../secret.pt', which is no file in its"):
        load_initial_weights(Net(), snapshot, [], FilePolicy(pinned=tuple(digests)))
    with pytest.raises(ConfigError, match="names '../../secret.pt', which is no file in its"):
        load_initial_weights(Net(), snapshot, [], FilePolicy(SecurityLevel.off))
