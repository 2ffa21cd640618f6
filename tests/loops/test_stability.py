"""`Stability` in a plain loop: a bad step leaves no trace, and what was done is recorded."""

import logging
import resource
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from runner import Stability
from runner.core.errors import CheckpointError, ConfigError, GaveUp, UsageError
from runner.core.schemas.stability import SpikeConfig, StabilityConfig
from runner.diagnose.replay.results import StepPhase
from runner.loops.stability import device_random_state, replay_step, set_device_random_state
from tests.loops.builders import Batch, loss_of, poisoned, same, state
from tests.runs import debug_file


def loop(
    net: nn.Module, optimizer: Any, batches: list[Batch], stability: Stability, **also: Any
) -> list[Any]:
    return [
        stability.step(net, loss_of(net(x), y), optimizer, batch=(x, y) if also else None)
        for x, y in batches
    ]


def test_a_bad_step_is_reported_and_counted_and_nothing_stays_once_it_is_closed(
    net: nn.Module, batches: list[Batch]
) -> None:
    optimizer = torch.optim.AdamW(net.parameters())
    with Stability() as stability:
        reports = loop(net, optimizer, [*batches[:3], poisoned(batches[3])], stability)
    fault = reports[3].faults[0]
    assert (fault.step, fault.kind, fault.action) == (4, "non_finite", "skipped")
    assert stability.summary().faults == {"non_finite": 1} and stability.summary().skipped == 1
    assert not optimizer._optimizer_step_pre_hooks
    with pytest.raises(UsageError, match="it is closed"):
        loop(net, optimizer, batches[:1], stability)


def test_a_spike_is_skipped_and_named(net: nn.Module, batches: list[Batch]) -> None:
    spike = SpikeConfig(window=20, at_least=10, threshold=10, ratio=3, floor=1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with Stability(StabilityConfig(spike=spike)) as stability:
        loop(net, optimizer, batches[:20], stability)
        before = state(net, optimizer)
        x, y = batches[20]
        report = stability.step(net, 1000 * loss_of(net(x), y), optimizer)
        assert report.skipped and report.faults[0].kind == "spike"
        assert same(before, state(net, optimizer))
        assert not stability.step(net, loss_of(net(x), y), optimizer).skipped
    assert "step 21: spike, loss" in str(stability.summary())


def test_data_that_is_never_finite_ends_in_giving_up_with_what_was_tried(
    net: nn.Module, batches: list[Batch], tmp_path: Path
) -> None:
    optimizer = torch.optim.AdamW(net.parameters())
    with Stability(StabilityConfig(max_consecutive_skips=3), tmp_path) as stability:
        loop(net, optimizer, batches[:2], stability)
        before = state(net, optimizer)
        with pytest.raises(GaveUp, match="step 6: the loss was nan, 4 bad") as caught:
            loop(net, optimizer, [poisoned(b) for b in batches], stability, kept=True)
        assert same(before, state(net, optimizer))
    assert all(parameter.grad is None for parameter in net.parameters())
    assert caught.value.exit_code == 4 and "replay_step(" in str(caught.value)
    assert "load an earlier checkpoint" in str(caught.value)
    history = debug_file(tmp_path, "history")
    assert history["counts"] == {"non_finite": 4}
    assert [row["action"] for row in history["faults"]] == ["skipped", "the run gives up"]
    assert debug_file(tmp_path, "anomalies")["count"] == 4
    with pytest.raises(GaveUp, match="step 1: the loss was nan; inspect"):
        loop(net, torch.optim.AdamW(net.parameters()), [poisoned(batches[0])], Stability("strict"))


def test_a_first_step_that_is_bad_leaves_no_trace_in_buffers_once_they_are_watched(
    net: nn.Module, twin: nn.Module, batches: list[Batch]
) -> None:
    fresh = {name: t.clone() for name, t in net.state_dict().items()}
    for model, watched in ((net, True), (twin, False)):
        optimizer = torch.optim.AdamW(model.parameters())
        with Stability() as stability:
            if watched:
                stability.watch(model, optimizer)
            assert loop(model, optimizer, [poisoned(batches[0])], stability)[0].skipped
    assert all(torch.equal(t, fresh[name]) for name, t in net.state_dict().items())
    # its forward came before the buffers were copied: what it did to the statistics stays
    assert twin[2].running_mean.isnan().all()
    assert all(torch.equal(p, fresh[name]) for name, p in twin.named_parameters())


def test_a_captured_step_is_replayed_to_the_module_and_the_line(
    net: nn.Module, batches: list[Batch], tmp_path: Path
) -> None:
    class Root(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x - 1).sqrt()

    model = nn.Sequential(net, Root())
    model[0][4].bias.data += 10
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with Stability(folder=tmp_path, captures=1) as stability:
        x, y = batches[0]
        assert not loop(model, optimizer, [(x, y)], stability, kept=True)[0].skipped
        with torch.no_grad():
            model[0][4].bias[3] = -20.0
        reports = loop(model, optimizer, [(x, y), (x, y)], stability, kept=True)
    folders = [report.faults[0].capture for report in reports]
    assert folders == ["debug/captures/step_00000002", ""]
    before = torch.get_rng_state()
    weights = [p.clone() for p in model.parameters()]
    cause = replay_step(tmp_path / folders[0], model, loss_of)
    assert cause.phase is StepPhase.forward and (cause.module, cause.kind) == ("1", "Root")
    assert cause.line is not None and cause.line.source.strip() == "return (x - 1).sqrt()"
    assert same(weights, list(model.parameters())) and torch.equal(before, torch.get_rng_state())
    with pytest.raises(CheckpointError, match="does not fit this model"):
        replay_step(tmp_path / folders[0], nn.Linear(2, 2), loss_of)


def test_numbers_may_be_read_every_so_many_steps(net: nn.Module, batches: list[Batch]) -> None:
    optimizer = torch.optim.AdamW(net.parameters())
    seen = [*batches[:3], poisoned(batches[3]), *batches[4:7]]
    with Stability(every=5) as stability:
        reports = loop(net, optimizer, seen, stability)
        assert [len(r.faults) for r in reports] == [0, 0, 0, 0, 1, 0, 0]
        assert reports[3].skipped and reports[4].faults[0].step == 4
        assert stability.summary().steps == 7


def test_a_mistake_names_the_argument(
    net: nn.Module, twin: nn.Module, batches: list[Batch], caplog: pytest.LogCaptureFixture
) -> None:
    optimizer, (x, y) = torch.optim.AdamW(net.parameters()), batches[0]
    stability, loss = Stability(), loss_of(net(x), y)
    for call, message in (
        (lambda: stability.step(net, net(x), optimizer), r"loss must be a scalar .* of shape \[32"),
        (lambda: stability.step(net, loss.detach(), optimizer), "depends on no parameter"),
        (lambda: stability.step(twin, loss_of(twin(x), y), optimizer), "another model or opt"),
        (lambda: Stability().step(net, loss_of(twin(x), y), optimizer), "depends on none of the"),
        (lambda: Stability(every=0), "every must be a whole number ≥ 1, got 0"),
        (lambda: Stability(5), "overrides must be a list of strings, got 5"),  # type: ignore[arg-type]
        (lambda: Stability("stability.clip_norm=1"), r"one string: \['stability.clip_norm=1'\]"),
        (lambda: Stability(["optimizer.lr=1"]), "optimizer.lr=1 has no effect here"),
        (lambda: Stability(["stability.watch.leaks=false"]), "leaks=false has no effect here"),
        (lambda: Stability().step(net, loss, net), "got a Sequential"),  # type: ignore[arg-type]
    ):
        with pytest.raises(UsageError, match=message):
            call()
    with pytest.raises(ConfigError, match="stability.clip_norm"):
        Stability(["stability.clip_norm=-1"])
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]


class DeviceDropout(nn.Module):
    """Drops values by a mask from the generator of a device, which the host's states do not set."""

    generator = torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.rand(x.shape, generator=DeviceDropout.generator)
        masks.append(mask)
        return x * mask


masks: list[Tensor] = []


def test_a_replay_draws_the_random_numbers_of_the_device_again(
    net: nn.Module, batches: list[Batch], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = DeviceDropout.generator.manual_seed(5)
    for module in ("runner.loops.stability", "runner.diagnose.replay.step"):
        monkeypatch.setattr(f"{module}.device_random_state", lambda device: generator.get_state())
        monkeypatch.setattr(
            f"{module}.set_device_random_state", lambda device, state: generator.set_state(state)
        )
    masks.clear()
    model = nn.Sequential(DeviceDropout(), net)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    seen = [*batches[:3], poisoned(batches[3]), *batches[4:8]]
    with Stability(folder=tmp_path, every=3) as stability:  # reported two steps later
        loop(model, optimizer, seen, stability, kept=True)
    of_bad_step, before = masks[3], generator.get_state()
    replay_step(tmp_path / "debug/captures/step_00000004", model, loss_of)
    assert torch.equal(masks[-1], of_bad_step) and len(masks) == len(seen) + 1
    assert torch.equal(generator.get_state(), before)  # the caller's


def test_the_random_state_of_a_device_is_read_and_set_by_its_module(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    states: dict[str, Tensor] = {"cuda:1": torch.ones(16), "mps": torch.zeros(44)}
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: states[str(device)])
    monkeypatch.setattr(torch.mps, "get_rng_state", lambda: states["mps"])
    monkeypatch.setattr(
        torch.cuda, "set_rng_state", lambda state, device: states.update({str(device): state})
    )
    monkeypatch.setattr(torch.mps, "set_rng_state", lambda state: states.update(mps=state))
    assert device_random_state(torch.device("cpu")) is None
    for name in list(states):
        device = torch.device(name)
        assert device_random_state(device) is states[name]
        set_device_random_state(device, torch.arange(3))
        assert states[name].tolist() == [0, 1, 2]


def test_records_are_written_from_the_first_step_on(
    net: nn.Module, batches: list[Batch], tmp_path: Path
) -> None:
    read = partial(debug_file, tmp_path)
    optimizer = torch.optim.AdamW(net.parameters())
    with Stability(folder=tmp_path) as stability:
        assert not (tmp_path / "debug/history.json").exists()
        loop(net, optimizer, batches[:1], stability)
        history, anomalies = read("history"), read("anomalies")
        assert (history["counts"], history["faults"], history["steps"]) == ({}, [], 1)
        assert (anomalies["count"], anomalies["anomalies"], anomalies["steps"]) == (0, [], 1)
        assert 0 <= history["seconds"] == anomalies["seconds"] < 600
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        assert 0.5 * peak < history["memory"] < 2 * peak
        loop(net, optimizer, [*batches[1:5], poisoned(batches[5])], stability)
        assert (read("history")["steps"], read("history")["counts"]) == (6, {"non_finite": 1})
        assert (read("anomalies")["steps"], read("anomalies")["count"]) == (6, 1)
        loop(net, optimizer, batches[6:8], stability)
        stability.summary()
        assert read("history")["steps"] == read("anomalies")["steps"] == 8
        loop(net, optimizer, batches[8:9], stability)
    assert read("history")["steps"] == read("anomalies")["steps"] == 9
