"""The learning rate as a pure function of the samples trained on: warm-up, then constant, or a decay."""

import dataclasses
import math

from megatron.base.config import Config, choice_problems, flag, flag_name, minimum_problems


@dataclasses.dataclass(frozen=True)
class _Length:
    """A length that the field `name` gives, whose last part is its unit: iterations or samples."""

    name: str
    count: int

    @property
    def unit(self) -> str:
        return self.name.rpartition("_")[2]

    def samples(self, global_batch_size: int) -> int:
        return self.count if self.unit == "samples" else self.count * global_batch_size

    def __str__(self) -> str:
        return f"{flag_name(self.name)} {self.count}"


@dataclasses.dataclass(frozen=True)
class ScheduleConfig(Config):
    """How the learning rate goes; raises `ConfigError` with all that is wrong when it is made."""

    lr: float = flag(dataclasses.MISSING, "largest learning rate, reached at the end of the warm-up")
    min_lr: float = flag(0.0, "learning rate at the end of the decay and after it")
    lr_decay_style: str = flag(
        "linear",
        "how the learning rate falls after the warm-up",
        choices=("constant", "linear", "cosine", "inverse-square-root"),
    )
    lr_decay_iters: int | None = flag(
        None, "iterations until --min-lr is reached, warm-up included; those of the whole training by default"
    )
    lr_decay_samples: int | None = flag(None, "samples until --min-lr is reached, in place of --lr-decay-iters")
    lr_warmup_iters: int = flag(0, "iterations over which the learning rate rises from 0 to --lr")
    lr_warmup_samples: int = flag(0, "samples over which the learning rate rises, in place of --lr-warmup-iters")
    lr_warmup_fraction: float | None = flag(None, "the warm-up as a part of the decay, in place of --lr-warmup-iters")

    def problems(self) -> list[str]:
        """One sentence for each number out of its range and for each contradiction."""
        found = choice_problems(self)
        found += minimum_problems(self, 0, "lr", "min_lr", "lr_warmup_iters", "lr_warmup_samples")
        found += minimum_problems(self, 1, "lr_decay_iters", "lr_decay_samples")
        if self.min_lr > self.lr:
            found.append(f"--min-lr {self.min_lr}: it must not be above --lr {self.lr}")
        fraction = self.lr_warmup_fraction
        if fraction is not None and not 0 <= fraction <= 1:
            found.append(f"--lr-warmup-fraction {fraction}: it must be at least 0 and at most 1")
        warmups = [] if fraction is None else [f"--lr-warmup-fraction {fraction}"]
        warmups += map(str, self._lengths("lr_warmup_iters", "lr_warmup_samples"))
        decays = list(map(str, self._lengths("lr_decay_iters", "lr_decay_samples")))
        found += [f"{' and '.join(given)}: give one of them" for given in (warmups, decays) if len(given) > 1]
        return found + self._order_problems(self._decay(), None)

    def _lengths(self, *names: str) -> list[_Length]:
        """Those of these fields that are given; 0 is not."""
        return [_Length(name, getattr(self, name)) for name in names if getattr(self, name)]

    def _decay(self, train_iters: int | None = None, train_samples: int | None = None) -> _Length | None:
        """How long the decay is: as told here, else as the whole training."""
        training = {"train_samples": train_samples, "train_iters": train_iters}
        told = self._lengths("lr_decay_samples", "lr_decay_iters")
        told += [_Length(name, count) for name, count in training.items() if count is not None]
        return told[0] if told else None

    def training_problems(
        self, train_iters: int | None, train_samples: int | None = None, global_batch_size: int | None = None
    ) -> list[str]:
        """What is wrong in a run of so many iterations or samples, beyond `problems()`.

        Iterations and samples are compared only where `global_batch_size` is given.
        """
        return self._order_problems(self._decay(train_iters, train_samples), global_batch_size)

    def _order_problems(self, decay: _Length | None, batch: int | None) -> list[str]:
        """Whether a warm-up is longer than the decay that it is part of."""
        found = []
        for warmup in self._lengths("lr_warmup_iters", "lr_warmup_samples"):
            if decay is None or (batch is None and warmup.unit != decay.unit):
                continue
            if warmup.samples(batch or 1) > decay.samples(batch or 1):
                conversion = "" if warmup.unit == decay.unit else f" at {batch} samples an iteration"
                found.append(f"{warmup}: it must not be above {decay}{conversion}")
        return found

    def spans(
        self, global_batch_size: int, train_iters: int | None = None, train_samples: int | None = None
    ) -> tuple[float, int]:
        """Samples of the warm-up and of the decay, which includes it; arguments as for `learning_rate`."""
        length = self._decay(train_iters, train_samples)
        assert length is not None, "neither the config nor the caller says how long the decay is"
        decay = length.samples(global_batch_size)
        if self.lr_warmup_fraction is not None:
            return self.lr_warmup_fraction * decay, decay
        warmup = self._lengths("lr_warmup_iters", "lr_warmup_samples")
        return sum(length.samples(global_batch_size) for length in warmup), decay


def learning_rate(
    config: ScheduleConfig,
    scheduled_samples: int,
    *,
    global_batch_size: int,
    train_iters: int | None = None,
    train_samples: int | None = None,
) -> float:
    """The learning rate of the iteration that starts after `scheduled_samples` samples.

    Args:
        config: the schedule.
        scheduled_samples: samples of the iterations so far whose step was taken; a skipped one does not count.
        global_batch_size: samples of an iteration, by which iterations are converted.
        train_iters, train_samples: how long the whole training is; one of them unless the config gives the decay.

    Counted in samples, as Megatron-LM 2.5 does, so that it does not depend on the batch size at the time: the first
    iteration of a warm-up has rate 0. The decay includes the warm-up. With `q` the part of the decay after the warm-up
    that has passed, linear gives `min_lr + (1 - q) (lr - min_lr)` and cosine `min_lr + (1 + cos(pi q)) / 2
    (lr - min_lr)`; inverse-square-root gives `lr sqrt(warm-up / scheduled_samples)`, where the warm-up is at least one
    iteration, and never less than `min_lr`.
    """
    warmup, decay = config.spans(global_batch_size, train_iters, train_samples)
    if scheduled_samples < warmup:
        return config.lr * scheduled_samples / warmup
    if config.lr_decay_style == "constant":
        return config.lr
    if scheduled_samples >= decay:
        # At the very end of a decay that is all warm-up, the rate is still the peak that it has just reached.
        return config.lr if scheduled_samples == warmup else config.min_lr
    if config.lr_decay_style == "inverse-square-root":
        start = max(warmup, global_batch_size)
        return max(config.min_lr, config.lr * math.sqrt(start / max(scheduled_samples, start)))
    passed = (scheduled_samples - warmup) / (decay - warmup)
    left = 1.0 - passed if config.lr_decay_style == "linear" else (1.0 + math.cos(math.pi * passed)) / 2.0
    return config.min_lr + left * (config.lr - config.min_lr)
