"""GPT and its parts (transformer blocks, embedding, output), written with the layers of `megatron.mpu`."""

from megatron.model.chunk import Chunk
from megatron.model.config import TransformerConfig
from megatron.model.gpt import GPTModel, build_gpt
from megatron.model.init import initialize_parameters
from megatron.model.output import gather_logits
from megatron.model.recompute import RecomputeConfig

__all__ = [
    "Chunk",
    "GPTModel",
    "RecomputeConfig",
    "TransformerConfig",
    "build_gpt",
    "gather_logits",
    "initialize_parameters",
]
