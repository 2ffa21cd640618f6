"""Each line of the hot path that may wait for the device says why, and the docs list them."""

import runpy
from types import SimpleNamespace

import pytest

from tests.test_architecture import ROOT


@pytest.fixture(scope="module")
def script() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(ROOT / "scripts" / "host_sync_docs.py")))


def test_every_possible_host_read_in_the_hot_path_says_why(script: SimpleNamespace) -> None:
    silent = [
        f"{file.relative_to(ROOT)}:{number} needs `# host sync: why`, or `# host sync: none, why`"
        for file in script.hot_files()
        for number in script.undocumented(file.read_text())
    ]
    assert len(script.hot_files()) > 30
    assert not silent, "\n".join(silent)


@pytest.mark.parametrize(
    "line",
    [
        *("x = flag.item()", "rows = table.tolist()", "copy = loss.cpu()", "value = float(loss)"),
        *("where = mask.nonzero()", "weight = torch.tensor(weight, device=device)"),
        *("number = int(total.sum())", "if bool(flags[0]): pass", "device.synchronize()"),
    ],
)
def test_a_line_that_reads_the_device_needs_a_reason(script: SimpleNamespace, line: str) -> None:
    assert script.undocumented(f"first = 1\n{line}\n") == [2]
    assert not script.undocumented(f"{line}  # host sync: at the end\n")
    assert not script.undocumented(f"# host sync: none, a list\n{line}\n")
    assert script.undocumented(f"y = 0  # host sync: another line\n{line}\n") == [2]
    assert script.undocumented(f"{line}  # host sync:\n") == [1]


def test_the_table_of_host_waits_in_the_docs_is_made_from_the_comments(
    script: SimpleNamespace,
) -> None:
    stale = "docs/host_waits.md is stale: run python scripts/host_sync_docs.py"
    assert script.TARGET.read_text() == script.page(), stale
    assert "optim.gradients.coalesced_gradients" in script.table()
