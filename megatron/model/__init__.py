"""GPT and its parts (transformer blocks, embedding, output), written with the layers of `megatron.mpu`."""

from megatron.model.config import TransformerConfig
from megatron.model.gpt import GPTModel, build_gpt, gather_logits
from megatron.model.init import initialize_parameters
from megatron.model.recompute import RecomputeConfig

__all__ = [
    "GPTModel",
    "RecomputeConfig",
    "TransformerConfig",
    "build_gpt",
    "gather_logits",
    "initialize_parameters",
]
