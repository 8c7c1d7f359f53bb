"""A toy of tied pipeline stages: every layer has a loss of its own, so that each stage runs without the others."""

import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron import mpu
from megatron.optimizer import Optimizer, OptimizerConfig, PrecisionConfig

WIDTH, HIDDEN, WORDS, LAYERS = 8, 12, 21, 4
TIED = "words.weight"
CONSTANTS: dict[str, Any] = {"weight_decay": 0.1, "clip_grad": 0.5, "ddp_bucket_size": 150}


class Layer(nn.Module):
    """Two parallel matrices with a replicated norm in front."""

    def __init__(self, group: mpu.GroupInfo | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, dtype=dtype)
        self.up = mpu.ColumnParallelLinear(WIDTH, HIDDEN, gather_output=False, group=group, dtype=dtype)
        self.down = mpu.RowParallelLinear(HIDDEN, WIDTH, input_is_parallel=True, group=group, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.up(self.norm(x))
        return x + self.down(torch.tanh(hidden))[0]


class Stages(nn.Module):
    """What one rank holds: layers by their global number, the words at both ends, a matrix without use beside layer 2.

    Attributes:
        chunks: the layers of each chunk.
        names: of the parameters of each chunk.
    """

    def __init__(self, chunks: Sequence[range], group: mpu.GroupInfo | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.chunks = chunks
        held = {number for layers in chunks for number in layers}
        if held & {0, LAYERS - 1}:
            self.words = mpu.VocabParallelEmbedding(24, WIDTH, real_num_embeddings=WORDS, group=group, dtype=dtype)
        self.layers = nn.ModuleDict({str(number): Layer(group, dtype) for number in sorted(held)})
        if 2 in held:
            self.spare = nn.Parameter(torch.zeros(3, 5, dtype=dtype))
        if LAYERS - 1 in held:
            self.norm = nn.LayerNorm(WIDTH, dtype=dtype)
        self.names = [[name for name, _ in self.named_parameters() if self._layer(name) in c] for c in chunks]
        draw_by_name(self)

    def _layer(self, name: str) -> int:
        kind, _, rest = name.partition(".")
        if kind == "layers":
            return int(rest.split(".")[0])
        return {"spare": 2, "norm": LAYERS - 1, "words": 0 if "0" in self.layers else LAYERS - 1}[kind]

    @property
    def duplicates(self) -> list[str]:
        """Copies of what another stage has."""
        return [] if "0" in self.layers else [name for name, _ in self.named_parameters() if name == TIED]

    def loss(self, chunk: int, ids: Tensor) -> Tensor:
        """The sum of the losses of a chunk's layers. `ids` are [s, b]."""
        return torch.stack([self._loss(number, ids) for number in self.chunks[chunk]]).sum()

    def _loss(self, number: int, ids: Tensor) -> Tensor:
        layer = self.layers[str(number)]
        dtype = next(layer.parameters()).dtype
        if number == 0:
            return torch.sin(layer(self.words(ids))).sum()
        waves = torch.arange(1, WIDTH + 1) * number * 0.3
        x = layer(torch.sin(ids.unsqueeze(-1) * waves).to(dtype))  # [s, b, h]
        if number < LAYERS - 1:
            return torch.sin(x).sum()
        logits = mpu.parallel_linear(self.norm(x), self.words.weight, group=self.words.group)
        return torch.sin(mpu.gather_from_tensor_model_parallel_region(logits, self.words.group)[..., :WORDS]).sum()


@torch.no_grad()
def draw_by_name(model: nn.Module) -> None:
    """Weights that depend on their names only, whatever the layout."""
    shardings = mpu.parameter_shardings(model)
    for name, parameter in model.named_parameters():
        draw = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        whole = torch.randn(shardings[name].global_shape, generator=draw, dtype=torch.float64) * 0.4
        for piece in shardings[name].pieces(tuple(parameter.shape)):
            parameter[piece.local] = whole[piece.region].to(parameter.dtype)


def my_stages(dtype: torch.dtype = torch.float64) -> Stages:
    """This rank's stages at the current layout: chunk `c` of pipeline rank `r` is stage `c p + r`."""
    p, rank = mpu.get_pipeline_model_parallel_world_size(), mpu.get_pipeline_model_parallel_rank()
    v = mpu.get_virtual_pipeline_model_parallel_world_size() or 1
    each = LAYERS // (p * v)
    stages = range(rank, p * v, p)
    return Stages([range(stage * each, (stage + 1) * each) for stage in stages], None, dtype)


def whole_model(dtype: torch.dtype = torch.float64) -> Stages:
    """All of it in one process."""
    return Stages([range(LAYERS)], mpu.SERIAL_GROUP, dtype)


def stage_optimizer(model: Stages, precision: PrecisionConfig | None = None, **choices: Any) -> Optimizer:
    """Over the current groups."""
    tied_here = mpu.get_pipeline_model_parallel_world_size() > 1 and mpu.is_rank_in_embedding_group()
    return Optimizer(
        model,
        mpu.parameter_shardings(model),
        OptimizerConfig(**{**CONSTANTS, **choices}),
        precision,
        data_group=mpu.get_data_parallel_group(),
        tensor_group=mpu.get_tensor_model_parallel_group(),
        tensor_rank=mpu.get_tensor_model_parallel_rank(),
        model_group=mpu.get_model_parallel_group(),
        model_rank=dist.get_rank(mpu.get_model_parallel_group()),
        everyone=dist.group.WORLD,
        own_buckets=[TIED],
        embedding_group=mpu.get_embedding_group() if tied_here else None,
        duplicates=model.duplicates,
        parts={name: chunk for chunk, names in enumerate(model.names) for name in names},
    )


def run_backward(model: Stages, optimizer: Optimizer, ids: Tensor, chunks: Iterable[int], last: bool) -> None:
    """The backward passes of one micro-batch; `last` where they complete the gradients."""
    for chunk in chunks:
        loss = model.loss(chunk, ids)
        if last:
            optimizer.last_micro_batch(model.names[chunk])
        if loss.requires_grad:
            (loss * optimizer.loss_scale).backward()


def train(model: Stages, optimizer: Optimizer, steps: range, data: tuple[int, int] = (0, 1)) -> list[float]:
    """Gradient norms of some iterations of 4 samples, which data rank `data[0]` of `data[1]` takes its share of."""
    norms = []
    for step in steps:
        ids = torch.randint(WORDS, (4, 5), generator=torch.Generator().manual_seed(step))
        mine = ids.chunk(data[1])[data[0]].split(1)
        optimizer.zero_grad()
        for number, part in enumerate(mine):
            run_backward(model, optimizer, part, reversed(range(len(model.chunks))), number == len(mine) - 1)
        optimizer.reduce_gradients(4.0)
        norms.append(optimizer.step(0.05).grad_norm)
    optimizer.wait_for_parameters()
    return norms
