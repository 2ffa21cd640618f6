"""Each technique shows that it engaged; its evidence denies it where it did not."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from runner import build, train
from runner.core.build.setup import Components
from runner.core.config.groups import CONF
from runner.core.errors import ConfigError
from runner.core.format import technique_status
from runner.core.interfaces.run import Run
from runner.core.interfaces.technique import (
    Evidence,
    RunBuilder,
    RunParts,
    Technique,
    TechniqueStatus,
)
from runner.core.schemas.data import DataConfig
from runner.core.schemas.optimization import CudaGraphs, Optimization, Tf32
from runner.core.techniques.application import warn_unused_settings
from runner.core.techniques.fingerprint import FIELDS_READ, MeasuredTechnique
from runner.core.train.evidence import collect_evidence, technique_statuses
from tests import runs

QUICK = [
    *["training.steps=4", "checkpoint=off", "device.threads=1", "optimization=none"],
    *["data.validation_samples=8", "checks=off"],
]
TABLE = ["data=synthetic", "data.form=tabular", "data.features=16", "data.samples=400"]
IMAGES = ["data=synthetic", "data.form=images", "data.samples=200", "data.channels=3"]


def on(name: str, *knobs: str) -> list[str]:
    return [f"optimization.{name}.{switch}" for switch in ("enabled=true", *knobs)]


def row(run: Run, name: str) -> TechniqueStatus:
    return next(row for row in technique_statuses(run) if row.name == name)


def trained(name: str, *overrides: str, model: nn.Module | None = None) -> TechniqueStatus:
    with runs.opened(*QUICK, *overrides, given=Components(model=model)) as run:
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


@pytest.mark.parametrize(
    ("exact", "only_training", "engaged"),
    [(0, False, True), (1, False, True), (9, True, False)],
)
def test_mixed_precision_is_engaged_by_the_share_of_layers_in_16_bits(
    exact: int, only_training: bool, engaged: bool
) -> None:
    layers = [Layer(i < exact, only_training) for i in range(17)]
    model = nn.Sequential(*layers, nn.Linear(16, 10))
    amp = trained("amp", *TABLE, *on("amp", "dtype=bf16"), model=model)
    assert amp.evidence["layers"] == f"{18 - exact} of 18"
    assert amp.engaged is engaged
    share = f"{18 - exact} of 18 layers with all products in 16 bits"
    assert amp.reason == (share if exact else "")


def test_fp16_runs_with_a_loss_scale() -> None:
    amp = trained("amp", *on("amp", "dtype=fp16"))
    assert amp.engaged and amp.evidence["loss_scale"] > 1


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
    model = Convolutions(sorted_back)
    layout = trained("channels_last", *IMAGES, *on("channels_last"), model=model)
    assert layout.evidence["convolutions"] == f"{8 - sorted_back} of 8"
    assert layout.engaged is engaged
    assert bool(layout.reason) is (sorted_back > 0)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x).relu()


class Uncompiled(Block):
    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Blocks(nn.Module):
    """Calls the first `past` of its blocks by their class, past what is put in the instances."""

    def __init__(self, past: int = 0, block: type[Block] = Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.head, self.past = nn.Linear(16, 10), past

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = self.blocks  # no loop: a graph break in one leaves all of it eager
        x = Block.forward(first, x) if self.past > 0 else first(x)
        x = Block.forward(second, x) if self.past > 1 else second(x)
        return self.head(third(x))


@pytest.mark.parametrize("past", [0, 1, 2])
def test_recompute_is_engaged_by_the_share_of_blocks_that_ran_again(past: int) -> None:
    again = trained("recompute", *TABLE, *on("recompute"), model=Blocks(past))
    assert again.evidence["recomputed_blocks"] == 3 - past
    assert again.engaged is (past < 2)
    assert again.reason == (f"{3 - past} of 3 blocks ran again in the backward" if past else "")


class OneProduct(Block):
    """Keeps its input for the backward, with recompute and without."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@pytest.mark.parametrize(
    ("block", "what", "engaged"),
    [
        (Block, "full", True),
        (Block, "selective", False),  # keeps the product in place of the activation
        (OneProduct, "full", False),
        (OneProduct, "selective", False),
    ],
)
def test_recompute_that_holds_as_many_bytes_is_not_engaged(
    block: type[Block], what: str, engaged: bool
) -> None:
    asked = [*TABLE, *on("recompute", f"what={what}")]
    again = trained("recompute", *asked, model=Blocks(block=block))
    held, without = again.evidence["held_bytes"], again.evidence["held_bytes_without"]
    assert again.evidence["recomputed_blocks"] == 3
    assert (held < without) is engaged is again.engaged
    assert engaged or f"{held:,} bytes are held" in again.reason


class Heavy(nn.Module):
    """Small layers around large products that are kept out of the compiler."""

    def __init__(self, functional: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(4))
        self.up, self.head, self.functional = nn.Linear(16, 512), nn.Linear(16, 10), functional

    @torch.compiler.disable
    def products(self, x: Tensor) -> Tensor:
        hidden = F.linear(x, self.up.weight) if self.functional else self.up(x)
        return hidden.relu() @ self.up.weight

    def forward(self, x: Tensor) -> Tensor:
        first, second, third, fourth = self.norms
        return self.head(fourth(third(self.products(second(first(x))))))


@runs.needs_compiler
@pytest.mark.parametrize("functional", [True, False], ids=["function", "layer"])
def test_compile_is_not_engaged_where_the_heavy_work_runs_uncompiled(functional: bool) -> None:
    compiled = trained("compile", *TABLE, *on("compile"), model=Heavy(functional))
    assert compiled.evidence["layers"] == ("5 of 5" if functional else "5 of 6")
    assert not compiled.engaged
    assert compiled.reason.startswith(f"{compiled.evidence['work']} of the work")
    assert float(compiled.evidence["work"].rstrip("%")) < 10


@runs.needs_compiler
def test_compile_is_engaged_by_the_share_of_layers_in_compiled_graphs() -> None:
    model = Blocks(block=Uncompiled)  # of which the compiler is kept out
    compiled = trained("compile", *TABLE, *on("compile"), model=model)
    assert compiled.evidence["graphs"] >= 1
    assert compiled.evidence["layers"] == "1 of 4"
    assert not compiled.engaged
    assert compiled.reason == "1 of 4 layers in compiled graphs"


@runs.needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(("samples", "made"), [(70, 3), (40, 2)])
def test_the_whole_step_is_engaged_by_the_share_of_steps_in_one_graph(
    samples: int, made: int
) -> None:
    data = [*TABLE[:3], f"data.samples={samples}", "data.validation=0.1", "training.batch_size=24"]
    whole = trained("whole_step", *data, *on("whole_step"), model=nn.Linear(16, 10))
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
    asked = [*QUICK, *TABLE, *on("attention", "kernel=math")]
    with runs.opened(*asked, given=Components(model=Attending())) as run:
        run.model.written_out = written_out  # decided by the user's code later on
        train(run)
        kernel = row(run, "attention")
    assert kernel.engaged is (written_out < 2)
    assert kernel.evidence["calls"] == f"{4 - written_out} of 4"
    assert bool(kernel.reason) is (written_out > 0)


@pytest.mark.parametrize(
    ("optimizer", "ran", "guard"),
    [
        ("AdamW", "fused", "in the kernel"),
        ("SGD", "fused", "in the kernel"),
        ("RAdam", "foreach", "host reads a flag"),
    ],
)
def test_the_fused_optimizer_says_what_ran(optimizer: str, ran: str, guard: str) -> None:
    fused = trained("fused_optimizer", *on("fused_optimizer"), f"optimizer.name={optimizer}")
    assert fused.evidence["implementation"] == ran
    assert fused.evidence["guard"] == guard
    assert fused.evidence["weights"] == ("6 of 6" if ran == "fused" else "0 of 6")
    assert fused.engaged is (ran == "fused")
    assert ran == "fused" or "no fused kernel" in fused.reason


def test_accumulation_counts_its_backward_passes() -> None:
    asked = [*TABLE, "model=mlp", "training.batch_size=32", *on("accumulation", "micro_batch=8")]
    with runs.opened(*QUICK, *asked) as run:
        collect_evidence(run)
        cut = row(run, "accumulation")
        assert cut.engaged and cut.evidence == {"micro_batch": 8, "backward_per_update": 4}
        run.micro_batch = 64
        collect_evidence(run)
        assert not row(run, "accumulation").engaged


def test_a_chunked_loss_is_not_engaged_once_the_layer_makes_whole_logits() -> None:
    text = ["data=stdlib_text", "data.sequence=32", "training.batch_size=4"]
    model = ["model=gpt", "model.width=32", "model.depth=1"]
    with runs.opened(*QUICK, *text, *model, *on("chunked_loss", "chunk=16", "min_mb=0")) as run:
        for module in run.model.modules():
            vars(module).pop("forward", None)
        collect_evidence(run)
        assert not row(run, "chunked_loss").engaged


def test_what_needs_a_gpu_is_not_engaged_where_its_switch_changes_nothing() -> None:
    with runs.opened(*QUICK, *TABLE, "model=mlp") as run:
        rounded, graphs = Tf32(True).engaged(run), CudaGraphs(True).engaged(run)
    assert not rounded.engaged and rounded.reason == "fp32 products keep their whole mantissa"
    assert not graphs.engaged and "needs a compiled model" in graphs.reason


def test_tf32_is_refused_on_a_cpu_with_the_reason_and_is_an_error_under_strict() -> None:
    refused = trained("tf32", *on("tf32"))
    assert refused.requested and not refused.engaged and "no TF32" in refused.reason
    with pytest.raises(ConfigError, match=r"optimization\.tf32.*cannot engage"):
        build(runs.config(*QUICK, *on("tf32"), "optimization.strict=true"))


CUDA = ["device=cuda"]


@pytest.mark.gpu
def test_products_are_rounded_while_the_run_lasts() -> None:
    before = torch.get_float32_matmul_precision()
    rounded = trained("tf32", *CUDA, *on("tf32"), "model.width=256")
    assert rounded.engaged
    assert rounded.evidence["products_are_rounded"]
    assert torch.get_float32_matmul_precision() == before


@pytest.mark.gpu
def test_a_compiled_step_launches_cuda_graphs_and_another_names_the_missing_evidence() -> None:
    compiled = trained("cuda_graphs", *CUDA, *on("cuda_graphs"), *on("compile"))
    assert compiled.engaged and compiled.evidence["graph_launches_per_step"] >= 1
    eager = trained("cuda_graphs", *CUDA, *on("cuda_graphs"))
    assert "optimization.compile.enabled=true" in eager.reason


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["dynamic", "weight_only"])
def test_the_int8_copy_runs_on_a_gpu(mode: str) -> None:
    int8 = on("quantization", f"mode={mode}", "max_drop=1")
    assert trained("quantization", *CUDA, *int8, "training.steps=40").engaged


def test_a_closed_run_leaves_no_global_switch_behind() -> None:
    def switches() -> list[object]:
        return [
            torch.is_anomaly_enabled(),
            torch.are_deterministic_algorithms_enabled(),
            torch.get_num_threads(),
            torch.is_autocast_enabled("cpu"),
            torch.backends.cuda.matmul.allow_tf32,
            torch.is_grad_enabled(),
        ]

    before = switches()
    runs.trained(*QUICK, "debug=anomaly", "optimization=amp", "device.deterministic=true")
    assert switches() == before


def test_a_technique_without_evidence_yet_is_unknown_and_no_fall_back() -> None:
    with runs.opened(*QUICK, "optimization=basic") as run:
        first = next(row for row in technique_statuses(run) if row.requested)
        assert not first.known
        assert technique_status(asdict(first)) == "unknown"
        assert all(row.known for row in train(run).techniques)


@pytest.mark.parametrize("name", ["whole_step", "compile"])
def test_anomaly_mode_at_every_step_is_reported_to_keep_it_from_being_compiled(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    summary = runs.trained(*QUICK, *on("compile"), *on(name), "debug=anomaly")
    reason = "debug=anomaly observes every step"
    assert f"optimization.{name}: {reason}" in caplog.text
    assert "debug.anomaly.every=50" in caplog.text
    for technique in {name, "compile"}:
        status = runs.status(summary, technique)
        assert not status.engaged and reason in status.reason


# -- techniques of the user's own -------------------------------------------------------------


@dataclass
class Claimed(Technique):
    """Makes a change, and claims to be engaged."""

    change: Callable[[RunBuilder], object] = lambda builder: None

    def apply(self, builder: RunBuilder) -> None:
        self.change(builder)

    def engaged(self, run: Run) -> Evidence:
        return Evidence(True, "twice as fast")


def set_field(name: str, value: Any) -> Callable[[RunBuilder], None]:
    return lambda builder: setattr(builder, name, value)


def wrap(builder: RunBuilder) -> None:
    """Change what has no effect on a step."""
    forward = builder.forward
    builder.forward = lambda *inputs: forward(*inputs)
    builder.model.register_forward_hook(lambda *_: None)
    builder.placements.append(lambda batch: batch)
    builder.contexts.append(nullcontext)
    builder.model.fast = True  # type: ignore[assignment]
    builder.technique_facts["mine"] = {"speed": 2}


def autocast(builder: RunBuilder) -> None:
    builder.contexts.append(lambda: torch.autocast("cpu", dtype=torch.bfloat16))


def remember(builder: RunBuilder) -> None:
    builder.forward = partial(checkpoint, builder.forward, use_reentrant=False)


def double_gradients(builder: RunBuilder) -> None:
    for parameter in builder.model.parameters():
        parameter.register_hook(lambda gradient: gradient * 2)


def own(technique: Technique, *overrides: str) -> TechniqueStatus:
    config = runs.config(*QUICK, *TABLE, *overrides)
    config.optimization.extra = ["mine.Own"]
    given = Components(model=Blocks(), techniques={"mine.Own": technique})
    with build(config, given=given) as run:
        train(run)
        return row(run, "Own")


@pytest.mark.parametrize("change", [Claimed.change, wrap])
def test_a_technique_of_the_users_own_is_not_engaged_by_its_word(
    change: Callable[[RunBuilder], object],
) -> None:
    status = own(Claimed(True, change))
    assert not status.engaged
    assert status.reason == "claims to be engaged; nothing measurable changed"
    assert status.evidence["measured"] == "nothing"


@pytest.mark.parametrize(
    ("change", "measured"),
    [
        (autocast, "numbers"),
        (remember, "memory for the backward"),
        (double_gradients, "numbers"),
        (lambda builder: builder.optimizer_options.update(foreach=True), "optimizer_options"),
        (set_field("micro_batch", 4), "micro_batch"),
        (set_field("loss_scale", 2.0), "loss_scale"),
    ],
)
def test_what_a_technique_of_the_users_own_changed_is_measured_and_named(
    change: Callable[[RunBuilder], object], measured: str
) -> None:
    status = own(Claimed(True, change))
    assert status.engaged
    assert measured in status.evidence["measured"]
    assert status.reason == "claimed by the technique itself; twice as fast"


UNREAD = [
    *[("index_limit", 99), ("requested_micro_batch", 4), ("requested_threads", 3)],
    *[("requested_tf32", True), ("ema", True), ("recorded", {"a": 1}), ("in_memory", False)],
    *[("cuda_graphs", True), ("batch_size", 7), ("fallback_reasons", {"mine": "faster"})],
    *[("recoveries", [lambda run, error: False]), ("forward_cost", 1), ("fast", True)],
    ("optimizer_options", {"foreach": None, "fused": False}),  # as without it
    ("data", DataConfig(kind="own", prefetch=7)),  # without workers
]


@pytest.mark.parametrize(("field", "value"), UNREAD, ids=[name for name, _ in UNREAD])
def test_a_users_technique_that_sets_what_no_part_of_the_run_reads_is_not_engaged(
    field: str, value: Any
) -> None:
    status = own(Claimed(True, set_field(field, value)))
    assert not status.engaged and status.evidence["measured"] == "nothing"


def test_what_the_build_reads_after_the_techniques_is_compared_for_those_of_the_user(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read: set[str] = set()

    def get(builder: RunBuilder, name: str) -> Any:
        read.add(name)
        return object.__getattribute__(builder, name)

    apply = MeasuredTechnique.apply

    def apply_and_watch(measured: MeasuredTechnique, builder: RunBuilder) -> str | None:
        reason = apply(measured, builder)
        monkeypatch.setattr(RunBuilder, "__getattribute__", get)
        return reason

    monkeypatch.setattr(MeasuredTechnique, "apply", apply_and_watch)
    own(Claimed(True))
    own_fields = {f.name for f in fields(RunBuilder)} - {f.name for f in fields(RunParts)}
    assert read & own_fields - {"optimizer_options", "data"} <= {*FIELDS_READ, "measure_gains"}


class Incomplete(Technique):
    def apply(self, builder: RunBuilder) -> str | None:
        return None


class Unproven(Claimed):
    def engaged(self, run: Run) -> Evidence:
        return True  # type: ignore[return-value]


@pytest.mark.parametrize("kind", ["Incomplete", "Layer"])
def test_a_class_that_is_no_complete_technique_is_refused(kind: str) -> None:
    trusted = f"security.trusted=[{__name__.partition('.')[0]}]"
    message = f"^optimization.extra: {__name__}.{kind} is not a Technique; inherit from runner.Tec"
    with pytest.raises(ConfigError, match=message):
        build(runs.config(*QUICK, trusted, f"optimization.extra=[{__name__}.{kind}]"))


def test_evidence_of_another_type_is_named() -> None:
    reason = own(Unproven(True)).reason
    assert reason.endswith("engaged() of Unproven must return runner.Evidence, got bool")


def test_under_strict_an_unmeasurable_claim_ends_the_run() -> None:
    with pytest.raises(ConfigError, match="nothing measurable changed"):
        own(Claimed(True), "optimization.strict=true", "training.steps=20")


@dataclass
class WithOneMore(Optimization):
    """The group with one line more, as a developer would add it."""

    claimed: Claimed = field(default_factory=Claimed)


def test_a_field_of_the_group_is_all_that_registers_a_technique() -> None:
    config: Any = runs.config(*QUICK, "training.batch_size=32")
    config.optimization = WithOneMore(claimed=Claimed(True, set_field("micro_batch", 16)))
    with build(config) as run:
        summary = train(run)
    last = summary.techniques[-1]
    assert (last.name, last.engaged, last.reason) == ("claimed", True, "twice as fast")
    assert run.micro_batch == 16


def test_a_setting_of_a_technique_that_is_off_is_named_and_no_option_has_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    typed = (*runs.TABLE, "optimization=none", "optimization.recompute.what=every")
    with runs.opened(*typed):
        (message,) = (r.message for r in caplog.records if "has no effect" in r.message)
    assert message.startswith("optimization.recompute.what=every has no effect: ")
    assert "optimization.recompute.enabled=true" in message
    caplog.clear()
    replayed = Components(choices={"data.split": "random"})  # its own techniques are switched off
    with runs.opened(*typed, given=replayed):
        assert not [r for r in caplog.records if "has no effect" in r.message]
    for option in sorted((CONF / "optimization").glob("*.yaml")):
        warn_unused_settings(runs.config(f"optimization={option.stem}").optimization)
    assert not caplog.records
