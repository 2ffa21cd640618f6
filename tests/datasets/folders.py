"""Folders as Hugging Face has them, made on the spot: a tiny model and a real tokenizer."""

from __future__ import annotations

import csv
import os
import random
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

GOOD = ("great", "lovely", "superb")
BAD = ("awful", "dull", "tedious")
FILLER = ("the film was", "i found the acting", "what a", "and the plot is", "in the end", "so")


def reviews(path: Path, count: int = 120, labels: bool = True) -> Path:
    """A csv of reviews of very different lengths, which single words tell apart."""
    draw = random.Random(0)
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["text", "label"] if labels else ["text"])
        for number in range(count):
            words = GOOD if number % 2 else BAD
            parts = [f"{draw.choice(FILLER)} {draw.choice(words)}" for _ in range(1 + number % 5)]
            rows.writerow([" ".join(parts), "good" if number % 2 else "bad"][: 1 + labels])
    return path


def tokenizer(folder: Path, kind: str = "bert") -> Any:
    """A word-piece tokenizer trained on the reviews, saved as `save_pretrained` does."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=names)
    made.train_from_iterator([" ".join((*GOOD, *BAD, *FILLER))] * 3, trainer)
    special = {"unk_token": "[UNK]", "model_max_length": 64}
    if kind == "bert":
        pair = [("[CLS]", 2), ("[SEP]", 3)]
        made.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", None, pair)
        special |= {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    else:
        special |= {"eos_token": "[SEP]"}
    fast = PreTrainedTokenizerFast(tokenizer_object=made, **special)
    fast.save_pretrained(folder)
    return fast


def bert(folder: Path, shards: bool = False, **more: Any) -> Path:
    """A body with the head of its pre-training, which fine-tuning leaves out."""
    import torch
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(1)
    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 64, "max_position_embeddings": 64}
    sizes |= {"initializer_range": 0.1, **more}  # so that a fresh one has something to tell
    model = BertForMaskedLM(BertConfig(vocab_size=len(tokenizer(folder)), **sizes))
    model.save_pretrained(folder, **({"max_shard_size": "20KB"} if shards else {}))
    return folder


def gpt2(folder: Path) -> Path:
    """A small decoder whose tokenizer has no padding."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    vocab = len(tokenizer(folder, "gpt2"))
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "vocab_size": vocab}
    GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=3, eos_token_id=3)).save_pretrained(folder)
    return folder
