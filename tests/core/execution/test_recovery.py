"""Out of memory: cut smaller and carried on with, or one clear error; under a real limit."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from runner import build, compose, train
from runner.core.build.arguments import loss_objective
from runner.core.build.setup import Components
from runner.core.device.device_errors import is_out_of_memory, translate_oom
from runner.core.errors import ConfigError, OutOfMemory
from runner.core.interfaces.objective import Objective
from runner.core.record.summary import Summary
from tests.runs import differences, opened, trained, weights

ROOT = Path(__file__).parents[3]
QUICK = ["monitoring.progress=false", "device=cpu", "device.threads=2", "optimization=none"]
CNN = [*QUICK, "data=digits", "model=cnn", "model.width=8", "training.batch_size=32",
       "training.steps=3"]  # fmt: skip
CPU = ("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
       "you tried to allocate 8388608 bytes. Error code 12 (Cannot allocate memory)")  # fmt: skip

FAILED = "API call failed at /cache/ab/c.main.cpp, line 131"


@pytest.mark.parametrize(
    ("error", "lacks"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (MemoryError(), True),
        (RuntimeError(CPU), True),
        (RuntimeError("std::bad_alloc"), True),
        (OSError(errno.ENOMEM, "fork"), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (OSError(errno.ENOENT, "gone"), False),
        (ConfigError("x", "out of memory"), False),
        (ValueError("not enough memory"), False),
        (RuntimeError(f"aoti_torch_empty_strided(2, s, s, 6, 0, 0, &buf1) {FAILED}"), True),
        (RuntimeError(f"aoti_torch_empty_strided_pinned(1, s, s, 6, 0, 0, &buf1) {FAILED}"), True),
        (RuntimeError(f"aoti_torch_cpu_addmm_out(buf2, arg6_1, arg4_1, 1L, 1L) {FAILED}"), False),
        (RuntimeError(f"aoti_torch_copy_(empty_strided, arg4_1, 0) {FAILED}"), False),
        (RuntimeError(f"my_library_call() {FAILED}"), False),
    ],
    ids=repr,
)
def test_lack_of_memory_is_recognised(error: Exception, lacks: bool) -> None:
    assert is_out_of_memory(error) is lacks


def test_a_capture_that_lack_of_memory_has_ended_is_recognised() -> None:
    ended = torch.AcceleratorError("CUDA error: operation failed due to a previous error captured")
    assert not is_out_of_memory(ended)
    ended.__context__ = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    assert is_out_of_memory(ended)
    ended.__context__ = RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    assert not is_out_of_memory(ended)


def test_the_cause_of_a_failed_call_of_compiled_code_is_read_where_torch_keeps_it() -> None:
    library = ctypes.CDLL(str(next((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"))))
    if not hasattr(library, "torch_exception_get_what"):
        pytest.skip("torch keeps it from 2.13 on")
    (size, stride), number = map(ctypes.c_int64 * 1, (2**50, 1)), ctypes.c_int32
    failed = library.aoti_torch_empty_strided(
        ctypes.c_int64(1), size, stride, number(6), number(0), number(0), ctypes.c_void_p()
    )
    assert failed and is_out_of_memory(RuntimeError(f"aoti_torch_cpu_convolution(x, w) {FAILED}"))


def test_a_real_allocation_that_fails_is_recognised_and_told_in_plain_words() -> None:
    with pytest.raises(OutOfMemory, match=r"more\) here; make the model smaller") as caught:
        with translate_oom("here"):
            torch.empty(2**50)
    assert caught.value.exit_code == 2
    assert caught.value.__cause__ is None


class Limited(Objective):
    """An objective that allocates more than any machine has when a part is above `most` samples."""

    def __init__(self, own: Objective, most: int, from_step: int = 0) -> None:
        self.own, self.most, self.left = own, most, from_step

    def _weigh(self, target: Any) -> None:
        if len(target) > self.most and self.left <= 0:
            torch.empty(2**50)
        self.left -= 1

    def __call__(self, output: Any, target: Any) -> Any:
        self._weigh(target)
        return self.own(output, target)

    def weight(self, target: Any) -> Any:
        return self.own.weight(target)

    def batch_sums(self, output: Any, target: Any) -> Any:
        self._weigh(target)
        return self.own.batch_sums(output, target)

    def metrics(self, totals: Any) -> Any:
        return self.own.metrics(totals)

    def confusion(self, totals: Any) -> Any:
        return self.own.confusion(totals)


def trained_within(most: int, *overrides: str) -> tuple[dict[str, Any], Summary]:
    with opened(*CNN, *overrides) as run:
        run.objective = Limited(run.objective, most)
        summary = train(run)
        return weights(run), summary


def test_weights_and_batchnorm_are_those_of_the_smaller_micro_batch_from_the_start() -> None:
    named, _ = trained_within(32, "training.micro_batch=8")
    halved, summary = trained_within(8)
    assert differences(named, halved) == []
    assert summary.status == "done" and summary.steps == 3
    choice = [c for c in summary.choices if c.key == "training.micro_batch"]
    assert [c.value for c in choice] == [8]
    assert "step 1 ran out of memory" in choice[0].reason and "with 16" in choice[0].reason


@pytest.mark.slow
def test_validation_is_cut_smaller_too_and_its_metrics_stay() -> None:
    _, plain = trained_within(32, "training.micro_batch=8")
    _, cut = trained_within(8, "training.micro_batch=8")
    assert cut.faults["out_of_memory"] == 2  # 32 to 16 to 8
    for name, value in plain.metrics.items():
        assert cut.metrics[name] == pytest.approx(value, rel=1e-5), name


def test_a_resumed_run_keeps_the_smaller_size(tmp_path: Path) -> None:
    overrides = [*CNN, "checkpoint.resume=auto"]
    with build(compose(overrides), tmp_path) as run:
        run.objective = Limited(run.objective, 16)
        train(run)
        assert run.micro_batch == 16
    with build(compose([*overrides, "training.steps=5"]), tmp_path) as run:
        assert run.micro_batch == 16
        train(run)
        assert run.checkpointer.choices["training.micro_batch"] == 16


def test_one_sample_that_does_not_fit_is_one_clear_error_after_a_checkpoint(tmp_path: Path) -> None:
    late = ["training.batch_size=4", "training.validate_every=100"]
    with build(compose([*CNN, *late]), tmp_path) as run:
        run.objective = Limited(run.objective, 0, from_step=2)
        with pytest.raises(OutOfMemory, match="step 3: out of memory .* with one sample"):
            train(run)
    found = Summary.read(tmp_path)
    assert found.status == "failed" and "optimization=memory_efficient" in found.reason
    assert found.steps == 2 and found.checkpoint.last == "checkpoints/step_00000002"
    assert found.faults["out_of_memory"] == 3  # 4, 2 and 1


@pytest.mark.slow
def test_batchnorm_without_values_enough_is_the_same_error(my_package: None) -> None:
    own = ["data=cancer", "model._target_=my_package.Normed", "security.trusted=[my_package]"]
    with build(compose([*QUICK, *own, "training.steps=2"])) as run:
        run.objective = Limited(run.objective, 1)
        with pytest.raises(OutOfMemory, match="BatchNorm needs more"):
            train(run)


# under a real limit, in a process of its own

WARM = """
import json, resource, sys, torch
a = torch.randn(512, 512, requires_grad=True)  # threads and libraries are there before the limit
(a @ a).sum().backward()
torch.nn.functional.conv2d(torch.randn(4, 3, 32, 32), torch.randn(8, 3, 3, 3))
from hashlib import sha256
from runner import Hook, build, compose, train
from runner.core.device import memory
from runner.core.errors import RunnerError

def limit(mib):
    with open("/proc/self/statm") as file:
        held = int(file.read().split()[0]) * memory.PAGE
    resource.setrlimit(resource.RLIMIT_AS, (held + (mib << 20), resource.RLIM_INFINITY))

class Limit(Hook):  # set after the graph is compiled: a compiler has no room in it
    def on_step(self, run, step):
        if step.number == 1: limit(60)
"""
LIMITED = """
if left := int(sys.argv[1]): limit(left)
try:
    with build(compose(sys.argv[2:])) as run:
        summary = train(run)
        state = b"".join(t.numpy().tobytes() for t in run.model.state_dict().values())
except RunnerError as error:
    sys.stderr.write(f"error: {error}")
    sys.exit(error.exit_code)
print(json.dumps({"micro": run.micro_batch, "weights": sha256(state).hexdigest(),
                  "faults": summary.faults, "status": summary.status, "steps": summary.steps}))
"""
GRAPH_LIMITED = """
with build(compose(sys.argv[1:])) as run:
    run.hooks.append(Limit())
    summary = train(run)
    row = next(row for row in summary.techniques if row.name == "whole_step")
print(json.dumps({"micro": run.micro_batch, "status": summary.status, "row": row.reason,
                  "faults": summary.faults, "steps": summary.steps}))
"""
LARGE = ["data=synthetic", "data.form=tokens", "data.sequence=256", "model=gpt",
         "model.width=128", "model.depth=2", "training.batch_size=32"]  # fmt: skip


def program(code: str, *typed: str) -> subprocess.CompletedProcess[str]:
    # one heap: what idle threads' heaps reserve would count as held, and be there to fill
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MALLOC_ARENA_MAX": "1"}
    command = [sys.executable, "-c", WARM + code, *typed]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def limited(mib: int, *overrides: str) -> subprocess.CompletedProcess[str]:
    small = ("training.steps=1", "data.validation_samples=8")
    return program(LIMITED, str(mib), *QUICK, *small, *overrides)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS is kept by Linux")
def test_a_batch_larger_than_the_limit_trains_to_the_end_in_smaller_parts() -> None:
    done = limited(140, *LARGE)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["status"] == "done" and found["steps"] == 1
    assert found["faults"]["out_of_memory"] >= 1
    named = limited(0, *LARGE, f"training.micro_batch={found['micro']}")
    assert json.loads(named.stdout.splitlines()[-1])["weights"] == found["weights"]


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS is kept by Linux")
@pytest.mark.slow
def test_a_model_larger_than_the_limit_ends_in_one_line_and_its_exit_code() -> None:
    tokens = ["data=synthetic", "data.form=tokens", "data.sequence=2048", "data.samples=16"]
    done = limited(260, *tokens, "model=gpt", "model.width=256", "model.depth=12")
    assert done.returncode == OutOfMemory.exit_code, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: ") and "out of memory" in last
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS is kept by Linux")
def test_weights_that_do_not_fit_are_answered_with_the_model_and_not_the_batch() -> None:
    done = limited(130, "data=synthetic", "data.form=tabular", "data.samples=16", "model=mlp",
                   "model.depth=4", "model.width=4096")  # fmt: skip
    last = done.stderr.splitlines()[-1]
    assert done.returncode == OutOfMemory.exit_code, last
    assert "make the model smaller, or keep less for each weight" in last
    assert "batch_size" not in last


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS is kept by Linux")
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++")
@pytest.mark.slow
def test_a_whole_step_through_the_cpp_wrapper_that_exceeds_the_limit_goes_on_with_less() -> None:
    whole = ["optimization.whole_step.enabled=true", "optimization.fused_optimizer.enabled=true"]
    many = ["data=synthetic", "data.form=tabular", "data.features=16", "data.samples=262144"]
    tiny = ["model.width=64", "model.depth=1", "training.steps=3", "training.validate_every=100"]
    size = ["training.batch_size=200000", "data.validation_samples=8", "checks=off"]
    done = program(GRAPH_LIMITED, *QUICK, *whole, *many, *tiny, *size)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["status"] == "done" and found["steps"] == 3 and found["micro"] < 200000
    assert found["faults"]["out_of_memory"] >= 1
    assert re.match(r"step \d ran out of memory", found["row"])


class ShortOfMemory(nn.Module):
    """Does not fit with more than 16 samples in training; `norm` adds a BatchNorm."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(30) if norm else nn.Identity(), nn.Linear(30, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and len(x) > 16:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return self.layer(self.norm(x))


def pair_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    similarity = output @ output.T
    return nn.functional.cross_entropy(similarity, torch.arange(len(output)))


@pytest.mark.parametrize(
    ("loss", "norm", "effect"),
    [
        (None, False, "its gradient is the same"),
        (nn.functional.cross_entropy, False, "its gradient is the same"),
        (pair_loss, False, "the step is another one: the loss is not a mean over samples"),
        (None, True, "the step is another one: BatchNorm"),
    ],
)
def test_a_halved_batch_is_called_the_same_only_where_the_loss_is_a_mean_over_samples(
    loss: Any, norm: bool, effect: str
) -> None:
    options = [*QUICK, "data=cancer", "training.batch_size=32", "training.steps=2"]
    components = Components(ShortOfMemory(norm), objective=loss and loss_objective(loss))
    summary = trained(*options, given=components)
    (choice,) = [c for c in summary.choices if c.key == "training.micro_batch"]
    assert choice.value == 16 and effect in choice.reason
