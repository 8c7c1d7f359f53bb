"""State of the sharded optimizer goes through a checkpoint to any other layout and to the plain optimizer, and back."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn

from megatron import mpu
from megatron.checkpointing import Placed, load_checkpoint, save_checkpoint
from megatron.optimizer import Optimizer, OptimizerConfig, PrecisionConfig
from tests.harness.ranks import Ranks

KINDS = ("plain", "sharded")
TENSOR_SIZES = (1, 2, 4)  # so that there are 4, 2 and 1 data ranks


class Model(nn.Module):
    """One parameter of each kind: split by padded rows, by rows, by columns, and whole on each rank."""

    def __init__(self) -> None:
        super().__init__()
        kind: dict[str, Any] = {"dtype": torch.bfloat16}
        self.embedding = mpu.VocabParallelEmbedding(48, 24, real_num_embeddings=37, **kind)
        self.up = mpu.ColumnParallelLinear(24, 40, gather_output=False, **kind)
        self.down = mpu.RowParallelLinear(40, 24, input_is_parallel=True, **kind)
        self.norm = nn.LayerNorm(24, **kind)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids)
        return self.norm(hidden + self.down(self.up(hidden)[0])[0])


class Run:
    """A model and its optimizer in bfloat16, with buckets so small that several are cut over the data ranks."""

    def __init__(self, sharded: bool, seed: int) -> None:
        mpu.get_rng_tracker().reset()
        mpu.model_parallel_manual_seed(seed)
        self.layout = {"tensor": mpu.get_tensor_model_parallel_world_size()}
        self.model = Model()
        self.optimizer = Optimizer(
            self.model,
            mpu.parameter_shardings(self.model),
            OptimizerConfig(use_distributed_optimizer=sharded, ddp_bucket_size=700),
            PrecisionConfig(bf16=True),
            data_group=mpu.get_data_parallel_group(),
            tensor_group=mpu.get_tensor_model_parallel_group(),
            tensor_rank=mpu.get_tensor_model_parallel_rank(),
            everyone=dist.group.WORLD,
            own_buckets=["embedding.weight"],
        )

    def train(self, steps: range) -> None:
        for step in steps:
            draw = torch.Generator().manual_seed(100 * step + mpu.get_data_parallel_rank())
            self.optimizer.zero_grad()
            output = self.model(torch.randint(37, (6,), generator=draw)).float()
            (output * torch.randn(output.shape, generator=draw)).sum().backward()
            self.optimizer.reduce_gradients(6.0)
            self.optimizer.step(0.01)

    def weights(self) -> Placed:
        shardings = mpu.parameter_shardings(self.model)
        return {name: (parameter, shardings[name]) for name, parameter in self.model.named_parameters()}

    def save(self, directory: Path) -> None:
        first = mpu.get_data_parallel_rank() == 0
        weights = self.weights() if first else {}
        state = self.optimizer.state_tensors() if first or self.optimizer.sharded else {}
        save_checkpoint(
            directory,
            2,
            {**weights, **state},
            self.optimizer.state(),
            {},
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            layout=self.layout,
        )

    def load(self, directory: Path) -> None:
        tensors = {**self.weights(), **self.optimizer.state_tensors()}
        for tensor, _ in tensors.values():
            tensor.detach().fill_(7.0)
        loaded = load_checkpoint(
            directory, tensors, rank=dist.get_rank(), layout=self.layout, world_size=dist.get_world_size()
        )
        self.optimizer.load_state(loaded.state)


def assert_same(plain: Run, sharded: Run) -> None:
    """Weights are equal in each bit, and the shards of the state are ranges of the plain optimizer's."""
    for name, (tensor, _) in plain.weights().items():
        assert torch.equal(tensor, sharded.weights()[name][0]), name
    whole = plain.optimizer.state_tensors()
    shards = sharded.optimizer.state_tensors()
    assert shards.keys() == whole.keys()
    for name, (tensor, place) in shards.items():
        expected = whole[name][0].reshape(-1)
        if sharded.optimizer.sharded:
            expected = expected[place.begin : place.end]  # type: ignore[union-attr]
        assert torch.equal(tensor.reshape(-1), expected), name


def save_at(directory: Path, tensor: int) -> None:
    mpu.initialize_model_parallel(tensor)
    for kind in KINDS:
        run = Run(kind == "sharded", seed=1)
        run.train(range(2))
        run.save(directory / f"{tensor} {kind}")
    mpu.destroy_model_parallel()


def load_at(directory: Path, tensor: int) -> None:
    mpu.initialize_model_parallel(tensor)
    for saved_at in TENSOR_SIZES:
        plain, sharded = Run(False, seed=2), Run(True, seed=3)
        for of_plain, of_sharded in (KINDS, KINDS[::-1]):
            plain.load(directory / f"{saved_at} {of_plain}")
            sharded.load(directory / f"{saved_at} {of_sharded}")
            assert_same(plain, sharded)
        plain.train(range(2, 3))
        sharded.train(range(2, 3))
        assert_same(plain, sharded)
    mpu.destroy_model_parallel()


def any_layout(rank: int, world_size: int, directory: str) -> None:
    for tensor in TENSOR_SIZES:
        save_at(Path(directory), tensor)
    for tensor in TENSOR_SIZES:
        load_at(Path(directory), tensor)


def test_saved_sharded_and_loaded_at_any_layout(ranks: Ranks, tmp_path: Path) -> None:
    ranks(4, any_layout, str(tmp_path))
    kept = set()
    for rank in range(4):
        with safe_open(str(tmp_path / "1 sharded" / "iter_0000002" / f"rank_0000{rank}.safetensors"), "pt") as file:
            kept |= {(rank, key.split("@")[0]) for key in file.keys()}  # noqa: SIM118 - it is no mapping
    # The embedding's bucket is cut in four, the last of which is padding; weights are written once.
    assert [rank for rank, name in sorted(kept) if name == "optimizer.master_weight.embedding.weight"] == [0, 1, 2]
    assert [rank for rank, name in sorted(kept) if name == "embedding.weight"] == [0]
