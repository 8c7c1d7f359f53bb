"""What a checkpoint must say of itself to be used, and which tokenizer is that of its model."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpointing import save_checkpoint
from megatron.mpu import replicated
from megatron.tasks.trained import TrainedConfig, stored_config, tokenizer_of

MODEL = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "max_position_embeddings": 4}
CONFIG = {"model": MODEL, "tokenizer": {"tokenizer_type": "NullTokenizer", "vocab_size": 10}}


def saved(folder: Path, **state: Any) -> str:
    """A checkpoint that says `state` of itself."""
    weight = torch.zeros(2)
    tensors = {"weight": (weight, replicated("weight", weight))}
    save_checkpoint(folder, 1, tensors, state, {}, rank=0, world_size=1, layout={})
    return str(folder)


@pytest.mark.parametrize(
    ("state", "sentence"),
    [
        ({"config": CONFIG, "model": {"model": "bert", "vocab_size": 10}}, "its checkpoint is of a bert"),
        ({"config": {"model": MODEL}}, "does not say its tokenizer"),
        ({}, "does not say its model and tokenizer"),
    ],
)
def test_a_checkpoint_that_cannot_be_used_is_told(tmp_path: Path, state: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        stored_config(saved(tmp_path, **state))


def test_the_tokenizer_is_the_checkpoint_s_wherever_its_files_lie_now(tmp_path: Path) -> None:
    pieces, elsewhere = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a"], tmp_path / "elsewhere.txt"
    elsewhere.write_text("\n".join(pieces))
    was = {"tokenizer_type": "BertWordPieceCase", "vocab_file": str(tmp_path / "vocab.txt")}
    sizes = {"vocab_size": len(pieces), "model": "gpt"}
    load = saved(tmp_path / "saved", config={"model": MODEL, "tokenizer": was}, model=sizes)
    stored = stored_config(load)
    with pytest.raises(
        ValueError, match="there is no such file.*say where the tokenizer of the checkpoint .* lies now"
    ):
        tokenizer_of(TrainedConfig(load), stored)
    assert tokenizer_of(TrainedConfig(load, vocab_file=str(elsewhere)), stored).tokenize("a") == [5]
    elsewhere.write_text("\n".join([*pieces, "b"]))
    with pytest.raises(ValueError, match="has 7 ids, and the model .* has 6: it is not the tokenizer of that model"):
        tokenizer_of(TrainedConfig(load, vocab_file=str(elsewhere)), stored)
