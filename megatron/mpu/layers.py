"""Linear layers and an embedding whose matrices are cut over the tensor-parallel ranks."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from megatron.mpu.initialize import Group, GroupInfo, resolve_group
from megatron.mpu.linear import parallel_linear
from megatron.mpu.mappings import (
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from megatron.mpu.random import PARAMETER_STREAM, get_rng_tracker
from megatron.mpu.sharding import Sharding, mirror_attributes
from megatron.mpu.utils import VocabUtility, check_id_dtype, check_ids, local_rows

Initializer = Callable[[torch.Tensor], Any]


class _ParallelLayer(nn.Module):
    """What the layers share: a group, and parameters that know their place and how to be filled.

    Attributes:
        group: the ranks that the layer is cut over.
        sharding: parameter name -> where this rank's part lies in the whole.
        initializers: parameter name -> fills a tensor in place; it is given the whole matrix.
    """

    weight: nn.Parameter
    sequence_parallel: bool

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.group: GroupInfo = resolve_group(group)
        self.sharding: dict[str, Sharding] = {}
        self.initializers: dict[str, Initializer] = {}

    def _check_positive(self, **sizes: int) -> None:
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{type(self).__name__}: {name} {size}: it must be at least 1")

    def _part(self, what: str, size: int, stride: int = 1) -> int:
        """`size / t`, provided that it can be cut in `stride * t` chunks."""
        if size % (stride * self.group.size):
            by = f"the tensor parallel size {self.group.size}" + (f" times stride {stride}" if stride > 1 else "")
            raise ValueError(f"{type(self).__name__}: {what} {size} is not divisible by {by}")
        return size // self.group.size

    def _summed(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of `x`, which is nobody else's, over the ranks: all of it, or this rank's shard of the sequence."""
        if self.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(x, self.group)
        return reduce_from_tensor_model_parallel_region(x, self.group, in_place=True)

    def _add(
        self,
        name: str,
        local: tuple[int, ...],
        whole: tuple[int, ...],
        split_dim: int | None,
        fill: Initializer,
        stride: int = 1,
        partial_gradient: bool = False,
        **where: Any,
    ) -> None:
        """Register an empty parameter of shape `local`, saying where in the whole it belongs and how that is filled."""
        size = self.group.size if split_dim is not None else 1
        offset = 0 if split_dim is None else self.group.rank * (local[split_dim] // stride)
        self.register_parameter(name, nn.Parameter(torch.empty(local, **where)))
        self.sharding[name] = Sharding(name, whole, split_dim, offset, stride, size, partial_gradient)
        self.initializers[name] = fill

    def _fill(self) -> dict[str, torch.Tensor]:
        """Draw each parameter whole, in float32 on the CPU from the stream that all ranks share, and keep this rank's
        part; what lies outside the global shape becomes zero. Returns the whole tensors, none on the meta device."""
        wholes = {}
        with torch.no_grad(), get_rng_tracker().fork(PARAMETER_STREAM):
            for name, parameter in self._parameters.items():
                if parameter is None or parameter.is_meta:
                    continue
                whole = torch.empty(self.sharding[name].global_shape, dtype=torch.float32, device="cpu")
                self.initializers[name](whole)
                parameter.zero_()
                for piece in self.sharding[name].pieces(tuple(parameter.shape)):
                    parameter[piece.local] = whole[piece.region].to(parameter)
                wholes[name] = whole
        mirror_attributes(self)
        return wholes


class ColumnParallelLinear(_ParallelLayer):
    """`y = x A^T + b` with the rows of A (its output) cut over the ranks: weight `[output/t, input]`.

    Forward nothing (all-gather with `gather_output`), backward all-reduce of the input's gradient, while the weight's
    is computed. With `sequence_parallel` forward all-gather of the input, backward the same again and reduce-scatter of
    the input's gradient. What becomes of the weight's gradient is said at `parallel_linear`.

    Args:
        input_size, output_size: of the whole matrix.
        bias: add a bias `[output/t]`, which begins at zero.
        gather_output: return all of the output on every rank, else this rank's columns.
        init_method: fills the whole matrix `[output, input]` in place.
        stride: for a matrix of several fused ones: it is cut in `stride * t` chunks, of which a rank takes every t-th.
        keep_master_weight_for_test: keep the whole float32 matrix as `master_weight`.
        skip_bias_add: leave the bias to the caller (who may fuse it), as second result.
        sequence_parallel: the input is this rank's shard of the first dimension, `[s/t, ..., input]`.
        group: the ranks; None is the current tensor group.
        dtype, device: of the parameters; PyTorch's defaults where None. On "meta" nothing is drawn.

    Raises:
        ValueError: a size or the stride is below 1, `output_size` is not divisible by the ranks (times the stride), or
            `sequence_parallel` together with `gather_output`: ranks that have all of the output are to share it out.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        gather_output: bool = True,
        init_method: Initializer = nn.init.xavier_normal_,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        skip_bias_add: bool = False,
        *,
        sequence_parallel: bool = False,
        group: Group = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(group)
        self._check_positive(input_size=input_size, output_size=output_size, stride=stride)
        self.input_size, self.output_size = input_size, output_size
        if sequence_parallel and gather_output:
            raise ValueError(f"{type(self).__name__}: gather_output True: with sequence_parallel it must be False")
        self.gather_output, self.skip_bias_add, self.stride = gather_output, skip_bias_add, stride
        self.sequence_parallel = sequence_parallel
        self.output_size_per_partition = part = self._part("output_size", output_size, stride)
        where: dict[str, Any] = {"dtype": dtype, "device": device}
        self._add("weight", (part, input_size), (output_size, input_size), 0, init_method, stride, **where)
        if bias:
            self._add("bias", (part,), (output_size,), 0, nn.init.zeros_, stride, **where)
        else:
            self.register_parameter("bias", None)
        wholes = self._fill()
        self.master_weight = wholes.get("weight") if keep_master_weight_for_test else None

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`[..., input]` -> (`[..., output/t]`, or `[..., output]` with `gather_output`; bias if skipped).

        With `sequence_parallel` `[s/t, ..., input]` -> `[s, ..., output/t]`.
        """
        bias = None if self.skip_bias_add else self.bias
        output = parallel_linear(input_, self.weight, bias, group=self.group, sequence_parallel=self.sequence_parallel)
        output_bias: torch.Tensor | None = self.bias if self.skip_bias_add else None
        if self.gather_output:
            output = self._gathered(output)
            if output_bias is not None:  # as wide as what it is to be added to
                output_bias = self._gathered(output_bias)
        return output, output_bias

    def _gathered(self, x: torch.Tensor) -> torch.Tensor:
        return gather_from_tensor_model_parallel_region(x, self.group, stride=self.stride)

    def extra_repr(self) -> str:
        return f"{self.input_size}, {self.output_size}, ranks={self.group.size}, gather_output={self.gather_output}"


class RowParallelLinear(_ParallelLayer):
    """`y = x A^T + b` with the columns of A (its input) cut over the ranks: weight `[output, input/t]`.

    Forward all-reduce, backward nothing (all-gather of the input's gradient where the input is scattered here). With
    `sequence_parallel` forward reduce-scatter, backward all-gather. The bias is replicated and added after that; with
    `sequence_parallel` its gradient is one of a shard of the sequence, as its sharding says (`partial_gradient`).

    Args:
        input_is_parallel: the input is this rank's columns already; else it is whole and split here.
        sequence_parallel: the output is this rank's shard of the first dimension, `[s/t, ..., output]`.
        The others as in `ColumnParallelLinear`.

    Raises:
        ValueError: a size or the stride is below 1, or `input_size` is not divisible by the ranks (times the stride).
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        input_is_parallel: bool = False,
        init_method: Initializer = nn.init.xavier_normal_,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        skip_bias_add: bool = False,
        *,
        sequence_parallel: bool = False,
        group: Group = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(group)
        self._check_positive(input_size=input_size, output_size=output_size, stride=stride)
        self.input_size, self.output_size = input_size, output_size
        self.input_is_parallel, self.skip_bias_add, self.stride = input_is_parallel, skip_bias_add, stride
        self.sequence_parallel = sequence_parallel
        self.input_size_per_partition = part = self._part("input_size", input_size, stride)
        where: dict[str, Any] = {"dtype": dtype, "device": device}
        self._add("weight", (output_size, part), (output_size, input_size), 1, init_method, stride, **where)
        if bias:
            whole = (output_size,)
            self._add("bias", whole, whole, None, nn.init.zeros_, partial_gradient=sequence_parallel, **where)
        else:
            self.register_parameter("bias", None)
        wholes = self._fill()
        self.master_weight = wholes.get("weight") if keep_master_weight_for_test else None

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`[..., input/t]`, or `[..., input]` unless `input_is_parallel` -> (`[..., output]`, bias if skipped).

        With `sequence_parallel` -> `[s/t, ..., output]`; ValueError where s is not divisible by the ranks.
        """
        x = input_
        if not self.input_is_parallel:
            x = scatter_to_tensor_model_parallel_region(x, self.group, stride=self.stride)
        output = self._summed(parallel_linear(x, self.weight, group=self.group, reduce_gradient=False))
        if self.skip_bias_add:
            return output, self.bias
        return output if self.bias is None else output + self.bias.to(output.dtype), None

    def extra_repr(self) -> str:
        return (
            f"{self.input_size}, {self.output_size}, ranks={self.group.size}, "
            f"input_is_parallel={self.input_is_parallel}"
        )


class VocabParallelEmbedding(_ParallelLayer):
    """Word embeddings with the vocabulary cut over the ranks: weight `[vocab/t, dim]`.

    Forward all-reduce, backward nothing; with `sequence_parallel` forward reduce-scatter, backward all-gather.

    Args:
        num_embeddings: rows in all, padding included.
        embedding_dim: size of a row.
        init_method: fills the matrix of real rows `[real_num_embeddings, dim]` in place.
        real_num_embeddings: rows at or above it are padding: zeros, and outside of the sharding's global shape. None:
            all are real.
        sequence_parallel: the output is this rank's shard of the first dimension, `[s/t, ..., dim]`.
        group, dtype, device: as in `ColumnParallelLinear`.

    Raises:
        ValueError: a size is below 1, `num_embeddings` is not divisible by the ranks or below `real_num_embeddings`.
            In `forward` for ids that are no integers and, on a CPU, for an id outside the real rows; on CUDA such an id
            stops the lookup with a device-side assertion, since looking at it on the host would make it wait. With
            `sequence_parallel` also where s is not divisible by the ranks.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        init_method: Initializer = nn.init.xavier_normal_,
        *,
        real_num_embeddings: int | None = None,
        sequence_parallel: bool = False,
        group: Group = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(group)
        self._check_positive(num_embeddings=num_embeddings, embedding_dim=embedding_dim)
        real = num_embeddings if real_num_embeddings is None else real_num_embeddings
        if not 0 < real <= num_embeddings:
            raise ValueError(f"real_num_embeddings {real}: it must be at least 1 and at most {num_embeddings}")
        self.num_embeddings, self.embedding_dim, self.real_num_embeddings = num_embeddings, embedding_dim, real
        self.sequence_parallel = sequence_parallel
        self.num_embeddings_per_partition = part = self._part("num_embeddings", num_embeddings)
        self.vocab_start_index, self.vocab_end_index = VocabUtility.vocab_range_from_per_partition_vocab_size(
            part, self.group.rank, self.group.size
        )
        self._add("weight", (part, embedding_dim), (real, embedding_dim), 0, init_method, dtype=dtype, device=device)
        self._fill()

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        """Ids `[...]` -> `[..., dim]`; with `sequence_parallel` `[s, ...]` -> `[s/t, ..., dim]`."""
        check_id_dtype(input_, "token id")
        ids = input_.long()
        check_ids(ids, self.real_num_embeddings, 0, "token id")
        rows, elsewhere = local_rows(
            ids, self.vocab_start_index, self.num_embeddings_per_partition, self.real_num_embeddings
        )
        output = F.embedding(rows, self.weight)
        if self.group.size == 1:
            return output
        output = output.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        return self._summed(output)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, ranks={self.group.size}, real={self.real_num_embeddings}"
