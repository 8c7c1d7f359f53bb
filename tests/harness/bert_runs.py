"""Whole runs of pretrain_bert.py for tests: a tiny BERT on made-up sentences, and what came of it on every rank."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import pretrain_bert
from megatron.data.indexed import IndexedWriter
from megatron.training.arguments import parse_composed
from megatron.training.bert import BertRunConfig
from tests.harness import runs
from tests.harness.runs import Outcome, Recorder, outcome_of

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS, PARTS = 60, 20
TINY: dict[str, Any] = {
    "tokenizer_type": "BertWordPieceLowerCase",
    "vocab_size": None,
    "seq_length": 32,
    "max_position_embeddings": 32,
    "lr_decay_style": "linear",
    "short_seq_prob": 0.5,
}


def write_sentences(folder: Path, count: int = 60, seed: int = 0) -> str:
    """`count` documents of 2 to 6 sentences, and `vocab.txt`. Some tokens are frequent, and each has one that often
    follows it; the first of a sentence tells which sentence of its document it is.
    """
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = [*SPECIAL, *(f"w{i}" for i in range(WORDS)), *(f"##p{i}" for i in range(PARTS))]
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n", encoding="utf-8")
    random = np.random.default_rng(seed)
    first, last = len(SPECIAL) + 6, len(vocabulary)
    follower = first + random.permutation(last - first)

    def frequent() -> int:
        return first + min(int(random.geometric(0.2)) - 1, last - first - 1)

    with IndexedWriter(folder / "text_sentence", np.uint16) as writer:
        for sentences in random.integers(2, 7, count):
            lengths = random.integers(3, 12, sentences)
            tokens: list[int] = []
            for number, length in enumerate(lengths):
                tokens.append(len(SPECIAL) + number)
                tokens.append(frequent())
                for jump in random.random(length - 2) < 0.5:
                    tokens.append(frequent() if jump else int(follower[tokens[-1] - first]))
            writer.add_documents(tokens, lengths, [sentences])
    return str(folder / "text_sentence")


def flags(data_path: str, **changes: Any) -> list[str]:
    """The command line of a tiny run; `changes` as in `runs.flags`."""
    vocabulary = Path(data_path).parent / "vocab.txt"
    return runs.flags(data_path, **{**TINY, "vocab_file": str(vocabulary), **changes})


def run_pretrain_bert(rank: int, world_size: int, words: Sequence[str]) -> Outcome:
    """Pretrain by `words` on the ranks of the harness (`rank` of `world_size`)."""
    recorder = Recorder()
    config = parse_composed(BertRunConfig, words, world_size=world_size)
    return outcome_of(pretrain_bert.train(config, [recorder]), recorder)
