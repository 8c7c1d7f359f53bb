"""From the environment of a launcher to a device, process groups and seeded generators."""

import contextlib
import dataclasses
import datetime
import logging
import os
from collections.abc import Iterator

import torch
from torch import distributed as dist
from torch.distributed import HashStore, PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from megatron import mpu
from megatron.base.config import Config, choice_problems, flag, minimum_problems, range_problems
from megatron.training.failure import shared_failure
from megatron.training.launcher import Launch, launched_ranks, local_rank


@dataclasses.dataclass(frozen=True)
class DistributedConfig(Config):
    """How the ranks are laid out and how they talk."""

    tensor_model_parallel_size: int = flag(
        1,
        "ranks that share each layer (tensor model parallelism)",
        aliases=["model-parallel-size"],
    )
    sequence_parallel: bool = flag(
        False, "each tensor-parallel rank does norms, dropout and residuals on its share of the sequence"
    )
    distributed_backend: str | None = flag(
        None,
        "nccl trains on GPUs, gloo on CPUs; nccl where there is a GPU if not given",
        choices=[None, "nccl", "gloo"],
    )
    distributed_timeout_minutes: float = flag(10.0, "minutes after which a collective that waits for a rank fails")

    def problems(self) -> list[str]:
        found = choice_problems(self) + minimum_problems(self, 1, "tensor_model_parallel_size")
        return found + range_problems(self, 0.01, 1e6, "distributed_timeout_minutes")

    def input_problems(self) -> list[str]:
        """Whether there is a device for the backend."""
        if self.distributed_backend == "nccl" and not torch.cuda.is_available():
            return ["--distributed-backend nccl: there is no GPU here that PyTorch can use; gloo trains on CPUs"]
        return []


@dataclasses.dataclass(frozen=True)
class World:
    """Where this process stands.

    Attributes:
        rank, size: its rank of that many.
        device: what it calculates on.
        store: the one that the ranks met in, None if adopted.
        reports: whether it tells how the run goes: the first rank of the last stage, where losses are known.
    """

    rank: int
    size: int
    device: torch.device
    store: Store | None
    reports: bool


def world_size() -> int:
    """The number of ranks: of the world that exists already, else of the launcher's environment, else one."""
    return dist.get_world_size() if dist.is_initialized() else launched_ranks()


def choose_backend(backend: str | None) -> str:
    """`backend`, or nccl where there is a GPU and gloo elsewhere."""
    return backend or ("nccl" if torch.cuda.is_available() else "gloo")


def _backend_there(asked: str | None) -> str:
    """The backend of the process group that exists; one that has both, or has not chosen yet, is used as `asked`.

    Raises ValueError where it is another than `asked`.
    """
    there = dist.get_backend()
    kinds = [kind for kind in ("nccl", "gloo") if kind in there] or ["nccl", "gloo"]
    if asked is not None and asked not in kinds:
        raise ValueError(f"--distributed-backend {asked}: the process group that exists already is of {there}")
    return kinds[0] if len(kinds) == 1 else choose_backend(asked)


def bind_device(backend: str) -> torch.device:
    """The device of this process: the CPU with gloo, else the GPU numbered LOCAL_RANK, made current.

    It must come before the first collective, which would otherwise open every rank's context on GPU 0.
    """
    if backend == "gloo":
        return torch.device("cpu")
    number, there = local_rank(), torch.cuda.device_count()
    if number >= there:
        raise ValueError(f"LOCAL_RANK {number}: this node has {there} GPUs, start at most as many ranks on it")
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


def device_facts(device: torch.device) -> tuple[str, tuple[int, int] | None]:
    """The name of a device, and its compute capability, None for what is no GPU."""
    if device.type != "cuda":
        return device.type, None
    return torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)


def _meet(backend: str, timeout: datetime.timedelta, device: torch.device) -> Store:
    """Start `torch.distributed` by the launcher's environment, or as a world of one where there is none."""
    launch = Launch.of_environment()
    if "RANK" in os.environ:
        store, rank, size = next(rendezvous("env://", timeout=timeout))
    else:
        store, rank, size = HashStore(), launch.rank, launch.size
    dist.init_process_group(
        backend,
        store=PrefixStore("process-group", store),
        rank=rank,
        world_size=size,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )
    return store


@contextlib.contextmanager
def distributed_world(
    config: DistributedConfig, seed: int, pipeline_size: int = 1, virtual_size: int = 1
) -> Iterator[World]:
    """Process groups, device and generators for a run; an exception inside the block ends all ranks with its message.

    The model is over `pipeline_size` ranks, each with `virtual_size` stages of it.
    What the caller has started already (`torch.distributed`, model parallelism of the same size) is adopted and left
    as it is, exceptions too; what is started here is ended here.
    """
    asked, adopted = config.distributed_backend, dist.is_initialized()
    backend = _backend_there(asked) if adopted else choose_backend(asked)
    device = bind_device(backend)
    timeout = datetime.timedelta(minutes=config.distributed_timeout_minutes)
    store = None if adopted else _meet(backend, timeout, device)
    failed = True
    try:
        with contextlib.nullcontext() if store is None else shared_failure(store, dist.get_rank()):
            _initialize_model_parallel((config.tensor_model_parallel_size, pipeline_size), virtual_size, timeout)
            first = _quiet_unless_first_of_stage()
            mpu.model_parallel_manual_seed(seed)
            reports = first and mpu.is_pipeline_last_stage(ignore_virtual=True)
            yield World(dist.get_rank(), dist.get_world_size(), device, store, reports)
        failed = False
    finally:
        # After a failure the peers may be in a collective, and taking its group down could wait for them for ever.
        if not adopted and (dist.get_world_size() == 1 or not failed):
            mpu.destroy_model_parallel()
            dist.destroy_process_group()


def _quiet_unless_first_of_stage() -> bool:
    """Warnings that all ranks of a stage would give alike are heard once; whether this is the rank that gives them."""
    first = mpu.get_tensor_model_parallel_rank() == mpu.get_data_parallel_rank() == 0
    logging.getLogger("megatron").setLevel(logging.WARNING if first else logging.ERROR)
    return first


def _initialize_model_parallel(sizes: tuple[int, int], virtual_size: int, timeout: datetime.timedelta) -> None:
    if not mpu.model_parallel_is_initialized():
        mpu.initialize_model_parallel(*sizes, virtual_size if virtual_size > 1 else None, timeout=timeout)
    there = (mpu.get_tensor_model_parallel_world_size(), mpu.get_pipeline_model_parallel_world_size())
    for kind, asked, ranks in zip(("tensor", "pipeline"), sizes, there, strict=True):
        if asked != ranks:
            raise ValueError(
                f"--{kind}-model-parallel-size {asked}: the groups that exist already are of {ranks} ranks"
            )
