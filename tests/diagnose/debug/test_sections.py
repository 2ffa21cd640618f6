"""Named sections: counted by name and category while somebody asks, and nothing otherwise."""

import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

from runner import profile
from runner.diagnose.debug import sections
from runner.diagnose.debug.sections import MAX_SECTIONS, OTHERS
from tests.my_package import Computed


def busy() -> None:
    torch.randn(64, 64) @ torch.randn(64, 64)


def test_inner_sections_count_in_the_outer_one_and_an_error_ends_its_section() -> None:
    with profile.section("before"), profile.collect() as totals:
        for _ in range(3):
            with profile.section("batch", category="data"):
                busy()
                with profile.section("tokenise", category="data"):
                    busy()
        with pytest.raises(ValueError, match="bad"), profile.section("a"):
            raise ValueError("bad")
        with profile.section("b"):
            busy()
    with profile.section("after"):
        busy()
    rows = {total.name: total for total in totals.by_time()}
    assert sorted(rows) == ["a", "b", "batch", "tokenise"]
    assert [rows[name].calls for name in ("batch", "tokenise", "a", "b")] == [3, 3, 1, 1]
    assert rows["batch"].category == "data"
    assert rows["batch"].seconds > rows["tokenise"].seconds
    assert rows["batch"].mean == pytest.approx(rows["batch"].seconds / 3)
    assert rows["a"].seconds < rows["b"].seconds
    assert sections._active_totals is None


def test_threads_do_not_disturb_each_other_and_names_without_end_are_bounded() -> None:
    @profile.section("worker", category="thread")
    def work(_: int) -> None:
        for _ in range(200):
            with profile.section("inner"):
                pass

    with profile.collect() as totals:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(8)))
        for i in range(MAX_SECTIONS + 50):
            with profile.section(f"sample {i}"):
                pass
    assert totals.rows["worker", "thread"].calls == 8
    assert totals.rows["inner", ""].calls == 1600
    assert len(totals.rows) == MAX_SECTIONS + 1 and totals.rows[OTHERS, ""].calls == 52


def test_a_section_in_a_compiled_model_causes_no_graph_break_or_recompilation() -> None:
    torch._dynamo.reset()

    def sectioned(module: nn.Module, x: Tensor) -> Tensor:
        with profile.section("layer", category="model"):
            x = module.layer(x)
        return x.relu()

    model, x = Computed(sectioned, layer=nn.Linear(4, 4)), torch.randn(2, 4)
    graphs: list[int] = []

    def backend(module: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        graphs.append(len(inputs))
        return module.forward

    compiled = torch.compile(model, fullgraph=True, backend=backend)  # raises at a break
    first = compiled(x)
    with profile.collect() as totals, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(compiled(x), first)
        assert torch.equal(model(x), first)
    assert len(graphs) == 1
    assert totals.rows["layer", "model"].calls == 1, "the eager call"
