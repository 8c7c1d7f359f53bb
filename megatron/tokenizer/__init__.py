"""Text to token ids and back, behind one small interface. Needs no torch."""

from megatron.tokenizer.build import build_tokenizer
from megatron.tokenizer.config import TokenizerConfig
from megatron.tokenizer.protocol import Tokenizer

__all__ = ["Tokenizer", "TokenizerConfig", "build_tokenizer"]
