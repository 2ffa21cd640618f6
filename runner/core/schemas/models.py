"""The `model` config group, one dataclass per option, and the `objective` group."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from runner.core.bounds import Bounded, bounded
from runner.core.errors import ConfigError

OBJECTIVE_KINDS = ("auto", "classification", "language_modelling", "regression", "model")


@dataclass
class ModelConfig(Bounded, key="model"):
    """Keys of every model; the sizes of inputs and outputs come from the data."""

    kind: str = MISSING  # set by `model=NAME`: the built-in model
    _target_: str | None = None  # your model class; null: a built-in model
    arguments: dict[str, Any] = field(default_factory=dict)  # arguments for `_target_`
    weights: str | None = None  # initial weights: a file or a run's folder; null: the model's own
    weights_except: list[str] = field(default_factory=list)  # names not to load, such as head.*

    def __post_init__(self) -> None:
        if self.weights == "":
            raise ConfigError("model.weights", "is empty", "name a file or a run's folder, or null")
        if self.weights_except and self.weights is None:
            problem = "needs model.weights"
            raise ConfigError("model.weights_except", problem, "add model.weights=PATH")
        if not all(self.weights_except):
            raise ConfigError("model.weights_except", "has an empty name", "e.g. [head]")
        if self._target_ is None:  # a class of the user gets none of these
            super().__post_init__()
            self.check()

    def check(self) -> None:
        """Raise ConfigError if the option's keys contradict each other."""


@dataclass
class MlpConfig(ModelConfig):
    """A multi-layer perceptron over flattened inputs."""

    kind: str = "mlp"
    width: int = bounded(256, min=1)  # units per hidden layer
    depth: int = bounded(2, min=0)  # hidden layers; 0: a linear model
    dropout: float = bounded(0.0, min=0, below=1)  # probability, after each hidden layer


@dataclass
class CnnConfig(ModelConfig):
    """A small ResNet."""

    kind: str = "cnn"
    width: int = bounded(32, min=1)  # channels of the first stage; doubled by each later one
    stages: int = bounded(3, min=1)  # stages of residual blocks
    blocks: int = bounded(2, min=1)  # residual blocks per stage


@dataclass
class TransformerConfig(ModelConfig):
    """Keys of both transformers."""

    width: int = bounded(128, min=1)  # size of the embeddings
    depth: int = bounded(4, min=1)  # transformer blocks
    heads: int = bounded(4, min=1)  # attention heads; must divide `width`
    dropout: float = bounded(0.0, min=0, below=1)  # probability, on embeddings and residuals

    def check(self) -> None:
        """Raise ConfigError unless `heads` divides `width`."""
        if self.width % self.heads:
            divisors = [n for n in range(1, min(self.width, 16) + 1) if self.width % n == 0]
            problem = f"must divide model.width={self.width}, got {self.heads}"
            fix = f"use one of {', '.join(map(str, divisors))}, or another width"
            raise ConfigError("model.heads", problem, fix)


@dataclass
class GptConfig(TransformerConfig):
    """A decoder-only transformer with tied embeddings."""

    kind: str = "gpt"


@dataclass
class TextClassifierConfig(TransformerConfig):
    """A bidirectional transformer encoder that labels text."""

    kind: str = "classifier"
    depth: int = bounded(2, min=1)  # transformer blocks
    dropout: float = bounded(0.1, min=0, below=1)  # probability, on embeddings and residuals


@dataclass
class HuggingFaceConfig(ModelConfig):
    """A Hugging Face transformers model in a local folder, with its tokenizer."""

    kind: str = "hf"
    path: str = MISSING  # folder with config.json, tokenizer and weights; nothing is downloaded
    pretrained: bool = True  # false: random weights; config.json and tokenizer are enough


_ALL = (MlpConfig, CnnConfig, GptConfig, TextClassifierConfig, HuggingFaceConfig)
OPTIONS: dict[str, type[ModelConfig]] = {cls.kind: cls for cls in _ALL}


@dataclass
class ObjectiveConfig(Bounded, key="objective"):
    """The training loss and the metrics."""

    # auto (by the data), classification, language_modelling, regression, or model: the model's own
    kind: str = "auto"
    _target_: str | None = None  # your own loss: (output, target) -> mean; null: a built-in one
    arguments: dict[str, Any] = field(default_factory=dict)  # arguments for `_target_`
    # classification: cross_entropy | focal; regression: mse | mae | huber; null: the first of these
    loss: str | None = None
    gamma: float = bounded(2.0, min=0)  # focal: larger values weight well-classified samples less
    delta: float = bounded(1.0, above=0)  # huber: linear beyond this error, in standard deviations
    # null | balanced | a weight for each class, in the training loss only; balanced: training
    # samples / (classes * samples of the class)
    class_weights: Any = None
    label_smoothing: float = bounded(0.0, min=0, below=1)  # cross_entropy: smoothing share; 0: off
    top_k: int = bounded(5, min=1)  # classification: k of a second, top-k accuracy; 1: none
    # names of torchmetrics, and yours: a function (output, target) -> value a sample or mean, or a
    # class with update and compute, e.g. [F1Score, my_package.top3]
    metrics: list[str] = field(default_factory=list)
    # targets of this value are ignored; null: none, which saves counting them in each micro-batch
    ignore_index: int | None = -100

    def __post_init__(self) -> None:
        if self.kind not in OBJECTIVE_KINDS:
            fix = f"use {', '.join(OBJECTIVE_KINDS)}"
            raise ConfigError("objective.kind", f"unknown objective {self.kind!r}", fix)
        super().__post_init__()
        weights = self.class_weights
        numbers = isinstance(weights, list)
        numbers = numbers and all(type(x) in (int, float) and 0 < x < math.inf for x in weights)
        if weights not in (None, "balanced") and not numbers:
            fix = "use balanced, null, or a number above 0 for each class: [1, 2.5]"
            raise ConfigError("objective.class_weights", f"cannot be {weights!r}", fix)
