"""The checks of training that tests/gpu runs on a GPU, on the CPU: the same code on one gloo rank."""

from pathlib import Path

import pytest
import torch

from megatron import mpu
from megatron.model import TransformerConfig
from tests.harness import training_checks
from tests.harness.ranks import Ranks
from tests.harness.runs import write_documents

CPU = torch.device("cpu")
SIZES = TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=4, max_position_embeddings=16)


def check_runs(rank: int, world_size: int, data_path: str) -> None:
    mpu.initialize_model_parallel(1)
    training_checks.check_precision(data_path, "gloo", "bf16", lr=5e-3, eval_iters=0)
    training_checks.check_sharded_optimizer(
        data_path, "gloo", 0.0, bf16=True, hidden_dropout=0.1, eval_iters=0, train_iters=5
    )


def check_fast_forms(rank: int, world_size: int) -> None:
    mpu.initialize_model_parallel(1)
    for dtype in training_checks.KERNEL_TOLERANCES:
        training_checks.check_attention(CPU, dtype, SIZES)
        training_checks.check_padding(CPU, dtype, SIZES)
        training_checks.check_norm(CPU, dtype)
    training_checks.check_adam(CPU)


@pytest.mark.slow
def test_runs(ranks: Ranks, tmp_path: Path) -> None:
    ranks(1, check_runs, write_documents(tmp_path / "documents"))


def test_fast_forms(ranks: Ranks) -> None:
    ranks(1, check_fast_forms)
