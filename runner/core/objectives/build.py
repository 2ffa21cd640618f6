"""Construction of an objective from the `objective` group and the data's sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from runner.core.errors import ConfigError
from runner.core.findings import Choice
from runner.core.interfaces.batch import Sizes
from runner.core.interfaces.objective import Objective
from runner.core.schemas.data import CLASS_TARGET_FIX, TargetTransform
from runner.core.schemas.models import OBJECTIVE_KINDS, ObjectiveConfig

Resolve = Callable[[str, str], Any]
TARGET_KEY = "objective._target_"
# Knobs of only some objectives: elsewhere they would silently have no effect.
OPTION_KINDS = {
    "loss": ("classification", "regression"),
    "gamma": ("classification",),
    "delta": ("regression",),
    "class_weights": ("classification",),
    "label_smoothing": ("classification",),
    "ignore_index": ("classification", "language_modelling", "model"),
}
LOSSES = {"classification": ("cross_entropy", "focal"), "regression": ("mse", "mae", "huber")}
"""Losses by kind; the first is the default."""
PROBABILITY_LOSSES = ("BCELoss", "binary_cross_entropy")
BINARY_LOSSES = (*PROBABILITY_LOSSES, "BCEWithLogitsLoss", "binary_cross_entropy_with_logits")
REGRESSION_LOSSES = ("MSELoss", "L1Loss", "SmoothL1Loss", "HuberLoss", "PoissonNLLLoss") + (
    *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "poisson_nll_loss"),
)
"""Elementwise losses of torch.nn, by name."""
LOSS_LINKS = {
    **dict.fromkeys(("PoissonNLLLoss", "poisson_nll_loss"), "exp"),
    **dict.fromkeys(("BCEWithLogitsLoss", "binary_cross_entropy_with_logits"), "sigmoid"),
}
"""Functions from a model's output to the target's unit, by loss."""
OPTION_LOSS = {"gamma": "focal", "delta": "huber", "label_smoothing": "cross_entropy"}


def build_objective(
    config: ObjectiveConfig,
    sizes: Sizes,
    resolve: Resolve,
    class_weights: Tensor | None = None,
    model: nn.Module | None = None,
) -> Objective:
    """Construct the objective; `auto` is that of the data's task. Raises ConfigError."""
    kind = sizes.task if config.kind == "auto" else config.kind
    if config._target_ is not None:
        kind = "custom"
    for option, kinds in OPTION_KINDS.items():
        if getattr(config, option) != getattr(ObjectiveConfig, option) and kind not in kinds:
            fix = f"it is for {' and '.join(kinds)}"
            raise ConfigError(f"objective.{option}", f"is not used by {kind}", fix)
    if config._target_ is not None:
        from runner.core.objectives.custom import build_custom  # imported only if used

        return build_custom(config, config._target_, sizes, resolve, bool(elementwise_loss(config)))
    if config.arguments:
        key = f"objective.{next(iter(config.arguments))}"
        raise ConfigError(key, "no such key", f"only {TARGET_KEY} takes more keys")
    if kind == "model":
        from runner.core.objectives.from_model import ModelLossObjective, shifts_labels

        return ModelLossObjective(sizes.task, config.ignore_index, shifts_labels(model))
    if kind not in OBJECTIVE_KINDS or kind != sizes.task:
        targets_are_classes = (kind, sizes.task) == ("classification", "regression")
        fix = f"use objective=auto, other data, or name a loss by {TARGET_KEY}"
        problem = f"{kind} does not fit the data, whose task is {sizes.task!r}"
        fix = f"if the targets are classes, {CLASS_TARGET_FIX}" if targets_are_classes else fix
        raise ConfigError("objective.kind", problem, fix)
    loss = _loss_name(config, kind)
    if kind == "language_modelling":  # imported only if used
        from runner.core.objectives.language_modelling import LanguageModellingObjective

        return LanguageModellingObjective(sizes.vocab, config.ignore_index)
    if kind == "regression":
        from runner.core.objectives.regression import RegressionObjective

        scale = sizes.target_mean, sizes.target_deviation
        return RegressionObjective(*scale, loss, config.delta, sizes.log_target)
    if sizes.classes is None:
        problem = "classification needs the number of classes"
        raise ConfigError("objective", problem, "set the data set's attribute `classes`")
    from runner.core.objectives.classification import ClassificationObjective

    smoothing, top_k, ignored = config.label_smoothing, config.top_k, config.ignore_index
    gamma = config.gamma if loss == "focal" else None
    options = smoothing, top_k, ignored, class_weights, gamma
    return ClassificationObjective(sizes.classes, sizes.class_names, *options)


def _loss_name(config: ObjectiveConfig, kind: str) -> str:
    """Return the name of the loss; ConfigError for one of another kind, or for foreign knobs."""
    names = LOSSES.get(kind, ("cross_entropy",))
    loss = config.loss or names[0]
    if loss not in names:
        fix = f"use {', '.join(names)}"
        raise ConfigError("objective.loss", f"unknown loss {loss!r} for {kind}", fix)
    for option, required_loss in OPTION_LOSS.items():
        if getattr(config, option) != getattr(ObjectiveConfig, option) and loss != required_loss:
            fix = f"it is for objective.loss={required_loss}"
            raise ConfigError(f"objective.{option}", f"is not used by {loss}", fix)
    return loss


def adapt_sizes(
    config: ObjectiveConfig, sizes: Sizes, own: bool, transform: TargetTransform | None = None
) -> tuple[Sizes, list[Choice]]:
    """Adapt the data's sizes to a loss by `_target_`.

    It gets targets in their own unit, unless `transform` is set. For an elementwise loss of torch,
    integer targets of a user's data set (`own`) are quantities, not classes. ConfigError if the
    targets are classes and the loss is not for those, or if a loss does not fit `transform`.
    """
    name = elementwise_loss(config)
    if config._target_ is None or (sizes.task == "classification" and not name):
        return sizes, []
    link = LOSS_LINKS.get(name, "") if config.arguments.get("log_input", True) else ""
    if sizes.task != "classification":
        if transform not in (None, TargetTransform.none):
            if link:
                problem = f"{transform.name} does not fit {config._target_}, which applies {link}"
                raise ConfigError("data.target_transform", problem, "leave it out")
            return sizes, []
        reason = f"{config._target_} gets targets in their own unit"
        scaled = sizes.target_mean or sizes.target_deviation != 1.0
        choices = [Choice("data.target", "not standardised", reason)] if scaled else []
        if link:
            reason = f"{config._target_} applies it: predictions are in the target's unit"
            choices.append(Choice("objective", f"predictions are {link} of the output", reason))
        return replace(sizes.unscaled(), link=link), choices
    if name in BINARY_LOSSES:
        if sizes.classes != 2:
            problem = f"{name} is for two classes, and the data has {sizes.classes}"
            raise ConfigError(TARGET_KEY, problem, "use objective=auto")
        if name in PROBABILITY_LOSSES:
            problem = f"{name} takes probabilities, but the model returns logits"
            raise ConfigError(TARGET_KEY, problem, f"use {TARGET_KEY}=torch.nn.BCEWithLogitsLoss")
        reason = f"{config._target_} takes float targets, and one output for two classes"
        return sizes, [Choice(TARGET_KEY, "float targets", reason)]
    if not own:
        problem = f"{name} is for regression, but the targets are classes"
        fix = "use objective=auto; for numbers in a table or arrays: data.task=regression"
        raise ConfigError(TARGET_KEY, problem, fix)
    reason = f"{config._target_} is for regression; for classes use objective=auto"
    regression_sizes = replace(sizes, task="regression", classes=1, class_names=(), link=link)
    return regression_sizes, [Choice(TARGET_KEY, "float targets", reason)]


def meaning_of_targets(config: ObjectiveConfig, own_loss: bool = False) -> str:
    """Return `given` if a user's loss interprets the targets, `classes` if typed, or `inferred`."""
    if own_loss or config._target_ is not None or config.kind == "model":
        return "given"
    return "classes" if config.kind == "classification" else "inferred"


def elementwise_loss(config: ObjectiveConfig) -> str:
    """Return the name of an elementwise loss of torch.nn, or "" for any other loss."""
    module, _, name = (config._target_ or "").rpartition(".")
    is_torch = f"{module}.".startswith("torch.nn.")
    return name if is_torch and name in BINARY_LOSSES + REGRESSION_LOSSES else ""
