"""Writes whole weights as a classic checkpoint of Megatron-LM, at any numbers of ranks and in any version of it."""

import argparse
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron.model import TransformerConfig

_BY_ROWS = ("word_embeddings.weight", "query_key_value", "dense_h_to_4h", "lm_head.bias")
_BY_COLUMNS = ("self_attention.dense.weight", "dense_4h_to_h.weight")
_AXES = {0: (1, 0, 2), 1.0: (0, 2, 1), 2.0: (0, 1, 2), 3.0: (0, 1, 2)}  # of [n, 3, d]


@dataclasses.dataclass(frozen=True)
class Layout:
    """How it is cut and spelt.

    Attributes:
        tensor, pipeline, virtual: ranks, and chunks of each.
        version: of the format, 0 to 3.0.
        padded: rows of the word embeddings; those after the real ones are filled with 7.
        old: whether names, counter and container are those of the first versions.
        apex: whether the optimizer counts its steps as apex's does, once for a group, or as PyTorch's for each tensor.
    """

    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    version: float = 3.0
    padded: int = 128
    old: bool = False
    apex: bool = False


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far the run had come.

    Attributes:
        iteration, steps: iterations, and those of them that were not skipped.
        scheduled: samples that the learning rate goes by.
        scaler: loss scale, clean steps, and what is left of the hysteresis; None where no loss scale is sought.
    """

    iteration: int = 7
    steps: int = 7
    scheduled: int = 24
    scaler: tuple[float, int, int] | None = (1024.0, 5, 1)


def write_classic(
    directory: Path,
    config: TransformerConfig,
    weights: Mapping[str, Tensor],
    layout: Layout,
    args: Mapping[str, Any],
    moments: Mapping[str, Mapping[str, Tensor]] | None = None,
    progress: Progress = Progress(),  # noqa: B008 - it is frozen
) -> None:
    """Write an iteration below `directory`.

    Args:
        config, weights: a GPT or BERT by our names. 16-bit weights get master weights if `moments` has `master_weight`.
        args: what the flags were beside those of the model and the layout.
        moments: for each kind of the optimizer's state a tensor for each weight; None for no optimizer. Where there
            are master weights alone, it has not taken a step yet.
        progress: of the run.
    """
    kept = vars_of(config, layout) | dict(args)
    name = f"iter_{progress.iteration:07d}"
    for pipeline in range(layout.pipeline):
        for tensor in range(layout.tensor):
            place = (layout, tensor, pipeline)
            chunks = [_chunk(config, weights, *place, chunk) for chunk in range(layout.virtual)]
            record: dict[str, Any] = {"args": argparse.Namespace(**kept | {"rank": tensor})}
            record["total_iters" if layout.old else "iteration"] = progress.iteration
            record |= {} if layout.version == 0 else {"checkpoint_version": layout.version}
            models = ["model"] if layout.virtual == 1 else [f"model{i}" for i in range(layout.virtual)]
            record |= {model: _nested(chunk, layout.old) for model, chunk in zip(models, chunks, strict=True)}
            record |= {"random_rng_state": (3, (1, 2), None), "np_rng_state": np.random.RandomState(1).get_state()}
            record["rng_tracker_states"] = {"model-parallel-rng": torch.zeros(16, dtype=torch.uint8)}
            if moments is not None:
                states = {
                    kind: [_chunk(config, values, *place, chunk) for chunk in range(layout.virtual)]
                    for kind, values in moments.items()
                }
                record["optimizer"] = _optimizer(chunks, states, progress, layout.apex)
                schedule = {"max_lr": 0.1, "num_steps": progress.scheduled, "decay_style": "linear"}
                record["lr_scheduler"] = schedule
            folder = f"mp_rank_{tensor:02d}" + (f"_{pipeline:03d}" if layout.pipeline > 1 else "")
            path = directory / name / folder / "model_optim_rng.pt"
            path.parent.mkdir(parents=True)
            torch.save(record, path, _use_new_zipfile_serialization=not layout.old)
    (directory / "latest_checkpointed_iteration.txt").write_text(str(progress.iteration))


def vars_of(config: TransformerConfig, layout: Layout) -> dict[str, Any]:
    """The flags of the model and of the layout."""
    names: tuple[str, ...] = (
        "num_layers",
        "hidden_size",
        "num_attention_heads",
        "max_position_embeddings",
        "layernorm_epsilon",
    )
    names += ("attention_dropout", "hidden_dropout")
    sizes = {name: getattr(config, name) for name in names}
    ranks = {"tensor_model_parallel_size": layout.tensor, "pipeline_model_parallel_size": layout.pipeline}
    if layout.old:
        ranks = {"model_parallel_size": layout.tensor}
    return sizes | ranks | {"padded_vocab_size": layout.padded, "params_dtype": torch.float32}


def _chunk(
    config: TransformerConfig, whole: Mapping[str, Tensor], layout: Layout, tensor: int, pipeline: int, chunk: int
) -> dict[str, Tensor]:
    """What one stage has on one tensor rank, by classic names."""
    stages = layout.pipeline * layout.virtual
    stage, each = chunk * layout.pipeline + pipeline, config.num_layers // stages
    found: dict[str, Tensor] = {}
    heads: dict[str, Tensor] = {}
    for name, values in whole.items():
        head, _, rest = name.partition(".")
        if head == "embedding" and stage == 0:
            found[name] = _cut(config, name, values, layout, tensor)
        elif rest.startswith("layers."):
            _, number, part = rest.split(".", 2)
            if int(number) // each == stage:
                found[f"encoder.layers.{int(number) % each}.{part}"] = _cut(config, name, values, layout, tensor)
        elif rest.startswith("final_layernorm") and stage == stages - 1:
            found[f"encoder.{rest}"] = values.clone()
        elif head not in ("embedding", "transformer") and stage == stages - 1:
            (found if head == "pooler" else heads)[name] = _cut(config, name, values, layout, tensor)
    if stages > 1 and stage == stages - 1:
        words = "embedding.word_embeddings.weight"
        found["word_embeddings_for_head.weight"] = _cut(config, words, whole[words], layout, tensor)
    return found | heads


def _cut(config: TransformerConfig, name: str, values: Tensor, layout: Layout, tensor: int) -> Tensor:
    if "word_embeddings" in name or name == "lm_head.bias":
        values = torch.cat([values, values.new_full((layout.padded - len(values), *values.shape[1:]), 7)])
    if any(part in name for part in _BY_ROWS):
        values = values.chunk(layout.tensor, 0)[tensor]
    elif name.endswith(_BY_COLUMNS):
        values = values.chunk(layout.tensor, 1)[tensor]
    if "query_key_value" in name:
        heads = config.num_attention_heads // layout.tensor
        apart = values.unflatten(0, (heads, 3, config.head_size))
        values = apart.permute(*_AXES[layout.version], *range(3, apart.dim())).flatten(0, 2)
    return values.clone()


def _nested(chunk: Mapping[str, Tensor], old: bool) -> dict[str, Any]:
    """The tree in which a stage is kept; the copy of the word embeddings is last in it, whatever the model's order."""
    model: dict[str, Any] = {"language_model": {}}
    for name, values in sorted(chunk.items(), key=lambda item: item[0].startswith("word_embeddings_for_head")):
        head, _, rest = name.partition(".")
        if head == "embedding":
            stem, _, kind = rest.partition(".")
            model["language_model"].setdefault("embedding", {}).setdefault(stem, {})[kind] = values
        elif head == "encoder":
            spelt = rest.replace("self_attention", "attention") if old else rest
            model["language_model"].setdefault("transformer" if old else "encoder", {})[spelt] = values
        else:
            (model["language_model"] if head == "pooler" else model).setdefault(head, {})[rest] = values
    return model


def _optimizer(
    chunks: list[dict[str, Tensor]], states: Mapping[str, list[dict[str, Tensor]]], progress: Progress, apex: bool
) -> dict[str, Any]:
    """Decayed matrices first, then norms and biases, each in the order of the model; masters beside the rest."""
    places = [(number, name) for number, chunk in enumerate(chunks) for name in chunk]
    groups = [
        [place for place in places if (chunks[place[0]][place[1]].dim() > 1) == decayed] for decayed in (True, False)
    ]
    numbered = [place for group in groups for place in group]
    kinds = [kind for kind in states if kind != "master_weight"]
    count = {} if apex else {"step": torch.tensor(float(progress.steps))}
    state = {
        i: {**count, **{kind: states[kind][chunk][name] for kind in kinds}} for i, (chunk, name) in enumerate(numbered)
    }
    begins = (0, len(groups[0]))
    param_groups = [
        {"lr": 0.1, **({"step": progress.steps} if apex else {}), "params": list(range(begin, begin + len(group)))}
        for begin, group in zip(begins, groups, strict=True)
    ]
    plain = {"state": state if kinds else {}, "param_groups": param_groups}
    if "master_weight" not in states:
        return plain
    masters = [[_marked(states["master_weight"][chunk][name]) for chunk, name in group] for group in groups]
    mixed: dict[str, Any] = {"optimizer": plain, "fp32_from_fp16_params": masters}
    if progress.scaler is not None:
        scale, growth, hysteresis = progress.scaler
        scaler = {"scale": torch.tensor([scale]), "growth_tracker": growth, "hysteresis_tracker": hysteresis}
        mixed["grad_scaler"] = scaler
    return mixed


def _marked(tensor: Tensor) -> Tensor:
    """A tensor with an attribute, as Megatron-LM marks its master weights."""
    marked = tensor.clone()
    marked.tensor_model_parallel = True  # type: ignore[attr-defined]
    return marked
