"""CUDA graphs are refused where a step has several backwards, and dropped where it gets them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._inductor.compile_fx as inductor
from torch import Tensor, nn

from runner import train
from runner.core.device import device_errors
from runner.core.execution.evaluation import evaluate
from runner.core.interfaces.run import Run
from runner.core.optim import whole_step
from runner.core.optim.whole_step import StepGraph
from runner.core.record.summary import Summary
from runner.core.schemas.optimization import CudaGraphs
from runner.core.techniques import compiler, cuda_graphs
from runner.core.train.step import make_step
from tests import runs
from tests.core.execution.test_recovery import Limited
from tests.runs import differences

TABLE = [
    *["optimization=none", "data=synthetic", "data.form=tabular", "data.features=16"],
    *["data.samples=256", "training.batch_size=32", "training.steps=4", "checks=off"],
    *["model.width=16", "model.depth=1", "training.validate_every=100"],
]
COMPILE = [*TABLE, "optimization.compile.enabled=true", "optimization.compile.min_steps=1"]
WHOLE = [
    *["optimization.whole_step.enabled=true", "optimization.fused_optimizer.enabled=true"],
    "optimization.whole_step.cpp_wrapper=false",
]
GRAPHS_MODE = "optimization.compile.mode=reduce_overhead"


# refused


def gpu_builder(micro_batch: int, cuda_graphs: bool) -> Any:
    return SimpleNamespace(
        micro_batch=micro_batch, batch_size=32, cuda_graphs=cuda_graphs, fallback_reasons={},
        device=SimpleNamespace(kind="cuda"),
        choose=lambda key, decide: "default", scope=ExitStack(),
    )  # fmt: skip


@pytest.mark.parametrize("mode", ["auto", "default", "reduce-overhead", "max-autotune"])
@pytest.mark.parametrize("requested", [True, False])
def test_no_mode_with_cuda_graphs_is_selected_for_micro_batches(mode: str, requested: bool) -> None:
    split, whole = gpu_builder(16, requested), gpu_builder(32, requested)
    assert compiler.CUDA_GRAPH_MODES.keys().isdisjoint(compiler.select_modes(mode, split))
    with_graphs = compiler.select_modes(mode, whole)[0] in compiler.CUDA_GRAPH_MODES
    assert with_graphs == (requested or mode in compiler.CUDA_GRAPH_MODES)
    reason = split.fallback_reasons.get("compile", "")
    assert ("micro-batches of 16" in reason) == with_graphs and not whole.fallback_reasons


def test_cuda_graphs_are_skipped_for_micro_batches_with_the_reason() -> None:
    split, whole = gpu_builder(16, False), gpu_builder(32, False)
    reason = cuda_graphs.apply(CudaGraphs(True), split)
    assert reason == "micro-batches of 16: the step is several backward passes"
    assert cuda_graphs.apply(CudaGraphs(True), whole) is None
    assert (split.cuda_graphs, whole.cuda_graphs) == (False, True)


@pytest.mark.parametrize(
    ("typed", "reason"),
    [
        ("training.micro_batch=16", "micro-batches of 16: the step is several backward passes"),
        ("optimization.accumulation.enabled=true optimization.accumulation.micro_batch=16",
         "micro-batches of 16: the step is several backward passes"),
        ("optimizer.name=RAdam", "RAdam"),
    ],
    ids=["micro_batch", "accumulation", "optimizer"],
)  # fmt: skip
def test_the_whole_step_is_refused_for_several_backwards_or_an_optimizer_without_a_kernel(
    typed: str, reason: str
) -> None:
    with runs.opened(*TABLE, *WHOLE, *typed.split()) as run:
        assert run.step_graph is None
        assert reason in runs.status(train(run), "whole_step").reason


def test_a_bare_model_gets_no_cuda_graphs_as_calls_would_overwrite_outputs() -> None:
    from runner import optimize

    graphs = ["optimization.cuda_graphs.enabled=true"]
    example = torch.zeros(3, 4)
    with optimize(nn.Linear(4, 2), "none", example=example, overrides=graphs) as model:
        (row,) = [row for row in model.engagements() if row.name == "cuda_graphs"]
    assert not row.engaged and "overwrite" in row.reason


# dropped by halving


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Compile by tracing alone; returns the modes of the compiled calls."""
    modes: list[str] = []

    def compile_traced(part: nn.Module, mode: str, dynamic: bool | None) -> None:
        def backend(graph: Any, inputs: Any) -> Any:
            def call(*args: Any) -> Any:
                modes.append(mode)
                return graph(*args)

            return call

        part.compile(backend=backend)

    monkeypatch.setattr(compiler, "_compile", compile_traced)
    return modes


def state(run: Run) -> list[Any]:
    """Copies of weights, buffers and moments."""
    return deepcopy([run.model.state_dict(), run.update.optimizer.state_dict()["state"]])


def trained(*overrides: str, most: int | None = None, later: int = 0) -> tuple[Run, Summary]:
    with runs.opened(*overrides) as run:
        if most is not None:
            run.objective = Limited(run.objective, most, later)
        return run, train(run)


@pytest.mark.parametrize("later", [0, 2], ids=["first step", "third step"])
def test_a_compiled_forward_out_of_memory_continues_with_half_the_batch_and_no_cuda_graphs(
    later: int, calls: list[str]
) -> None:
    run, summary = trained(*COMPILE, GRAPHS_MODE, most=16, later=later)
    assert run.micro_batch == 16 and summary.status == "done"
    halved = calls.index("default")  # a call may be made twice, to look at the first batch
    assert halved > later and {*calls[:halved]} == {"reduce-overhead"}
    assert {*calls[halved:]} == {"default"}
    assert "ran out of memory" in run.fallback_reasons["cuda_graphs"]
    eager, _ = trained(*TABLE, most=16, later=later)
    assert differences(state(run), state(eager)) == []


def test_one_sample_is_tried_again_without_cuda_graphs(calls: list[str]) -> None:
    with runs.opened(*COMPILE, GRAPHS_MODE, "training.batch_size=1") as run:
        objective = run.objective

        class LessMemory(Limited):
            def _weigh(self, target: Any) -> None:
                if calls and calls[-1] == "reduce-overhead":
                    torch.empty(2**50)

        run.objective = LessMemory(objective, 0)
        assert train(run).status == "done"
        assert run.compilation is not None and run.compilation.mode == "default"


def test_a_loss_of_a_cuda_graph_is_copied_as_the_next_step_overwrites_it(calls: list[str]) -> None:
    class OneLoss(Limited):
        """Returns every loss in the same memory, as a graph does."""

        memory = torch.zeros(())

        def __call__(self, output: Any, target: Any) -> Any:
            loss = self.own(output, target)
            self.memory.copy_(loss.detach())
            return Overwritten.apply(loss, self.memory)

    class Overwritten(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, loss: Tensor, memory: Tensor) -> Tensor:
            return memory.view_as(memory)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
            return gradient, None

    with runs.opened(*COMPILE, GRAPHS_MODE) as run:
        run.objective = OneLoss(run.objective, 32)
        run.model.train()
        batches = run.train.batches(0)
        losses = [make_step(run, next(batches))[0].loss for _ in range(3)]
        run.train.close()
    assert len({loss.item() for loss in losses}) == 3


def test_an_evaluation_never_runs_a_compiled_graph(calls: list[str]) -> None:
    with runs.opened(*COMPILE, GRAPHS_MODE) as run:
        run.model.train()
        step, _ = make_step(run, next(run.train.batches(0)))
        loss, made = step.loss.item(), len(calls)
        evaluate(run)
        assert made == len(calls) == 1 and step.loss.item() == loss
        run.train.close()


# out of memory in the whole step


def fail(*_: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def fail_in_cpp(*_: Any) -> Any:
    call = "aoti_torch_empty_strided(2, int_array_0, int_array_1, 6, 0, 0, &buf3_handle)"
    raise RuntimeError(f"{call} API call failed at /tmp/c.cpp, line 131")


@pytest.mark.parametrize("failure", [fail, fail_in_cpp], ids=["torch", "C++ wrapper"])
def test_out_of_memory_in_the_whole_step_continues_eagerly_with_half_the_batch(
    failure: Callable[..., Any],
) -> None:
    with runs.opened(*TABLE, *WHOLE) as run:
        assert run.step_graph is not None
        run.step_graph._step = failure
        summary = train(run)
    assert run.step_graph is None and run.micro_batch == 16
    assert summary.status == "done" and summary.faults["out_of_memory"] == 1
    row = runs.status(summary, "whole_step")
    assert row.status == "fell back" and "step 1 ran out of memory" in row.reason
    eager, _ = trained(*TABLE, WHOLE[1], "training.micro_batch=16")
    assert differences(state(run), state(eager)) == []


def test_a_failed_call_of_compiled_code_that_only_computes_is_not_taken_for_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device_errors, "_last_cause", str)  # torch's is of an earlier test
    error = RuntimeError("aoti_torch_cpu_mm_out(buf2, arg6, arg4) API call failed at c.cpp, line 1")
    with runs.opened(*TABLE, *WHOLE) as run:
        assert run.step_graph is not None
        run.step_graph.steps, run.step_graph._step = 1, lambda *_: (_ for _ in ()).throw(error)
        with pytest.raises(RuntimeError, match="mm_out"):
            train(run)
    assert run.micro_batch == 32


def test_an_eager_step_out_of_memory_gives_up_the_whole_step_for_full_batches() -> None:
    with runs.opened(*TABLE, *WHOLE) as run:
        graph = run.step_graph
        assert graph is not None
        run.objective = Limited(run.objective, 16)
        samples, graph.samples = graph.samples, 0  # the first step is eager, as a watched one is
        run.model.train()
        batches = run.train.batches(0)
        make_step(run, next(batches))
        graph.samples, graph._step = samples, fail
        make_step(run, next(batches))
        assert run.step_graph is None and run.micro_batch == 16
        run.train.close()


SMALL = "optimization=none training.batch_size=8 checks=off training.steps=4".split()
HEADS = ["model.width=16", "model.depth=1", "model.heads=2"]
TOKENS = ["data=synthetic", *"data.form=tokens data.sequence=8 data.vocab=32".split()]
MODELS = {
    "mlp": [*TABLE, "optimizer.ema=0.9"],
    "cnn": [*SMALL, *"data=digits model=cnn model.width=4 model.stages=1 model.blocks=1".split()],
    "gpt": [*SMALL, *TOKENS, "data.samples=64", "model=gpt", *HEADS],
    "classifier": [*SMALL, "data=stdlib_parts", "model=classifier", *HEADS],
}
SLOW_MODELS = [
    "mlp" if name == "mlp" else pytest.param(name, marks=pytest.mark.slow) for name in MODELS
]


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_a_whole_step_changes_no_weight_before_its_last_allocation(model: str) -> None:
    from torch._inductor.codecache import PyCodeCache

    with runs.opened(*MODELS[model], *WHOLE) as run:
        graph = run.step_graph
        assert graph is not None, run.fallback_reasons
        run.model.train()
        batch = next(run.train.batches(0))
        graph(batch)
        (module,) = PyCodeCache.modules
        allocate, sizes = module.empty_strided_cpu, []

        def limited(size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
            sizes.append(size)
            if len(sizes) == fails_at:
                fail()
            return allocate(size, stride, dtype)  # type: ignore[no-any-return]

        fails_at = 0
        module.empty_strided_cpu = limited
        graph.dry_run(batch)
        before, allocations = state(run), len(sizes)
        assert allocations > 5
        for fails_at in range(1, allocations + 1):
            sizes.clear()
            with pytest.raises(torch.OutOfMemoryError):
                graph(batch)
            assert differences(before, state(run)) == [], (fails_at, sizes[-1])
        fails_at = 0
        graph(batch)
        assert differences(before, state(run))
        run.train.close()


# inputs that a graph changes


class Traced(Exception):
    """The graph is known; no code is generated."""


@pytest.mark.parametrize("model", SLOW_MODELS)
def test_inputs_that_the_whole_step_changes_are_static(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed: set[int] = set()
    static: set[int] = set()

    def inspect(graph: Any, inputs: Any, **options: Any) -> None:
        nodes = [node for node in graph.graph.nodes if node.op == "placeholder"]
        copies = [n for n in graph.graph.nodes if n.target is torch.ops.aten.copy_.default]
        changed.update(nodes.index(n.args[0]) for n in copies if n.args[0] in nodes)
        static.update(options["static_input_idxs"])
        raise Traced

    monkeypatch.setattr(inductor, "_compile_fx_inner", inspect)
    with runs.opened(*MODELS[model], *WHOLE) as run, ExitStack() as scope:
        graph = run.step_graph
        assert graph is not None, run.fallback_reasons
        whole_step._mark_static(run.update, graph.targets)  # as with CUDA graphs
        scope.callback(run.train.close)
        run.model.train()
        assert isinstance(graph, StepGraph)
        make_step(run, next(run.train.batches(0)))
        weights = len(list(run.model.parameters()))
        assert "Traced" in run.fallback_reasons["whole_step"]
    assert len(changed) >= 3 * weights and changed <= static  # a weight and its two moments
