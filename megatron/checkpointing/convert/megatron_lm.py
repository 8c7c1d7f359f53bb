"""From a classic checkpoint of Megatron-LM to a `Transfer`: what its flags say, weights, optimizer and progress."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron.base.compose import make_section
from megatron.base.config import Config, flag_fields
from megatron.checkpointing.convert import bert, gpt
from megatron.checkpointing.convert.bert import classic_kind
from megatron.checkpointing.convert.classic import WORDS, ClassicCheckpoint, open_classic
from megatron.checkpointing.convert.classic_optimizer import ClassicOptimizer, read_optimizer
from megatron.checkpointing.convert.deferred import Readable
from megatron.checkpointing.convert.mapping import Rows, import_all
from megatron.checkpointing.convert.models import ModelKind
from megatron.checkpointing.convert.transfer import Transfer, table_of
from megatron.model import TransformerConfig
from megatron.optimizer.state import OPTIMIZER_STATE

# Sections of a run's config that say how it was laid out, stored or logged, which does not matter any more.
_LEFT_BEHIND = ("distributed", "pipeline", "recompute", "checkpoint", "logging", "tokenizer", "model")

# Choices of a model that have the same names.
_SAME = (
    "kv_channels",
    "layernorm_epsilon",
    "attention_dropout",
    "hidden_dropout",
    "init_method_std",
    "make_vocab_size_divisible_by",
    "apply_residual_connection_post_layernorm",
)

# The sections of the config of a run of such a model.
Sections = Callable[[ModelKind], Mapping[str, type[Config]]]


@dataclasses.dataclass(frozen=True)
class Told:
    """What the user adds to what a source says of itself; None for nothing.

    Attributes:
        vocab_size: real tokens.
        tokenizer_size: those that the tokenizer has, where `vocab_size` is not told.
        num_attention_heads, activation: of the model.
        step: which iteration; the newest by default.
        optimizer: whether its state is wanted.
        keep_padding: whether rows of the vocabulary beyond the real tokens are kept as weights.
    """

    vocab_size: int | None = None
    tokenizer_size: int | None = None
    num_attention_heads: int | None = None
    activation: str | None = None
    step: int | None = None
    optimizer: bool = True
    keep_padding: bool = False


def from_classic(directory: Path, told: Told, sections: Sections) -> Transfer:
    """The GPT or BERT below `directory`. `sections` gives those of a run's config, which the saved flags may fill.

    Raises ValueError where it is not whole, is of another kind, or holds what has no place here.
    """
    checkpoint = open_classic(directory, told.step)
    notes: list[str] = []
    weights = checkpoint.weights()
    config, kind = model_config(checkpoint, weights, told, notes), classic_kind(weights)
    if kind.is_bert and checkpoint.args.get("openai_gelu"):
        raise ValueError(f"{checkpoint.folder}: openai_gelu: a BERT has the exact GELU in its masked-LM head here")
    there = sum(piece.shape[0] for piece in weights[WORDS])
    vocab_size = _vocab_size(checkpoint, there, told)
    config = with_padding(config, told, vocab_size, there)
    rows = Rows(checkpoint.order, config.head_size, config.vocabulary_rows(vocab_size))
    if there > rows.vocab_size:
        notes.append(
            f"the {there - rows.vocab_size} padding rows, which Megatron-LM trains and counts in its loss, are left "
            "out: --keep-padding keeps them"
        )
    entries = list(bert.classic_entries(config, kind) if kind.is_bert else gpt.classic_entries(config))
    tensors = import_all(entries, weights, rows)
    optimizer = read_optimizer(checkpoint) if told.optimizer else None
    table = table_of(entries, weights, rows)
    if optimizer is not None:
        for part, pieces in sorted(optimizer.tensors.items()):
            tensors |= import_all(entries, pieces, rows, f"{OPTIMIZER_STATE}{part}.")
            table.append(f"{len(pieces):3d} x {part} of the optimizer, as the parameters -> {OPTIMIZER_STATE}{part}.*")
    progress = _progress(checkpoint, optimizer, notes)
    return Transfer(
        config,
        vocab_size,
        tensors,
        kind,
        iteration=checkpoint.iteration,
        progress=progress,
        optimizer=None if optimizer is None else optimizer.state,
        sections={**saved_sections(checkpoint.args, sections(kind)), "model": dataclasses.asdict(config)},
        table=table,
        notes=notes,
    )


def with_padding(config: TransformerConfig, told: Told, vocab_size: int, there: int) -> TransformerConfig:
    """The same, with all rows of the vocabulary that are `there` if the padding after the real ones is to be kept."""
    kept = there if told.keep_padding and there > vocab_size else None
    return dataclasses.replace(config, padded_vocab_size=kept)


def _vocab_size(checkpoint: ClassicCheckpoint, there: int, told: Told) -> int:
    size = told.vocab_size or told.tokenizer_size
    if size is not None:
        return size
    raise ValueError(
        f"{checkpoint.folder}: the vocabulary is padded to {there}, and the checkpoint does not say how many tokens "
        "are real: give its tokenizer (--vocab-file and --merge-file, or --tokenizer-model) or --vocab-size"
    )


def model_config(
    checkpoint: ClassicCheckpoint, weights: Mapping[str, list[Readable]], told: Told, notes: list[str]
) -> TransformerConfig:
    """The model by the saved flags and, where an old program did not save them, by the shapes of its tensors."""
    args = checkpoint.args
    shapes = {name: pieces[0].shape for name, pieces in weights.items()}
    layer = "encoder.layers.0.mlp.dense_h_to_4h.weight"
    if not {WORDS, "embedding.position_embeddings.weight", layer} <= shapes.keys():
        raise ValueError(f"{checkpoint.folder}: it is no transformer with learned positions")
    if len(shapes[WORDS]) < 2:
        raise ValueError(f"{checkpoint.folder}: {WORDS} is {list(shapes[WORDS])}, and must be a matrix")
    values = {
        "num_layers": checkpoint.num_layers,
        "hidden_size": shapes[WORDS][1],
        "num_attention_heads": _heads(checkpoint, told),
        "max_position_embeddings": shapes["embedding.position_embeddings.weight"][0],
        "ffn_hidden_size": sum(piece.shape[0] for piece in weights[layer]),
        "activation": told.activation or _activation(args, notes),
        "untie_embeddings_and_output_weights": "output_layer.weight" in weights,
    }
    values |= {name: args[name] for name in _SAME if args.get(name) is not None}
    return own_defaults(make_section(TransformerConfig, values))


def _heads(checkpoint: ClassicCheckpoint, told: Told) -> int:
    """Of its attention. ValueError where neither it nor the user says it, or they differ."""
    heads: list[int] = [
        n for n in (checkpoint.args.get("num_attention_heads"), told.num_attention_heads) if n is not None
    ]
    if not heads:
        raise ValueError(f"{checkpoint.folder}: it does not say its --num-attention-heads: give that flag")
    if heads[0] != heads[-1]:
        raise ValueError(f"--num-attention-heads {heads[-1]}: the checkpoint {checkpoint.folder} says {heads[0]}")
    return heads[0]


def own_defaults(config: TransformerConfig) -> TransformerConfig:
    """The same with nothing said that follows from the rest."""
    ffn = None if config.ffn_size == 4 * config.hidden_size else config.ffn_size
    head = None if config.projection_size == config.hidden_size else config.head_size
    return dataclasses.replace(config, ffn_hidden_size=ffn, kv_channels=head)


def _activation(args: Mapping[str, Any], notes: list[str]) -> str:
    """GELU by its tanh approximation in the fused kernel and in OpenAI's form, else exact."""
    names = ("bias_gelu_fusion", "openai_gelu")
    if not any(name in args for name in names):
        notes.append("it does not say which GELU it was trained with: taken for gelu_tanh, else give --activation")
        return "gelu_tanh"
    return "gelu_tanh" if any(args.get(name) for name in names) else "gelu_erf"


def _progress(checkpoint: ClassicCheckpoint, optimizer: ClassicOptimizer | None, notes: list[str]) -> dict[str, int]:
    """How far the run had come. Samples are counted by old programs in iterations of one size."""
    args = checkpoint.args
    batch = args.get("global_batch_size") or 0
    consumed = args.get("consumed_train_samples")
    if consumed is None:
        consumed = checkpoint.iteration * batch
        notes.append(f"it does not say how many samples it has consumed: taken for {consumed}")
    schedule = checkpoint.record.get("lr_scheduler")
    scheduled = schedule.get("num_steps") if isinstance(schedule, dict) else None
    steps = optimizer.state["step_count"] if optimizer is not None else checkpoint.iteration
    return {
        "iteration": checkpoint.iteration,
        "consumed_samples": int(consumed),
        "scheduled_samples": int(consumed if scheduled is None else scheduled),
        "skipped_iterations": max(checkpoint.iteration - steps, 0),
    }


def saved_sections(args: Mapping[str, Any], sections: Mapping[str, type[Config]]) -> dict[str, dict[str, Any]]:
    """The saved flags that are fields of the sections, by section, without those that do not matter any more."""
    found = {
        name: {field.name: args[field.name] for field in flag_fields(section) if _is_plain(args.get(field.name))}
        for name, section in sections.items()
        if name not in _LEFT_BEHIND
    }
    if "bert" in found:
        found["bert"]["bert_no_binary_head"] = not args.get("bert_binary_head", True)
    if "params_dtype" in found.get("precision", {}):
        found["precision"]["params_dtype"] = "float32"  # theirs is that of the weights, which fp16 and bf16 say here
    if found.get("training", {}).get("rampup_batch_size"):
        found["training"]["rampup_batch_size"] = [int(number) for number in args["rampup_batch_size"]]  # saved as text
    if args and "training" in found:
        found["training"] |= {"loss_normalization": "microbatch", "eval_samples": "moving"}
    return found


def _is_plain(value: Any) -> bool:
    """Whether it is what a flag is given as: a number, text of one line, or a list of such."""
    entries = value if isinstance(value, list | tuple) else [value]
    return all(isinstance(entry, int | float) or (isinstance(entry, str) and entry.isprintable()) for entry in entries)
