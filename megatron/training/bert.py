"""The configs of a BERT's pretraining, composed, and what its data must know of a vocabulary."""

import dataclasses
from typing import ClassVar

from megatron.data import BertDataConfig, BertIds, DataConfig
from megatron.tokenizer import Tokenizer
from megatron.training.config import RunConfig


@dataclasses.dataclass(frozen=True)
class SentencesConfig(DataConfig):
    """Which sets of sentences, how they are split and blended, and how samples are cut from them."""

    # Where a document ends is told by its sentences here, not by a token.
    no_flags: ClassVar[frozenset[str]] = frozenset({"reset_position_ids", "reset_attention_mask", "eod_mask_loss"})


@dataclasses.dataclass(frozen=True)
class BertRunConfig(RunConfig):
    """All flags of a BERT's pretraining run, from the command line or --config FILE.yaml."""

    data: SentencesConfig
    bert: BertDataConfig

    @property
    def most_counted(self) -> int:
        """About what a full sample adds to the number that divides the loss: its tokens that are to be predicted."""
        return max(1, round(self.bert.mask_prob * self.data.seq_length))


def vocabulary_ids(tokenizer: Tokenizer) -> BertIds:
    """What masking must know of a vocabulary; ValueError for one without BERT's special tokens or parts of words."""
    return BertIds(
        tokenizer.cls,
        tokenizer.sep,
        tokenizer.mask,
        tokenizer.pad,
        special_ids=tokenizer.special_ids,
        continues_word=tokenizer.continues_word(),
    )
