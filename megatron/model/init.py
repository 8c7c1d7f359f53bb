"""Initial weights that do not depend on the layout: drawn in blocks of rows, seeded by the tensor's name.

Every tensor is cut into blocks of 1,024 rows of the whole tensor. A block is drawn in float32 on the CPU from a
generator seeded by a hash of (seed, name, block number), then cast. A rank draws the blocks that it holds a part of.
"""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from megatron import mpu
from megatron.mpu.sharding import Piece, Sharding

BLOCK_ROWS = 1024

Fill = Callable[[Tensor], Any]


def normal(std: float) -> Fill:
    """A fill from N(0, std)."""
    return functools.partial(nn.init.normal_, mean=0.0, std=std)


def output_normal(std: float, num_layers: int) -> Fill:
    """The fill of a layer's output projections: N(0, std / sqrt(2 l)), since 2 l of them add up in the residual."""
    return normal(std / math.sqrt(2 * num_layers))


def block_seed(seed: int, name: str, block: int) -> int:
    """32 bits of SHA-256 of (seed, name, block): all that a Mersenne Twister takes."""
    return mpu.derive_seed(seed, name, block) & 0xFFFFFFFF


def fills(model: nn.Module) -> dict[str, Fill]:
    """The fill of every parameter by its full name: the owner's `initializers`, or that of a norm (ones and zeros)."""
    found: dict[str, Fill] = {}
    for prefix, module in model.named_modules():
        for name, _ in module.named_parameters(recurse=False):
            found[f"{prefix}.{name}" if prefix else name] = _fill_of(module, name)
    return found


def _fill_of(module: nn.Module, name: str) -> Fill:
    initializers = getattr(module, "initializers", {})
    if name in initializers:
        return initializers[name]
    assert isinstance(module, nn.LayerNorm), f"{type(module).__name__}.{name} has no initializer"
    return nn.init.ones_ if name == "weight" else nn.init.zeros_


def initialize_parameters(model: nn.Module, seed: int, dtype: torch.dtype, device: torch.device | str) -> None:
    """Materialise `model`, built on the device "meta", and fill its parameters; the same at any layout.

    Args:
        model: modules that hold `sharding` and `initializers`, or are layer norms. Rows outside a parameter's global
            shape (the padding of a vocabulary) become zeros.
        seed: of the run.
        dtype: of the parameters; they are drawn in float32 whatever it is.
        device: where the parameters will live; they are drawn on the CPU.

    No collectives. The default generators are left as they were.
    """
    assert not list(model.buffers()), "a buffer would be left without a value"
    model.to(dtype).to_empty(device=device)
    shardings, model_fills = mpu.parameter_shardings(model), fills(model)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for name, parameter in model.named_parameters():
            fill_parameter(parameter, shardings[name], model_fills[name], seed)
    mpu.mirror_attributes(model)


def fill_parameter(parameter: Tensor, sharding: Sharding, fill: Fill, seed: int) -> None:
    """Fill this rank's part of one parameter, block by block; moves the default CPU generator."""
    parameter.zero_()
    pieces = sharding.pieces(tuple(parameter.shape))
    for block, rows in enumerate(_blocks(sharding.global_shape[0])):
        held = [piece for piece in pieces if _overlap(piece, rows)]
        if held:
            torch.default_generator.manual_seed(block_seed(seed, sharding.name, block))
            drawn = torch.empty(len(rows), *sharding.global_shape[1:], dtype=torch.float32, device="cpu")
            fill(drawn)
        for piece in held:
            _copy_rows(parameter, piece, drawn, rows)


def _blocks(rows: int) -> Iterator[range]:
    """The rows of each block of a tensor of `rows` rows."""
    return (range(start, min(start + BLOCK_ROWS, rows)) for start in range(0, rows, BLOCK_ROWS))


def _overlap(piece: Piece, rows: range) -> range:
    """Which of the global `rows` the piece has."""
    return range(max(piece.offset[0], rows.start), min(piece.offset[0] + piece.shape[0], rows.stop))


def _copy_rows(parameter: Tensor, piece: Piece, drawn: Tensor, rows: range) -> None:
    """Copy the part of a block (`drawn`, the global `rows`) that the piece has to its place in `parameter`."""
    common = _overlap(piece, rows)
    others = tuple(slice(start, start + size) for start, size in zip(piece.offset[1:], piece.shape[1:], strict=True))
    target = parameter[piece.local]
    first = common.start - piece.offset[0]
    part = drawn[(slice(common.start - rows.start, common.stop - rows.start), *others)]
    target[first : first + len(common)].copy_(part)
