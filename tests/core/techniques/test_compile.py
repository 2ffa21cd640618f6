"""Compiling reports what it did, goes down when it fails, and is left out where it cannot pay."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.variables.tensor import TensorVariable

from runner import train
from runner.core.build.setup import Components
from runner.core.errors import DataError
from runner.core.record.console import close_logging, set_up_logging
from runner.core.techniques import compiler, cost
from tests import runs
from tests.core.techniques.test_evidence import Blocks

TABLE = [
    *["training.steps=4", "data=synthetic", "data.form=tabular", "data.features=16"],
    *["training.batch_size=32", "data.samples=256", "checks=off"],
]
TINY = [*TABLE, "model.width=16", "model.depth=1"]
COMPILE = "optimization=compile"


@runs.needs_compiler
@pytest.mark.usefixtures("my_package")
def test_a_graph_break_is_reported_with_its_line() -> None:
    own = [*TABLE, COMPILE, "model._target_=my_package.Branching", *runs.OURS]
    broken = runs.status(runs.trained(*own), "compile")
    assert broken.engaged
    assert broken.evidence["graph_breaks"] == 1
    file, _, line = broken.evidence["broken_at"][0].rpartition(":")
    assert "if output.sum() > 0" in Path(file).read_text().splitlines()[int(line) - 1]
    assert "branching" in broken.evidence["why_broken"][0].lower()


def item(x: torch.Tensor) -> torch.Tensor:
    return x * x.sum().item()


def branch(x: torch.Tensor) -> torch.Tensor:
    return x if x.sum() > 0 else -x


def test_messages_of_the_compiler_are_one_line_on_the_screen_and_whole_in_the_log(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    lines = [f"({__file__}:{f.__code__.co_firstlineno + 1})" for f in (item, branch)]
    set_up_logging("info", tmp_path)
    with ExitStack() as scope:
        compiler.prepare(scope)
        # torch warns once a process, and another test may have caused it
        TensorVariable._warn_capture_scalar_outputs.cache_clear()
        torch.compile(item, backend="eager")(torch.ones(3))
        with pytest.raises(Exception, match="branching") as failed:
            torch.compile(branch, backend="eager", fullgraph=True)(torch.ones(3))
        gist = compiler.log_compiler_error(failed.value)
    close_logging()
    shown = capfd.readouterr().err.splitlines()
    assert len(shown) == 1 and f"Graph break from `Tensor.item()` {lines[0]}" in shown[0]
    assert "\n" not in gist and gist.endswith(lines[1]) and len(gist) < 250
    logged = (tmp_path / "run.log").read_text()
    assert "capture_scalar_outputs = True" in logged and str(failed.value).split()[-1] in logged


@runs.needs_compiler
def test_the_second_run_uses_what_the_first_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    pair = [runs.status(runs.trained(*TINY, COMPILE), "compile").evidence for _ in range(2)]
    assert [evidence["cache"] for evidence in pair] == ["cold", "warm"]


@pytest.mark.parametrize("content", [b"", b"\x7fELF", b"text" * 100])
def test_a_damaged_library_of_the_cache_is_removed_and_said(
    tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed process leaves part of a file; the loader's own message names it."""
    cache, other = tmp_path / "cache" / "ab" / "code.so", tmp_path / "other.so"
    cache.parent.mkdir(parents=True)
    monkeypatch.setenv(compiler.CACHE_VARIABLE, str(tmp_path / "cache"))
    for library in (cache, other):
        library.write_bytes(content)
        with pytest.raises(OSError, match="file too short|invalid ELF header") as raised:
            ctypes.CDLL(str(library))
        is_said = f"{library} was damaged" in compiler.log_compiler_error(raised.value)
        assert is_said == (not library.exists()) == (library == cache)


@runs.needs_compiler
def test_regional_compile_takes_the_blocks_and_validation_stays_eager() -> None:
    regional = [*TABLE, COMPILE, "optimization.compile.regional=true"]
    blocks = Blocks()
    model = nn.Sequential(nn.Linear(16, 16), blocks)  # so that all inputs of blocks take gradients
    with runs.opened(*regional, given=Components(model=model)) as run:
        compiled = runs.status(train(run), "compile")
        chosen = [m for m in run.model.modules() if m._compiled_call_impl is not None]
        assert chosen == list(blocks.blocks)
    assert compiled.engaged
    assert compiled.evidence["graph_breaks"] == 0
    assert compiled.evidence["recompiles"] == 0  # neither for evaluation nor for each block


@runs.needs_compiler
def test_a_token_that_is_not_in_the_vocabulary_is_an_error_and_not_the_end_of_the_process() -> None:
    text = ["data=stdlib_text", "model=gpt", "model.width=16", "model.depth=1", "data.sequence=16"]
    with runs.opened(*text, COMPILE) as run:
        inputs, target = next(run.train.batches(0))
        inputs[0, 0] = 100_000
        with pytest.raises(DataError, match="token id is out of range"):
            for place in run.train.placements:  # type: ignore[attr-defined]
                place((inputs, target))


def test_the_cache_is_one_folder_per_torch_and_cpu_unless_it_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = compiler.cache_folder({"XDG_CACHE_HOME": "/cache"})
    assert here.parent == Path("/cache/runner/compiled") and torch.__version__ in here.name
    monkeypatch.setattr(compiler, "cpu_flags", lambda: frozenset({"another"}))
    assert compiler.cache_folder({"XDG_CACHE_HOME": "/cache"}) != here
    assert compiler.cache_folder({"TORCHINDUCTOR_CACHE_DIR": "/mine"}) == Path("/mine")


# -- the mode --------------------------------------------------------------------------------------


@pytest.fixture
def gpu_builder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A builder on a GPU whose default mode pays from 100 steps on."""
    monkeypatch.setattr(cost, "compile_break_even", lambda builder, cold: (100, "by rule"))
    choices: dict[str, tuple[str, str]] = {}
    with ExitStack() as scope:
        yield SimpleNamespace(
            device=SimpleNamespace(kind="cuda"),
            cuda_graphs=False,
            micro_batch=32,
            batch_size=32,
            total_steps=100,
            scope=scope,
            choices=choices,
            choose=lambda key, decide: choices.setdefault(key, decide())[0],
        )


def test_auto_on_a_gpu_is_default_mode_and_autotunes_where_the_run_pays_for_it(
    gpu_builder: Any,
) -> None:
    required = 100 * cost.AUTOTUNE_S / cost.COLD_COMPILE_S
    gpu_builder.total_steps = int(required) - 1
    assert compiler.select_modes("auto", gpu_builder) == ["default"]
    mode, reason = gpu_builder.choices["optimization.compile.mode"]
    assert mode == "default" and "autotuning from 1,000 on" in reason
    gpu_builder.choices.clear()
    gpu_builder.total_steps = int(required)
    autotuned = ["max-autotune-no-cudagraphs", "default"]
    assert compiler.select_modes("auto", gpu_builder) == autotuned
    gpu_builder.total_steps = 1  # a resumed run keeps its choice
    assert compiler.select_modes("auto", gpu_builder) == autotuned
    assert compiler.select_modes("max-autotune", gpu_builder) == ["max-autotune", "default"]
    gpu_builder.device.kind = "cpu"
    assert compiler.select_modes("auto", gpu_builder) == ["default"]


def test_autotuning_prints_no_tables_until_the_run_ends(gpu_builder: Any) -> None:
    from torch._inductor import config as inductor_config
    from torch._inductor import select_algorithm

    def prints() -> list[bool]:
        return [select_algorithm.PRINT_AUTOTUNE, inductor_config.max_autotune_report_choices_stats]

    before = prints()
    assert all(before)
    compiler.select_modes("default", gpu_builder)
    assert prints() == before
    compiler.select_modes("max-autotune", gpu_builder)
    assert not any(prints())
    gpu_builder.scope.close()
    assert prints() == before


def test_a_clock_that_stands_still_leaves_an_assumed_time_of_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("runner.core.techniques.cost.step_seconds", lambda builder: 0.0)
    builder = SimpleNamespace(measure_gains=True, gains=None)
    steps, reason = cost.compile_break_even(builder)
    assert steps > 0 and "the clock does not advance" in reason


@pytest.mark.parametrize(("dynamic", "graphs"), [(True, 1), (False, 2)])
def test_sizes_that_may_change_need_no_second_graph(
    dynamic: bool, graphs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_module = nn.Module.compile

    def without_code(module: nn.Module, mode: str, dynamic: bool | None) -> None:
        compile_module(module, backend="eager", dynamic=dynamic)

    monkeypatch.setattr(nn.Module, "compile", without_code)
    torch._dynamo.reset()
    compilation = compiler.Compilation([SizedByInput()], ["default"], dynamic)
    compilation.start()
    for rows in (3, 5, 7):
        compilation.parts[0](torch.ones(rows, 2))
    compilation.stop()
    found = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert found == graphs if dynamic else found >= graphs
    key = "optimization.compile.dynamic"
    assert runs.config(f"{key}={dynamic}").optimization.compile.dynamic is dynamic


class SizedByInput(nn.Module):
    """A model whose graph depends on the number of rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x.shape[0]
