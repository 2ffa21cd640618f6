"""Construction of a model from the `model` group and the data's sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from runner.data.batch import Sizes
from runner.device import memory
from runner.errors import ConfigError
from runner.models.config import ModelConfig


@dataclass(frozen=True)
class SizeFit:
    """A model's class, and the tasks and sizes of data that it needs."""

    module: str  # imported only if used
    name: str
    tasks: tuple[str, ...]
    sizes: tuple[str, ...]  # of the data, required by its constructor

    def fits(self, sizes: Sizes) -> bool:
        """Whether the model is for the task, and the data states every size."""
        return sizes.task in self.tasks and not self.missing(sizes)

    def missing(self, sizes: Sizes) -> list[str]:
        """Return the required sizes that the data does not state."""
        return [name for name in self.sizes if getattr(sizes, name) is None]


OTHER_NAMES = {
    "classes": ("num_classes", "num_labels", "n_classes"),
    "in_channels": ("in_chans",),
    "image_size": ("img_size",),
    "vocab": ("vocab_size",),
    "sequence": ("seq_len",),
}
"""Names of the sizes in constructors of other libraries."""
BUILDERS = {"timm": ("num_classes", "in_chans"), "torchvision": ("num_classes",)}
"""Packages with functions that take these sizes as `**kwargs`, not in their signature."""
LARGE = 10**8  # models of about this many weights are sized on the meta device first
COMMON = {f.name for f in fields(ModelConfig)}
LABELS = ("classification", "regression")
FITS = {
    "mlp": SizeFit("runner.models.mlp", "MLP", LABELS, ("in_features", "classes")),
    "cnn": SizeFit("runner.models.cnn", "CNN", LABELS, ("in_channels", "image_size", "classes")),
    "gpt": SizeFit(
        "runner.models.transformer", "GPT", ("language_modelling",), ("vocab", "sequence")
    ),
    "classifier": SizeFit(
        "runner.models.transformer", "TextClassifier", LABELS, ("vocab", "sequence", "classes")
    ),
}


def build_model(config: ModelConfig, sizes: Sizes, resolve: Callable[[str, str], Any]) -> nn.Module:
    """Build the model that `config` names, on the CPU, with fresh weights.

    Built-in models get the option's fields and the data's sizes; a user's class gets
    `model.arguments` and the sizes that its constructor names. Raises ConfigError if the model
    does not fit the data or has no trainable parameter.
    """
    if config._target_ is None:
        model = _ours(config, sizes)
    else:
        from runner.security.registry import assembled, construct

        factory = resolve(config._target_, "model._target_")
        arguments = assembled(config.arguments, resolve, "model")
        model = construct(factory, *_with_sizes(factory, arguments, sizes), "model")
        if not isinstance(model, nn.Module):
            problem = f"{config._target_} made a {type(model).__name__}, not a torch.nn.Module"
            fix = "name a module's class, or a function that returns a module"
            raise ConfigError("model._target_", problem, fix)
    if not any(p.requires_grad for p in model.parameters()):
        problem = f"{config._target_ or config.kind} has no parameter that needs a gradient"
        fix = "set requires_grad on those to train"
        raise ConfigError("model", problem, fix)
    return model


def _with_sizes(
    factory: Any, arguments: dict[str, Any], sizes: Sizes
) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the arguments, with sizes passed as **kwargs, and the sizes by all of their names."""
    known = sizes.for_constructor()
    known |= {other: known[n] for n in known for other in OTHER_NAMES.get(n, ())}
    package = str(getattr(factory, "__module__", "")).partition(".")[0]
    if package not in BUILDERS or isinstance(factory, type):
        return arguments, known
    return {name: known[name] for name in BUILDERS[package] if name in known} | arguments, known


def refuse_lazy(model: nn.Module) -> None:
    """Raise ConfigError for lazy modules, which get their sizes in the first forward."""
    for name, module in model.named_modules():
        own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        if any(is_lazy(tensor) for tensor in own):
            what = f"{name or 'the model'} ({type(module).__name__}) is lazy"
            problem = f"{what}: its sizes are unknown until a first forward, after the optimizer"
            fix = "name the sizes (Linear for LazyLinear), or run one batch through it beforehand"
            raise ConfigError("model", problem, fix)


def _ours(config: ModelConfig, sizes: Sizes) -> nn.Module:
    if config.kind not in FITS:
        raise ConfigError("model.kind", f"unknown model {config.kind!r}", f"use {', '.join(FITS)}")
    own_fields = {f.name: getattr(config, f.name) for f in fields(config) if f.name not in COMMON}
    for name in config.arguments:
        problem = f"model={config.kind} has no such key"
        raise ConfigError(f"model.{name}", problem, f"use {', '.join(own_fields)}")
    fit = FITS[config.kind]
    if not fit.fits(sizes):
        raise ConfigError("model", *_misfit(config.kind, fit, sizes))
    factory = getattr(import_module(fit.module), fit.name)
    build = partial(factory, **own_fields, **{k: getattr(sizes, k) for k in fit.sizes})
    width = own_fields["width"] << own_fields.get("stages", 0)  # each stage doubles it
    if width**2 * max(own_fields.get("depth", 0), own_fields.get("blocks", 0)) > LARGE:
        _check_memory(build)
    model: nn.Module = build()
    return model


def _check_memory(build: Callable[[], nn.Module]) -> None:
    """Raise ConfigError if the weights alone exceed the available memory."""
    with torch.device("meta"):
        size = sum(p.numel() * p.element_size() for p in build().parameters())
    if size > (available := memory.available_bytes()):
        fix = f"use a model smaller than the available {available / 1e9:,.1f} GB"
        raise ConfigError("model.width", f"the weights take {size / 1e9:,.1f} GB", fix)


def _misfit(kind: str, fit: SizeFit, sizes: Sizes) -> tuple[str, str]:
    stated = ", ".join(f"{k}={v}" for k, v in sizes.for_constructor().items()) or "no sizes"
    if sizes.task in fit.tasks:
        needs = f"needs {' and '.join(fit.missing(sizes))}"
    else:
        needs = f"is for {' or '.join(fit.tasks)}"
    options = [f"model={name}" for name, other in FITS.items() if other.fits(sizes)]
    fix = f"use {' or '.join(options)}" if options else "set your own model with model._target_"
    return f"{kind} {needs}, but the data is for {sizes.task} and gives {stated}", fix
