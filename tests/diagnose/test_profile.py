"""`profile_model` and `system_info`: numbers that can be worked out by hand."""

import copy
import json
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._C._autograd import DeviceType

from runner import optimize, profile_model, system_info
from runner.core.errors import UsageError
from runner.core.techniques.flops import data_sheet, peak_flops
from runner.diagnose.debug.module_times import read_trace
from tests.my_package import Computed


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 16, bias=False))


PRODUCTS = 32 * (128 * 256 + 256 * 16)


def test_operations_parameters_memory_and_times_of_a_perceptron_and_the_measured_peak() -> None:
    model = linear()
    model[2].requires_grad_(False)
    profile = profile_model(model, torch.randn(32, 128), runs=20)
    assert profile.flops == 2 * PRODUCTS
    assert profile.parameters["all"] == 128 * 256 + 256 + 256 * 16
    assert profile.parameters["trainable"] == 128 * 256 + 256
    assert profile.parameters["bytes"] == 4 * profile.parameters["all"]
    hidden = 32 * 256 * 4
    assert profile.memory["activations"] == hidden  # the ReLU's output; the input is the caller's
    ms = profile.latency_ms
    assert 0 < ms["p50"] <= ms["p90"] <= ms["p95"] <= ms["p99"]
    assert profile.samples_per_second == pytest.approx(32e3 / ms["p50"])
    assert profile.peak is not None and "measured here" in profile.peak.source
    per_second = profile.flops / (ms["p50"] / 1e3)
    assert profile.mfu == pytest.approx(per_second / profile.peak.flops_per_second)


def test_a_backward_counts_twice_and_leaves_no_trace() -> None:
    model = nn.Sequential(linear(), nn.BatchNorm1d(16), nn.Dropout(0.5))
    model.eval()
    before = copy.deepcopy(model.state_dict())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    profile = profile_model(model, torch.randn(32, 128).requires_grad_(), runs=3, backward=True)
    # for each product of the forward one by the weights and one by the inputs
    assert profile.flops == 6 * PRODUCTS
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters())
    assert not model.training


def test_attention_is_counted_on_a_cpu_too() -> None:
    """One head, no products but the two of attention."""
    attends = Computed(lambda _, x: nn.functional.scaled_dot_product_attention(x, x, x))
    profile = profile_model(attends, torch.randn(2, 1, 64, 32), runs=2)
    assert profile.flops == 2 * 2 * (2 * 64 * 64 * 32)


def test_the_peak_of_a_gpu_is_that_of_its_data_sheet() -> None:
    with optimize(nn.Linear(2, 2), "none", example=torch.randn(1, 2)) as fast:
        device = fast.lazy.run.device
    for name, dtype, tera in (
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989),
        ("NVIDIA H100 PCIe", torch.bfloat16, 756),
        ("NVIDIA H100 NVL", torch.bfloat16, 835),
        ("NVIDIA H200", torch.bfloat16, 989),
        ("NVIDIA GH200 480GB", torch.bfloat16, 989),
        ("NVIDIA B200", torch.bfloat16, 2250),
        ("NVIDIA GB200", torch.bfloat16, 2500),  # not the B200
        ("NVIDIA A100-SXM4-80GB", torch.bfloat16, 312),
        ("NVIDIA A100 80GB PCIe", torch.bfloat16, 312),
        ("A100-SXM4-40GB", torch.bfloat16, 312),  # of older drivers
        ("Tesla V100-SXM2-16GB", torch.float16, 125),
        ("Tesla V100-PCIE-32GB", torch.float16, 112),
        ("NVIDIA L40S", torch.bfloat16, 362),  # not the L4
        ("Tesla T4", torch.float16, 65),
    ):
        profile = peak_flops(replace(device, kind="cuda", name=name), dtype)
        assert profile is not None and profile.flops_per_second == pytest.approx(tera * 1e12)


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA Unheard-of", "NVIDIA RTX A1000", "NVIDIA RTX A1000 Laptop GPU", "NVIDIA RTX A4000",
        "NVIDIA T400 4GB", "Quadro T400", "NVIDIA A10G", "NVIDIA A100X", "NVIDIA B300 SXM6 AC",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA H100 80GB HBM3 MIG 3g.40gb", "NVIDIA L40S-48Q",
        "NVIDIA GeForce RTX 4090", "NVIDIA H20", "Tesla V100S-PCIE-32GB", "NVIDIA DGX GB200",
    ],
)  # fmt: skip
def test_a_gpu_whose_name_only_contains_that_of_a_data_sheet_has_no_peak(name: str) -> None:
    assert data_sheet(name) is None


def test_the_table_names_the_slowest_operators_and_the_record_is_plain() -> None:
    profile = profile_model(linear(), torch.randn(512, 128), runs=3)
    spent = list(profile.operators_ms.values())
    assert spent == sorted(spent, reverse=True)  # which is first depends on the machine
    assert {"aten::addmm", "aten::clamp_min"} <= set(profile.operators_ms)
    assert {"latency", "throughput", "MFU", "parameters"} <= set(str(profile).split())
    assert max(map(len, str(profile).splitlines())) <= 100
    assert json.loads(json.dumps(asdict(profile)))["flops"] == profile.flops


def test_an_optimized_model_is_profiled_under_its_techniques() -> None:
    overrides = ["optimization.amp.enabled=true", "optimization.amp.dtype=bf16"]
    with optimize(linear(), "none", overrides=overrides) as fast:
        profile = profile_model(fast, torch.randn(32, 128), runs=3)
    assert profile.dtype == "bf16"
    assert profile.peak is not None and profile.peak.dtype == "bf16"
    assert profile.flops == 2 * PRODUCTS


def test_a_model_that_fails_is_one_clear_error() -> None:
    model, x = linear(), torch.randn(2, 128)
    for call, message in (
        (lambda: profile_model(model, torch.randn(2, 5)), r"shape \[2, 5\]: RuntimeError"),
        (lambda: profile_model(model, {"y": x}), r"\{y: .*TypeError"),
        (lambda: profile_model(model, 3), "example_input must be"),
        (lambda: profile_model(model, x, runs=0), "runs must be"),
        (lambda: profile_model(max, x), "model must be"),  # type: ignore[arg-type]
    ):
        with pytest.raises(UsageError, match=message):
            call()


def test_system_info_is_what_the_doctor_sees() -> None:
    info = json.loads(json.dumps(system_info()))
    assert info["versions"]["torch"] == torch.__version__.partition("+")[0] or torch.__version__
    assert info["device"]["kind"] in ("cpu", "cuda", "mps")
    assert info["memory"]["total"] > 0
    assert {row["name"] for row in info["techniques"]} >= {"amp", "compile", "tf32"}


def test_on_a_gpu_the_time_of_a_kernel_counts_once() -> None:
    def row(key: str, kind: DeviceType, device_us: float) -> Any:
        return SimpleNamespace(
            key=key, device_type=kind, is_user_annotation=False, self_device_time_total=device_us,
            count=3,
        )  # fmt: skip

    rows = [row("aten::mm", DeviceType.CPU, 6000), row("cuLaunchKernel", DeviceType.CPU, 6000)]
    rows.append(row("ampere_sgemm_128x64", DeviceType.CUDA, 6000))
    trace = read_trace(SimpleNamespace(key_averages=lambda: rows, events=list), steps=1)
    assert trace.operators == [{"name": "aten::mm", "calls": 3, "seconds": 6e-3}]
    assert trace.kernel_seconds == 6e-3
