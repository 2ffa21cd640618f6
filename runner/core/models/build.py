"""Construction of a model from the `model` group and the data's sizes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, fields
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from runner.core.device import memory
from runner.core.errors import ConfigError
from runner.core.interfaces.batch import Sizes
from runner.core.preserved_state import float32_default
from runner.core.schemas.models import ModelConfig


@dataclass(frozen=True)
class ModelRequirements:
    """A model's class, and the tasks and sizes of data that it needs."""

    module: str  # in this folder, imported only if used
    name: str
    tasks: tuple[str, ...]
    sizes: tuple[str, ...]  # of the data, required by its constructor

    def fits(self, sizes: Sizes) -> bool:
        """Whether the model is for the task, and the data states every size."""
        return sizes.task in self.tasks and not self.missing(sizes)

    def missing(self, sizes: Sizes) -> list[str]:
        """Return the required sizes that the data does not state."""
        return [name for name in self.sizes if getattr(sizes, name) is None]


SIZE_ALIASES = {
    "classes": ("num_classes", "num_labels", "n_classes"),
    "in_channels": ("in_chans",),
    "image_size": ("img_size",),
    "vocab": ("vocab_size",),
    "sequence": ("seq_len",),
}
"""Names of the sizes in constructors of other libraries."""
KWARGS_SIZES = {"timm": ("num_classes", "in_chans"), "torchvision": ("num_classes",)}
"""Packages with functions that take these sizes as `**kwargs`, not in their signature."""
LARGE_MODEL = 10**8  # models of about this many weights are sized on the meta device first
COMMON_FIELDS = {f.name for f in fields(ModelConfig)}
LABEL_TASKS, TEXT_TASKS = ("classification", "regression"), ("language_modelling",)
BUILT_IN_MODELS = {
    "mlp": ModelRequirements("mlp", "MLP", LABEL_TASKS, ("in_features", "classes")),
    "cnn": ModelRequirements("cnn", "CNN", LABEL_TASKS, ("in_channels", "image_size", "classes")),
    "gpt": ModelRequirements("transformer", "GPT", TEXT_TASKS, ("vocab", "sequence")),
    "classifier": ModelRequirements(
        "transformer", "TextClassifier", LABEL_TASKS, ("vocab", "sequence", "classes")
    ),
}


def build_model(config: ModelConfig, sizes: Sizes, resolve: Callable[[str, str], Any]) -> nn.Module:
    """Build the model that `config` names, on the CPU, with fresh weights.

    Built-in models get the option's fields and the data's sizes; a user's class gets
    `model.arguments` and the sizes that its constructor names. Raises ConfigError if the model
    does not fit the data or has no trainable parameter.
    """
    if config._target_ is None:
        # the constructor of a data set may have left a half type as the default
        is_double = torch.get_default_dtype() is torch.float64
        with nullcontext() if is_double else float32_default():
            model = _build_built_in(config, sizes)
    else:
        from runner.core.security.registry import construct, instantiate_nested

        factory = resolve(config._target_, "model._target_")
        arguments = instantiate_nested(config.arguments, resolve, "model")
        model = construct(factory, *_add_sizes(factory, arguments, sizes), "model")
        if not isinstance(model, nn.Module):
            problem = f"{config._target_} made a {type(model).__name__}, not a torch.nn.Module"
            fix = "name a module's class, or a function that returns a module"
            raise ConfigError("model._target_", problem, fix)
    if not any(p.requires_grad for p in model.parameters()):
        problem = f"{config._target_ or config.kind} has no parameter that needs a gradient"
        fix = "set requires_grad on those to train"
        raise ConfigError("model", problem, fix)
    return model


def _add_sizes(
    factory: Any, arguments: dict[str, Any], sizes: Sizes
) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the arguments, with sizes passed as **kwargs, and the sizes by all of their names."""
    by_name = sizes.for_constructor()
    by_name |= {other: by_name[n] for n in by_name for other in SIZE_ALIASES.get(n, ())}
    package = str(getattr(factory, "__module__", "")).partition(".")[0]
    if package not in KWARGS_SIZES or isinstance(factory, type):
        return arguments, by_name
    kwargs = {name: by_name[name] for name in KWARGS_SIZES[package] if name in by_name}
    return kwargs | arguments, by_name


def refuse_lazy(model: nn.Module) -> None:
    """Raise ConfigError for lazy modules, which get their sizes in the first forward."""
    for name, module in model.named_modules():
        own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        if any(is_lazy(tensor) for tensor in own):
            what = f"{name or 'the model'} ({type(module).__name__}) is lazy"
            problem = f"{what}: its sizes are unknown until a first forward, after the optimizer"
            fix = "name the sizes (Linear for LazyLinear), or run one batch through it beforehand"
            raise ConfigError("model", problem, fix)


def _build_built_in(config: ModelConfig, sizes: Sizes) -> nn.Module:
    if config.kind not in BUILT_IN_MODELS:
        names = ", ".join(BUILT_IN_MODELS)
        raise ConfigError("model.kind", f"unknown model {config.kind!r}", f"use {names}")
    own_fields = [f.name for f in fields(config) if f.name not in COMMON_FIELDS]
    options = {name: getattr(config, name) for name in own_fields}
    for name in config.arguments:
        problem = f"model={config.kind} has no such key"
        raise ConfigError(f"model.{name}", problem, f"use {', '.join(options)}")
    requirements = BUILT_IN_MODELS[config.kind]
    if not requirements.fits(sizes):
        raise ConfigError("model", *_describe_misfit(config.kind, requirements, sizes))
    factory = getattr(import_module(f"runner.core.models.{requirements.module}"), requirements.name)
    build = partial(factory, **options, **{k: getattr(sizes, k) for k in requirements.sizes})
    width = options["width"] << options.get("stages", 0)  # each stage doubles it
    if width**2 * max(options.get("depth", 0), options.get("blocks", 0)) > LARGE_MODEL:
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


def _describe_misfit(kind: str, requirements: ModelRequirements, sizes: Sizes) -> tuple[str, str]:
    stated = ", ".join(f"{k}={v}" for k, v in sizes.for_constructor().items()) or "no sizes"
    if sizes.task in requirements.tasks:
        needs = f"needs {' and '.join(requirements.missing(sizes))}"
    else:
        needs = f"is for {' or '.join(requirements.tasks)}"
    options = [f"model={name}" for name, other in BUILT_IN_MODELS.items() if other.fits(sizes)]
    fix = f"use {' or '.join(options)}" if options else "set your own model with model._target_"
    if sizes.vocab and not sizes.class_names and "in_features" in requirements.missing(sizes):
        # whole numbers of an array
        fix = f"if they are features, save x as float32; only if they are token ids, {fix}"
    return f"{kind} {needs}, but the data is for {sizes.task} and gives {stated}", fix
