"""What can be asked of the model: the `model` group, one dataclass per option."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

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
        self._check_weights()
        if self._target_ is None:  # a foreign class checks for itself, and gets none of these
            self.check()

    def check(self) -> None:
        """Raise ConfigError where the option's own keys make no model."""

    def _check_weights(self) -> None:
        if self.weights == "":
            raise ConfigError("model.weights", "is empty", "name a file or a run's folder, or null")
        if self.weights_except and self.weights is None:
            raise ConfigError(
                "model.weights_except", "leaves out parts of no weights", "add model.weights=PATH"
            )
        if not all(self.weights_except):
            raise ConfigError("model.weights_except", "has an empty name", "e.g. [head]")

    def _positive(self, *keys: str) -> None:
        for key in keys:
            if getattr(self, key) < 1:
                raise ConfigError(
                    f"model.{key}", f"{getattr(self, key)} is not a count", "use 1 or more"
                )

    def _share(self, key: str) -> None:
        if not 0 <= getattr(self, key) < 1:
            raise ConfigError(
                f"model.{key}", f"{getattr(self, key)} is not a share", "use 0 to below 1"
            )

    def _divides_width(self, width: int, heads: int) -> None:
        if width % heads:
            fits = [n for n in range(1, min(width, 16) + 1) if width % n == 0]
            raise ConfigError(
                "model.heads",
                f"{heads} heads cannot share model.width={width} evenly",
                f"use one of {', '.join(map(str, fits))}, or another width",
            )


@dataclass
class Mlp(ModelConfig):
    """A multi-layer perceptron over flattened inputs."""

    kind: str = "mlp"
    width: int = 256
    depth: int = 2  # hidden layers; 0 is a linear model
    dropout: float = 0.0

    def check(self) -> None:
        """Sizes are counts, dropout is a share."""
        self._positive("width")
        if self.depth < 0:
            raise ConfigError("model.depth", f"{self.depth} is not a count", "use 0 or more")
        self._share("dropout")


@dataclass
class Cnn(ModelConfig):
    """A small ResNet."""

    kind: str = "cnn"
    width: int = 32  # channels of the first stage; each later stage doubles it
    stages: int = 3
    blocks: int = 2  # residual blocks per stage

    def check(self) -> None:
        """Sizes are counts."""
        self._positive("width", "stages", "blocks")


@dataclass
class Gpt(ModelConfig):
    """A decoder-only transformer with tied embeddings."""

    kind: str = "gpt"
    width: int = 128
    depth: int = 4
    heads: int = 4
    dropout: float = 0.0

    def check(self) -> None:
        """Sizes are counts, heads divide the width, dropout is a share."""
        self._positive("width", "depth", "heads")
        self._divides_width(self.width, self.heads)
        self._share("dropout")


@dataclass
class Classifier(ModelConfig):
    """A bidirectional transformer encoder that labels text."""

    kind: str = "classifier"
    width: int = 128
    depth: int = 2
    heads: int = 4
    dropout: float = 0.1

    def check(self) -> None:
        """Sizes are counts, heads divide the width, dropout is a share."""
        self._positive("width", "depth", "heads")
        self._divides_width(self.width, self.heads)
        self._share("dropout")


OPTIONS: dict[str, type[ModelConfig]] = {cls.kind: cls for cls in (Mlp, Cnn, Gpt, Classifier)}
