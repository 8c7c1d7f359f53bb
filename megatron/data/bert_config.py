"""How BERT's samples are made: `BertDataConfig`."""

import dataclasses

from megatron.base.config import Config, flag


@dataclasses.dataclass(frozen=True)
class BertDataConfig(Config):
    """What is masked, how many samples are short, and whether they are pairs."""

    mask_prob: float = flag(0.15, "share of the tokens that are to be predicted")
    short_seq_prob: float = flag(0.1, "share of the samples that are cut to a random shorter length")
    bert_no_binary_head: bool = flag(False, "samples of one segment, without a pair whose order is to be told")

    def problems(self) -> list[str]:
        found = []
        if not 0 < self.mask_prob <= 1:
            found.append(f"--mask-prob {self.mask_prob}: it must be above 0 and at most 1")
        if not 0 <= self.short_seq_prob <= 1:
            found.append(f"--short-seq-prob {self.short_seq_prob}: it must be at least 0 and at most 1")
        return found
