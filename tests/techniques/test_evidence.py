"""Each technique's evidence says no where it was asked for, and did not take hold."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from runner import build, compose, train
from runner.build import Components
from runner.errors import ConfigError
from runner.techniques.base import Evidence, RunBuilder, Technique, TechniqueStatus
from runner.techniques.config import CudaGraphs, Pipeline, Tf32
from runner.training.evidence import collect_evidence, technique_statuses
from runner.training.hook import Hook, Step
from runner.training.run import Run

QUICK = [
    "training.steps=4",
    "monitoring.progress=false",
    "checkpoint=off",
    "device=cpu",
    "device.threads=1",
    "optimization=none",
    "data.validation_samples=8",
    "checks=off",
]
TABLE = ["data=synthetic", "data.form=tabular", "data.features=16", "data.samples=400"]
IMAGES = ["data=synthetic", "data.form=images", "data.samples=200", "data.channels=3"]
COMPILES = pytest.mark.skipif(shutil.which("g++") is None, reason="compiling needs g++")


def on(name: str, *knobs: str) -> list[str]:
    switches = ["enabled=true", *knobs]
    return [f"optimization.{name}.{switch}" for switch in switches]


def row(run: Run, name: str) -> TechniqueStatus:
    return next(row for row in technique_statuses(run) if row.name == name)


def trained(name: str, overrides: list[str], **given: Any) -> TechniqueStatus:
    with build(compose([*QUICK, *overrides]), given=Components(**given)) as run:
        train(run)
        return row(run, name)


class Layer(nn.Module):
    """A product that is no nn.Linear, in 32 bits where it is `exact`."""

    def __init__(self, exact: bool, only_training: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16) / 4)
        self.exact, self.only_training = exact, only_training

    def forward(self, x: Tensor) -> Tensor:
        exact = self.exact and (self.training or not self.only_training)
        with torch.autocast("cpu", enabled=False) if exact else nullcontext():
            return F.linear(x.float() if exact else x, self.weight).relu()


def layers(count: int, exact: int, only_training: bool = False) -> nn.Module:
    return nn.Sequential(
        *(Layer(i < exact, only_training) for i in range(count - 1)), nn.Linear(16, 10)
    )


@pytest.mark.parametrize(
    ("exact", "only_training", "engaged"),
    [(0, False, True), (1, False, True), (9, True, False)],
)
def test_mixed_precision_is_engaged_by_the_share_of_layers_in_16_bits(
    exact: int, only_training: bool, engaged: bool
) -> None:
    amp = trained("amp", [*TABLE, *on("amp", "dtype=bf16")], model=layers(18, exact, only_training))
    assert amp.evidence["layers"] == f"{18 - exact} of 18"
    assert amp.engaged is engaged
    assert amp.reason == (
        "" if not exact else f"{18 - exact} of 18 layers with all products in 16 bits"
    )


class Convolutions(nn.Module):
    """`sorted_back` of its eight convolutions get their input in NCHW order."""

    def __init__(self, sorted_back: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.rest = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(7))
        self.head, self.sorted_back = nn.Linear(8, 10), sorted_back

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for i, layer in enumerate(self.rest):
            x = layer(x.contiguous() if i < self.sorted_back else x).relu()
        return self.head(x.mean((2, 3)))


@pytest.mark.parametrize(("sorted_back", "engaged"), [(0, True), (1, True), (4, False)])
def test_channels_last_is_engaged_by_the_share_of_convolutions_that_copy_nothing(
    sorted_back: int, engaged: bool
) -> None:
    given = {"model": Convolutions(sorted_back)}
    layout = trained("channels_last", [*IMAGES, *on("channels_last")], **given)
    assert layout.evidence["convolutions"] == f"{8 - sorted_back} of 8"
    assert layout.engaged is engaged
    assert bool(layout.reason) is (sorted_back > 0)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x).relu()


class Blocks(nn.Module):
    """Calls the first `past` of its blocks by their class, past what is put in the instances."""

    def __init__(self, past: int = 0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head, self.past = nn.Linear(16, 10), past

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            x = Block.forward(block, x) if i < self.past else block(x)
        return self.head(x)


@pytest.mark.parametrize("past", [0, 1, 2])
def test_recompute_is_engaged_by_the_share_of_blocks_that_ran_again(past: int) -> None:
    again = trained("recompute", [*TABLE, *on("recompute", "what=full")], model=Blocks(past))
    assert again.evidence["recomputed_blocks"] == 3 - past
    assert again.engaged is (past < 2)
    assert again.reason == ("" if not past else f"{3 - past} of 3 blocks ran again in the backward")


class Uncompiled(Block):
    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Chain(nn.Module):
    """Three blocks, of which the compiler is kept out of the first so many."""

    def __init__(self, left_out: int) -> None:
        super().__init__()
        self.a, self.b, self.c = ((Uncompiled if i < left_out else Block)() for i in range(3))
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        x = self.b(x)
        return self.head(self.c(x))


@COMPILES
def test_compile_is_engaged_by_the_share_of_layers_in_compiled_graphs() -> None:
    left_out = 3
    compiled = trained("compile", [*TABLE, *on("compile")], model=Chain(left_out))
    assert compiled.evidence["graphs"] >= 1
    assert compiled.evidence["layers"] == f"{4 - left_out} of 4"
    assert not compiled.engaged
    assert compiled.reason == f"{4 - left_out} of 4 layers in compiled graphs"


@COMPILES
@pytest.mark.slow
@pytest.mark.parametrize(("samples", "made"), [(70, 3), (40, 2)])
def test_the_whole_step_is_engaged_by_the_share_of_steps_in_one_graph(
    samples: int, made: int
) -> None:
    data = [*TABLE[:3], f"data.samples={samples}", "data.validation=0.1", "training.batch_size=24"]
    whole = trained("whole_step", [*data, *on("whole_step")], model=nn.Linear(16, 10))
    assert whole.evidence["steps"] == f"{made} of 4"
    assert whole.engaged is (made == 3)


class Attending(nn.Module):
    """Attention by torch's function in all but `written_out` of four layers."""

    written_out = 0

    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.head = nn.Linear(16, 4 * 8), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.inputs(x).view(-1, 1, 4, 8)
        for i in range(4):
            if i < self.written_out:
                weights = (tokens @ tokens.transpose(-1, -2) / 8**0.5).softmax(-1)
                tokens = tokens + weights @ tokens
            else:
                tokens = tokens + F.scaled_dot_product_attention(tokens, tokens, tokens)
        return self.head(tokens.flatten(1))


@pytest.mark.parametrize("written_out", [0, 1, 2])
def test_attention_is_engaged_by_the_share_of_calls_that_reach_the_kernel(written_out: int) -> None:
    asked = [*QUICK, *TABLE, *on("attention", "kernel=flash")]
    with build(compose(asked), given=Components(model=Attending())) as run:
        run.model.written_out = written_out  # decided by the user's code later on
        train(run)
        kernel = row(run, "attention")
    assert kernel.engaged is (written_out < 2)
    if written_out < 4:
        assert kernel.evidence["calls"] == f"{4 - written_out} of 4"
    assert bool(kernel.reason) is (written_out > 0)


class Patient(Hook):
    """Goes on once every worker has the batch that it owes."""

    def on_step(self, run: Run, step: Step) -> None:
        pipes = run.train.pool.pipes  # type: ignore[attr-defined]
        assert all(pipe.poll(30) for pipe in pipes)


@pytest.mark.usefixtures("my_package")
def test_the_pipeline_states_how_many_batches_were_ready() -> None:
    data = [
        "data._target_=my_package.Noisy",
        "+data.seconds=0.0",
        "data.validation=0.1",
        "security.trusted=[my_package]",
        "model=mlp",
        "model.width=8",
        "training.batch_size=16",
        "training.steps=12",
    ]
    asked = [*QUICK, *data, *on("pipeline", "budget_s=0.0001")]
    with build(compose(asked)) as run:
        if run.train.pool is None:  # type: ignore[attr-defined]
            pytest.skip("no worker was worth it here")
        run.hooks.append(Patient())
        train(run)
        pipeline = row(run, "pipeline")
    ready, asked_for = map(int, pipeline.evidence["batches"].split(" of "))
    assert asked_for == 12
    assert pipeline.engaged and ready >= 11


@pytest.mark.usefixtures("my_package")
def test_a_pipeline_whose_loop_waits_as_long_as_without_workers_is_not_engaged() -> None:
    data = [
        "data._target_=my_package.Noisy",
        "+data.seconds=0.002",
        "data.workers=1",
        "security.trusted=[my_package]",
        "model=mlp",
    ]
    with build(compose([*QUICK, *data, *on("pipeline")])) as run:
        train(run)
        waited = Pipeline(True).engaged(run).facts["wait_share"]
        run.train.pool.ready = 0  # type: ignore[attr-defined]
        run.remarks["pipeline"] = {"wait_share_without_workers": waited}
        found = Pipeline(True).engaged(run)
    assert not found.engaged
    assert found.reason == "0 of 4 batches ready when they were asked for"


def test_a_pipeline_without_workers_is_not_engaged() -> None:
    with build(compose([*QUICK, *TABLE, "model=mlp"])) as run:
        train(run)
        found = Pipeline(True).engaged(run)
    assert not found.engaged
    assert found.reason == "no worker fetches ahead: they would not pay for themselves"


def test_accumulation_says_no_once_a_batch_fits_into_one_part() -> None:
    asked = [*TABLE, "model=mlp", "training.batch_size=32", *on("accumulation", "micro_batch=8")]
    with build(compose([*QUICK, *asked])) as run:
        collect_evidence(run)
        assert row(run, "accumulation").evidence["backward_per_update"] == 4
        run.micro_batch = 64
        collect_evidence(run)
        assert not row(run, "accumulation").engaged


def test_a_chunked_loss_says_no_once_the_layer_makes_whole_logits() -> None:
    text = ["data=stdlib_text", "data.sequence=32", "training.batch_size=4"]
    model = ["model=gpt", "model.width=32", "model.depth=1"]
    asked = [*text, *model, *on("chunked_loss", "chunk=16", "min_mb=0")]
    with build(compose([*QUICK, *asked])) as run:
        collect_evidence(run)
        assert row(run, "chunked_loss").engaged
        for module in run.model.modules():
            vars(module).pop("forward", None)
        collect_evidence(run)
        assert not row(run, "chunked_loss").engaged


def test_system_settings_that_the_users_code_takes_back_are_named() -> None:
    quick = [word for word in QUICK if not word.startswith("device.threads")]
    threads = torch.get_num_threads()
    with build(compose([*quick, *TABLE, *on("system", "neighbours=false"), "model=mlp"])) as run:
        chosen = next(c.value for c in run.choices if c.key == "device.threads")
        collect_evidence(run)
        assert row(run, "system").engaged
        torch.set_num_threads(chosen + 1)
        collect_evidence(run)
        assert not row(run, "system").engaged
        # what a thread that has started since then does with denormals may be told after it
        reason = row(run, "system").reason
        assert reason.partition("; ")[0] == f"{chosen + 1} threads, not the {chosen} chosen"
    torch.set_num_threads(threads)


def test_what_needs_a_gpu_says_no_where_its_switch_changes_nothing() -> None:
    with build(compose([*QUICK, *TABLE, "model=mlp"])) as run:
        rounded, graphs = Tf32(True).engaged(run), CudaGraphs(True).engaged(run)
    assert not rounded.engaged and rounded.reason == "fp32 products keep their whole mantissa"
    assert not graphs.engaged and "needs a compiled model" in graphs.reason


# -- techniques of the user's own -------------------------------------------------------------


@dataclass
class Claimed(Technique):
    """Says that it is engaged, whatever it did."""

    def apply(self, draft: RunBuilder) -> str | None:
        return None

    def engaged(self, run: Run) -> Evidence:
        return Evidence(True, "twice as fast")


class Attribute(Claimed):
    def apply(self, draft: RunBuilder) -> None:
        draft.model.fast = True  # type: ignore[assignment]
        draft.remarks["mine"] = {"speed": 2}


class Context(Claimed):
    def apply(self, draft: RunBuilder) -> None:
        draft.contexts.append(nullcontext)


class Wrapper(Claimed):
    def apply(self, draft: RunBuilder) -> None:
        forward = draft.forward
        draft.forward = lambda *inputs: forward(*inputs)
        draft.model.register_forward_hook(lambda *_: None)
        draft.placements.append(lambda batch: batch)


class Undone(Claimed):
    def apply(self, draft: RunBuilder) -> None:
        draft.scope.callback(torch.set_float32_matmul_precision, "highest")
        torch.set_float32_matmul_precision("medium")

    def engaged(self, run: Run) -> Evidence:
        torch.set_float32_matmul_precision("highest")
        return super().engaged(run)


class Autocast(Claimed):
    def apply(self, draft: RunBuilder) -> None:
        draft.contexts.append(lambda: torch.autocast("cpu", dtype=torch.bfloat16))


class Remember(Claimed):
    def apply(self, draft: RunBuilder) -> None:
        draft.forward = partial(checkpoint, draft.forward, use_reentrant=False)


class Doubled(Claimed):
    def apply(self, draft: RunBuilder) -> None:
        for parameter in draft.model.parameters():
            parameter.register_hook(lambda gradient: gradient * 2)


class Unfused(Claimed):
    def apply(self, draft: RunBuilder) -> None:
        draft.optimizer_options["foreach"] = False


def own(technique: Technique, *overrides: str, model: nn.Module | None = None) -> TechniqueStatus:
    config = compose([*QUICK, *TABLE, *overrides])
    config.optimization.extra = ["mine.Own"]
    model = model or Blocks()
    given = Components(model=model, techniques={"mine.Own": technique})
    with build(config, given=given) as run:
        train(run)
        return row(run, "Own")


@pytest.mark.parametrize("technique", [Claimed, Attribute, Context, Wrapper])
def test_a_technique_of_the_users_own_is_not_engaged_by_its_word(
    technique: type[Claimed],
) -> None:
    found = own(technique(True))
    assert not found.engaged
    assert found.reason == "claims to be engaged; nothing measurable changed"
    assert found.evidence["measured"] == "nothing"


@pytest.mark.parametrize(
    ("technique", "measured"),
    [
        (Autocast, "operators of a step"),
        (Remember, "memory for the backward"),
        (Doubled, "numbers of a step"),
        (Unfused, "optimizer_options"),
    ],
)
def test_what_a_technique_of_the_users_own_changed_is_measured_and_named(
    technique: type[Claimed], measured: str
) -> None:
    found = own(technique(True))
    assert found.engaged
    assert measured in found.evidence["measured"]
    assert found.reason == "claimed by the technique itself; twice as fast"


def test_changes_that_were_undone_later_are_not_engaged() -> None:
    undone = own(Undone(True))
    assert undone.reason == "claims to be engaged; its changes were undone"
    assert not undone.engaged


def test_under_strict_an_unmeasurable_claim_ends_the_run() -> None:
    with pytest.raises(ConfigError, match="nothing measurable changed"):
        own(Claimed(True), "optimization.strict=true", "training.steps=20")
