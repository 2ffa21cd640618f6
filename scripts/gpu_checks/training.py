"""Checks that build runs in their own process: sync-free steps, graphs, memory, kernels."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from gpu_checks.base import Workplace, require, require_engaged, technique_rows
from runner import RunConfig, build, compose, train
from runner.core.build.setup import Components
from runner.core.interfaces.hook import Hook, Step
from runner.core.interfaces.nested import tree_map
from runner.core.interfaces.run import Run
from runner.core.record.summary import Summary
from runner.core.train.step import make_step

PLAIN = ("checks=off", "checkpoint=off", "monitoring=quiet", "monitoring.tensorboard=false")
MEASURED = ("optimization=ultra", "optimization.measure=false")


def on(name: str, *settings: str) -> tuple[str, ...]:
    """Return the overrides that request a technique."""
    return tuple(f"optimization.{name}.{text}" for text in ("enabled=true", *settings))


def off(*names: str) -> tuple[str, ...]:
    """Return the overrides that switch techniques off."""
    return tuple(f"optimization.{name}.enabled=false" for name in names)


@contextmanager
def built(device: str, *overrides: str, given: Components | None = None) -> Iterator[Run]:
    """Build a run on the device without a folder; it is closed at the end."""
    with build(compose([f"device={device}", *overrides]), given=given) as run:
        yield run


def plain_summary(summary: Summary) -> dict[str, Any]:
    """Return the summary's techniques as `summary.json` has them."""
    return {"techniques": [asdict(row) for row in summary.techniques]}


def relative_distance(first: list[Tensor], second: list[Tensor]) -> float:
    """Return the distance of two lists of tensors, relative to the size of the second."""
    pairs = [(a.double().cpu(), b.double().cpu()) for a, b in zip(first, second, strict=True)]
    difference = sum(float((a - b).square().sum()) for a, b in pairs)
    return float((difference / max(1e-300, sum(float(b.square().sum()) for _, b in pairs))) ** 0.5)


# -- steps without a host sync ---------------------------------------------------------------------

OPTIMIZERS = (
    "AdamW", "Adam", "SGD", "Adagrad", "Adadelta", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop",
    "Rprop", "Adafactor", "Muon",
)  # fmt: skip
MAY_WAIT = ("Rprop", "Adafactor", "Muon")  # documented: the host reads the flag once a step
GUARDED = (
    *PLAIN, "data=digits", "model=mlp", "optimization=none", "optimizer.weight_decay=0.0",
    "optimizer.lr=0.01", "training.steps=20", *on("fused_optimizer"),
)  # fmt: skip
PRECISIONS = {
    "fp32": (),
    "bf16": on("amp", "dtype=bf16"),
    "fp16": on("amp", "dtype=fp16"),
}
VARIANTS = {
    "plain": ("stability.clip_norm=null", "schedule=constant"),
    "clip, ema, schedule": ("optimizer.ema=0.9", "schedule=cosine"),
}
SYNC_FREE = tuple(
    (*GUARDED, *precision, *variant)
    for precision in PRECISIONS.values()
    for variant in VARIANTS.values()
)
"""Of every optimizer: composing takes longer than these 20 steps, so its name is set after it."""
STEPS, BAD_STEP, FIRST_STRICT = 20, 10, 4
SAME_WEIGHTS = 1e-4  # relative, of all weights after 20 steps in fp32 on two devices
AMPLIFIED = 20  # times the effect of one rounding, where that is larger


class Net(nn.Module):
    """A model that every optimizer takes: no weight of one dimension, statistics of a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 32, bias=False)
        self.norm = nn.BatchNorm1d(32, affine=False)
        self.last = nn.Linear(32, 10, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x.flatten(1))).relu())


def make_net(perturbed: bool = False) -> Net:
    """Return the same model each time; `perturbed`: each weight off by one rounding."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = Net()
        if perturbed:
            with torch.no_grad():
                for weight in net.parameters():
                    weight.mul_(1 + (torch.randint(0, 2, weight.shape) * 2 - 1) * 2.0**-23)
    return net


@dataclass
class GuardedSteps:
    """What 20 steps with one bad batch left behind."""

    weights: list[Tensor]
    host_waits: bool
    skipped: list[bool]  # by step
    changed: list[str]  # parts of the state that the bad step changed
    sync_error: str = ""  # of the first step that made the host wait


def guarded_state(run: Run) -> list[Tensor]:
    """Return copies of parameters, buffers, average and optimizer state; without a host sync."""
    update = run.update
    state = [t for s in update.optimizer.state.values() for t in s.values()]
    tensors = [*run.model.parameters(), *run.model.buffers(), *update.average, *state]
    return [t.detach().clone() for t in tensors if isinstance(t, Tensor)]


@contextmanager
def forbid_host_sync(device: str, forbidden: bool) -> Iterator[None]:
    """Raise at any call that makes the host wait for the GPU."""
    if device == "cuda" and forbidden:
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")


@cache
def guarded_config(device: str, overrides: tuple[str, ...]) -> RunConfig:
    """Return the composed config; copy it before a change."""
    return compose([f"device={device}", *overrides])


def make_guarded_steps(
    device: str, optimizer: str, overrides: tuple[str, ...], perturbed: bool = False
) -> GuardedSteps:
    """Make 20 steps, of which one has a batch of NaN; strict from the fourth on."""
    config = copy.deepcopy(guarded_config(device, overrides))
    config.optimizer.name = optimizer
    with build(config, given=Components(model=make_net(perturbed))) as run:
        run.model.train()
        batches = list(islice(run.train.batches(0), STEPS))
        run.train.close()
        bad = batches[BAD_STEP - 1]
        batches[BAD_STEP - 1] = tree_map(bad[0], lambda t: t * float("nan")), bad[1]
        waits, skipped, states, error = run.update.host_waits, [], [], ""
        for number, batch in enumerate(batches, 1):
            strict = number >= FIRST_STRICT and not waits
            try:
                with forbid_host_sync(device, strict):
                    if number == BAD_STEP:
                        states.append(guarded_state(run))
                    step, _ = make_step(run, batch)
                    run.progress.step += 1
                    if number == BAD_STEP:
                        states.append(guarded_state(run))
            except RuntimeError as failure:
                if "synchronizing" not in str(failure):
                    raise
                error = f"step {number}: {failure}"
                break
            skipped.append(step.skipped)
        pairs = list(zip(*states, strict=True)) if len(states) == 2 else []
        changed = [str(i) for i, (a, b) in enumerate(pairs) if not torch.equal(a, b)]
        return GuardedSteps(
            weights=[p.detach().cpu() for p in run.model.parameters()],
            host_waits=waits,
            skipped=[bool(flag) for flag in skipped],
            changed=changed,
            sync_error=error,
        )


def sync_free(place: Workplace) -> None:
    """No step waits for the GPU, and a bad one changes nothing, under 13 optimizers."""
    problems: list[str] = []
    waiting: set[str] = set()
    distances: dict[str, float] = {}
    for name in OPTIMIZERS:
        for precision, more in PRECISIONS.items():
            for variant, others in VARIANTS.items():
                label = f"{name}, {precision}, {variant}"
                overrides = (*GUARDED, *more, *others)
                steps = make_guarded_steps(place.device, name, overrides)
                if steps.host_waits:
                    waiting.add(name)
                problems += _guard_problems(label, steps)
                if precision == "fp32" and not steps.sync_error:
                    distance, limit = compare_with_cpu(steps.weights, name, overrides)
                    distances[label] = distance
                    if not distance <= limit:
                        problems.append(
                            f"{label}: weights differ from the CPU's by {distance:.1e} of their "
                            f"size; {limit:.1e} is allowed"
                        )
        place.record(problems=problems, host_waits=sorted(waiting), distances=distances)
    if unexpected := waiting - set(MAY_WAIT):
        problems.append(f"the host reads a flag each step under {', '.join(sorted(unexpected))}")
    require(not problems, "\n".join(problems))


def _guard_problems(label: str, steps: GuardedSteps) -> list[str]:
    """Return what is wrong with the guarded steps of one case."""
    if steps.sync_error:
        return [f"{label}: {steps.sync_error}"]
    problems = []
    if not steps.skipped[BAD_STEP - 1]:
        problems.append(f"{label}: the step with the bad batch was not skipped")
    if steps.changed:
        problems.append(f"{label}: the skipped step changed state {', '.join(steps.changed)}")
    if all(steps.skipped):
        problems.append(f"{label}: every step was skipped")
    return problems


def compare_with_cpu(
    weights: list[Tensor], optimizer: str, overrides: tuple[str, ...]
) -> tuple[float, float]:
    """Return the distance of the weights to those of the CPU, and what is allowed.

    The limit is at least the effect of one rounding of the initial weights, times 20.
    """
    reference, perturbed = (
        make_guarded_steps("cpu", optimizer, overrides, one_off).weights
        for one_off in (False, True)
    )
    limit = max(SAME_WEIGHTS, AMPLIFIED * relative_distance(perturbed, reference))
    return relative_distance(weights, reference), limit


# -- CUDA graphs -----------------------------------------------------------------------------------

TOKENS = (
    *PLAIN, "model=gpt", "model.width=256", "model.depth=4", "model.heads=4", "data=synthetic",
    "data.form=tokens", "data.sequence=256", "data.samples=400", "training.batch_size=16",
    "optimizer.lr=3e-4", "training.steps=50", "training.validate_every=50",
)  # fmt: skip
IMAGES = (
    *PLAIN, "model=cnn", "data=synthetic", "data.form=images", "data.samples=800",
    "training.batch_size=32", "optimizer.lr=3e-4", "training.steps=50",
    "training.validate_every=50",
)  # fmt: skip
SIXTEEN_BITS = (*MEASURED, *off("chunked_loss"), "optimization.amp.min_mflop=0")
EAGER = (*SIXTEEN_BITS, *off("whole_step", "compile", "cuda_graphs"))
GRAPHED = {
    "whole_step": SIXTEEN_BITS,
    "compile": (*SIXTEEN_BITS, *off("whole_step")),
}
# the same batch in every step and a rate of 0: only dropout changes the loss
DROPOUT = (
    *TOKENS, *SIXTEEN_BITS, "model.dropout=0.1", "data.samples=20", "optimizer.lr=0",
    "optimizer.weight_decay=0", "data.shuffle=false", "training.steps=12",
)  # fmt: skip
GRAPHS = (
    *((*data, *level) for data in (TOKENS, IMAGES) for level in (EAGER, *GRAPHED.values())),
    DROPOUT,
)
LOSS_TOLERANCE = 2e-3  # mean relative difference of 50 losses in 16 bits


class LossRecorder(Hook):
    """Copies each step's loss on the device: a graph overwrites its outputs."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []

    def on_step(self, run: Run, step: Step) -> None:
        """Copy the loss."""
        self.losses.append(step.loss.detach().clone())

    def values(self) -> list[float]:
        """Return the losses; host sync."""
        return [float(loss) for loss in self.losses]


def train_recorded(device: str, *overrides: str) -> tuple[list[float], dict[str, Any], int]:
    """Train; return the losses, the techniques, and how often inductor refused a graph."""
    from torch._dynamo.utils import counters

    with built(device, *overrides) as run:
        recorder = LossRecorder()
        run.hooks.append(recorder)
        summary = plain_summary(train(run))
        return recorder.values(), summary, int(counters["inductor"]["cudagraph_skips"])


def graphs(place: Workplace) -> None:
    """Steps as CUDA graphs have the losses of eager ones, and new dropout masks in each."""
    place.record(dropout=compare_dropout(place.device))
    for model, data in (("gpt", TOKENS), ("cnn", IMAGES)):
        eager, _, _ = train_recorded(place.device, *data, *EAGER)
        for name, level in GRAPHED.items():
            losses, summary, skips = train_recorded(place.device, *data, *level)
            difference = mean_difference(losses, eager)
            rows = technique_rows(summary)
            kept = {n: rows[n] for n in ("whole_step", "compile", "cuda_graphs")}
            facts = {"difference": difference, "cudagraph_skips": skips, "techniques": kept}
            place.record(**{f"{model}, {name}": facts})
            label = f"{model}, {name}"
            require(difference <= LOSS_TOLERANCE, f"{label}: losses differ by {difference:.1e}")
            names = [name, *(["cuda_graphs"] if place.device == "cuda" else [])]
            require_engaged(summary, names, label)
            require(skips == 0, f"{label}: inductor refused {skips} graphs")
    dropout = place.facts["dropout"]
    require(dropout["distinct"] == dropout["steps"], f"dropout masks repeat: {dropout}")
    require(dropout["repeats"], "a second run has other dropout masks")


def compare_dropout(device: str) -> dict[str, Any]:
    """Train twice with a rate of 0: how many losses are distinct, and whether the runs agree."""
    first, second = (train_recorded(device, *DROPOUT)[0] for _ in range(2))
    return {"steps": len(first), "distinct": len(set(first)), "repeats": first == second}


def mean_difference(losses: list[float], expected: list[float]) -> float:
    """Return the mean relative difference of two series of losses."""
    pairs = zip(losses, expected, strict=True)
    return sum(abs(a - b) / abs(b) for a, b in pairs) / len(expected)


# -- out of memory ---------------------------------------------------------------------------------

FRACTION = 0.03
CROWDED = (
    *PLAIN, "model=cnn", "data=synthetic", "data.form=images", "data.samples=10000",
    "data.validation=0.01", "data.drop_last=true", "training.batch_size=8192", "training.steps=40",
    "monitoring.every=5", "training.validate_every=40",
)  # fmt: skip
LIMITED = (f"device.memory_fraction={FRACTION}",)
CROWDED_LEVELS = {  # a level, and the one that it is after its graph was dropped
    "none": (("optimization=none",), ("optimization=none",)),
    "ultra": (MEASURED, (*MEASURED, *off("whole_step", "compile", "cuda_graphs"))),
}
MAX_CLEANED = 2  # times that a healthy run near its limit is emptied
KEPT_SHARE = 1.1  # of the memory of a run that began with the smaller micro-batch
OUT_OF_MEMORY = tuple(
    (*CROWDED, *LIMITED, *level) for levels in CROWDED_LEVELS.values() for level in levels
)


class MemoryRecorder(Hook):
    """The allocated bytes after the last step."""

    def __init__(self) -> None:
        self.allocated = 0

    def on_step(self, run: Run, step: Step) -> None:
        """Read the allocator's counter, which is the host's."""
        if step.number == run.total_steps:
            self.allocated = torch.cuda.memory_allocated(run.device.torch)


def train_crowded(device: str, *overrides: str) -> dict[str, Any]:
    """Train with too little memory; return what the run and the allocator say."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    with built(device, *overrides) as run:
        recorder = MemoryRecorder()
        run.hooks.append(recorder)
        summary = train(run)
        return {
            "status": summary.status,
            "faults": dict(summary.faults),
            "micro_batch": run.micro_batch,
            "allocated": recorder.allocated,
            "peak_reserved": torch.cuda.max_memory_reserved(run.device.torch),
            "limit": round(FRACTION * run.device.memory_bytes),
        }


def out_of_memory(place: Workplace) -> None:
    """A batch that does not fit is halved, eagerly and as a graph, and nothing stays behind."""
    for name, (level, without_graph) in CROWDED_LEVELS.items():
        facts = train_crowded(place.device, *CROWDED, *LIMITED, *level)
        place.record(**{name: facts})
        cut = f"training.micro_batch={facts['micro_batch']}"
        fitting = train_crowded(place.device, *CROWDED, *LIMITED, *without_graph, cut)
        place.record(**{f"{name}, smaller from the start": fitting})
    for name in CROWDED_LEVELS:
        facts, fitting = place.facts[name], place.facts[f"{name}, smaller from the start"]
        problems = memory_problems(facts, fitting)
        require(not problems, f"{name}: {'; '.join(problems)}")


def memory_problems(facts: dict[str, Any], fitting: dict[str, Any]) -> list[str]:
    """Return what is wrong with a run that ran out of memory, beside one that did not."""
    problems = []
    if facts["status"] != "done":
        problems.append(f"it ended as {facts['status']}")
    if not facts["faults"].get("out_of_memory"):
        problems.append("it never ran out of memory")
    if not facts["micro_batch"] < 8192:
        problems.append(f"its micro-batch is {facts['micro_batch']}")
    if facts["peak_reserved"] > facts["limit"]:
        problems.append(f"it reserved {facts['peak_reserved']:,} of {facts['limit']:,} bytes")
    if fitting["faults"].get("out_of_memory"):
        problems.append("the smaller micro-batch does not fit from the start")
    cleaned = facts["faults"].get("memory_cleaned", 0)
    if cleaned > MAX_CLEANED:
        problems.append(f"its memory was emptied {cleaned} times")
    if facts["allocated"] > KEPT_SHARE * fitting["allocated"]:
        kept = f"{facts['allocated']:,} and {fitting['allocated']:,} bytes"
        problems.append(f"memory stays behind: {kept}")
    return problems


# -- kernels ---------------------------------------------------------------------------------------

ATTENTION_DTYPES = {
    "flash": (torch.bfloat16, torch.float16),
    "efficient": (torch.float32, torch.bfloat16, torch.float16),
    "cudnn": (torch.bfloat16, torch.float16),
    "math": (torch.float32, torch.bfloat16, torch.float16),
}
KERNEL_NAMES = {  # part of the name of the CUDA kernel; None: products and a softmax
    "flash": "flash",
    "efficient": "fmha",
    "cudnn": "cudnn",
    "math": None,
}
FUSED_NAMES = ("flash", "fmha", "cudnn")
SMALL_GPT = (
    *PLAIN, "model=gpt", "model.width=128", "model.depth=2", "model.heads=2", "data=synthetic",
    "data.form=tokens", "data.sequence=128", "data.samples=80", "training.batch_size=16",
    "training.steps=3", "optimization=none",
)  # fmt: skip
SMALL_CNN = (
    *PLAIN, "model=cnn", "data=synthetic", "data.form=images", "data.samples=400",
    "training.batch_size=32", "training.steps=3", "optimization=none",
)  # fmt: skip
ENGAGED = {
    ("amp", "quantization"): (
        *SMALL_GPT, *on("amp", "dtype=bf16"), *on("quantization", "max_drop=1.0"),
    ),
    ("channels_last", "fused_optimizer"): (
        *SMALL_CNN, *on("channels_last"), *on("fused_optimizer"),
    ),
    ("tf32",): (*SMALL_GPT, *on("tf32")),
}  # fmt: skip
BF16 = on("amp", "dtype=bf16")
ATTENTION = {
    "flash": (*SMALL_GPT, *BF16, *on("attention", "kernel=flash")),
    "efficient": (*SMALL_GPT, *on("attention", "kernel=efficient")),
    "cudnn": (*SMALL_GPT, *BF16, *on("attention", "kernel=cudnn")),
    "math": (*SMALL_GPT, *on("attention", "kernel=math")),
}
KERNELS = (*ENGAGED.values(), *ATTENTION.values())
FP32_ERROR = 1e-5  # relative to fp64; TF32 has 1e-3, a few ten operands in fp32 1e-7


def kernels(place: Workplace) -> None:
    """Each attention kernel runs where it is requested, and `none` computes in fp32."""
    errors = product_errors(place.device)
    place.record(product_errors=errors)
    for names, overrides in ENGAGED.items():
        if place.device == "cuda" or names != ("tf32",):
            with built(place.device, *overrides) as run:
                require_engaged(plain_summary(train(run)), names, " and ".join(names))
    for name, overrides in ATTENTION.items():
        if place.device != "cuda" and name != "math":
            continue
        with built(place.device, *overrides) as run:
            row = technique_rows(plain_summary(train(run)))["attention"]
        place.record(**{name: {"row": row}})
        require(row["engaged"], f"attention, {name}: not engaged: {row['reason']}")
    for name, dtypes in ATTENTION_DTYPES.items():
        for dtype in dtypes if place.device == "cuda" else ():
            label, ran = f"{name}, {dtype}", kernel_names(name, dtype)
            place.record(**{label: ran})
            require(has_expected_kernel(name, ran), f"attention, {label}: only {ran} ran")
    for name, error in errors.items():
        require(error <= FP32_ERROR, f"optimization=none: {name} is off by {error:.1e} from fp64")


def product_errors(device: str) -> dict[str, float]:
    """Return the relative error of a product and a convolution within a run of `none`."""
    with built(device, *SMALL_CNN) as run:
        noise = torch.Generator().manual_seed(0)
        image, weight, matrix = (
            torch.randn(*shape, generator=noise).to(run.device.torch)
            for shape in ((8, 64, 32, 32), (64, 64, 3, 3), (512, 512))
        )
        calls: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
            "convolution": (nn.functional.conv2d, (image, weight)),
            "product": (torch.mm, (matrix, matrix)),
        }
        return {
            name: relative_distance([call(*inputs)], [call(*(x.double() for x in inputs))])
            for name, (call, inputs) in calls.items()
        }


def kernel_names(name: str, dtype: torch.dtype) -> list[str]:
    """Return the names of the CUDA kernels that one forced call of attention runs."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.profiler import ProfilerActivity, profile

    backends = {
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "math": SDPBackend.MATH,
    }
    query = torch.randn(2, 4, 128, 64, device="cuda", dtype=dtype)
    attention = torch.nn.functional.scaled_dot_product_attention
    with sdpa_kernel([backends[name]]):
        attention(query, query, query, is_causal=True)  # its first call loads what it needs
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            attention(query, query, query, is_causal=True)
            torch.cuda.synchronize()
    cuda = torch.autograd.DeviceType.CUDA
    return sorted({event.name for event in profiler.events() if event.device_type == cuda})


def has_expected_kernel(name: str, kernel_names: list[str]) -> bool:
    """Whether a kernel of this kind is among the names; of `math`, that no fused one is."""
    names = [text.lower() for text in kernel_names]
    part = KERNEL_NAMES[name]
    if part is None:
        return not any(fused in text for text in names for fused in FUSED_NAMES)
    return any(part in text for text in names)
