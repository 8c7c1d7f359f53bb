"""GPT and its parts (transformer blocks, embedding, output), written with the layers of `megatron.mpu`."""

from megatron.model.config import TransformerConfig
from megatron.model.gpt import GPTModel, build_gpt, gather_logits
from megatron.model.init import initialize_parameters

__all__ = ["GPTModel", "TransformerConfig", "build_gpt", "gather_logits", "initialize_parameters"]
