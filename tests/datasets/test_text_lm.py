"""data=text_lm, and texts that its models continue, beside the same sampling by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import runner
from runner.core.build.setup import Components
from runner.core.errors import ConfigError, DataError, UsageError
from runner.core.execution.evaluation import inference
from runner.core.execution.generate import Sampling, generate
from runner.core.interfaces.run import Run
from runner.core.record.tensorboard import PREFIX
from tests import runs
from tests.datasets import folders

LINES = "".join(f"{n} green bottles hanging on the wall, and one fell\n" for n in range(200))
LM = ("data=text_lm", "model=gpt", "model.width=32", "model.depth=2", "model.heads=2")
SHORT = (*LM, "data.sequence=16", "training.steps=6", "training.batch_size=8", "optimizer.lr=0.01")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a trained run, whose text is gone."""
    folder = tmp_path_factory.mktemp("lm")
    text = folder / "book.txt"
    text.write_text(LINES)
    runs.trained(*SHORT, f"data.path={text}", "optimizer.ema=0.5", folder=folder / "run")
    text.unlink()
    return folder / "run"


@pytest.fixture
def book(tmp_path: Path) -> tuple[str, ...]:
    """Overrides for a short run on a text."""
    (tmp_path / "book.txt").write_text(LINES)
    return (*SHORT, f"data.path={tmp_path}/book.txt")


def by_hand(run: Run, prompt: str, tokens: int, seed: int | None) -> str:
    """The text by a forward of the whole context for each token; the likeliest without a seed."""
    ids = [*prompt.encode()]
    start = 0
    generator = torch.Generator().manual_seed(seed or 0)
    with inference(run) as forward:
        for _ in range(tokens):
            if len(ids) - start > 16:
                start = len(ids) - 8
            scores = forward(torch.tensor([ids[start:]]))[0, -1].double()
            if seed is None:
                ids.append(int(scores.argmax()))
            else:
                shares = (scores / 0.7).softmax(0)
                ids.append(int(torch.multinomial(shares, 1, generator=generator)))
    return bytes(ids).decode("utf-8", "replace")


def test_a_text_is_bytes_with_its_end_as_validation(book: tuple[str, ...]) -> None:
    with runs.opened(*book, "data.validation=0.2") as run:
        source: Any = run.validation.fetch.source
        inputs, target = source.fetch(source.validation[:1], None)
        held_out = LINES.encode()[len(LINES) - round(len(LINES) * 0.2) :]
        assert bytes(inputs[0].tolist()) == held_out[:16]
        assert bytes(target[0].tolist()) == held_out[1:17]
        assert run.sizes.vocab == 256


@pytest.mark.parametrize("has_validation", [True, False])
def test_files_of_a_folder_are_its_splits_or_one_text(tmp_path: Path, has_validation: bool) -> None:
    (tmp_path / "train.txt").write_text("a" * 400)
    (tmp_path / "test.txt").write_text("t" * 100)
    if has_validation:
        (tmp_path / "val.txt").write_text("v" * 100)
    with runs.opened(*SHORT, f"data.path={tmp_path}") as run:
        train, validation = run.train.fetch.source.streams  # type: ignore[attr-defined]
        assert set(bytes(validation.ids)) == set(b"v" if has_validation else b"a")
        assert set(bytes(train.ids)) == set(b"a") and run.test is not None
    other = tmp_path / "parts"
    (other / "deeper").mkdir(parents=True)
    (other / "1.txt").write_text("b" * 100)
    (other / "deeper/2.txt").write_text("c" * 100)
    (other / ".hidden.txt").write_text("h" * 100)
    with runs.opened(*SHORT, f"data.path={other}", "data.validation=0.4") as run:
        train, validation = run.train.fetch.source.streams  # type: ignore[attr-defined]
        text = b"b" * 100 + b"\n" + b"c" * 100 + b"\n"
        assert bytes(train.ids) + bytes(validation.ids) == text


@pytest.mark.parametrize(
    ("content", "problem"),
    [(b"", "is empty"), (b"a\0b" * 50, "is no text in UTF-8"), (b"short", "tokens are too few")],
)
def test_what_is_no_text_is_refused(tmp_path: Path, content: bytes, problem: str) -> None:
    (tmp_path / "book.txt").write_bytes(content)
    with pytest.raises(DataError, match=problem):
        runs.opened(*SHORT, f"data.path={tmp_path}/book.txt").__enter__()


@pytest.mark.parametrize("seed", [None, 3])
def test_a_continued_text_is_that_of_whole_forwards(trained: Path, seed: int | None) -> None:
    temperature = 0 if seed is None else 0.7
    with runner.load(trained) as model:
        made = model.generate("bottles", tokens=40, temperature=temperature, seed=seed or 0)
        assert model._run is not None
        assert made == by_hand(model._run, "bottles", 40, seed)
        assert made.startswith("bottles")


def test_only_the_likeliest_are_drawn_and_the_callers_random_state_stays(trained: Path) -> None:
    with runner.load(trained) as model:
        greedy = model.generate("wall", tokens=12, temperature=0)
        torch.manual_seed(5)
        before = torch.get_rng_state()
        assert model.generate("wall", tokens=12, top_k=1, seed=9) == greedy
        assert torch.equal(torch.get_rng_state(), before)
        assert model.generate("wall", tokens=12, seed=1) != model.generate("wall", tokens=12)


def test_a_run_without_samples_has_the_same_bits(book: tuple[str, ...], tmp_path: Path) -> None:
    weights, events = [], []
    for samples in ("null", "0"):
        folder = tmp_path / samples
        typed = (*book, "model.dropout=0.1", f"monitoring.samples={samples}")
        with runs.opened(*typed, folder=folder) as run:
            runner.train(run)
            weights.append(runs.weights(run))
        events.append(b"".join(file.read_bytes() for file in folder.glob(f"{PREFIX}*")))
    assert not runs.differences(*weights)
    assert [b"val/samples" in event for event in events] == [True, False]
    assert "▸".encode() in events[0]


@pytest.mark.parametrize(
    ("typed", "problem"),
    [
        ({"prompt": ""}, "prompt must be a text"),
        ({"prompt": 3}, "prompt must be a text"),
        ({"tokens": 0}, "tokens must be a whole number ≥ 1"),
        ({"temperature": -1.0}, "temperature must be a number ≥ 0"),
        ({"temperature": float("nan")}, "temperature must be a number ≥ 0"),
        ({"top_k": 0}, "top_k must be a whole number ≥ 1"),
        ({"seed": -1}, "seed must be a whole number ≥ 0"),
    ],
)
def test_wrong_arguments_are_named(trained: Path, typed: dict[str, Any], problem: str) -> None:
    with runner.load(trained) as model, pytest.raises(UsageError, match=problem):
        model.generate(**{"prompt": "wall", **typed})


def test_outputs_that_are_not_finite_give_no_text(book: tuple[str, ...]) -> None:
    with runs.opened(*book) as run:
        with torch.no_grad():
            next(run.model.parameters()).fill_(float("nan"))
        with pytest.raises(DataError, match="not finite"):
            generate(run, torch.tensor([[65, 66]]), Sampling(tokens=2))


def test_what_has_no_text_is_told_so(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"monitoring\.samples: needs text"):
        runs.trained("data=cancer", "model=mlp", "training.steps=1", "monitoring.samples=2")
    with runner.load(trained) as model, pytest.raises(UsageError, match="use generate"):
        model.predict("some text")
    folder = tmp_path / "digits"
    runs.trained("training.steps=2", folder=folder)
    made = runs.command(tmp_path, "job=predict", f"checkpoint.resume={folder}", "predict.prompt=a")
    assert made.returncode == 2
    assert "predict.prompt: needs a language model" in made.stderr


def test_the_command_prints_and_writes_the_text_without_data(trained: Path, tmp_path: Path) -> None:
    prompt = "bottles, {of} "  # as it is typed: with the space at its end
    typed = [f"checkpoint.resume={trained}", f"predict.prompt={prompt}", "predict.tokens=30"]
    made = runs.command(tmp_path, "job=predict", *typed, f"hydra.run.dir={tmp_path}/text")
    assert made.returncode == 0, made.stderr
    written = (tmp_path / "text/predictions.txt").read_text()
    with runner.load(trained) as model:
        assert written == model.generate(prompt, tokens=30)
    assert prompt in made.stdout


def test_a_tokenizer_of_one_file_gives_the_ids_of_its_folder(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folders.bert(tmp_path / "vocabulary")  # with config.json, which a folder needs
    fast = transformers.AutoTokenizer.from_pretrained(tmp_path / "vocabulary")
    text = "the film was great and the plot is dull. " * 40
    (tmp_path / "book.txt").write_text(text)
    expected = fast(text, add_special_tokens=False)["input_ids"]
    ids = {}
    for name in ("vocabulary", "vocabulary/tokenizer.json"):
        typed = (f"data.path={tmp_path}/book.txt", f"data.tokenizer={tmp_path}/{name}")
        with runs.opened(*SHORT, *typed) as run:
            source: Any = run.train.fetch.source
            ids[name] = [i for stream in source.streams for i in stream.ids.tolist()]
            assert source.codec.decode(source.codec.encode_text("great film")) == "great film"
    assert ids["vocabulary"][: len(expected)] == ids["vocabulary/tokenizer.json"] == expected


def test_a_pretrained_decoder_generates_by_its_own_method(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder = folders.gpt2(tmp_path / "gpt2")
    (tmp_path / "book.txt").write_text("the film was great and the plot is dull. " * 40)
    typed = ("data=text_lm", f"data.path={tmp_path}/book.txt", "data.sequence=16", "model=hf",
             f"model.path={folder}", "training.steps=2", "training.batch_size=4")  # fmt: skip
    with runs.opened(*typed, folder=tmp_path / "run") as run:
        runner.train(run)
        prompt = torch.tensor([[5, 6, 7]])
        before = torch.get_rng_state()
        made = generate(run, prompt, Sampling(tokens=5, temperature=0.0))
        model: Any = run.model.eval()
        expected = model.generate(prompt, max_new_tokens=5, do_sample=False, pad_token_id=0)
        assert made.tolist() == expected.tolist()
        drawn = [generate(run, prompt, Sampling(tokens=5, seed=s)).tolist() for s in (1, 1, 2)]
        assert drawn[0] == drawn[1] != drawn[2]
        assert torch.equal(torch.get_rng_state(), before)
        with pytest.raises(ConfigError, match="exceed the model's 64 positions"):
            generate(run, prompt, Sampling(tokens=62))


class FixedContext(torch.nn.Module):
    """A decoder that takes 16 ids and nothing else, with a `generate` of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(256, 256)
        self.positions = torch.nn.Parameter(torch.zeros(16, 256))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.table(ids) + self.positions
        return output

    def generate(self, text: str) -> str:
        raise AssertionError(text)


def test_a_model_that_takes_no_shorter_text_trains_on_without_samples(
    book: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    assert runs.trained(*book, given=Components(model=FixedContext())).status == "done"
    assert caplog.text.count("monitoring.samples: no texts from now on") == 1
