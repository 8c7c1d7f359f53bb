"""What a transformer looks like: its sizes, the place of its norms, its activation, its dropout."""

import dataclasses
from typing import Any

from megatron.base.config import Config, choice_problems, flag, minimum_problems, range_problems
from megatron.base.formulas import layer_parameters

_MOST_LAYERS = 10**6
# With so many the bytes of weights, gradients and optimizer state are a number of 64 bits still.
_MOST_PARAMETERS = 2**57

# The choices that change what given weights compute. Dropout, the kernel of attention, the spread of initial weights,
# padding of the vocabulary that is no weight and the chunks of the loss do not.
_SIGNATURE = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "max_position_embeddings",
    "layernorm_epsilon",
    "norm_position",
    "apply_residual_connection_post_layernorm",
    "activation",
    "padded_vocab_size",
    "untie_embeddings_and_output_weights",
)


@dataclasses.dataclass(frozen=True)
class TransformerConfig(Config):
    """Sizes and choices of a transformer; raises `ConfigError` with all that is wrong when it is made."""

    num_layers: int = flag(dataclasses.MISSING, "number of transformer layers (l)")
    hidden_size: int = flag(dataclasses.MISSING, "width of the hidden states (h)")
    num_attention_heads: int = flag(dataclasses.MISSING, "number of attention heads (n)")
    max_position_embeddings: int = flag(dataclasses.MISSING, "longest sequence that has learned positions")
    ffn_hidden_size: int | None = flag(None, "inner width of the MLP (f); 4 times --hidden-size by default")
    kv_channels: int | None = flag(
        None, "size of one attention head (d); --hidden-size over --num-attention-heads by default"
    )
    make_vocab_size_divisible_by: int = flag(
        128, "pad the vocabulary to a multiple of this times --tensor-model-parallel-size"
    )
    padded_vocab_size: int | None = flag(
        None,
        "train a vocabulary of so many rows, those beyond the tokenizer's ids too, and count them in the loss, as "
        "Megatron-LM does; by default the loss knows the tokenizer's ids alone",
    )
    untie_embeddings_and_output_weights: bool = flag(
        False, "give the output projection a matrix of its own; by default it is the word embedding's"
    )
    layernorm_epsilon: float = flag(1e-5, "what layer norms add to the variance")
    norm_position: str = flag(
        "pre",
        "pre: x + f(LN(x)) with a norm at the end; post: LN(x + f(x)), as the original BERT",
        choices=("pre", "post"),
    )
    apply_residual_connection_post_layernorm: bool = flag(
        False, "take the residual from the output of a layer's norms, not from their input; with --norm-position pre"
    )
    activation: str = flag("gelu_tanh", "GELU by its tanh approximation or exactly", choices=("gelu_tanh", "gelu_erf"))
    attention_backend: str = flag(
        "fused",
        "fused: PyTorch's kernel, which keeps no s x s matrix; unfused: the matrix written out and kept",
        choices=("fused", "unfused"),
    )
    attention_dropout: float = flag(0.1, "probability of dropping an attention weight")
    hidden_dropout: float = flag(0.1, "probability of dropping a hidden value, before each residual addition")
    init_method_std: float = flag(0.02, "standard deviation of the initial weights")
    cross_entropy_chunk_size: int | None = flag(
        None, "tokens whose logits exist at one time in the loss, the others recomputed; all of them by default"
    )

    @property
    def head_size(self) -> int:
        """d, the size of one attention head."""
        return self.hidden_size // self.num_attention_heads if self.kv_channels is None else self.kv_channels

    @property
    def projection_size(self) -> int:
        """n d, the width of the queries of all heads."""
        return self.num_attention_heads * self.head_size

    @property
    def ffn_size(self) -> int:
        """f, the inner width of the MLP."""
        return 4 * self.hidden_size if self.ffn_hidden_size is None else self.ffn_hidden_size

    def vocabulary_rows(self, vocab_size: int) -> int:
        """Rows of the vocabulary that are weights and columns of the loss, for a tokenizer of `vocab_size` ids.

        Raises ValueError where `padded_vocab_size` has no row for an id.
        """
        rows = vocab_size if self.padded_vocab_size is None else self.padded_vocab_size
        if rows < vocab_size:
            raise ValueError(f"--padded-vocab-size {rows}: it must be at least {vocab_size}, the ids of the tokenizer")
        return rows

    def problems(self) -> list[str]:
        """One sentence for each size that is not positive, does not divide, or is out of its range."""
        sizes = ("hidden_size", "num_attention_heads", "max_position_embeddings")
        optional = ("ffn_hidden_size", "kv_channels", "make_vocab_size_divisible_by", "cross_entropy_chunk_size")
        problems = choice_problems(self) + minimum_problems(self, 1, *sizes, *optional, "padded_vocab_size")
        problems += minimum_problems(self, 0, "layernorm_epsilon", "init_method_std")
        problems += range_problems(self, 0, 1, "attention_dropout", "hidden_dropout")
        problems += range_problems(self, 1, _MOST_LAYERS, "num_layers")
        if self.apply_residual_connection_post_layernorm and self.norm_position != "pre":
            problems.append(
                f"--apply-residual-connection-post-layernorm: it needs --norm-position pre, not {self.norm_position}"
            )
        heads = self.num_attention_heads
        if self.kv_channels is None and heads > 0 and self.hidden_size % heads:
            problems.append(
                f"--hidden-size {self.hidden_size}: it must be a multiple of --num-attention-heads {heads}, "
                "unless --kv-channels is given"
            )
        return problems or self._size_problems()

    def _size_problems(self) -> list[str]:
        """One sentence where the tensors of one layer and of the embeddings cannot even be addressed."""
        h, f, projection = self.hidden_size, self.ffn_size, self.projection_size
        rows = self.max_position_embeddings + self.make_vocab_size_divisible_by
        parameters = layer_parameters(h, f, projection) + h * rows
        if parameters < _MOST_PARAMETERS:
            return []
        others = f"heads of {projection} elements, an MLP of {f} and {rows} rows of embeddings"
        return [f"--hidden-size {h}: with {others} there are {parameters:.2g} parameters, more than can be addressed"]

    def tensor_problems(self, tensor_parallel_size: int) -> list[str]:
        """One sentence for each size that cannot be split over `tensor_parallel_size` ranks."""
        derived = f" (4 times --hidden-size {self.hidden_size})" if self.ffn_hidden_size is None else ""
        split = {
            f"--num-attention-heads {self.num_attention_heads}": self.num_attention_heads,
            f"--ffn-hidden-size {self.ffn_size}{derived}": self.ffn_size,
        }
        return [
            f"{words}: it must be a multiple of --tensor-model-parallel-size {tensor_parallel_size}"
            for words, size in split.items()
            if size % tensor_parallel_size
        ]

    def signature(self) -> dict[str, Any]:
        """The choices that change what given weights compute: kept in a checkpoint and compared when it is loaded."""
        chosen = {name: getattr(self, name) for name in _SIGNATURE}
        return chosen | {"ffn_hidden_size": self.ffn_size, "kv_channels": self.head_size}
