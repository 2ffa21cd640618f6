"""Which kernel computes attention."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from importlib.util import find_spec
from statistics import median
from typing import TYPE_CHECKING, Any

from runner.errors import ConfigError
from runner.techniques.base import Evidence, RunBuilder, Technique
from runner.techniques.probe import operators
from runner.training.run import Run

if TYPE_CHECKING:
    from runner.device.device import Device
    from runner.techniques.kernels import Call

KEY = "optimization.attention.kernel"
MARGIN = 0.05  # a kernel less than this much faster is not worth a choice that may not repeat
SAMPLES = 8  # that the calls are looked at, and timed, with

RAN = {
    "flash": "aten::_scaled_dot_product_flash_attention",
    "efficient": "aten::_scaled_dot_product_efficient_attention",
    "cudnn": "aten::_scaled_dot_product_cudnn_attention",
    "math": "aten::_scaled_dot_product_attention_math",
    "xformers": "xformers",
}
PRODUCTS = ("aten::bmm", "aten::baddbmm")


class Kernel(Enum):
    """Ways to compute it; `auto` measures those that run here."""

    auto = "auto"
    flash = "flash"  # never holds the matrix [query, key]
    efficient = "efficient"  # the same for more masks and older GPUs
    cudnn = "cudnn"  # NVIDIA's own, for Hopper and later
    math = "math"  # in steps, of which 16-bit ones run in fp32
    plain = "plain"  # matmul, softmax, matmul
    xformers = "xformers"  # needs the package


@dataclass
class Attention(Technique):
    """The kernel behind torch's scaled_dot_product_attention, for any model that calls it.

    A kernel asked for by name is never replaced by another: what it cannot take is an error.
    `auto` times a forward and a backward of the model's own calls, takes under a second, and
    leaves torch's choice alone where nothing is clearly faster.
    """

    kernel: Kernel = Kernel.auto
    matrix_mb: int = 1024  # auto: what the matrices [query, key] of all layers may hold together

    def __post_init__(self) -> None:
        if self.matrix_mb < 0:
            raise ConfigError("optimization.attention.matrix_mb", "is negative", "use 0 or more")

    def unavailable(self, device: Device) -> str | None:
        """Some kernels are for NVIDIA's GPUs only."""
        if self.kernel is Kernel.xformers and find_spec("xformers") is None:
            return "needs xformers: pip install xformers"
        only_cuda = self.kernel in (Kernel.efficient, Kernel.cudnn, Kernel.xformers)
        if only_cuda and device.kind != "cuda":
            return f"{self.kernel.value} runs on NVIDIA GPUs only"
        if device.kind == "mps" and self.kernel not in (Kernel.math, Kernel.plain):
            return "MPS has one kernel of its own (and math, plain)"
        return None

    def apply(self, draft: RunBuilder) -> str | None:
        """Look at the model's calls, choose, and switch over until the run closes."""
        from runner.techniques import kernels, trial

        samples = min(draft.micro_batch, SAMPLES)
        inputs, _ = trial.batch(draft, samples)
        with trial.untouched(draft):
            draft.model.train()
            try:
                calls = kernels.calls_of(lambda: trial.forward(draft, inputs))
            except Exception as error:  # such as a model that knows its batch size
                return f"the model does not take {samples} samples ({type(error).__name__})"
            if not calls:
                return "the model does not call scaled_dot_product_attention"
            with trial.entered(draft):
                first = kernels.default_of(calls)
                if self.kernel is not Kernel.auto:
                    name = self.kernel.value
                    reason = kernels.refusal(name, calls, draft.model)
                else:
                    name = self._choose(draft, first, calls, draft.micro_batch / samples)
                    reason = None  # what cannot take a call leaves it to the next
        draft.remarks["attention"] = {"calls": sum(call.times for call in calls)}
        if reason is None and (self.kernel is not Kernel.auto or name != first):
            strictly = self.kernel is not Kernel.auto
            draft.scope.enter_context(kernels.use(name, draft.model, strictly))
        return reason

    def _choose(self, draft: RunBuilder, first: str, calls: list[Call], batches: float) -> str:
        from runner.techniques import kernels

        def decide() -> tuple[str, str]:
            held = sum(call.matrices() for call in calls) * batches
            too_large = held > self.matrix_mb * 2**20
            names = [first]
            for kernel in ("flash", "efficient", "cudnn", "math", "plain"):
                if kernel == first or (too_large and kernel in kernels.HOLDING_MATRICES):
                    continue
                if Attention(True, Kernel(kernel)).unavailable(draft.device) is None:
                    if kernels.refusal(kernel, calls, draft.model) is None:
                        names.append(kernel)
            said = f"; matrices of {held / 2**20:,.0f} MB rule out math and plain"
            said = said if too_large else ""
            if len(names) == 1:
                return first, f"torch's choice, and the only one here{said}"
            ratios = kernels.race(names, first, calls, draft.model, draft.device.synchronize)
            best = kernels.faster(ratios, first, MARGIN)
            times = ", ".join(f"{n} {median(r):.2f}" for n, r in ratios.items() if n != first)
            dtype = "".join({str(call.query.dtype).removeprefix("torch.") for call in calls[:1]})
            shape = "x".join(map(str, calls[0].query.shape))
            told = f"time of {times} against torch's {first} at {shape} ({dtype})"
            return best, f"{told}{said}"

        return str(draft.choose(KEY, decide))

    def engaged(self, run: Run) -> Evidence:
        """The kernels that ran in one step, by the operators' names."""
        wanted = self.kernel.value
        if self.kernel is Kernel.auto:
            wanted = next(str(c.value) for c in reversed(run.choices) if c.key == KEY)
        seen = operators(run)
        ran = {name: _count(seen, start) for name, start in RAN.items()}
        ran = {name: n for name, n in ran.items() if n}
        products = sum(seen.get(name, 0) for name in PRODUCTS)
        facts: dict[str, Any] = {"kernel": wanted, "ran": ran or {"bmm": products}}
        calls = int(run.remarks["attention"]["calls"])
        if wanted == "default":
            return _share(sum(ran.values()), calls, facts)
        others = [name for name in ran if name != wanted]
        if others:
            return Evidence(False, f"{' and '.join(others)} ran in its place", facts)
        # compiled, math and plain are taken apart, and only their two products keep their names
        apart = products // 2 if wanted in ("math", "plain") else 0
        return _share(ran.get(wanted, apart), calls, facts)


def _share(ran: int, calls: int, facts: dict[str, Any]) -> Evidence:
    """Of the calls that the model made when it was built; recomputed ones run twice a step."""
    shown = Evidence.of_share(min(ran, calls), calls, "calls ran in an attention kernel", **facts)
    return shown if ran else replace(shown, reason="no attention kernel was seen")


def _count(seen: Any, start: str) -> int:
    """Calls of the operators that start so, forward only."""
    return sum(
        n for name, n in seen.items() if name.startswith(start) and not name.endswith("_backward")
    )
