"""The `model` config group: one dataclass per option."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from runner.bounds import bounded, check_bounds
from runner.errors import ConfigError


@dataclass
class ModelConfig:
    """What every model has; the sizes of inputs and outputs come from the data."""

    kind: str = MISSING  # which of our options this is
    _target_: str | None = None  # a class of the user's own, in place of ours
    arguments: dict[str, Any] = field(default_factory=dict)  # what its constructor gets
    weights: str | None = None  # a file, or a run's folder, that the first weights are read from
    weights_except: list[str] = field(default_factory=list)  # names that are not; also `head.*`

    def __post_init__(self) -> None:
        if self.weights == "":
            raise ConfigError("model.weights", "is empty", "name a file or a run's folder, or null")
        if self.weights_except and self.weights is None:
            problem = "needs model.weights"
            raise ConfigError("model.weights_except", problem, "add model.weights=PATH")
        if not all(self.weights_except):
            raise ConfigError("model.weights_except", "has an empty name", "e.g. [head]")
        if self._target_ is None:  # a foreign class checks for itself, and gets none of these
            check_bounds(self, "model")
            self.check()

    def check(self) -> None:
        """Raise ConfigError if the option's keys contradict each other."""


@dataclass
class Mlp(ModelConfig):
    """A multi-layer perceptron over flattened inputs."""

    kind: str = "mlp"
    width: int = bounded(256, min=1)
    depth: int = bounded(2, min=0)  # hidden layers; 0 is a linear model
    dropout: float = bounded(0.0, min=0, below=1)


@dataclass
class Cnn(ModelConfig):
    """A small ResNet."""

    kind: str = "cnn"
    width: int = bounded(32, min=1)  # channels of the first stage; each later stage doubles it
    stages: int = bounded(3, min=1)
    blocks: int = bounded(2, min=1)  # residual blocks per stage


@dataclass
class Transformer(ModelConfig):
    """What both transformers have."""

    width: int = bounded(128, min=1)
    depth: int = bounded(4, min=1)
    heads: int = bounded(4, min=1)
    dropout: float = bounded(0.0, min=0, below=1)

    def check(self) -> None:
        """Raise ConfigError unless `heads` divides `width`."""
        if self.width % self.heads:
            fits = [n for n in range(1, min(self.width, 16) + 1) if self.width % n == 0]
            problem = f"must divide model.width={self.width}, got {self.heads}"
            fix = f"use one of {', '.join(map(str, fits))}, or another width"
            raise ConfigError("model.heads", problem, fix)


@dataclass
class Gpt(Transformer):
    """A decoder-only transformer with tied embeddings."""

    kind: str = "gpt"


@dataclass
class Classifier(Transformer):
    """A bidirectional transformer encoder that labels text."""

    kind: str = "classifier"
    depth: int = bounded(2, min=1)
    dropout: float = bounded(0.1, min=0, below=1)


@dataclass
class HuggingFace(ModelConfig):
    """A model of transformers out of a local folder; texts go through the tokenizer in it."""

    kind: str = "hf"
    path: str = MISSING  # the folder: config.json, tokenizer and weights; nothing is downloaded
    pretrained: bool = True  # false: fresh weights, and config.json and tokenizer are enough


_ALL = (Mlp, Cnn, Gpt, Classifier, HuggingFace)
OPTIONS: dict[str, type[ModelConfig]] = {cls.kind: cls for cls in _ALL}
