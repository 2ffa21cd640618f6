"""Several optimizers, each of some parameters, as one: `optimizer.groups` with their own `name`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from runner.core.errors import ConfigError
from runner.core.findings import Choice, notice
from runner.core.optim.fine_tuning import match_names
from runner.core.optim.optimizer import (
    build_optimizer,
    find_optimizer,
    incompatibility,
    small_weight,
)
from runner.core.schemas.optimizer import OWN_OPTIMIZER, OptimizerConfig


class CombinedOptimizer(Optimizer):
    """Steps several optimizers of different parameters; their `state_dict()` has torch's form."""

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        super().__init__([group for part in parts for group in part.param_groups], {})
        self.combined_parts = list(parts)
        for part in parts:
            self.state.update(part.state)
        self._share()

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the parameters of each part; `closure` is called once, before."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.combined_parts:
            part.step()
        return loss

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "combined_parts": self.combined_parts}

    def __setstate__(self, state: dict[str, Any]) -> None:  # also by load_state_dict
        super().__setstate__(state)
        self._share()

    def _share(self) -> None:
        """Give each part its groups and the common state, in which every parameter has a key."""
        groups_by_part = self.split_groups(self.param_groups)
        for part, groups in zip(self.combined_parts, groups_by_part, strict=True):
            part.__setstate__({"state": self.state, "param_groups": groups})

    def split_groups(self, groups: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
        """Return the groups by part."""
        rest = iter(groups)
        return [[next(rest) for _ in part.param_groups] for part in self.combined_parts]

    def split_state(self, state: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return a `state_dict` by part, each with parameters counted from 0."""
        states: list[dict[str, Any]] = []
        start = 0
        for groups in self.split_groups(state["param_groups"]):
            end = start + sum(len(group["params"]) for group in groups)
            own = [{**g, "params": [n - start for n in g["params"]]} for g in groups]
            entries = {n - start: e for n, e in state["state"].items() if start <= n < end}
            states.append({"state": entries, "param_groups": own})
            start = end
        return states

    def join_states(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the `state_dict` of which `split_state` gives `states`."""
        entries: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        for state in states:
            start = sum(len(group["params"]) for group in groups)
            entries |= {start + n: entry for n, entry in state["state"].items()}
            for group in state["param_groups"]:
                groups.append({**group, "params": [start + n for n in group["params"]]})
        return {"state": entries, "param_groups": groups}


@dataclass(frozen=True)
class Part:
    """One optimizer of several: its class, config, and parameters by name."""

    key: str
    cls: type[Optimizer]
    config: OptimizerConfig
    parameters: dict[str, Tensor]


def divide(
    config: OptimizerConfig, main: type[Optimizer], names: Mapping[str, Tensor]
) -> tuple[list[Part], list[Choice]]:
    """Return the optimizers of `names`, `main` last, and notes about weights left to `main`.

    A group's weights that its class does not take (Muon: all but matrices) are left to the groups
    after it. Raises ConfigError.
    """
    rest = {name: p for name, p in names.items() if p.requires_grad}
    parts: list[Part] = []
    notes: list[Choice] = []
    of_main: dict[str, Tensor] = {}
    for number, group in enumerate(config.groups):
        key = f"optimizer.groups.{number}"
        matched = match_names(group["match"], rest, f"{key}.match", "trained")
        if not group.keys() & OWN_OPTIMIZER:
            of_main |= {name: rest.pop(name) for name in matched}
            continue
        cls = find_optimizer(group["name"], f"{key}.name") if "name" in group else main
        taken = [name for name in matched if _takes(cls, rest[name])] or matched
        if left := [name for name in matched if name not in taken]:
            shape = list(rest[left[0]].shape)
            reason = f"{cls.__name__} takes no weight of shape {shape}: {left[0]} is left to others"
            value = f"{len(taken)} of {len(matched)} weights"
            notes.append(notice(key, value, reason))
        options = {**({} if "name" in group else config.options), **group.get("options", {})}
        changes: dict[str, Any] = {"options": options}
        if "name" in group:
            changes |= {"name": group["name"], "_target_": None}
        if "weight_decay" in group:
            changes["weight_decay"] = group["weight_decay"]
        rate = [{"match": group["match"], "lr": group["lr"]}] if "lr" in group else []
        own_config = replace(config, groups=rate, **changes)
        parts.append(Part(key, cls, own_config, {name: rest.pop(name) for name in taken}))
    if of_main or rest:
        others = [group for group in config.groups if not group.keys() & OWN_OPTIMIZER]
        own_config = replace(config, groups=others)
        parts.append(Part("optimizer", main, own_config, {**of_main, **rest}))
    return parts, notes


def build_combined(
    config: OptimizerConfig, main: type[Optimizer], model: nn.Module
) -> tuple[CombinedOptimizer, list[Choice]]:
    """Construct the optimizers of the model's trainable parameters. Raises ConfigError."""
    parts, notes = divide(config, main, dict(model.named_parameters()))
    optimizers: list[Optimizer] = []
    for part in parts:
        if conflict := incompatibility(part.cls, model, part.config.weight_decay, part.parameters):
            raise ConfigError(part.key, *conflict)
        parameters, key = part.parameters, part.key
        optimizers.append(build_optimizer(part.config, part.cls, model, {}, parameters, key))
    if modes := [type(o).__name__ for o in optimizers if callable(getattr(o, "eval", None))]:
        problem = f"{modes[0]} has an evaluation mode of its own"
        raise ConfigError("optimizer.groups", problem, "use it for all parameters")
    return CombinedOptimizer(optimizers), notes


def _takes(cls: type[Optimizer], parameter: Tensor) -> bool:
    try:
        cls([small_weight(parameter)], lr=0.1)  # type: ignore[call-arg]
    except ValueError:
        return False
    return True
