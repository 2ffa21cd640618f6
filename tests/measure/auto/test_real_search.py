"""`optimization=auto` in real runs: what it chooses is kept, taken again, and ended cleanly."""

import json
import multiprocessing
import os
import signal
import sys
from pathlib import Path
from subprocess import PIPE, STDOUT, Popen
from typing import Any

import psutil
import pytest

from runner.core.build.build import build
from runner.core.config.composing import compose, compose_raw, typed
from runner.core.errors import ConfigError
from runner.core.jobs.train import main as train
from runner.measure.auto.resolve import (
    EVIDENCE_FILE,
    YAML_FILE,
    enable_techniques,
    make_arms,
    read_cache,
    resolve_auto,
    to_yaml,
)
from runner.measure.auto.search import NONE, make_candidates

ROOT = Path(__file__).parents[3]


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "runner" / "auto"


LONG = """
    optimization=auto model.width=512 training.steps=400000 training.batch_size=256
    optimization.auto.budget_s=60 optimization.auto.without=[compile,whole_step]
    checkpoint=off
    """.split()


@pytest.mark.slow
def test_a_real_search_leaves_a_config_to_commit_the_evidence_and_a_choice_to_take_again(
    tmp_path: Path, own_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = compose(LONG)
    given = resolve_auto(config, tmp_path / "run")
    assert given.optimization is not None
    asked = [name for name, t in given.optimization.techniques() if t.enabled]
    evidence = json.loads((tmp_path / "run" / EVIDENCE_FILE).read_text())
    assert evidence["techniques"] == asked
    rows = {row["name"]: row for row in evidence["tried"]}
    assert "system fused_optimizer" in rows
    assert all(row["why"] or row["state"] == "chosen" for row in rows.values())
    if evidence["chosen"] != NONE:
        assert rows[evidence["chosen"]]["parity"] != "FAIL"
        assert rows[evidence["chosen"]]["final_interval"][0] > 1
    assert evidence["left_out"]["compile"] == "optimization.auto.without names it"

    # another run of the same config measures nothing
    (stored,) = own_cache.glob("*.json")
    before = len(multiprocessing.active_children())
    again_given = resolve_auto(config, tmp_path / "second")
    assert again_given.optimization == given.optimization
    assert "measured before" in again_given.chosen[0].reason
    assert len(multiprocessing.active_children()) == before

    stored.write_text("{half a")
    assert read_cache(stored) is None
    assert "is damaged and not used" in caplog.text


def test_the_selection_is_a_config_file_that_says_the_same(tmp_path: Path) -> None:
    base = compose(["optimization.attention.kernel=flash"]).optimization
    optimization = enable_techniques(base, ["amp", "attention", "fused_optimizer"])
    folder = tmp_path / "conf" / "optimization"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text(to_yaml(optimization, "faster: much"))
    by_file = typed(compose_raw(["optimization=mine"], folders=[tmp_path / "conf"])).optimization
    assert by_file.techniques() == optimization.techniques()


def test_a_run_too_short_for_a_search_takes_what_is_free_and_keeps_it_when_it_is_continued(
    tmp_path: Path, own_cache: Path
) -> None:
    summary = train(compose(["optimization=auto", "training.steps=20"]), tmp_path)
    (choice,) = [c for c in summary.choices if c.key == "optimization"]
    assert choice.value == "system fused_optimizer"
    assert "budget_s=180 (from 360 s): only free techniques are enabled" in choice.reason
    assert not own_cache.exists()
    assert {row.name for row in summary.techniques if row.requested} == set(choice.value.split())
    assert (tmp_path / YAML_FILE).is_file()
    more = ["optimization=auto", "training.steps=40", "checkpoint.resume=auto"]
    second = train(compose(more), tmp_path)
    (again,) = [c for c in second.choices if c.key == "optimization"]
    assert (again.value, again.reason) == (choice.value, "as before the run was resumed")
    assert second.steps == 40


def test_a_technique_enabled_by_name_is_on_in_every_candidate() -> None:
    config = compose(["optimization=auto", "optimization.amp.enabled=true"])
    arms = make_arms(config, make_candidates(["tf32", "amp"]))
    assert all(arm.config.optimization.amp.enabled for arm in arms)
    assert [arm.name for arm in arms][:2] == [NONE, "none again"]
    assert all(not arm.config.checkpoint.enabled for arm in arms)


def test_candidates_of_a_distributed_run_are_one_process_with_its_part_of_the_batch() -> None:
    typed = ["distributed=ddp", "distributed.processes=2", "training.batch_size=33", "device=cpu"]
    (arm, _) = make_arms(compose(["optimization=auto", *typed]), [])
    assert arm.config.distributed.kind.value == "none"
    assert arm.config.training.batch_size == 17


def test_auto_is_refused_where_it_was_not_resolved() -> None:
    with pytest.raises(ConfigError, match="resolved by measuring"):
        build(compose(["optimization=auto"]))


def test_a_technique_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match="optimization.auto.without"):
        compose(["optimization=auto", "optimization.auto.without=[ampp]"])


@pytest.mark.slow
def test_ctrl_c_ends_the_search_and_every_process_of_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "runner", *LONG, f"hydra.run.dir={tmp_path / 'run'}"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    output: Any = {"stderr": STDOUT, "stdout": PIPE, "text": True}
    with Popen(command, cwd=ROOT, env=environment, **output) as process:
        try:
            assert process.stdout is not None
            assert any("none: first step after" in line for line in process.stdout)
            family = psutil.Process(process.pid).children(recursive=True)
            assert family
            process.send_signal(signal.SIGINT)
            rest = process.stdout.read()
            assert process.wait(60) == 130, rest
        finally:
            process.kill()
    assert "while optimization=auto was measuring" in rest
    assert psutil.wait_procs(family, timeout=20)[1] == []
