"""What a run would need on many ranks: memory, checkpoints, communication, failures. On paper.

    python scripts/plan_scale.py data=stdlib_text model=gpt model.width=4096 model.depth=32 \\
        training.batch_size=1024 training.micro_batch=1 --ranks 8,64,1024

The config is typed as for `python -m runner`; `distributed=ddp` or `fsdp` plans that one alone. The
model, its optimizer and a step are made on one of so many ranks of torch's fake process group, with
fake tensors: shards, collectives and lifetimes are torch's, and nothing is allocated, sent or
computed. docs/measured/scaling.md says what of it was compared with real runs.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import warnings
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as recompute
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode

from runner import RunConfig, compose
from runner.core.data.open import open_data
from runner.core.data.preprocessing import OpenOptions
from runner.core.errors import RunnerError
from runner.core.interfaces.batch import call_model
from runner.core.models import build as models
from runner.core.objectives.build import build_objective
from runner.core.optim.optimizer import build_optimizer, resolve_optimizer_class
from runner.core.schemas.device import Compression, DistributedKind
from runner.core.schemas.optimization import Precision
from runner.core.security.files.policy import FilePolicy
from runner.core.security.registry import resolve
from runner.core.techniques.probe import repeated_blocks
from runner.scale.distributed.batchnorm import synchronise_batchnorm
from runner.scale.distributed.sharded import shard

BUCKET = "allreduce of a bucket"
GB = 1e9


@dataclass
class Plan:
    """A run of one kind on so many ranks; bytes are of one rank where nothing else is said."""

    kind: str
    ranks: int
    samples: int  # in a step
    micro_batch: int
    parameters: int
    weights: int
    gradients: int
    optimizer: int
    average: int
    peak: int  # all of these, and what a forward and backward hold at their peak
    sent: int  # in a step, by a ring
    calls: int  # collectives in a step
    sending_s: float
    flops: float  # of a rank in a step
    computing_s: float
    checkpoint: int  # of all ranks together
    writing_s: float
    failure_s: float  # mean time between failures of any node
    young_s: float  # between checkpoints
    daly_s: float
    lost: float  # share of the time, with Daly's interval


class Collectives(TorchDispatchMode):
    """Bytes that each collective of a step works on, whole, by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []

    def __torch_dispatch__(self, operator: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operator.namespace == "c10d":
            tensors = [t for t in tree_leaves(args) if isinstance(t, Tensor)]
            self.calls.append((str(operator), max(t.nbytes for t in tensors)))
        return operator(*args, **(kwargs or {}))


def ring(calls: list[tuple[str, int]], ranks: int, options: Any) -> tuple[int, float]:
    """Bytes that a rank sends and the seconds that it takes, each call after the other.

    A ring sends (n-1)/n of the bytes in n-1 steps; an all-reduce goes round twice.
    """
    rounds = [(2 if "allreduce" in name else 1, size) for name, size in calls]
    sent = sum(times * size for times, size in rounds) * (ranks - 1) / ranks
    hops = sum(times for times, _ in rounds) * (ranks - 1)
    return int(sent), sent / (options.bandwidth_gbs * GB) + hops * options.latency_us / 1e6


def buckets(model: nn.Module, config: RunConfig) -> list[tuple[str, int]]:
    """The all-reduces of DDP, whose own C++ part takes no fake tensors, by its own rule."""
    gradients = [p for p in model.parameters() if p.requires_grad][::-1]
    limit = int(config.distributed.bucket_mb * 2**20)
    groups, _ = dist._compute_bucket_assignment_by_size(gradients, [limit])
    share = 0.5 if config.distributed.compression is Compression.bf16 else 1.0
    return [(BUCKET, int(share * sum(gradients[i].nbytes for i in g))) for g in groups]


def local_bytes(tensors: Any) -> int:
    shards = (t.to_local() if isinstance(t, DTensor) else t for t in tensors)
    return sum(shard.nbytes for shard in shards if isinstance(shard, Tensor))


class Planner:
    """One config, on any number of ranks."""

    def __init__(self, config: RunConfig, options: Any) -> None:
        self.config, self.options = config, options
        self.look_up = partial(resolve, trusted=config.security.trusted_packages)
        opening = OpenOptions(FilePolicy.of(config.security, ()), None)
        self.data = open_data(config.data, self.look_up, opening)
        self.one = self.data.fetch(self.data.train[:1], None)
        self.objective = build_objective(config.objective, self.data.sizes, self.look_up)

    def plan(self, kind: str, ranks: int) -> Plan:
        """The figures of one rank, and what follows from them."""
        training, options = self.config.training, self.options
        samples = max(1, training.batch_size // ranks)
        micro_batch = min(samples, training.micro_batch or samples)
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
        mesh = init_device_mesh("cpu", (ranks,))
        parts = math.ceil(samples / micro_batch)
        late = parts > 1 and self.config.distributed.no_sync
        with FakeTensorMode(allow_non_fake_inputs=True):
            facts = self.rank(kind, mesh, micro_batch, late)
        dist.destroy_process_group()
        # gradients go with the last part alone; what fsdp gathers is gathered for each of them
        last = (BUCKET, "reduce_scatter") if late else ()
        once = [any(name in call[0] for name in last) for call in facts.calls]
        pairs = zip(facts.calls, once, strict=True)
        calls = [call for call, one in pairs for _ in range(1 if one else parts)]
        calls += [("allreduce", 16)] * 2  # a few numbers: loss and flags, the verdict
        sent, sending_s = ring(calls, ranks, options)
        flops = float(facts.flops * parts)
        rate = options.write_gbs * (ranks if kind == "fsdp" else 1)
        writing_s = facts.whole / min(rate, options.storage_gbs) / GB
        failure_s = options.node_mtbf_h * 3600 / math.ceil(ranks / options.ranks_per_node)
        return Plan(
            kind, ranks, samples, micro_batch, **facts.figures, checkpoint=facts.whole,
            sent=sent, calls=len(calls), sending_s=sending_s,
            flops=flops, computing_s=flops / (options.tflops * 1e12),
            **intervals(writing_s, failure_s, options.restart_s),
        )  # fmt: skip

    def rank(self, kind: str, mesh: Any, micro_batch: int, late: bool) -> Any:
        """A step of one rank: what it keeps, what it sends, what it computes.

        With `late` gradients are sent with the last micro-batch alone.
        """
        config = self.config
        model = models.build_model(config.model, self.data.sizes, self.look_up)
        whole = local_bytes(model.state_dict().values())
        sharded, blocks = kind == "fsdp", repeated_blocks(model)
        if config.distributed.sync_batchnorm:
            device, world = SimpleNamespace(kind="cpu"), SimpleNamespace(is_stand_in=False)
            synchronise_batchnorm(SimpleNamespace(model=model, device=device, world=world))
        if config.optimization.recompute.enabled:
            recompute.apply_activation_checkpointing(model, check_fn=set(blocks).__contains__)
        amp = config.optimization.amp
        if sharded:
            shard(model, mesh, amp.enabled and amp.dtype is not Precision.fp16)
        cls = resolve_optimizer_class(config.optimizer, model, self.look_up)
        optimizer = build_optimizer(config.optimizer, cls, model, {"foreach": True})
        grow = lambda t: t.new_empty((micro_batch, *t.shape[1:]))  # noqa: E731
        inputs, target = tree_map(grow, self.one)
        # fsdp frees what it has gathered, so that no copy of it may be kept for later
        cast = partial(torch.autocast, "cpu", torch.bfloat16, cache_enabled=not sharded)
        context = cast if amp.enabled else nullcontext
        step = partial(self.step, model, inputs, target, context)
        with Collectives() as collectives, FlopCounterMode(display=False) as flops:
            step()
        optimizer.step()  # makes its state
        gradients = local_bytes(p.grad for p in model.parameters())
        optimizer.zero_grad()
        moments = local_bytes(t for s in optimizer.state.values() for t in s.values())
        weights = local_bytes(model.state_dict().values())
        ema = config.optimizer.ema is not None
        average = local_bytes(p for p in model.parameters() if p.requires_grad and ema)
        peak = peak_bytes(step, model, (inputs, target), sharded)
        if sharded and late:  # until the last part each rank has those of all weights
            gradients = sum(p.numel() * p.itemsize for p in model.parameters() if p.requires_grad)
            peak += gradients
        figures = {
            "parameters": sum(p.numel() for p in model.parameters()),
            "weights": weights,
            "gradients": gradients,
            "optimizer": moments,
            "average": average,
            "peak": peak + moments + average,
        }
        whole += (moments + average) * (mesh.size() if sharded else 1)
        calls = collectives.calls if sharded else collectives.calls + buckets(model, config)
        counted = flops.get_total_flops()
        return SimpleNamespace(figures=figures, whole=whole, calls=calls, flops=counted)

    def step(self, model: nn.Module, inputs: Any, target: Any, context: Any) -> None:
        """Forward and backward over a micro-batch."""
        with context():
            loss = self.objective(call_model(model, inputs), target)
        loss.backward()


def peak_bytes(step: Any, model: nn.Module, batch: Any, sharded: bool) -> int:
    """What forward and backward hold at most beside the optimizer's state: torch's own count."""
    tracker: Any = FSDPMemTracker(model) if sharded else MemTracker()
    if sharded:
        tracker.track_inputs(tuple(t for t in tree_leaves(batch) if isinstance(t, Tensor)))
    else:
        tracker.track_external(model)
    with tracker:
        step()
    return max(d["Total"] for d in tracker.get_tracker_snapshot("peak").values())


def intervals(cost_s: float, failure_s: float, restart_s: float) -> dict[str, float]:
    """When to save, by Young (1974) and Daly (2006); lost: saving, half an interval, restarts."""
    young = math.sqrt(2 * cost_s * failure_s)
    x = cost_s / (2 * failure_s)
    daly = young * (1 + math.sqrt(x) / 3 + x / 9) - cost_s if x < 1 else failure_s
    lost = cost_s / (daly + cost_s) + ((daly + cost_s) / 2 + restart_s) / failure_s
    when = {"young_s": young, "daly_s": daly, "lost": min(1.0, lost)}
    return {"writing_s": cost_s, "failure_s": failure_s, **when}


def table(rows: list[dict[str, str]]) -> str:
    lines = [list(rows[0]), ["---"] + ["---:"] * (len(rows[0]) - 1), *(r.values() for r in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def show(plans: list[Plan], options: Any) -> str:
    """The two tables, and what they rest on."""
    bytes_of = ("weights", "gradients", "optimizer", "average", "peak")
    rows = [
        (
            {
                "kind, ranks": (name := f"{p.kind}, {p.ranks:,}"),
                "samples": f"{p.samples:,} by {p.micro_batch:,}",
                **{key: f"{getattr(p, key) / GB:,.3g}" for key in bytes_of},
                "sent": f"{p.sent / GB:,.3g}",
                "calls": f"{p.calls:,}",
                "sending, s": f"{p.sending_s:,.3g}",
                "computing, s": f"{p.computing_s:,.3g}",
            },
            {
                "kind, ranks": name,
                "checkpoint": f"{p.checkpoint / GB:,.3g}",
                "written in, s": f"{p.writing_s:,.3g}",
                "hours to a failure": f"{p.failure_s / 3600:,.3g}",
                "save each, min (Young)": f"{p.young_s / 60:,.3g}",
                "(Daly)": f"{p.daly_s / 60:,.3g}",
                "time lost": f"{p.lost:.2%}",
            },
        )
        for p in plans
    ]
    memory, failures = (table(list(part)) for part in zip(*rows, strict=True))
    given = ", ".join(f"{k} {v:g}" for k, v in vars(options).items() if isinstance(v, float))
    head = f"{plans[0].parameters:,} parameters. Of a rank, in GB, and in a step:"
    return f"{head}\n\n{memory}\n\nOf all ranks, in GB:\n\n{failures}\n\nAssumed: {given}."


def numbers(text: str) -> list[int]:
    """Numbers of ranks, by commas."""
    found = [int(part) for part in text.split(",") if part.strip().isdigit()]
    if not found or min(found) < 1 or len(found) != text.count(",") + 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not like 8,64,1024")
    return found


def main() -> None:
    """Print the plan of a config."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--ranks", type=numbers, default=[8, 64, 1024], help="such as 8,64,1024")
    parser.add_argument("--json", action="store_true")
    for key, value, what in (
        ("--bandwidth-gbs", 50.0, "GB/s that a rank sends"),
        ("--latency-us", 10.0, "of a message to the next rank"),
        ("--tflops", 400.0, "10^12 operations that a rank makes in a second of a step"),
        ("--write-gbs", 2.0, "GB/s that a rank writes"),
        ("--storage-gbs", 100.0, "GB/s that all ranks write together"),
        ("--ranks-per-node", 8.0, "that fail together"),
        ("--node-mtbf-h", 6300.0, "hours between failures of a node"),
        ("--restart-s", 300.0, "from a failure to the next step"),
    ):
        parser.add_argument(key, type=float, default=value, help=f"{what} ({value:g})")
    options = parser.parse_intermixed_args()
    warnings.filterwarnings("ignore")
    models.LARGE_MODEL = math.inf  # nothing is allocated that would have to fit
    try:
        config = compose(options.overrides)
    except RunnerError as error:
        parser.exit(error.exit_code, f"error: {error}\n")
    if config.training.batch_size < max(options.ranks):
        parser.error(
            f"training.batch_size: {max(options.ranks)} ranks need as many samples or more"
        )
    kind = config.distributed.kind
    kinds = ("ddp", "fsdp") if kind is DistributedKind.none else (kind.value,)
    planner = Planner(config, options)
    plans = [planner.plan(kind, n) for kind in kinds for n in options.ranks]
    print(json.dumps([asdict(p) for p in plans]) if options.json else show(plans, options))


if __name__ == "__main__":
    main()
