"""Which tokenizer a run uses: `TokenizerConfig`."""

import dataclasses
import os

from megatron.base.config import Config, choice_problems, flag, flag_name, minimum_problems

# The flags that each type cannot do without.
NEEDED = {
    "GPT2BPETokenizer": ("vocab_file", "merge_file"),
    "BertWordPieceLowerCase": ("vocab_file",),
    "BertWordPieceCase": ("vocab_file",),
    "SentencePieceTokenizer": ("tokenizer_model",),
    "HuggingFaceTokenizer": ("tokenizer_model",),
    "NullTokenizer": ("vocab_size",),
}

_LARGEST = 2**31  # ids: token files hold them as int32


@dataclasses.dataclass(frozen=True)
class TokenizerConfig(Config):
    """The tokenizer's type and files."""

    tokenizer_type: str = flag("GPT2BPETokenizer", "how text becomes ids", choices=tuple(NEEDED))
    vocab_file: str | None = flag(
        None, "vocab.json of GPT2BPETokenizer, a dict from token to id; vocab.txt of BertWordPiece..., a token a line"
    )
    merge_file: str | None = flag(
        None, "merges.txt of GPT2BPETokenizer: one pair of tokens a line, most frequent first"
    )
    tokenizer_model: str | None = flag(
        None, "tokenizer.json of HuggingFaceTokenizer, or the .model file of SentencePieceTokenizer"
    )
    vocab_size: int | None = flag(None, "number of ids of NullTokenizer, the last of which ends a document")
    parse_special_tokens: bool = flag(
        False, "read a special token's name in a text, <|endoftext|> say, as that token; it is text otherwise"
    )

    def problems(self) -> list[str]:
        found = choice_problems(self) + minimum_problems(self, 1, "vocab_size")
        if self.vocab_size is not None and self.vocab_size > _LARGEST:
            found.append(f"--vocab-size {self.vocab_size}: it must be at most {_LARGEST}, whose ids int32 holds")
        missing = [name for name in NEEDED.get(self.tokenizer_type, ()) if getattr(self, name) is None]
        if missing:
            needed = " and ".join(flag_name(name) for name in missing)
            found.append(f"--tokenizer-type {self.tokenizer_type} needs {needed}")
        if self.parse_special_tokens and self.tokenizer_type == "NullTokenizer":
            found.append("--parse-special-tokens: --tokenizer-type NullTokenizer reads ids, not names of tokens")
        return found

    def input_problems(self) -> list[str]:
        """A sentence for each file that the type needs and that is not there."""
        files = [(name, getattr(self, name)) for name in NEEDED[self.tokenizer_type] if name != "vocab_size"]
        return [f"{flag_name(name)} {file}: there is no such file" for name, file in files if not os.path.isfile(file)]
