"""From a `TokenizerConfig` to a tokenizer."""

from megatron.tokenizer.config import TokenizerConfig
from megatron.tokenizer.fast import bert_word_piece_tokenizer, gpt2_bpe_tokenizer, hugging_face_tokenizer
from megatron.tokenizer.null import NullTokenizer
from megatron.tokenizer.protocol import Tokenizer
from megatron.tokenizer.sentence_pieces import SentencePieceTokenizer


def build_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """The tokenizer that `config` names; ValueError, naming the flag, for files that are missing or not understood."""
    parse = config.parse_special_tokens
    match config.tokenizer_type:
        case "GPT2BPETokenizer":
            assert config.vocab_file is not None and config.merge_file is not None
            return gpt2_bpe_tokenizer(config.vocab_file, config.merge_file, parse)
        case "BertWordPieceLowerCase" | "BertWordPieceCase" as kind:
            assert config.vocab_file is not None
            return bert_word_piece_tokenizer(config.vocab_file, kind == "BertWordPieceLowerCase", parse)
        case "SentencePieceTokenizer":
            assert config.tokenizer_model is not None
            return SentencePieceTokenizer(config.tokenizer_model, parse)
        case "HuggingFaceTokenizer":
            assert config.tokenizer_model is not None
            return hugging_face_tokenizer(config.tokenizer_model, parse)
    assert config.vocab_size is not None
    return NullTokenizer(config.vocab_size)
