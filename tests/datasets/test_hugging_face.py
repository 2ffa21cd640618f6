"""model=hf: a tokenizer and a model from a local folder are trained by overrides alone."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runner import build, load, train
from runner.core.checkpoint.checkpointer import Checkpointer
from runner.core.data.open import open_data
from runner.core.device import memory
from runner.core.errors import ConfigError, DataError, SecurityError
from runner.core.jobs import evaluate
from runner.core.schemas.security import SecurityLevel
from runner.core.security.files.policy import FileLimits, FilePolicy
from runner.datasets import predict
from runner.datasets.hugging_face_model import _match_padding
from runner.datasets.text import LENGTH_MULTIPLE
from runner.datasets.tokenizer import Tokenizer
from runner.scan import sandbox
from tests import runs
from tests.datasets import folders

pytest.importorskip("transformers")
STEPS = 60
TUNED = (
    *("training.batch_size=16", f"training.steps={STEPS}", "checkpoint.every=20"),
    *("checkpoint.keep=9", "optimizer.lr=5e-3", "optimizer.ema=0.8", "data.workers=0"),
    *("optimizer.freeze=[embeddings.*]", "optimizer.groups=[{match: classifier, lr: 5e-3}]"),
    *("device.threads=1", "optimization=none", "schedule=linear"),
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model in shards, reviews, and a run that was fine-tuned by a command."""
    folder = tmp_path_factory.mktemp("hf")
    folders.bert(folder / "bert", shards=True)
    folders.reviews(folder / "reviews.csv")
    done = runs.command(folder, *overrides(folder), "hydra.run.dir=run", *runs.QUICK, *TUNED[-3:])
    assert done.returncode == 0, done.stderr
    return folder


def overrides(folder: Path) -> list[str]:
    data = ["data=text", f"data.path={folder}/reviews.csv"]
    return [*data, "model=hf", f"model.path={folder}/bert", *TUNED]


def table(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return [*csv.DictReader(file)]


def changed(folder: Path, place: Path, name: str, changes: dict[str, Any]) -> Path:
    """A copy of the model in `place`, one of whose JSON files has other values."""
    copy = Path(shutil.copytree(place / "bert", folder / "bert"))
    content = json.loads((copy / name).read_bytes()) | changes
    (copy / name).write_text(json.dumps(content))
    return copy


def end(folder: Path) -> tuple[dict[str, Any], list[Any]]:
    restored = Checkpointer(folder, keep=9).restore()
    assert restored is not None and restored.step == STEPS
    state = restored.state["update"]["optimizer"]["state"]
    return restored.model, [t for entry in state.values() for t in entry.values()]


def test_bert_learns_and_a_resumed_run_ends_in_the_same_bits(place: Path, tmp_path: Path) -> None:
    summary = runs.read(place / "run")
    assert summary["best"] > 0.85
    chosen = {c["key"]: c["reason"] for c in summary["choices"]}
    assert "37 of 41 tensors" in chosen["model.path"] and "in 6 shards" in chosen["model.path"]
    assert "left out of the file: cls.predictions" in chosen["model.path"]
    assert "parameters are trained" in chosen["optimizer.freeze"]
    weights, _ = end(place / "run")
    from transformers import BertModel

    body = BertModel.from_pretrained(place / "bert").state_dict()
    names = {n for n in body if torch.equal(body[n], weights[f"bert.{n}"])}
    assert names == {n for n in body if n.startswith("embeddings.")}  # loaded, and frozen

    step = next((place / "run/checkpoints").glob("step_*20"))
    shutil.copytree(step, tmp_path / "checkpoints" / step.name)
    with runs.opened(*overrides(place), "checkpoint.resume=auto", folder=tmp_path) as run:
        assert run.progress.step == 20
        train(run)
    assert end(tmp_path)[1] and not runs.differences(end(place / "run"), end(tmp_path))


def test_new_texts_are_predicted_as_transformers_does(place: Path, tmp_path: Path) -> None:
    new = folders.reviews(tmp_path / "new.csv", 11, labels=False)
    texts = [row["text"] for row in table(new)]
    asked = [*overrides(place), f"checkpoint.resume={place}/run", "job=predict"]
    predict.main(runs.config(*asked, f"data.path={new}"), tmp_path)
    rows = table(tmp_path / "predictions.csv")
    right = [row["prediction"] == ("bad", "good")[n % 2] for n, row in enumerate(rows)]
    assert len(rows) == 11 and sum(right) >= 9  # chance: 5.5
    with load(place / "run") as model:
        columns = model.predict({"text": texts})
        single = model.predict([{"text": texts[3]}])
    good = np.array([float(row["probability good"]) for row in rows])
    np.testing.assert_allclose(columns["probability good"], good, rtol=1e-6)
    np.testing.assert_allclose(single["probability good"], good[3:4], rtol=1e-5)  # other padding

    from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

    settings = BertConfig.from_pretrained(place / "bert", num_labels=2)
    theirs = BertForSequenceClassification(settings).eval()
    with runs.opened(*overrides(place), f"checkpoint.resume={place}/run", "job=predict") as run:
        with run.update.averaged():
            theirs.load_state_dict(run.model.state_dict())
    ids = AutoTokenizer.from_pretrained(place / "bert")(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        logits = theirs(ids["input_ids"], ids["attention_mask"]).logits.double().softmax(1)
    names = [name.removeprefix("probability ") for name in rows[0] if "probability" in name]
    np.testing.assert_allclose(logits[:, names.index("good")], good, rtol=1e-4)


def test_batches_are_padded_to_their_longest_text_and_masked(place: Path) -> None:
    config = runs.config(*overrides(place)).data
    data = open_data(config, lambda *_: None)
    widths = set()
    for start in range(0, 40, 4):
        inputs, _ = data.fetch(np.arange(start, start + 4), None)
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        longest = int(mask.sum(1).max())
        widths.add(ids.shape[1])
        assert ids.shape[1] == -(-longest // LENGTH_MULTIPLE) * LENGTH_MULTIPLE
        assert torch.equal(ids == 0, mask == 0)  # [PAD]
        assert (ids[:, 0] == 2).all()  # [CLS]
        assert all(row[int(n) - 1] == 3 for row, n in zip(ids, mask.sum(1), strict=True))  # [SEP]
    assert len(widths) > 1
    assert data.sizes.sequence == 64  # the tokenizer's own limit, below data.sequence


def test_a_decoder_learns_plain_text_and_labels_without_a_padding_token(tmp_path: Path) -> None:
    folders.gpt2(tmp_path / "gpt2")
    texts = [row["text"] for row in table(folders.reviews(tmp_path / "r.csv"))]
    (tmp_path / "corpus.txt").write_text("\n".join(texts * 3))
    own = ["model=hf", f"model.path={tmp_path}/gpt2", "training.steps=40", "optimizer.lr=1e-2"]
    own += ["training.batch_size=8", "optimization=none"]
    text = ["data=tokens", f"data.path={tmp_path}/corpus.txt", "data.sequence=16"]
    summary = runs.trained(*own, *text, folder=tmp_path / "run")
    assert summary.metrics["val/perplexity"] < 20  # of some 60 ids in use
    asked = ["job=evaluate", "evaluate.export=weights", f"checkpoint.resume={tmp_path}/run"]
    evaluate.main(runs.config(*own, *text, *asked), tmp_path / "evaluated")
    from transformers import AutoModelForCausalLM

    exported = tmp_path / "evaluated/exports"
    theirs, loaded = AutoModelForCausalLM.from_pretrained(exported, output_loading_info=True)
    assert not any(loaded.values())  # also the head, which is the embedding
    assert theirs.lm_head.weight is theirs.transformer.wte.weight
    labelled = ["data=text", f"data.path={tmp_path}/r.csv", "training.micro_batch=3"]
    with runs.opened(*own, *labelled) as run:
        assert run.model.config.pad_token_id == 3  # the end of a text
        assert train(run).metrics["val/accuracy"] > 0.9


@pytest.mark.parametrize(
    "level", [pytest.param("ultra", marks=pytest.mark.slow), "memory_efficient"]
)
def test_techniques_engage_or_say_why_not(place: Path, level: str) -> None:
    short = ["training.steps=8", "training.validate_every=8", "checkpoint.every=8"]
    summary = runs.trained(*overrides(place), *short, f"optimization={level}", "data.workers=2")
    assert summary.status == "done"
    for row in summary.techniques:
        assert row.engaged or row.reason or not row.requested, row
        assert "could not be collected" not in row.reason
    if level == "memory_efficient":
        assert runs.status(summary, "recompute").engaged


@pytest.mark.parametrize("kind", ["weights", pytest.param("export", marks=pytest.mark.slow)])
def test_a_tuned_model_is_exported(place: Path, tmp_path: Path, kind: str) -> None:
    asked = ["job=evaluate", f"evaluate.export={kind}", f"checkpoint.resume={place}/run"]
    summary = evaluate.main(runs.config(*overrides(place), *asked), tmp_path)
    assert summary.metrics["val/accuracy"] > 0.85
    assert summary.export["bytes"] > 0
    if kind == "export":
        return
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    exported, kind = tmp_path / "exports", AutoModelForSequenceClassification
    theirs, loaded = kind.from_pretrained(exported, output_loading_info=True)
    assert not any(loaded.values())  # no name is missing, left over or of another shape
    assert theirs.config.id2label == {0: "bad", 1: "good"} and theirs.config.use_cache
    texts = [row["text"] for row in table(place / "reviews.csv")][:9]
    ids = AutoTokenizer.from_pretrained(exported)(texts, padding=True, return_tensors="pt")
    asked = [*overrides(place), f"checkpoint.resume={place}/run", "job=predict"]
    with runs.opened(*asked) as run, run.update.averaged(), torch.no_grad():
        inputs = ids["input_ids"], ids["attention_mask"]
        assert torch.equal(theirs.eval()(*inputs).logits, run.model.eval()(*inputs).logits)


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"model_type": "unheard_of"}, "model.path: .* cannot be read"),
        ({"model_type": "new", "auto_map": {"AutoConfig": "a.B"}}, "custom code .* never run"),
        ({"quantization_config": {"quant_method": "gptq"}}, "has a quantization_config"),
        ({"hidden_size": 16}, "its config.json belongs to another model"),
        ({"max_position_embeddings": 32}, "data.sequence: 64 is more than the 32 positions"),
        ({"vocab_size": 20}, "has 20 tokens, but the data's ids go up to"),
    ],
)
def test_a_folder_that_does_not_fit_is_an_error_with_its_key(
    place: Path, tmp_path: Path, more: dict[str, Any], problem: str
) -> None:
    broken = changed(tmp_path, place, "config.json", more)
    (broken / "a.py").write_text("raise SystemExit('code of the folder ran')")
    with pytest.raises(ConfigError, match=problem):
        runs.trained(*overrides(place), f"model.path={broken}", f"data.tokenizer={place}/bert")


def test_pickled_weights_and_another_vocabulary_are_refused(place: Path, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(place / "bert", tmp_path / "bert"))
    for file in broken.glob("*.safetensors*"):
        file.unlink()
    torch.save({"bert.x": torch.nn.Linear(2, 2)}, broken / "pytorch_model.bin")
    with pytest.raises(SecurityError, match=r"pytorch_model.bin: refused"):
        runs.trained(*overrides(place), f"model.path={broken}")
    vocabulary = broken / "tokenizer.json"
    vocabulary.write_text(vocabulary.read_text().replace("great", "grear"))
    asked = [f"checkpoint.resume={place}/run", "job=predict", f"data.tokenizer={broken}"]
    with pytest.raises(ConfigError, match="a different vocabulary from the trained model"):
        predict.main(runs.config(*overrides(place), *asked), tmp_path / "out")


COUNTS: list[tuple[dict[str, Any], str]] = [
    ({"num_hidden_layers": 10**7}, r"num_hidden_layers=1e\+07, more than 1,024"),
    ({"num_labels": 10**9}, r"num_labels=1e\+09, more than 1,000,000"),
    ({"text_config": {"n_layers": [2, 10**6]}}, r"n_layers=1e\+06, more than 1,024"),
    ({"hidden_size": 10**12}, r"hidden_size=1e\+12, more than 2,147,483,648"),
    ({"vocab_size": 2 * 10**9}, r"weights that .*config.json describes take \d{3},\d{3},\d{3},"),
]


@pytest.mark.parametrize(("change", "problem"), COUNTS)
@pytest.mark.parametrize("pretrained", ["true", "false"])
def test_a_model_config_with_unusable_counts_is_refused_before_the_model_is_built(
    change: dict[str, Any], problem: str, pretrained: str, place: Path, tmp_path: Path
) -> None:
    path = changed(tmp_path, place, "config.json", change)
    asked = [*overrides(place), f"model.path={path}", f"data.tokenizer={place}/bert"]
    with pytest.raises(ConfigError, match=f"model.path: .*{problem}"):
        build(runs.config(*asked, f"model.pretrained={pretrained}"), tmp_path / "run")


GROWING = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 300}
PANIC = {"type": "Split", "pattern": {"Regex": "(a|a|aa|a+)+$"}, "behavior": "Isolated"}
HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "grows": ({"normalizer": {"type": "Sequence", "normalizers": [GROWING] * 4}}, "SIGABRT"),
    "panics": ({"pre_tokenizer": {**PANIC, "invert": False}}, "it fails on a text: .*retry-limit"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_tokenizer_that_takes_all_memory_or_panics_is_refused_in_the_sandbox(
    case: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, problem = HOSTILE[case]
    path = str(changed(tmp_path, place, "tokenizer.json", change))
    monkeypatch.setattr(sandbox, "FileLimits", lambda: FileLimits(memory=1 << 28))
    with pytest.raises(SecurityError, match=f"tokenizer.json: refused: .*{problem}.*another sou"):
        Tokenizer(path, texts=[b"a" * 28 + b"b"])
    if case == "panics":  # on a text that was not tried
        tokenizer = Tokenizer(path, policy=FilePolicy(SecurityLevel.off))
        with pytest.raises(ConfigError, match="data.tokenizer: .*it fails on a text"):
            list(tokenizer.encode([b"a" * 28 + b"b"], 32))


def test_a_text_without_line_ends_is_tokenized_in_pieces(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = Tokenizer(f"{place}/bert")
    words = "the film was great " * 200
    (tmp_path / "t.txt").write_text(words)
    expected = tokenizer.encode_file(tmp_path / "t.txt")
    monkeypatch.setattr("runner.datasets.tokenizer.PIECE", 19)
    monkeypatch.setattr("runner.datasets.tokenizer.PIECES", 3)
    assert np.array_equal(tokenizer.encode_file(tmp_path / "t.txt"), expected)
    monkeypatch.setattr(memory, "available_bytes", lambda: len(words) - 1)
    with pytest.raises(DataError, match=r"its ids take 3,800 bytes, but only 3,799"):
        tokenizer.encode_file(tmp_path / "t.txt")


@pytest.mark.parametrize("data", ["digits", "stdlib_parts", "stdlib_text"])
def test_data_without_tokens_of_the_model_are_refused(data: str) -> None:
    with pytest.raises(ConfigError, match=f"data={data} does not have; use data=text or data=t"):
        runs.config("model=hf", "model.path=somewhere", f"data={data}")


@pytest.mark.parametrize("pretrained", ["true", "false"])
def test_a_prediction_does_not_depend_on_its_batch_where_config_and_tokenizer_pad_differently(
    tmp_path: Path, pretrained: str
) -> None:
    folder = folders.gpt2(tmp_path / "gpt2")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"pad_token_id": 1}))
    folders.reviews(tmp_path / "r.csv")
    own = ["model=hf", f"model.path={folder}", f"model.pretrained={pretrained}", "data=text"]
    with runs.opened(*own, f"data.path={tmp_path}/r.csv", "optimization=none") as run:
        assert ("model.pad_token_id", 3) in [(c.key, c.value) for c in run.choices]
        data = run.train.fetch.source
        shortest, longest = int(data.lengths.argmin()), int(data.lengths.argmax())
        assert data.lengths[longest] - data.lengths[shortest] > LENGTH_MULTIPLE
        run.model.eval()
        together, alone = (
            run.model(**data.fetch(np.array(rows), None)[0]).logits[0]
            for rows in ([shortest, longest], [shortest])
        )
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


def test_positions_that_count_from_the_padding_keep_its_id() -> None:
    from transformers import RobertaConfig, RobertaForSequenceClassification

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = RobertaForSequenceClassification(RobertaConfig(vocab_size=20, **sizes))
    assert _match_padding(model, 3) == [] and model.config.pad_token_id == 1
