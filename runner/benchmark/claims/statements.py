"""What people say about techniques and tools, and on what work each of it is tried.

Plain data: nothing here measures. A workload is one that the technique is made for, of a size
that a laptop can take; what is claimed is written as a bar that has to be reached.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

HOLDS, FAILS, UNDECIDED = "holds", "does not hold", "undecided"
UNKNOWN = "not measurable here"
BETTER = "better than said"
PLAIN = "plain"


class Quantity(Enum):
    """What is compared, as a ratio to the plain run."""

    speed = "speed"  # its time over this one's: at least the bar
    cost = "cost"  # this one's time over its: at most the bar
    step_memory = "memory of a step"  # beyond what is held between steps: at most the bar
    memory = "memory"  # weights, the optimizer's state and a step: at most the bar
    inference = "inference"  # a forward of the float model over one of the int8 model
    latency = "latency"  # a compiled forward over an eager one of the same model: at most the bar
    scaling = "scaling"  # samples a second on all GPUs over those on one, a GPU


@dataclass(frozen=True)
class Statement:
    """One thing that is said, and how it would show."""

    name: str
    said: str
    quantity: Quantity
    bar: float
    arm: str  # of the trial, that is held against the plain one
    needs: str = ""  # the technique that must have taken hold
    tool: str = ""  # the debug tool whose looks are on an account of their own
    most: float | None = None  # where a range is said, its far end; past it is better than said
    run_steps: int | None = None  # of the run that a tool which looks once is held against
    why: str = ""  # it should, or should not, in one sentence


@dataclass(frozen=True)
class Trial:
    """Arms on one workload, and what they are to show."""

    about: str
    work: tuple[str, ...]
    arms: dict[str, tuple[str, ...]]
    statements: tuple[Statement, ...]
    plain: tuple[str, ...] = ("optimization=none",)
    block_s: float | None = None  # where turns have to be longer than the others'
    share: float = 1.0  # of the budget, next to the others': what is noisy needs more blocks
    images: bool = False  # reads image files, which are made first
    gpus: int = 0  # that it cannot be tried with fewer of


@dataclass
class ClaimResult:
    """One statement, as it was found here; ratios as in `Quantity`."""

    name: str
    said: str
    work: str
    quantity: str
    verdict: str = UNKNOWN
    ratio: float | None = None
    interval: tuple[float, float] | None = None  # 95 %
    noise: float | None = None  # the plain run against itself
    reason: str = ""  # for the verdict
    why: str = ""
    command: str = ""  # trains like the arm in question


@dataclass
class Claims:
    """All statements that were tried, and where."""

    rows: list[ClaimResult] = field(default_factory=list)
    machine: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    load: dict[str, Any] = field(default_factory=dict)  # medians over all that was measured
    command: str = ""
    started: str = ""
    seconds: float = 0.0
    schema: int = 1

    def as_dict(self) -> dict[str, Any]:
        """In plain values."""
        return asdict(self)


def _on(name: str, *knobs: str) -> tuple[str, ...]:
    return (
        "optimization=custom",
        f"optimization.{name}.enabled=true",
        *(f"optimization.{name}.{knob}" for knob in knobs),
    )


TEXT = ("data=stdlib_text", "data.validation_samples=16", "model=gpt")
GPT = (*TEXT, "data.sequence=128", "model.width=256", "training.batch_size=8")
LONG = (*TEXT, "data.sequence=1024", "model.depth=2", "training.batch_size=2")
DEEP = (*TEXT, "data.sequence=256", "model.depth=8", "training.batch_size=4")
PICTURES = (
    "data=synthetic", "data.form=images", "data.samples=1024", "data.validation=0.1", "model=cnn",
    "training.batch_size=64",
)  # fmt: skip
FILES = (
    "data=images", "data.image_size=32", "data.validation=0.1", "model=cnn", "model.width=8",
    "training.batch_size=32",
)  # fmt: skip
DIGITS = (
    "data=digits", "model=cnn", "model.width=16", "model.stages=2", "training.batch_size=64",
    "training.steps=184",
)  # fmt: skip
WIDE = (
    "data=synthetic", "data.form=tabular", "data.features=1024", "data.samples=4096", "model=mlp",
    "model.width=2048", "model.depth=3", "training.batch_size=256",
)  # fmt: skip

TRIALS = (
    Trial(
        "GPT of 4 layers of width 256, sequence 128, batch 8",
        GPT,
        {"compile": _on("compile")},
        (
            Statement(
                "torch.compile", "20–30 % faster", Quantity.speed, 1.2, "compile", "compile",
                most=1.3,
                why="It fuses what lies between the products of matrices; where these are most of "
                "a step there is little to fuse. Compiling comes on top, and is not counted here.",
            ),
            Statement(
                "torch.compile: training", "2–3× faster", Quantity.speed, 2.0, "compile", "compile",
                most=3.0,
                why="The same measurement, held against the larger claim: it is made of models "
                "with many small operators on a GPU.",
            ),
            Statement(
                "compiled inference", "40–60 % less latency", Quantity.latency, 0.6, "compile",
                "compile",
                most=0.4,
                why="A forward of the validation batch without gradients, compiled and eager in "
                "turn. Where products of matrices are most of it, both call the same kernels.",
            ),
        ),
    ),
    Trial(
        "GPT of 4 layers of width 256, sequence 128, batch 8",
        GPT,
        {"amp": _on("amp")},
        (
            Statement(
                "mixed precision: speed", "1.5–2× faster", Quantity.speed, 1.5, "amp", "amp",
                most=2.0,
                why="It is a matter of hardware with 16-bit products: Tensor Cores, or AVX512-BF16 "
                "and AMX on a CPU. Everything but the products stays as it was.",
            ),
            Statement(
                "mixed precision: training", "1.5–3× faster", Quantity.speed, 1.5, "amp", "amp",
                most=3.0,
                why="The same measurement, held against the wider range.",
            ),
            Statement(
                "mixed precision: memory", "half the memory", Quantity.memory, 0.55, "amp", "amp",
                why="Weights and the optimizer's state stay in fp32, and 16-bit copies of the "
                "weights come on top; only part of the activations is halved.",
            ),
        ),
    ),
    Trial(
        "GPT of 2 layers of width 128, sequence 1,024, batch 2",
        LONG,
        {"flash": _on("attention", "kernel=flash")},
        (
            Statement(
                "flash attention", "2–3× the memory efficiency", Quantity.step_memory, 0.5, "flash",
                "attention",
                most=1 / 3,
                why="The matrix of all pairs of tokens is never held, so the longer the sequence, "
                "the more it saves. Held against attention written out; torch's own default is "
                "flash already where it can be.",
            ),
        ),
        plain=_on("attention", "kernel=plain"),
    ),
    Trial(
        "GPT of 8 layers of width 128, sequence 256, batch 4",
        DEEP,
        {
            "recompute": _on("recompute", "what=full"),
            "micro-batches": _on("accumulation", "micro_batch=1"),
            "memory_efficient": ("optimization=memory_efficient",),
        },
        (
            Statement(
                "recompute", "up to 80 % less memory", Quantity.step_memory, 0.2, "recompute",
                "recompute",
                why="Of the activations alone it saves about that; a step also holds gradients, "
                "logits and one block's activations at a time.",
            ),
            Statement(
                "recompute: memory", "20–40 % less memory", Quantity.memory, 0.8, "recompute",
                "recompute",
                most=0.6,
                why="Of weights, the optimizer's state and a step together: the more of it are "
                "activations, the more is saved.",
            ),
            Statement(
                "micro-batches: memory", "20–40 % less memory", Quantity.memory, 0.8,
                "micro-batches", "accumulation",
                most=0.6,
                why="Activations are those of a quarter of the batch; what grows with the model "
                "stays.",
            ),
            Statement(
                "memory_efficient: memory", "20–40 % less memory", Quantity.memory, 0.8,
                "memory_efficient",
                most=0.6,
                why="The level as it is set: every block recomputed, micro-batches of 8, and the "
                "logits in chunks where they are large.",
            ),
        ),
    ),
    Trial(
        "small CNN on 256×256 JPEG files, batch 32",
        FILES,
        {"pipeline": _on("pipeline")},
        (
            Statement(
                "tuned loader", "20–30 % faster", Quantity.speed, 1.2, "pipeline",
                most=1.3,
                why="Decoding happens beside the step where cores are free for it. Data that lie "
                "in memory gain nothing, and a run that waits for files gains far more.",
            ),
        ),
        block_s=1.5,  # several rounds of batches, at a hundred milliseconds each
        share=3.0,
        images=True,
    ),
    Trial(
        "CNN on 32×32 images, batch 64",
        PICTURES,
        {"channels_last": _on("channels_last")},
        (
            Statement(
                "channels-last", "faster", Quantity.speed, 1.02, "channels_last", "channels_last",
                why="Convolutions are written for that layout; without it they reorder on the way "
                "in and out.",
            ),
        ),
        block_s=0.75,  # a step is some thirty milliseconds, and neighbours come in bursts
        share=2.0,
    ),
    Trial(
        "CNN on the digits, batch 64",
        DIGITS,
        {
            "anomaly": ("optimization=none", "debug=anomaly"),
            "gradcheck": ("optimization=none", "debug=gradcheck"),
            "memory": ("optimization=none", "debug=memory"),
        },
        (
            Statement(
                "anomaly mode", "+10–20 % time", Quantity.cost, 1.2, "anomaly",
                most=1.1,
                why="It keeps a stack trace for each operation and checks every gradient, which "
                "costs most where operations are small. Here it is on at every step.",
            ),
            Statement(
                "gradcheck", "+50–100 % time", Quantity.cost, 2.0, "gradcheck", tool="gradcheck",
                run_steps=184,
                most=1.5,
                why="It runs once, before the first step, and takes the same seconds whatever the "
                "length of the run: held here against a run of 184 steps.",
            ),
            Statement(
                "memory tracking", "below +5 % time", Quantity.cost, 1.05, "memory", tool="memory",
                why="It looks at one step in 50 and ever more rarely; such a step is several times "
                "as long.",
            ),
        ),
    ),
    Trial(
        "MLP, 3 layers of width 2,048, batch 256",
        WIDE,
        {"int8": _on("quantization")},
        (
            Statement(
                "int8 inference", "40–60 % faster", Quantity.inference, 1.4, "int8", "quantization",
                most=1.6,
                why="It needs large linear layers and a CPU or GPU with 8-bit products; inputs are "
                "quantised on the way, which small layers do not pay back.",
            ),
        ),
    ),
    Trial(
        "GPT of 4 layers of width 256, sequence 128, batch 8",
        GPT,
        {"ultra": ("optimization=ultra",), "full": ("optimization=full",)},
        (
            Statement(
                "all of it: speed", "5× faster", Quantity.speed, 5.0, "ultra",
                why="The parts do not multiply: compiling and 16 bits win on the same operations. "
                "This is optimization=ultra, the fastest level; full is slower and holds less.",
            ),
            Statement(
                "all of it: memory", "90 % less memory", Quantity.memory, 0.1, "full",
                why="Weights, gradients and the optimizer's state stay whatever is done about "
                "activations; they alone are more than a tenth. This is optimization=full.",
            ),
        ),
    ),
    Trial(
        "data parallel training",
        (),
        {},
        (
            Statement(
                "several GPUs", "linear scaling", Quantity.scaling, 0.9, "",
                why="Gradients have to be exchanged at every step, so it is a matter of the links "
                "between the GPUs and of how much is computed for each byte sent.",
            ),
        ),
        share=0.0,
        gpus=2,
    ),
)  # fmt: skip
