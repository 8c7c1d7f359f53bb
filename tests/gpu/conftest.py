"""The GPU of the tests in this folder, as the only rank of a world that talks by NCCL."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron import mpu


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
