"""Hostile folders are refused by the rule that is meant, by the scan and by the loaders."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from runner.core.errors import CheckpointError, ConfigError, SecurityError
from runner.core.findings import Reason, Severity, Trust
from runner.core.models.weights import read_weights
from runner.core.schemas.security import SecurityLevel
from runner.core.security.files.file_bytes import hash_file
from runner.core.security.files.formats import is_loadable
from runner.core.security.files.loader import open_file
from runner.core.security.files.policy import FilePolicy
from runner.core.security.files.provenance import Assessment
from runner.scan.sandbox import Sandbox
from runner.scan.scan import Scanner, list_folder, list_items
from tests.core.security.files import variants
from tests.core.security.files.variants import Variant

pytestmark = pytest.mark.filterwarnings(
    "ignore:Sparse CSR tensor support:UserWarning",
    "ignore:.*quantize:UserWarning",
    "ignore:TypedStorage is deprecated:UserWarning",
)
HOSTILE = variants.hostile()
FAMILIES = sorted({variant.family for variant in HOSTILE})
MOST_BYTES = 500 << 20
POLICY = FilePolicy()


@pytest.fixture(autouse=True)
def _sandbox_of_its_own() -> None:
    """Override: one process serves all loaders here, since it takes seconds to start."""


def written(variant: Variant, parent: Path) -> Path:
    folder = parent / variant.family / f"{HOSTILE.index(variant) if variant.rule else 0}"
    variant.write(folder)
    outside = parent / variant.family / "outside"
    outside.mkdir(exist_ok=True)
    (outside / "file").write_bytes(variants.MODEL)
    return folder


def scanned(folder: Path, sandbox: Sandbox, policy: FilePolicy = POLICY) -> list[Assessment]:
    """The verdicts of job=scan on the folder, its other files left out."""
    scanner = Scanner(policy)
    scanner.sandbox = sandbox
    items = [
        item
        for item in list_items(folder, policy)
        if item.kind != "file" or item.refused or is_loadable(item.path)
    ]
    return [scanner.scan(item) for item in items]


def refusals(rows: list[Assessment]) -> list[Reason]:
    return [reason for row in rows for reason in row.refusals]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_scan_refuses_each_variant_by_its_rule_in_little_memory(
    family: str, sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "crashes", 0)
    wrong, large = [], []
    for variant in [variant for variant in HOSTILE if variant.family == family]:
        found = refusals(scanned(written(variant, tmp_path), sandbox))
        codes = {reason.code for reason in found}
        if not any(code.startswith(variant.rule) for code in codes):
            wrong.append((variant.name, variant.rule, codes))
        if any("\n" in str(reason) or "\x1b" in str(reason) for reason in found):
            wrong.append((variant.name, "one line", codes))
        if sandbox.process is not None:
            peak = psutil.Process(sandbox.process.pid).memory_info().rss
            if peak > MOST_BYTES:
                large.append((variant.name, peak))
    assert (wrong, large, sandbox.crashes) == ([], [], 0)
    assert not list(tmp_path.glob("**/MARKER")) and not os.path.exists("MARKER")


@pytest.mark.parametrize("family", FAMILIES)
def test_no_loader_takes_a_variant_that_the_scan_refuses(family: str, tmp_path: Path) -> None:
    loaded = []
    for variant in [variant for variant in HOSTILE if variant.family == family]:
        folder = written(variant, tmp_path)
        path = folder / next(iter(variant.files))
        by_folder = "safetensors" in path.name or path.name.endswith(".bin")
        try:
            read_weights(folder if by_folder else path, POLICY)
            loaded.append(variant.name)
        except (SecurityError, CheckpointError):
            pass
        except ConfigError as error:  # an index that is no index
            assert variant.rule == "index.malformed", error
    assert loaded == []


@pytest.mark.parametrize("variant", variants.ordinary(), ids=lambda variant: variant.name)
def test_an_ordinary_folder_loads(variant: Variant, sandbox: Sandbox, tmp_path: Path) -> None:
    folder = written(variant, tmp_path)
    rows = scanned(folder, sandbox)
    assert rows and {row.trust for row in rows} == {Trust.UNTRUSTED}, refusals(rows)
    assert not [r for row in rows for r in row.reasons if r.severity is not Severity.NOTE]
    for row in rows:
        assert open_file(Path(row.path), POLICY, sandbox=sandbox).content is not None
    if (folder / "model.safetensors").exists() or list(folder.glob("*.index.json")):
        assert read_weights(folder, POLICY).tensors
    whole = Scanner(POLICY)
    whole.sandbox = sandbox
    assert whole.scan(list_folder(folder)).trust is Trust.UNTRUSTED


def test_a_config_that_runs_code_is_no_obstacle_for_its_weights_alone_or_once_pinned(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    variant = next(variant for variant in HOSTILE if variant.name == "auto_map")
    folder = written(variant, tmp_path)
    (row,) = [row for row in scanned(folder, sandbox) if row.refused]
    assert row.path.endswith("config.json") and "security.pinned" in str(row.refusals[0])
    whole = Scanner(POLICY)
    whole.sandbox = sandbox
    assert [r.code for r in whole.scan(list_folder(folder)).refusals] == ["config.code"]
    with pytest.raises(SecurityError, match=r"config\.json: has auto_map, which makes a program"):
        read_weights(folder, POLICY)
    weights = folder / "model.safetensors"
    assert read_weights(weights, POLICY).tensors
    assert read_weights(folder, FilePolicy(SecurityLevel.off)).tensors
    pinned = FilePolicy(pinned=tuple(hash_file(p)[0] for p in (weights, folder / "config.json")))
    assert not refusals(scanned(folder, sandbox, pinned)) and read_weights(folder, pinned).tensors
    own = FilePolicy(run_tree=(tmp_path,))
    assert not refusals(scanned(folder, sandbox, own))
