"""From config and sizes to a model, and every way in which they do not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from runner.core.errors import ConfigError
from runner.core.interfaces.batch import Sizes, call_model
from runner.core.models.build import build_model
from runner.core.schemas.models import (
    CnnConfig,
    GptConfig,
    MlpConfig,
    ModelConfig,
    TextClassifierConfig,
)

IMAGES = Sizes("classification", 64, in_channels=1, image_size=8, classes=10)
TABLE = Sizes("regression", 30, classes=2)
TEXT = Sizes("language_modelling", classes=100, vocab=100, sequence=8)
LABELLED = Sizes("classification", classes=6, vocab=100, sequence=8)

PIXELS, ROWS, IDS = torch.randn(3, 1, 8, 8), torch.randn(3, 30), torch.zeros(3, 8).long()
MASKED = {"input_ids": IDS, "attention_mask": torch.ones(3, 8).long()}


def never(target: str, key: str) -> Any:
    raise AssertionError(f"{target} was resolved for {key}")


class Net(nn.Module):
    def __init__(self, in_features: int, classes: int, width: int = 8) -> None:
        super().__init__()
        self.sizes = (in_features, classes, width)
        self.layer = nn.Linear(in_features, classes)


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2).requires_grad_(False)


def foreign(factory: Any, **arguments: Any) -> nn.Module:
    config = MlpConfig(_target_="mine.Net", width=-1, arguments=arguments)  # -1: not its argument

    def resolve(target: str, key: str) -> Any:
        assert (target, key) == ("mine.Net", "model._target_")
        return factory

    return build_model(config, IMAGES, resolve)


@pytest.mark.parametrize(
    ("config", "sizes", "inputs", "shape"),
    [
        (MlpConfig(width=16), IMAGES, PIXELS, (3, 10)),
        (MlpConfig(width=16), TABLE, ROWS, (3, 2)),
        (CnnConfig(width=4), IMAGES, PIXELS, (3, 10)),
        (GptConfig(width=16), TEXT, IDS, (3, 8, 100)),
        (TextClassifierConfig(width=16), LABELLED, MASKED, (3, 6)),
    ],
)
def test_sizes_come_from_the_data(
    config: ModelConfig, sizes: Sizes, inputs: Any, shape: tuple[int, ...]
) -> None:
    assert call_model(build_model(config, sizes, never), inputs).shape == shape


@pytest.mark.parametrize(
    ("config", "sizes", "says"),
    [
        (GptConfig(), IMAGES, r"gpt is for language_modelling, .*_features=64.*=mlp or model=cnn"),
        (CnnConfig(), TABLE, r"cnn needs in_channels and image_size, .*regression.*use model=mlp"),
        (MlpConfig(), LABELLED, r"mlp needs in_features, .*vocab=100.*use model=classifier"),
        (MlpConfig(), Sizes("classification", 4), r"mlp needs classes.*=4; .*model\._target_"),
        (MlpConfig(), Sizes("segmentation"), r"gives no sizes; set your own model"),
    ],
)
def test_an_error_about_data_names_what_fits(config: ModelConfig, sizes: Sizes, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        build_model(config, sizes, never)
    assert caught.value.key == "model"


def test_a_foreign_class_gets_its_arguments_and_the_sizes_it_names() -> None:
    assert foreign(Net, width=3).sizes == (64, 10, 3)


@pytest.mark.parametrize(
    ("factory", "arguments", "says"),
    [
        (dict, {}, r"model\._target_: mine\.Net made a dict, not a torch\.nn\.Module"),
        (Frozen, {}, r"mine\.Net has no parameter that needs a gradient"),
        (nn.Identity, {}, r"mine\.Net has no parameter that needs a gradient"),
        (Net, {"widht": 3}, r"model\.widht: .*did you mean \+model\.width"),
    ],
)
def test_an_object_that_is_no_model_or_cannot_learn_is_refused(
    factory: Any, arguments: dict[str, int], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        foreign(factory, **arguments)


def test_heads_divide_the_width() -> None:
    with pytest.raises(ConfigError, match=r"^model\.heads: must divide model\.width=100, got 3"):
        GptConfig(width=100, heads=3)
