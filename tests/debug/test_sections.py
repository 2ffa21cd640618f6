"""Named sections: counted by name and category while somebody asks, and nothing otherwise."""

from __future__ import annotations

import threading
import warnings

import pytest
import torch
from torch import Tensor, nn

from runner import profile
from runner.debug import sections
from runner.debug.sections import MOST, OTHERS, Totals, collect


def busy() -> None:
    torch.randn(64, 64) @ torch.randn(64, 64)


def test_inner_sections_count_in_the_outer_one_and_once_in_a_category() -> None:
    with profile.collect() as totals:
        for _ in range(3):
            with profile.section("batch", category="data"):
                busy()
                with profile.section("tokenise", category="data"):
                    busy()
                with profile.section("plot", category="look"):
                    busy()
    rows = {total.name: total for total in totals.by_time()}
    assert [rows[name].calls for name in ("batch", "tokenise", "plot")] == [3, 3, 3]
    assert rows["batch"].seconds > rows["tokenise"].seconds + rows["plot"].seconds
    assert totals.by_category()["data"] == pytest.approx(
        rows["batch"].seconds - rows["plot"].seconds
    )
    assert rows["batch"].mean == pytest.approx(rows["batch"].seconds / 3)


def test_a_section_that_raises_is_counted_and_the_next_one_is_not_inside_it() -> None:
    with profile.collect() as totals:
        with pytest.raises(ValueError, match="bad"), profile.section("a"):
            raise ValueError("bad")
        with profile.section("b"):
            busy()
    assert totals.rows["a", ""].calls == 1
    assert totals.rows["a", ""].seconds < totals.rows["b", ""].seconds


def test_threads_do_not_disturb_each_other() -> None:
    @profile.section("worker", category="thread")
    def work() -> None:
        for _ in range(200):
            with profile.section("inner"):
                pass

    with profile.collect() as totals:
        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert {total.name: total.calls for total in totals.by_time()} == {"worker": 8, "inner": 1600}
    worker = totals.rows["worker", "thread"]
    assert 0 <= worker.own <= worker.seconds


def test_nothing_is_counted_while_nobody_collects() -> None:
    with profile.section("before"), profile.collect() as totals:
        with profile.section("meanwhile"):
            pass
    with profile.section("after"):
        pass
    assert [total.name for total in totals.by_time()] == ["meanwhile"]
    assert sections._collecting is None


def test_names_without_end_do_not_fill_the_memory() -> None:
    with profile.collect() as totals:
        for i in range(MOST + 50):
            with profile.section(f"sample {i}"):
                pass
    assert len(totals.rows) == MOST + 1
    assert totals.rows[OTHERS, ""].calls == 50


class Sectioned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with profile.section("layer", category="model"):
            x = self.layer(x)
        return x.relu()


def test_a_section_in_a_compiled_model_breaks_no_graph_and_compiles_nothing_anew() -> None:
    torch._dynamo.reset()
    model, x = Sectioned(), torch.randn(2, 4)
    graphs: list[int] = []

    def backend(module: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        graphs.append(len(inputs))
        return module.forward

    compiled = torch.compile(model, fullgraph=True, backend=backend)  # raises at a break
    first = compiled(x)
    with collect(Totals()) as totals, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(compiled(x), first)
        assert torch.equal(model(x), first)
    assert len(graphs) == 1
    assert totals.rows["layer", "model"].calls == 1, "the eager call"
