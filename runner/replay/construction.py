"""Code that makes a model and a loss: what a script needs that does without the runner."""

from __future__ import annotations

import ast
import inspect
import math
import site
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import util
from pathlib import Path
from typing import Any

from torch import nn

from runner.batch import Sizes
from runner.config import RunConfig
from runner.models.build import COMMON, FITS
from runner.objectives.custom import Custom
from runner.run import Run
from runner.security.plain import check_name

CODE = "model_code"
OURS = ("runner.models.", "runner.deferred", "runner.errors")


@dataclass
class Code:
    """An expression, the lines that import what is in it, and the folders that these are in."""

    expression: str
    imports: list[str] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)


def model_code(config: RunConfig, sizes: Sizes, files: Path) -> Code:
    """What makes the model; of ours the modules are copied to `files`."""
    model = config.model
    if model._target_ is None:
        fit = FITS[model.kind]
        own = {k: v for k, v in vars(model).items() if k not in COMMON}
        own |= {name: getattr(sizes, name) for name in fit.sizes}
        copied = _copy(fit.module, files / CODE)
        return Code(_call(fit.name, own), [f"from {CODE}.{copied} import {fit.name}"])
    arguments = {**_known_sizes(model._target_, sizes), **model.arguments}
    made = Code("")
    made.expression = _expression({"_target_": model._target_, **arguments}, made)
    return made


def _known_sizes(target: str, sizes: Sizes) -> dict[str, int]:
    """Those that its signature names, as when the run was built."""
    try:
        parameters = inspect.signature(_object(target)).parameters
    except ValueError:
        return {}
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {
        k: v
        for k, v in sizes.for_constructor().items()
        if k in parameters and parameters[k].kind in kinds
    }


def _object(target: str) -> Any:
    """What a dotted name stands for; it was imported when the run was put together."""
    parts = target.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        module = sys.modules.get(".".join(parts[:cut]))
        if module is not None:
            found: Any = module
            for part in parts[cut:]:
                found = getattr(found, part)
            return found
    raise LookupError(target)


def _expression(value: Any, made: Code) -> str:
    """Code for an argument; `_target_` becomes a call."""
    if isinstance(value, Mapping):
        inner = {k: v for k, v in value.items() if k != "_target_"}
        if "_target_" not in value:
            pairs = [f"{k!r}: {_expression(v, made)}" for k, v in inner.items()]
            return "{" + ", ".join(pairs) + "}"
        target = str(value["_target_"])
        name = _name(target, made)
        return f"{name}({', '.join(_given(inner, target, made))})"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_expression(v, made) for v in value) + "]"
    if isinstance(value, float) and not math.isfinite(value):
        return f"float('{value}')"
    return repr(value)


def _given(arguments: Mapping[str, Any], target: str, made: Code) -> list[str]:
    """Code for what a call gets; a name that is more than that is refused."""
    return [f"{check_name(k, target)}={_expression(v, made)}" for k, v in arguments.items()]


def _name(target: str, made: Code) -> str:
    """Import what `target` names; what to call it."""
    found = _object(target)
    module = sys.modules[found.__module__]
    if not found.__module__.startswith("torch."):
        _add_path(module, made.paths)
    top, _, name = target.rpartition(".")
    made.imports.append(f"from {top} import {name}")
    return name


def _add_path(module: Any, paths: list[str]) -> None:
    file = getattr(module, "__file__", None)
    if file is None:
        return
    up = module.__name__.count(".") + (1 if Path(file).name == "__init__.py" else 0)
    root = str(Path(file).resolve().parents[up])
    if root not in paths and root not in site.getsitepackages():
        paths.append(root)


def _call(name: str, arguments: Mapping[str, Any]) -> str:
    return f"{name}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})"


def _copy(module: str, folder: Path) -> str:
    """Copy a module of ours and what it imports of ours; its name in the folder."""
    folder.mkdir(exist_ok=True)
    (folder / "__init__.py").write_text("", "utf-8")
    waiting, done = [module], set()
    while waiting:
        name = waiting.pop()
        if name in done:
            continue
        done.add(name)
        spec = util.find_spec(name)
        if spec is None or spec.origin is None:
            continue
        text = Path(spec.origin).read_text("utf-8")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(OURS):
                waiting.append(str(node.module))
        for prefix in OURS:
            text = text.replace(f"from {prefix}", f"from {CODE}.{prefix.split('.')[1]}" if (
                not prefix.endswith(".")) else f"from {CODE}.")  # fmt: skip
        (folder / f"{name.rpartition('.')[2]}.py").write_text(text, "utf-8")
    return module.rpartition(".")[2]


def loss_code(run: Run, config: RunConfig) -> Code | None:
    """The loss of `output` and `target`; None where its class is made for the runner."""
    objective = config.objective
    if objective._target_ is not None:
        if not isinstance(run.objective, Custom):
            return None  # an Objective of the user's own imports the runner
        made = Code("")
        given = dict(objective.arguments)
        if isinstance(_object(objective._target_), type):
            sizes = _known_sizes(objective._target_, run.sizes)
            loss = _expression({"_target_": objective._target_, **sizes, **given}, made)
            module = issubclass(_object(objective._target_), nn.Module)
            made.expression = f"{loss}{'.to(device)' if module else ''}(output, target)"
        else:
            name = _name(objective._target_, made)
            call = ["output", "target", *_given(given, objective._target_, made)]
            made.expression = f"{name}({', '.join(call)})"
        return made
    kind = run.sizes.task if objective.kind == "auto" else objective.kind
    logits, skip = "logits_of(output)", ""
    if objective.ignore_index not in (None, -100):  # which is torch's own
        skip = f", ignore_index={objective.ignore_index}"
    if kind == "regression":
        mean, deviation = run.sizes.target_mean, run.sizes.target_deviation
        wanted = f"(target.reshape({logits}.shape) - {mean!r}) / {deviation!r}"
        return Code(f"F.mse_loss({logits}, ({wanted}).to({logits}.dtype))")
    if kind == "language_modelling":
        flat = f"{logits}.flatten(0, -2), target.flatten()"
        return Code(f"F.cross_entropy({flat}{skip})")
    smooth = f", label_smoothing={objective.label_smoothing}" if objective.label_smoothing else ""
    return Code(f"F.cross_entropy({logits}, target{skip}{smooth})")
