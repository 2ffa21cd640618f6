"""What keeps a run from being faster, in words: one table of rules over what was measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Facts:
    """Of a step, outside the profiler's windows where possible; shares are of its time."""

    split: dict[str, float]  # shares of data, forward, backward, optimizer, whole_step, other
    step_ms: float = 0.0
    operators: float = 0.0  # called in a step
    operator_us: float = 0.0  # on average, on the host
    operator_share: float = 0.0  # of the window's time, in operators
    products: float = 0.0  # share of the operators' time in matrix products and the like
    graph: float = 0.0  # share of the operators' time in compiled graphs
    copies: float = 0.0  # share of the window's time in copies to and from the device
    busy: float | None = None  # share of the time in which an accelerator computed
    workers: int = 0  # that fetch data
    in_memory: bool = False
    cores: int = 1
    techniques: frozenset[str] = field(default_factory=frozenset)  # those applied

    @property
    def compiled(self) -> bool:
        """Whether operators are fused into graphs."""
        return bool(self.techniques & {"compile", "whole_step"})

    @property
    def idle(self) -> bool:
        """Whether it is the host that decides how fast a step is."""
        return self.busy is None or self.busy < BUSY

    @property
    def waits(self) -> bool:
        """Whether the data come too late for anything else to matter."""
        return self.idle and self.split.get("data", 0.0) > WAITS


@dataclass(frozen=True)
class Rule:
    """Speaks when its share is above the threshold."""

    name: str
    above: float
    share: Callable[[Facts], float]
    words: Callable[[Facts, float], str]


WAITS = 0.2  # share of a step
BUSY = 0.7  # an accelerator that computes more of the time than this is what limits the run
TINY_US = 12.0  # an operator this short is mostly the way to it
MANY = 100  # operators in a step


def _data(facts: Facts, share: float) -> str:
    waits = f"{share:.0%} of step time waits for data: "
    if facts.in_memory:
        return waits + "it is in memory, so a larger training.batch_size is what helps"
    if facts.workers >= facts.cores:
        return waits + f"all {facts.cores} cores fetch already; make samples cheaper to read"
    return waits + f"raise data.workers (now {facts.workers})"


def _optimizer(facts: Facts, share: float) -> str:
    takes = f"the optimizer takes {share:.0%} of a step: "
    if "fused_optimizer" not in facts.techniques:
        return takes + "optimization.fused_optimizer.enabled=true"
    return takes + "a larger training.batch_size needs fewer updates"


def _host(facts: Facts, share: float) -> str:
    says = f"host-bound: {facts.operators:,.0f} operators a step, {facts.operator_us:.1f} µs each"
    if facts.busy is not None:
        says += f", the device busy {facts.busy:.0%} of the time"
    if "whole_step" not in facts.techniques:
        return says + ": optimization.whole_step.enabled=true, or optimization.compile"
    return says + ": a larger training.batch_size"


def _compute(facts: Facts, share: float) -> str:
    says = f"compute-bound: {share:.0%} in matrix products"
    if "amp" not in facts.techniques:
        return says + "; 16 bits may help: optimization.amp.enabled=true"
    return says


RULES = (
    # name           above  share                                     what to do about it
    Rule("data",     WAITS,  lambda f: f.split.get("data", 0.0) if f.idle else 0.0, _data),
    Rule("between",  0.25,  lambda f: f.split.get("other", 0.0) if f.idle else 0.0,
         lambda f, x: f"{x:.0%} of step time is spent between steps, in hooks and the record: "
                      "raise monitoring.every and debug.every"),
    Rule("optimizer", 0.25, lambda f: f.split.get("optimizer", 0.0) if f.idle else 0.0, _optimizer),
    Rule("copies",   0.20,  lambda f: f.copies,
         lambda f, x: f"{x:.0%} of the time copies between host and device: data.pin_memory=true, "
                      "data.device_prefetch=true, and no .cpu() in the model"),
    # the share of the time that goes to operators so short that calling them is the work
    Rule("host",     0.50,  lambda f: _tiny(f), _host),
    Rule("compute",  0.50,  lambda f: 0.0 if f.waits or f.operator_share < 0.3 else f.products,
         _compute),
    Rule("graph",    0.50,  lambda f: 0.0 if f.waits else f.graph,
         lambda f, x: f"compute-bound: {x:.0%} of the operators' time is in compiled graphs"),
)  # fmt: skip
"""What is worth looking at comes first; each that speaks is said, the first is the finding."""


def _tiny(facts: Facts) -> float:
    """Share of a step that calls operators, where these are many and short."""
    if facts.operators < MANY or not facts.idle or facts.waits:
        return 0.0
    if facts.busy is not None:
        return 1.0 - facts.busy
    return 1.0 if facts.operator_us < TINY_US else 0.0


def verdicts(facts: Facts) -> list[str]:
    """What can be said, the most important first; never empty."""
    said = [rule.words(facts, share) for rule in RULES if (share := rule.share(facts)) > rule.above]
    if said:
        return said
    parts = sorted(facts.split.items(), key=lambda item: -item[1])
    told = ", ".join(f"{name.replace('_', ' ')} {share:.0%}" for name, share in parts if share)
    return [f"nothing stands out: {told}" if told else "too few steps to say anything"]
