"""Lengths may be others than before; types, dimensions, features and channels may not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from runner.checks.config import InputsConfig, Policy, SchemaConfig
from runner.checks.inputs.look import InputChecks

N = 8


def batch(shape: list[int], target: list[int] | None = None) -> tuple[Tensor, Tensor]:
    own = torch.Generator().manual_seed(sum(shape))
    y = torch.zeros(N) if target is None else torch.randint(0, 9, (N, *target), generator=own)
    return torch.randn(N, *shape, generator=own), y


def warmed(shape: list[int], target: list[int] | None = None) -> InputChecks:
    checks = InputChecks(InputsConfig(baseline=8, drift=Policy.off, range=Policy.off))
    for _ in range(9):
        assert checks.look(batch(shape, target)) == []
    return checks


HONEST = {
    "speech, features last": [[128, 8], [120, 8], [90, 8], [300, 8]],
    "speech, features first": [[80, 128], [80, 120], [80, 90]],
    "sound of one channel": [[1, 16_000], [1, 15_000]],
    "images": [[3, 32, 32], [3, 40, 48], [3, 32, 40]],
    "images, channels last": [[32, 32, 3], [40, 48, 3]],
    "video": [[3, 8, 16, 16], [3, 6, 16, 16]],
}
FAULTY = {
    "features of a table": [[10], [9]],
    "another dimension": [[128, 8], [128, 8, 1]],
    "both ends": [[128, 8], [120, 7]],
    "features, once lengths vary": [[128, 8], [120, 8], [120, 7]],
    "bands, once lengths vary": [[80, 128], [80, 120], [70, 120]],
    "grey images among coloured ones": [[3, 32, 32], [1, 32, 32]],
    "channels last for once": [[3, 32, 32], [32, 32, 3]],
}


@pytest.mark.parametrize("what", HONEST)
def test_samples_of_another_length_are_usual(what: str) -> None:
    first, *later = HONEST[what]
    checks = warmed(first)
    for shape in later:
        assert checks.look(batch(shape)) == []


@pytest.mark.parametrize("what", FAULTY)
def test_a_form_that_no_model_takes_is_a_finding(what: str) -> None:
    first, *later, last = FAULTY[what]
    checks = warmed(first)
    for shape in later:
        assert checks.look(batch(shape)) == []
    assert [r.code for r in checks.look(batch(last))] == ["input.form"]
    assert [r.code for r in checks.look((batch(first)[0].double(), torch.zeros(N)))] == [
        "input.form"
    ]


def test_labels_of_each_step_are_as_long_as_the_sequence_or_have_a_length_of_their_own() -> None:
    for target in ([128], [20]):
        checks = warmed([128, 8], target)
        assert [r.code for r in checks.look(batch([128, 8], [19]))] == ["input.form"]
        assert checks.look(batch([120, 8], [120])) == []
        assert checks.look(batch([110, 8], [17])) == []


def test_lengths_that_were_met_are_said_once_and_kept_in_a_checkpoint(
    caplog: pytest.LogCaptureFixture,
) -> None:
    checks = warmed([128, 8])
    with caplog.at_level("INFO", logger="runner"):
        for length in (120, 120, 100):
            assert checks.look(batch([length, 8])) == []
    assert [r.getMessage() for r in caplog.records] == [
        "checks.inputs: other lengths than before: inputs is of [120, 8] a sample, "
        "and was of [128, 8]"
    ]
    resumed = InputChecks(checks.config)
    resumed.load(checks.state())
    assert resumed.look(batch([60, 8])) == []
    assert [r.code for r in resumed.look(batch([128, 7]))] == ["input.form"]


def test_a_shape_that_the_config_gives_holds_for_lengths_too() -> None:
    for shape, codes in (([128, 8], ["input.form"]), ([-1, 8], [])):
        config = InputsConfig(baseline=8, drift=Policy.off, schema=SchemaConfig(shape=shape))
        checks = InputChecks(config)
        for _ in range(9):
            assert checks.look(batch([128, 8])) == []
        assert [r.code for r in checks.look(batch([120, 8]))] == codes
