"""What a model is made of: whatever is unusual is named with its place, and the usual passed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import MethodType, ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, spectral_norm, weight_norm

from runner.checks.model.check import check_model
from runner.objectives.deferred_logits import defer
from runner.security.trust import Severity

FAULT, WARNING, NOTE = Severity.REFUSAL, Severity.WARNING, Severity.NOTE
HERE = __name__


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Sequential(nn.Linear(6, 3)))


def listening(*args: Any, **kwargs: Any) -> None:
    """A hook of somebody's."""


class Foreign(nn.Linear):
    """A layer of somebody's."""


class Masked(nn.Module):
    """A parametrization of somebody's."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight


class Pretender(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input)


Pretender.__module__, Pretender.__qualname__ = "torch.nn.modules.linear", "Linear"


def on(register: str, hook: Any = listening) -> Callable[[nn.Module], None]:
    return lambda model: getattr(model[2], register)(hook)


def loud(self: nn.Module, x: Tensor) -> Tensor:
    return x


def hold(name: str, value: Any) -> Callable[[nn.Module], None]:
    return lambda model: setattr(model[2], name, value)


PLANTED: list[tuple[str, Callable[[nn.Module], None], str, Severity, str]] = [
    *((name, on(f"register_{name}"), "hooks.unexpected", WARNING, "2") for name in (
        "forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook",
        "state_dict_pre_hook", "state_dict_post_hook", "load_state_dict_pre_hook",
        "load_state_dict_post_hook",
    )),
    ("a hook in a partial", on("register_forward_hook", partial(listening, 1)),
     "hooks.unexpected", WARNING, "2"),
    ("a hook behind torch's own wrapper", on("register_forward_hook", torch.no_grad()(listening)),
     "hooks.unexpected", WARNING, "2"),
    ("a built-in as a hook", on("register_forward_hook", exec), "hooks.unexpected", WARNING, "2"),
    ("a hook on a weight", lambda m: m[0].weight.register_hook(listening),
     "hooks.unexpected", WARNING, "0.weight"),
    ("a hook on its gradient",
     lambda m: m[0].weight.register_post_accumulate_grad_hook(listening),
     "hooks.unexpected", WARNING, "0.weight"),
    ("a parametrization", lambda m: parametrize.register_parametrization(m[0], "weight", Masked()),
     "structure.foreign_class", NOTE, "0.parametrizations.weight.0"),
    ("a foreign class", hold("0", Foreign(6, 3)), "structure.foreign_class", NOTE, "2.0"),
    ("a class that says it is torch's", hold("0", Pretender(6, 3)), "structure.foreign_class",
     WARNING, "2.0"),
    ("a forward of this layer's own", lambda m: hold("forward", MethodType(loud, m[2]))(m),
     "structure.patched_method", WARNING, "2.forward"),
    ("a state_dict of its own", hold("state_dict", lambda **_: {}), "structure.patched_method",
     WARNING, "2.state_dict"),
    ("a list of layers", hold("more", [nn.Linear(2, 2)]), "structure.unregistered_module", WARNING,
     "2.more.0"),
    ("a list of parameters", hold("more", [nn.Parameter(torch.ones(2))]), "buffers.unregistered",
     WARNING, "2.more.0"),
    ("a tensor in a plain attribute", hold("mean", torch.ones(2)), "buffers.unregistered", NOTE,
     "2.mean"),
    ("a tensor on another device", hold("mean", torch.ones(2, device="meta")),
     "buffers.unregistered", WARNING, "2.mean"),
    ("a data set in a buffer", lambda m: m.register_buffer("seen", torch.zeros(2**21 * 3)),
     "buffers.huge", WARNING, "seen"),
    ("one layer in float64", lambda m: m[2].double(), "dtype.float64", WARNING, "2.0.weight"),
    ("two types in a layer", lambda m: setattr(m[0].bias, "data", m[0].bias.data.half()),
     "dtype.mixed", WARNING, "0"),
    ("two kinds of 16 bits", lambda m: (m[0].half(), m[1].bfloat16(), m[2].bfloat16()),
     "dtype.mixed", WARNING, "0.weight"),
]  # fmt: skip


@pytest.mark.parametrize(("plant", "code", "severity", "where"), [row[1:] for row in PLANTED],
                         ids=[row[0] for row in PLANTED])  # fmt: skip
def test_what_is_unusual_is_named_with_its_place(
    plant: Callable[[nn.Module], Any], code: str, severity: Severity, where: str
) -> None:
    model = net()
    assert check_model(model).reasons == []
    plant(model)
    found = [
        (r.code, r.severity, r.where) for r in check_model(model).reasons if r.severity >= severity
    ]
    assert found == [(code, severity, where)]


class Chooses(nn.Module):
    """Takes one of its own methods for its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.forward = self.quickly  # type: ignore[method-assign]

    def quickly(self, x: Tensor) -> Tensor:
        return x


def recomputed(model: nn.Module) -> None:
    from contextlib import ExitStack

    from runner.techniques.recompute import Recomputed, RecomputePolicy

    Recomputed(RecomputePolicy.full, [model[2]], 1).wrap(ExitStack())


HONEST: list[tuple[str, Callable[[nn.Module], Any]]] = [
    ("weight norm of torch", lambda m: parametrizations.weight_norm(m[0])),
    ("spectral norm of torch", lambda m: parametrizations.spectral_norm(m[0])),
    ("the older spectral norm", lambda m: spectral_norm(m[0])),
    ("attention", lambda m: m.append(nn.TransformerEncoderLayer(6, 2, 8))),
    ("recurrent layers", lambda m: m.append(nn.LSTM(6, 4, 2))),
    ("a forward of the runner's", lambda m: defer(m[2][0], 8)),
    ("blocks that the runner recomputes", recomputed),
    ("compiled", lambda m: m.compile()),
    ("a script", lambda m: m.append(torch.jit.script(nn.Linear(2, 2)))),
    ("layers listed twice", lambda m: hold("all", [m[0], m[1]])(m)),
    ("numbers and names", lambda m: hold("sizes", {"in": 4, "names": ["a"]})(m)),
    ("norms in 32 bits next to 16", lambda m: (m[0].half(), m[2].half())),
]


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("change", [row[1] for row in HONEST], ids=[row[0] for row in HONEST])
def test_what_torch_and_the_runner_do_to_a_model_is_passed(
    change: Callable[[nn.Module], Any],
) -> None:
    model = net()
    change(model)
    assert check_model(model).findings == []


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_older_weight_norm_is_torchs_own_hook() -> None:
    model = net()
    weight_norm(model[0])
    assert [r.code for r in check_model(model).findings] == []


def test_a_trusted_package_is_passed_and_the_others_are_then_a_warning() -> None:
    model = nn.Sequential(Foreign(4, 3), Chooses())
    model[0].register_forward_hook(listening)
    assert check_model(model, trusted=[HERE]).reasons == []
    report = check_model(model, trusted=["my_package"], foreign=WARNING)
    assert {(r.code, r.where) for r in report.findings} == {
        ("structure.foreign_class", "0"), ("structure.foreign_class", "1"),
        ("hooks.unexpected", "0"),
    }  # fmt: skip


def test_the_functions_of_its_own_class_may_stand_in_for_forward() -> None:
    assert [r.code for r in check_model(Chooses()).reasons] == ["structure.foreign_class"]


@pytest.fixture
def patched() -> Iterator[None]:
    own = nn.Linear.forward
    nn.Linear.forward = loud
    try:
        yield
    finally:
        nn.Linear.forward = own


def test_a_class_of_torch_whose_forward_was_replaced_is_named(patched: None) -> None:
    (reason,) = check_model(net()).reasons
    assert (reason.code, reason.where) == ("structure.patched_class", "0")
    assert reason.evidence == f"Linear.forward was replaced by code of {HERE}"


def test_a_hook_on_every_module_of_the_process_is_named() -> None:
    handle = nn.modules.module.register_module_forward_hook(listening)
    try:
        (reason,) = check_model(net()).reasons
    finally:
        handle.remove()
    assert (reason.code, reason.where) == ("hooks.unexpected", "(every module)")
    assert check_model(net()).reasons == []


def test_code_that_no_module_holds_is_not_believed() -> None:
    names: dict[str, Any] = {"__name__": "torch.nn.functional"}
    exec("def hook(*args): pass", names)  # noqa: S102  # what a loaded file could do
    model = net()
    model[0].register_forward_hook(names["hook"])
    (reason,) = check_model(model).reasons
    assert (reason.code, "of no module" in reason.evidence) == ("hooks.unexpected", True)


def test_a_class_made_while_running_is_known_by_its_functions() -> None:
    made = type("Linear", (nn.Linear,), {"forward": loud, "__module__": "torch.nn"})
    (reason,) = check_model(nn.Sequential(made(3, 3))).findings
    assert reason.code == "structure.foreign_class"
    assert reason.evidence == f"Linear is of {HERE}, though it says torch.nn"


def test_a_module_that_was_replaced_in_sys_modules_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torch.nn.modules.linear", ModuleType("linear"))
    assert {r.code for r in check_model(net()).findings} == {"structure.foreign_class"}
