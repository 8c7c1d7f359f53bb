"""The encoder of a pretrained BERT into the model of a task, whose head begins anew."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron import mpu
from megatron.base.complaints import raise_joined
from megatron.checkpointing import load_checkpoint
from megatron.checkpointing.load import find, read_index, read_state_of
from megatron.model import BertEncoder
from megatron.training.state import layout
from megatron.training.stored import model_differences

# The parts of a BERT that every kind of it has, and those of them that one pretrained without pairs lacks.
_ENCODER = ("embedding.", "transformer.", "pooler.")
_OF_PAIRS = {"embedding.tokentype_embeddings.": "token types", "pooler.": "pooler"}
# What of a model's description is about its heads, or about those parts.
_HEADS = ("model", "pooler", "token_types", "untie_embeddings_and_output_weights")


def load_encoder(model: BertEncoder, directory: str) -> list[str]:
    """Fill the encoder of `model` from the newest checkpoint of a BERT below `directory`; sentences on what was taken.

    Weights of another number format are rounded. Token types and pooler begin anew where the checkpoint does not have
    them, as the head does. Collective: the ranks agree on how it went. Raises ValueError where the checkpoint is
    damaged, of another kind or size, or made of other choices.
    """
    folder, iteration = find(Path(directory), None)
    index, _ = read_index(folder, iteration)
    _check_model(read_state_of(folder, index).get("model", {}), model.signature(), directory)
    stored, shardings = index.contents.tensors, mpu.parameter_shardings(model)
    new = tuple(part for part in _OF_PAIRS if not any(name.startswith(part) for name in stored))
    encoder = {name: p for name, p in model.named_parameters() if name.startswith(_ENCODER)}
    load_checkpoint(
        directory,
        {name: (p.detach(), shardings[name]) for name, p in encoder.items() if not name.startswith(new)},
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        layout=layout(),
        iteration=iteration,
        skip=sorted({name.split(".")[0] + "." for name in stored} - set(_ENCODER)),
        cast=True,
    )
    anew = ", ".join(["the head of the task", *(_OF_PAIRS[part] for part in new)])
    return [f"the encoder begins with iteration {iteration} of {directory}; new: {anew}"]


def _check_model(stored: Mapping[str, Any], present: Mapping[str, Any], directory: str) -> None:
    """Raise ValueError unless the encoders of two models' descriptions are alike."""
    kind = stored.get("model", "a model of another kind")
    if not str(kind).startswith("bert"):
        raise ValueError(f"--pretrained-checkpoint {directory}: its model is {kind}, it must be a bert")
    shared = [name for name in present if name not in _HEADS and name in stored]
    raise_joined(model_differences({n: stored[n] for n in shared}, {n: present[n] for n in shared}, directory))
