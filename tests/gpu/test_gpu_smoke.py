"""The mpu layers, streams, recomputation and collectives on one NVIDIA GPU, with NCCL as the backend."""

import pytest
import torch

from tests.harness import device_checks, device_generation

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(),
        reason="there is no GPU here that PyTorch can use: nothing on this machine shows that the layers work on one",
    ),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("chunk_size", [None, 16])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layers_agree_with_float64_on_the_cpu(gpu: torch.device, dtype: torch.dtype, chunk_size: int | None) -> None:
    device_checks.check_layers(gpu, dtype, chunk_size)


def test_streams_of_random_numbers(gpu: torch.device) -> None:
    device_checks.check_streams(gpu)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_recomputation_is_exact(gpu: torch.device, dtype: torch.dtype) -> None:
    device_checks.check_recompute(gpu, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_generation_behind_a_cache(gpu: torch.device, dtype: torch.dtype) -> None:
    device_generation.check_generation(gpu, dtype)


def test_collectives_of_one_rank_on_nccl(gpu: torch.device) -> None:
    device_checks.check_collectives(gpu)
