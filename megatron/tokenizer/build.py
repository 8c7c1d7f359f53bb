"""From a `TokenizerConfig` to a tokenizer."""

from megatron.tokenizer.config import TokenizerConfig
from megatron.tokenizer.fast import gpt2_bpe_tokenizer, hugging_face_tokenizer
from megatron.tokenizer.null import NullTokenizer
from megatron.tokenizer.protocol import Tokenizer


def build_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """The tokenizer that `config` names; ValueError, naming the flag, for files that are missing or not understood."""
    if config.tokenizer_type == "GPT2BPETokenizer":
        assert config.vocab_file is not None and config.merge_file is not None
        return gpt2_bpe_tokenizer(config.vocab_file, config.merge_file)
    if config.tokenizer_type == "HuggingFaceTokenizer":
        assert config.tokenizer_model is not None
        return hugging_face_tokenizer(config.tokenizer_model)
    assert config.vocab_size is not None
    return NullTokenizer(config.vocab_size)
