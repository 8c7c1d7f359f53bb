"""A trained model on its way from one program to another: our names, nothing read yet, and what else is known."""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from megatron.checkpointing.convert.deferred import Deferred, Readable, in_dtype
from megatron.checkpointing.convert.mapping import Entry, Rows, refuse_left_overs
from megatron.checkpointing.convert.models import GPT, ModelKind
from megatron.model import BertEncoder, GPTModel, TransformerConfig
from megatron.mpu.sharding import parameter_shardings
from megatron.optimizer.state import OPTIMIZER_STATE

_OF_TOKENS = ("embedding.word_embeddings.weight", "output_layer.weight", "lm_head.weight", "lm_head.bias")


@dataclasses.dataclass(frozen=True)
class Transfer:
    """A model, and of its training what the source knows.

    Attributes:
        config, vocab_size: the model's; the rows of the vocabulary are `config.vocabulary_rows(vocab_size)`.
        tensors: weights by our names and, if `optimizer` is there, its state as `optimizer.KIND.NAME`; whole.
        iteration: after which it was saved.
        progress: samples consumed and the like, as a run keeps them.
        kind: which model it is; a GPT by default.
        optimizer: the optimizer's plain state; None where the source has no optimizer.
        sections: fields of a run's config by section, as far as the source tells; always those of the model.
        table: a line for each kind of tensor, saying what it becomes.
        notes: sentences about what is not as one may expect.
    """

    config: TransformerConfig
    vocab_size: int
    tensors: Mapping[str, Readable]
    kind: ModelKind = GPT
    iteration: int = 0
    progress: Mapping[str, int] = dataclasses.field(default_factory=dict)
    optimizer: Mapping[str, Any] | None = None
    sections: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    table: Sequence[str] = ()
    notes: Sequence[str] = ()

    @property
    def weights(self) -> dict[str, Readable]:
        """The tensors that are not the optimizer's."""
        return {name: tensor for name, tensor in self.tensors.items() if not name.startswith(OPTIMIZER_STATE)}

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights. ValueError where they are of several."""
        dtypes = {tensor.dtype for tensor in self.weights.values()}
        if len(dtypes) > 1:
            names = ", ".join(sorted(map(str, dtypes)))
            raise ValueError(
                f"the weights are of several number formats, {names}: --dtype with --no-load-optim makes one"
            )
        return dtypes.pop()

    def model(self) -> GPTModel | BertEncoder:
        """The model without its weights, whole."""
        return self.kind.new(self.config, self.vocab_size, self.dtype)

    def check(self) -> None:
        """Raise ValueError unless the tensors are exactly those of the model, in its shapes."""
        shapes = {name: sharding.global_shape for name, sharding in parameter_shardings(self.model()).items()}
        refuse_left_overs(self.weights, shapes, "of the source")
        kinds = {name.split(".")[1] for name in self.tensors if name.startswith(OPTIMIZER_STATE)}
        of_state = {f"{OPTIMIZER_STATE}{kind}.{name}": shape for kind in kinds for name, shape in shapes.items()}
        refuse_left_overs(self.tensors, shapes | of_state, "of the source")
        for name, shape in (shapes | of_state).items():
            if self.tensors[name].shape != tuple(shape):
                raise ValueError(f"{name} is {list(self.tensors[name].shape)} and must be {list(shape)}")

    def without_padding(self) -> "Transfer":
        """The same without the rows of the vocabulary that are no tokens, where these are weights."""
        config = dataclasses.replace(self.config, padded_vocab_size=None)
        tensors = {n: _first_rows(t, self.vocab_size) if n.endswith(_OF_TOKENS) else t for n, t in self.tensors.items()}
        return dataclasses.replace(self, config=config, tensors=tensors)

    def without_optimizer(self) -> "Transfer":
        """The weights alone."""
        return dataclasses.replace(self, tensors=self.weights, optimizer=None)

    def in_dtype(self, dtype: torch.dtype) -> "Transfer":
        """The same with weights in `dtype`. ValueError where there is an optimizer's state, which goes with another."""
        if self.optimizer is not None and dtype != self.dtype:
            raise ValueError("weights change their number format only without the optimizer: give --no-load-optim")
        return dataclasses.replace(self, tensors={name: in_dtype(t, dtype) for name, t in self.tensors.items()})


def _first_rows(tensor: Readable, rows: int) -> Readable:
    if tensor.shape[0] == rows:
        return tensor
    return Deferred(tensor.dtype, (rows, *tensor.shape[1:]), lambda: tensor.read()[:rows].contiguous())


def table_of(entries: Iterable[Entry], theirs: Mapping[str, Sequence[Readable]], rows: Rows) -> list[str]:
    """A line for each kind of tensor: their name and shape, ours, and how the one becomes the other."""
    found: dict[str, list[str]] = {}
    for entry in entries:
        pieces = theirs[entry.theirs]
        shape = list(pieces[0].shape)
        how = [f"{len(pieces)} pieces along dimension {entry.split_dim}"] if len(pieces) > 1 else []
        if entry.split_dim is None and how:
            how = [f"the first of {len(pieces)} equal ones"]
        how += ["transposed"] * entry.transposed
        how += [f"rows [{', '.join(rows.order)}] as [n, 3, d]"] * (entry.fused and rows.order != "n3d")
        there = sum(piece.shape[0] for piece in pieces) if entry.vocabulary else rows.vocab_size
        how += [f"{there - rows.vocab_size} padding rows left out"] * (there > rows.vocab_size)
        text = f"{_any_layer(entry.theirs)} {shape} -> {_any_layer(entry.ours)}"
        found.setdefault(text + (f" ({', '.join(how)})" if how else ""), []).append(entry.ours)
    return [f"{len(names):3d} x {text}" for text, names in found.items()]


def _any_layer(name: str) -> str:
    return re.sub(r"\.[0-9]+\.", ".*.", name)
