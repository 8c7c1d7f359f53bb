"""Training on a GPU with NCCL: 16 bits against float32, fast forms against plain ones, memory of recomputation.

One rank shows that the code runs on NCCL, not that GPUs exchange the right numbers: only the last test does, and it
needs two of them: tensor ranks with sequence parallelism, and stages of an interleaved pipeline.
"""

import json
from pathlib import Path

import pytest
import torch

from megatron.base.apex import apex_kind
from megatron.base.complaints import ConfigError
from megatron.model import TransformerConfig, norm
from megatron.optimizer import adam
from tests.harness import training_checks
from tests.harness.closeness import assert_close
from tests.harness.launch import torchrun
from tests.harness.runs import flags, write_documents

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(),
        reason="there is no GPU here that PyTorch can use: nothing on this machine shows that training works on one",
    ),
]
RUN = {
    "num_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "seq_length": 128,
    "max_position_embeddings": 128,
    "micro_batch_size": 8,
    "global_batch_size": 16,
    "train_iters": 50,
    "eval_iters": 0,
}
SIZES = TransformerConfig(num_layers=8, hidden_size=1024, num_attention_heads=16, max_position_embeddings=1024)
UNFUSED = TransformerConfig(**vars(SIZES) | {"attention_backend": "unfused"})
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(scope="module")
def data_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_documents(tmp_path_factory.mktemp("data") / "documents", count=2000)


@pytest.fixture(params=["apex", "plain"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """NVIDIA's apex where it is, and PyTorch's own kernels as if it were not."""
    if request.param == "apex" and apex_kind() != "nvidia":
        pytest.skip("NVIDIA's apex is not installed: its FusedAdam and FusedLayerNorm are not shown")
    if request.param == "plain":
        monkeypatch.setattr(norm, "_fused_norm", lambda device: None)
        monkeypatch.setattr(adam, "_fused_adam", lambda device: None)
    return request.param


def has_bfloat16(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 0)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_16_bits_follow_float32(gpu: torch.device, data_path: str, precision: str) -> None:
    if precision == "bf16" and not has_bfloat16(gpu):
        with pytest.raises(ConfigError, match="--bf16: .* does not calculate in bfloat16"):
            training_checks.loss_curve(data_path, "nccl", bf16=True)
        return
    training_checks.check_precision(data_path, "nccl", precision, **RUN)


@pytest.mark.parametrize("precision", [None, "fp16"])
def test_sharding_overlap_and_recomputation_on_one_rank_change_nothing(
    gpu: torch.device, data_path: str, precision: str | None
) -> None:
    low = {"fp16": True, "initial_loss_scale": 2.0**12} if precision else {}
    training_checks.check_sharded_optimizer(data_path, "nccl", 3e-3 if precision else 1e-4, **RUN | low)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kernel_of_attention_against_the_matrix_written_out(gpu: torch.device, dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16 and not has_bfloat16(gpu):
        pytest.skip("this GPU does not calculate in bfloat16")
    training_checks.check_attention(gpu, dtype, SIZES)
    training_checks.check_padding(gpu, dtype, SIZES)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norm_against_float64(gpu: torch.device, form: str, dtype: torch.dtype) -> None:
    training_checks.check_norm(gpu, dtype)


def test_adam_against_float64(gpu: torch.device, form: str) -> None:
    training_checks.check_adam(gpu)


@pytest.mark.parametrize("sizes", [SIZES, UNFUSED], ids=["fused", "unfused"])
def test_memory_of_recomputation(gpu: torch.device, sizes: TransformerConfig) -> None:
    training_checks.check_recompute_memory(gpu, sizes, 4)


TWO_RANKS = {
    "tensor": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pipeline": {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1},
}


def losses_on(ranks: int, data_path: str, metrics: Path, **layout: object) -> list[float]:
    """Of a run on that many GPUs, started as a user does."""
    words = flags(data_path, **RUN | layout, distributed_backend="nccl", metrics_file=metrics)
    done = torchrun(ranks, ["pretrain_gpt.py", *words])
    assert done.returncode == 0, done.stderr
    return [json.loads(line)["loss"] for line in metrics.read_text().splitlines()]


@pytest.mark.parametrize("layout", TWO_RANKS)
def test_two_gpus_train_as_one(data_path: str, tmp_path: Path, layout: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"there is one GPU here: nothing shows that two of a {layout} group exchange the right numbers")
    expected = losses_on(1, data_path, tmp_path / "1.jsonl")
    assert_close(losses_on(2, data_path, tmp_path / "2.jsonl", **TWO_RANKS[layout]), expected, 1e-4)
