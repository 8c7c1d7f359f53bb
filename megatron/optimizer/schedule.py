"""The learning rate as a pure function of the samples consumed: warm-up, then constant, linear or cosine decay."""

import dataclasses
import math

from megatron.base.config import Config, choice_problems, flag, minimum_problems


@dataclasses.dataclass(frozen=True)
class ScheduleConfig(Config):
    """How the learning rate goes; raises `ConfigError` with all that is wrong when it is made."""

    lr: float = flag(dataclasses.MISSING, "largest learning rate, reached at the end of the warm-up")
    min_lr: float = flag(0.0, "learning rate at the end of the decay and after it")
    lr_decay_style: str = flag(
        "linear", "how the learning rate falls after the warm-up", choices=("constant", "linear", "cosine")
    )
    lr_decay_iters: int | None = flag(
        None, "iterations until --min-lr is reached, warm-up included; --train-iters by default"
    )
    lr_warmup_iters: int = flag(0, "iterations over which the learning rate rises from 0 to --lr")
    lr_warmup_fraction: float | None = flag(None, "the warm-up as a part of the decay, in place of --lr-warmup-iters")

    def problems(self) -> list[str]:
        """One sentence for each number out of its range and for each contradiction."""
        found = choice_problems(self) + minimum_problems(self, 0, "lr", "min_lr", "lr_warmup_iters")
        found += minimum_problems(self, 1, "lr_decay_iters")
        if self.min_lr > self.lr:
            found.append(f"--min-lr {self.min_lr}: it must not be above --lr {self.lr}")
        fraction = self.lr_warmup_fraction
        if fraction is not None and not 0 <= fraction <= 1:
            found.append(f"--lr-warmup-fraction {fraction}: it must be at least 0 and at most 1")
        if fraction is not None and self.lr_warmup_iters:
            found.append(
                f"--lr-warmup-fraction {fraction} and --lr-warmup-iters {self.lr_warmup_iters}: give one of them"
            )
        if self.lr_decay_iters is not None:
            found += self._warmup_problems(self.lr_decay_iters, "--lr-decay-iters")
        return found

    def training_problems(self, train_iters: int) -> list[str]:
        """What is wrong in a run of `train_iters` iterations, beyond `problems()`."""
        return self._warmup_problems(train_iters, "--train-iters") if self.lr_decay_iters is None else []

    def _warmup_problems(self, decay_iters: int, flag_of_decay: str) -> list[str]:
        if self.lr_warmup_iters <= decay_iters:
            return []
        return [f"--lr-warmup-iters {self.lr_warmup_iters}: it must not be above {flag_of_decay} {decay_iters}"]


def learning_rate(config: ScheduleConfig, consumed_samples: int, *, train_iters: int, global_batch_size: int) -> float:
    """The learning rate of the iteration that starts after `consumed_samples` samples.

    Counted in samples, as Megatron-LM 2.5 does, so that it does not depend on the batch size at the time: the first
    iteration of a warm-up has rate 0. Decay lasts `lr_decay_iters` (else `train_iters`) global batches, warm-up
    included. With `q` the part of the decay after the warm-up that has passed, linear gives
    `min_lr + (1 - q) (lr - min_lr)` and cosine `min_lr + (1 + cos(pi q)) / 2 (lr - min_lr)`.
    """
    decay = (config.lr_decay_iters or train_iters) * global_batch_size
    warmup: float = config.lr_warmup_iters * global_batch_size
    if config.lr_warmup_fraction is not None:
        warmup = config.lr_warmup_fraction * decay
    if consumed_samples < warmup:
        return config.lr * consumed_samples / warmup
    if config.lr_decay_style == "constant":
        return config.lr
    if consumed_samples >= decay:
        # At the very end of a decay that is all warm-up, the rate is still the peak that it has just reached.
        return config.lr if consumed_samples == warmup else config.min_lr
    passed = (consumed_samples - warmup) / (decay - warmup)
    left = 1.0 - passed if config.lr_decay_style == "linear" else (1.0 + math.cos(math.pi * passed)) / 2.0
    return config.min_lr + left * (config.lr - config.min_lr)
