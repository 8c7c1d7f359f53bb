"""The mpu layers, streams, recomputation and collectives on one NVIDIA GPU, with NCCL as the backend."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron import mpu
from tests.harness import device_checks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(),
        reason="there is no GPU here that PyTorch can use: nothing on this machine shows that the layers work on one",
    ),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[torch.device]:
    """The first GPU, as the only rank of an NCCL world."""
    device = torch.device("cuda", 0)
    rendezvous: Path = tmp_path_factory.mktemp("nccl") / "rendezvous"
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", init_method=f"file://{rendezvous}", rank=0, world_size=1, device_id=device)
    mpu.initialize_model_parallel(1)
    yield device
    mpu.destroy_model_parallel()
    mpu.get_rng_tracker().reset()
    dist.destroy_process_group()


@pytest.mark.parametrize("chunk_size", [None, 16])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layers_agree_with_float64_on_the_cpu(gpu: torch.device, dtype: torch.dtype, chunk_size: int | None) -> None:
    device_checks.check_layers(gpu, dtype, chunk_size)


def test_streams_of_random_numbers(gpu: torch.device) -> None:
    device_checks.check_streams(gpu)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_recomputation_is_exact(gpu: torch.device, dtype: torch.dtype) -> None:
    device_checks.check_recompute(gpu, dtype)


def test_collectives_of_one_rank_on_nccl(gpu: torch.device) -> None:
    device_checks.check_collectives(gpu)
