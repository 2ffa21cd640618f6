"""Construction of optimizers, without weight decay of norms and biases; whose code they run."""

from __future__ import annotations

import inspect
import logging
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from runner.core.errors import ConfigError
from runner.core.format import nearest
from runner.core.schemas.optimizer import OptimizerConfig

Optimizer = torch.optim.Optimizer
IMPLEMENTATION_OPTIONS = frozenset({"fused", "foreach", "differentiable"})
"""Options that choose how an update is computed; at most one of them may be on."""
OPTIONS_WITH_OWN_KEY = ("lr", "weight_decay")
OPTIONS_OF_THIS_RUN = (
    "fused", "foreach", "differentiable", "capturable", "lr_share", "param_names",
)  # fmt: skip
"""Options that techniques, the config and the model set, whatever a checkpoint has."""
TAKE_SPARSE = (torch.optim.SparseAdam, torch.optim.SGD, torch.optim.Adagrad)
TORCH_FOLDER = os.path.dirname(torch.__file__) + os.sep
# their hooks keep the state complete for callers of step()
OUR_HOOK_MODULES = {"runner.core.optim.user_optimizer"}
log = logging.getLogger("runner")


def resolve_optimizer_class(
    config: OptimizerConfig, model: nn.Module, resolve: Callable[[str, str], Any]
) -> type[Optimizer]:
    """Return the class that `config` names, torch's or the user's. Raises ConfigError."""
    cls: type[Optimizer]
    if config._target_ is None:
        key, cls = "optimizer.name", find_optimizer(config.name)
    else:
        key = "optimizer._target_"
        cls, fix = resolve(config._target_, key), "name a subclass of torch.optim.Optimizer"
        if not (isinstance(cls, type) and issubclass(cls, Optimizer)):
            raise ConfigError(key, f"{config._target_} is not an optimizer", fix)
    # several are checked where each one's parameters are known
    if not config.combines and (conflict := incompatibility(cls, model, config.weight_decay)):
        raise ConfigError(key, *conflict)
    return cls


def incompatibility(
    cls: type[Optimizer],
    model: nn.Module,
    weight_decay: float = 0.0,
    names: Collection[str] | None = None,
) -> tuple[str, str] | None:
    """Return why a step cannot use this class (for `names`), and what it can use, or None."""
    name = cls.__name__
    if _needs_closure(cls):
        return f"{name} runs the model several times a step", "use AdamW"
    weights = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    weights = [(n, p) for n, p in weights if names is None or n in names]
    sparse_ids = {id(module.weight) for module in sparse_embeddings(model)}
    sparse = [n for n, p in weights if id(p) in sparse_ids]
    dense = [n for n, p in weights if id(p) not in sparse_ids]
    both = "use SGD or Adagrad with weight_decay=0, which take dense and sparse gradients; or AdamW"
    both += " with sparse=False in the embedding"
    if dense and issubclass(cls, torch.optim.SparseAdam):
        problem = f"SparseAdam needs sparse gradients, but those of {dense[0]} are dense"
        return problem, both if sparse else "use AdamW"
    if sparse and cls is getattr(torch.optim, name, None):
        if not issubclass(cls, TAKE_SPARSE):
            fix = both if dense else "use SparseAdam, or sparse=False in the embedding"
            return f"{name} does not take sparse gradients, as those of {sparse[0]}", fix
        if weight_decay and cls is not torch.optim.SparseAdam:
            problem = f"{name} has no weight decay for sparse gradients, as those of {sparse[0]}"
            return problem, "set weight_decay=0"
    return None


def _needs_closure(cls: type[Optimizer]) -> bool:
    """Whether step() needs a closure that evaluates the model: LBFGS, and SAM in all its forms."""
    parameters = list(inspect.signature(cls.step).parameters.values())[1:]
    positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    is_required = any(p.default is p.empty for p in positional)
    two_steps = all(callable(getattr(cls, name, None)) for name in ("first_step", "second_step"))
    return issubclass(cls, torch.optim.LBFGS) or is_required or two_steps


def sparse_embeddings(model: nn.Module) -> list[nn.Embedding | nn.EmbeddingBag]:
    """Return the embeddings with sparse gradients."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    return [module for module in model.modules() if isinstance(module, kinds) and module.sparse]


def find_optimizer(name: str, key: str = "optimizer.name") -> type[Optimizer]:
    """Return the class of torch.optim with that name. Raises ConfigError."""
    classes = {
        key: value
        for key, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, Optimizer) and value is not Optimizer
    }
    if name not in classes:
        near = nearest(name, classes, 0.5)
        fix = f"did you mean {near}?" if near else f"one of {', '.join(sorted(classes))}"
        if "." in name:
            fix = f"for your own class use optimizer._target_={name}"
        raise ConfigError(key, f"torch.optim has no {name!r}", fix)
    return classes[name]


def build_optimizer(
    config: OptimizerConfig,
    cls: type[Optimizer],
    model: nn.Module,
    options: dict[str, Any],
    names: Mapping[str, Tensor] | None = None,
    key: str = "optimizer",  # named in errors
) -> Optimizer:
    """Construct the optimizer of the model's trainable parameters, or of those in `names`.

    Tensors of two or more dimensions decay; norms' scales and biases do not (as in GPT-2, and
    He et al. 2019, arXiv:1812.01187, section 3.1).
    """
    accepted = _accepted_options(cls)
    _check_config_options(config, cls.__name__, accepted, key)
    if config.options.keys() & IMPLEMENTATION_OPTIONS:
        options = {}  # the config has precedence
    arguments = {"lr": config.lr, **config.options, **options}
    if not any(p.requires_grad for p in model.parameters()):
        raise ConfigError("model", "has no parameter that requires a gradient", "nothing to train")
    has_weight_decay = "weight_decay" in accepted
    if has_weight_decay:
        arguments["weight_decay"] = config.weight_decay
    elif config.weight_decay:
        log.info("optimizer.weight_decay is not used: %s has no weight decay", cls.__name__)
    # of the whole model: vectors alone do decay
    has_matrix = any(p.ndim >= 2 for p in model.parameters() if p.requires_grad)
    trained = names or dict(model.named_parameters())
    groups = _parameter_groups(config, trained, has_weight_decay, has_matrix)
    stand_ins = [{**g, "params": [small_weight(p) for p in g["params"][:4]]} for g in groups]
    try:
        with skip_compiler_import():
            optimizer = cls(groups, **arguments)
    except (TypeError, ValueError, RuntimeError) as error:
        problem = f"{cls.__name__}: {error}"
        fix = "check its options"
        if cls is torch.optim.Muon and any(p.ndim != 2 for g in groups for p in g["params"]):
            fix = "give it matrices alone: optimizer.groups='[{match: \"*.weight\", name: Muon}]'"
        elif config.options:
            if option := _find_wrong_option(partial(cls, stand_ins), arguments, config.options):
                key, problem = f"{key}.options.{option}", f"is not for {problem}"
        raise ConfigError(key, problem, fix) from error
    if not is_torch_class(cls):
        _refuse_closure(partial(cls, stand_ins, **arguments), cls.__name__)
    has_shares = any("lr_share" in group for group in groups)
    if has_shares and not any("lr_share" in group for group in optimizer.param_groups):
        problem = f"{cls.__name__} makes its own groups, so these rates are lost"
        raise ConfigError("optimizer.groups", problem, "set the rates in its constructor")
    if cls is torch.optim.SGD:
        fill_momentum(optimizer)
    return optimizer


def _find_wrong_option(
    make: Callable[..., Any], arguments: Mapping[str, Any], options: Mapping[str, Any]
) -> str | None:
    """Return the option without which the constructor does not raise the same error, if any."""
    error = _error_of(make, arguments)
    for option in options:
        others = {name: value for name, value in arguments.items() if name != option}
        if _error_of(make, others) != error:
            return option
    return None


def _error_of(make: Callable[..., Any], arguments: Mapping[str, Any]) -> str:
    try:
        make(**arguments)
    except (TypeError, ValueError, RuntimeError) as error:
        return str(error)
    return ""


def small_weight(parameter: Tensor) -> Tensor:
    """Return a small weight with as many dimensions, and a gradient."""
    weight = nn.Parameter(torch.ones([min(2, n) for n in parameter.shape], dtype=parameter.dtype))
    weight.grad = torch.full_like(weight, 0.01)
    return weight


def _refuse_closure(make: Callable[[], Optimizer], name: str) -> None:
    """Raise ConfigError if step() fails on stand-ins, and works with a closure."""
    with torch.random.fork_rng([]):
        try:
            make().step()
        except Exception as failure:
            try:
                closure: Callable[[], Any] = partial(torch.zeros, (), requires_grad=True)
                make().step(closure)
            except Exception:  # it fails for another reason, which the first step will show
                return
            problem = f"{name}.step() needs a closure, which runs the model several times"
            raise ConfigError("optimizer._target_", problem, "use AdamW") from failure


def _parameter_groups(
    config: OptimizerConfig, names: Mapping[str, Tensor], has_weight_decay: bool, has_matrix: bool
) -> list[dict[str, Any]]:
    """Return the parameter groups: those of `optimizer.groups`, then the rest."""
    rest = {name: p for name, p in names.items() if p.requires_grad}
    exempt_vectors = has_weight_decay and has_matrix
    groups: list[dict[str, Any]] = []
    if config.groups:
        from runner.core.optim.fine_tuning import pop_groups

        for parameters, options in pop_groups(config, rest, has_weight_decay):
            decay = options.get("weight_decay", config.weight_decay)
            groups += _split_decayed(parameters, options, exempt_vectors and decay > 0)
    return groups + _split_decayed([*rest.values()], {}, exempt_vectors and config.weight_decay > 0)


def _split_decayed(
    parameters: list[Tensor], options: dict[str, Any], exempt_vectors: bool
) -> list[dict[str, Any]]:
    """Return one group, or with `exempt_vectors` a second one without decay for vectors."""
    decayed = [p for p in parameters if p.ndim >= 2 or not exempt_vectors]
    undecayed = [p for p in parameters if p.ndim < 2 and exempt_vectors]
    groups = [{"params": decayed, **options}] if decayed else []
    return groups + ([{"params": undecayed, **options, "weight_decay": 0.0}] if undecayed else [])


def _check_config_options(
    config: OptimizerConfig, name: str, accepted: list[str], key: str
) -> None:
    choices = [n for n in accepted if n not in ("params", *OPTIONS_WITH_OWN_KEY)]
    for option in config.options:
        own_key = f"{key}.options.{option}"
        if option in OPTIONS_WITH_OWN_KEY:
            raise ConfigError(own_key, "has its own key", f"use {key}.{option}")
        if option not in accepted:
            raise ConfigError(own_key, f"{name} has no such option", f"use {', '.join(choices)}")


def _accepted_options(cls: type[Optimizer]) -> list[str]:
    """Return the parameters of the constructor, and of its base classes if it takes **kwargs."""
    names: dict[str, None] = {}
    for base in cls.__mro__:
        parameters = inspect.signature(base).parameters.values()
        names |= dict.fromkeys(p.name for p in parameters if p.kind is not p.VAR_KEYWORD)
        if all(p.kind is not p.VAR_KEYWORD for p in parameters):
            break
    return list(names)


def combined_parts(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers that a CombinedOptimizer steps; none of any other."""
    parts: list[Optimizer] = vars(optimizer).get("combined_parts", [])
    return parts


def constructor_options(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return a copy of each group's values of constructor arguments: those a config can change."""
    if parts := combined_parts(optimizer):
        return [options for part in parts for options in constructor_options(part)]
    signatures = [inspect.signature(base) for base in type(optimizer).__mro__[:-1]]
    names = {name for signature in signatures for name in signature.parameters} - {"params"}
    names |= set(OPTIONS_OF_THIS_RUN)
    return [{k: deepcopy(v) for k, v in g.items() if k in names} for g in optimizer.param_groups]


def parameter_names(named: Mapping[str, Tensor], parameters: Sequence[Tensor]) -> list[list[str]]:
    """Return the names of each parameter."""
    names: dict[int, list[str]] = {id(parameter): [] for parameter in parameters}
    for name, parameter in named.items():
        if id(parameter) in names:
            names[id(parameter)].append(name)
    return [names[id(parameter)] for parameter in parameters]


def group_lr_shares(optimizer: Optimizer, lr: float | None) -> list[float]:
    """Return each group's multiple of the scheduled rate `lr`; 1 if it is None.

    Groups to which the optimizer's class gave rates of their own keep their ratio to the first.
    """
    groups = optimizer.param_groups
    if lr is None:
        return [1.0] * len(groups)
    rates = [float(group.get("lr", lr)) for group in groups]  # host sync: when it is built
    first = rates[0] or lr or 1.0
    return [g.get("lr_share", 1.0) * (r / first) for g, r in zip(groups, rates, strict=True)]


def fill_momentum(optimizer: Optimizer) -> None:
    """Create zero momentum buffers of fused SGD before its first step.

    Otherwise a first step skipped in the kernel leaves them uninitialised (torch 2.13). Zeros give
    the same update, since a first buffer equals the gradient, except with dampening: then steps are
    not skipped in the kernel.
    """
    if type(optimizer) is not torch.optim.SGD or not is_torch_class(torch.optim.SGD):
        return
    for group, weight in iterate_weights(optimizer):
        if group.get("fused") and group["momentum"] and not group["dampening"]:
            state = optimizer.state[weight]
            if state.get("momentum_buffer") is None:
                state["momentum_buffer"] = torch.zeros_like(weight)


def iterate_weights(optimizer: Optimizer) -> Iterator[tuple[dict[str, Any], Tensor]]:
    """Yield each weight with the options of its group."""
    return ((group, weight) for group in optimizer.param_groups for weight in group["params"])


def is_torch_class(cls: type[Optimizer]) -> bool:
    """Whether `cls` is a class of torch.optim itself, with an unpatched step()."""
    methods = (cls.step, getattr(cls, "_init_group", cls.step))
    return cls is getattr(torch.optim, cls.__name__, None) and all(map(_is_torch_code, methods))


def uses_torch_step(optimizer: Optimizer) -> bool:
    """Whether only torch's code makes an update: no subclass, no patch, no hook on step().

    Only then may a kernel replace step(), or step() run for an update that is reverted: a user's
    code may change weights, or Python state that no copy restores.
    """
    cls = type(optimizer)
    if cls is not getattr(torch.optim, cls.__name__, None) or not _is_torch_code(optimizer.step):
        return False
    registries: list[Any] = [
        *(optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks),
        *(_global_optimizer_pre_hooks, _global_optimizer_post_hooks),
    ]
    hooks = [hook for registry in registries if registry for hook in registry.values()]
    modules = {getattr(hook, "__module__", "") for hook in hooks}
    return modules <= OUR_HOOK_MODULES


def _is_torch_code(function: Any) -> bool:
    """Whether the function and all that it wraps are defined in torch's package."""
    while function is not None:
        code = getattr(function, "__code__", None)
        if code is None or not code.co_filename.startswith(TORCH_FOLDER):
            return False
        function = getattr(function, "__wrapped__", None)
    return True


@contextmanager
def skip_compiler_import() -> Iterator[None]:
    """Avoid the import of torch's compiler (a second, once) in an optimizer's first calls.

    torch imports it to exclude these calls from compilation; before the import nothing is compiled.
    """
    with ExitStack() as stack:
        for name in ("add_param_group", "state_dict", "load_state_dict"):
            inner: Any = getattr(getattr(Optimizer, name), "__wrapped__", None)
            if inner is not None and "torch._dynamo" not in sys.modules:
                inner.__dynamo_disable = inner  # where torch caches the compiler's wrapper
                stack.callback(vars(inner).pop, "__dynamo_disable", None)
        yield
