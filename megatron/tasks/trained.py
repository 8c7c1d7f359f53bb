"""A trained GPT from a checkpoint, built from what the checkpoint says of itself."""

import dataclasses
import os
from typing import Any

import torch

from megatron import mpu
from megatron.base.compose import make_section
from megatron.checkpointing import load_checkpoint, read_state
from megatron.model import GPTModel, TransformerConfig
from megatron.tokenizer import Tokenizer, TokenizerConfig
from megatron.training.state import layout
from megatron.training.stored import stored_precision


@dataclasses.dataclass(frozen=True)
class StoredConfig:
    """The part of a checkpoint's config that its use needs; `dtype` is the one in which its weights are stored."""

    model: TransformerConfig
    tokenizer: TokenizerConfig
    dtype: torch.dtype


def stored_config(directory: str | os.PathLike[str]) -> StoredConfig:
    """What the newest checkpoint below `directory` was trained with.

    Raises ValueError where there is none, or it does not say its model and tokenizer.
    """
    config: dict[str, Any] = read_state(directory).get("config", {})
    missing = [name for name in ("model", "tokenizer") if name not in config]
    if missing:
        raise ValueError(f"{directory}: its checkpoint does not say its {' and '.join(missing)}")
    return StoredConfig(
        make_section(TransformerConfig, config["model"]),
        make_section(TokenizerConfig, config["tokenizer"]),
        stored_precision(config).dtype,
    )


def end_of_document(tokenizer: Tokenizer) -> int | None:
    """The id at which a text ends, None for a tokenizer that has none."""
    try:
        return tokenizer.eod
    except ValueError:
        return None


def load_gpt(
    directory: str | os.PathLike[str],
    stored: StoredConfig,
    vocab_size: int,
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> GPTModel:
    """The GPT of the newest checkpoint below `directory`, in evaluation mode, split as the current tensor group is.

    Its weights become `dtype`; where that is None, weights of 16 bits become float32, in which any device calculates.
    Raises ValueError where a tensor is missing, damaged or of another shape.
    """
    model = GPTModel(stored.model, vocab_size, dtype=stored.dtype, device="meta").to_empty(device=device)
    mpu.mirror_attributes(model)
    shardings = mpu.parameter_shardings(model)
    tensors = {name: (p.detach(), shardings[name]) for name, p in model.named_parameters()}
    load_checkpoint(directory, tensors, rank=torch.distributed.get_rank(), layout=layout(), skip=("optimizer.",))
    return model.to(dtype or torch.promote_types(stored.dtype, torch.float32)).eval()
