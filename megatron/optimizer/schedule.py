"""The learning rate as a pure function of the samples trained on: warm-up, then constant, or a decay."""

import dataclasses
import math
from typing import ClassVar

from megatron.base.config import Config, choice_problems, flag, flag_name, minimum_problems


@dataclasses.dataclass(frozen=True)
class _Length:
    """A length that the field `name` gives, whose last part is its unit: iterations or samples.

    `told` is what the user knows it by, where it is not that field's flag.
    """

    name: str
    count: int
    told: str | None = None

    @property
    def unit(self) -> str:
        return self.name.rpartition("_")[2]

    def samples(self, global_batch_size: int) -> int:
        return self.count if self.unit == "samples" else self.count * global_batch_size

    def __str__(self) -> str:
        return f"{self.told or flag_name(self.name)} {self.count}"


@dataclasses.dataclass(frozen=True)
class ScheduleConfig(Config):
    """How the learning rate goes; raises `ConfigError` with all that is wrong when it is made."""

    # What gives the iterations of the whole training, where it is not --train-iters.
    whole_training: ClassVar[str | None] = None

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
    override_lr_scheduler: bool = flag(
        False,
        "go on by these flags where the schedule of the loaded checkpoint is another",
        aliases=["override-opt-param-scheduler", "override-opt_param-scheduler"],
    )
    use_checkpoint_lr_scheduler: bool = flag(
        False,
        "go on by the schedule of the loaded checkpoint, whatever these flags say",
        aliases=["use-checkpoint-opt-param-scheduler", "use-checkpoint-opt_param-scheduler"],
    )

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
        if self.override_lr_scheduler and self.use_checkpoint_lr_scheduler:
            found.append("--override-lr-scheduler and --use-checkpoint-lr-scheduler: give one of them")
        found += [f"{' and '.join(given)}: give one of them" for given in (warmups, decays) if len(given) > 1]
        return found + self._order_problems(self._decay(), None)

    def _lengths(self, *names: str) -> list[_Length]:
        """Those of these fields that are given; 0 is not."""
        return [_Length(name, getattr(self, name)) for name in names if getattr(self, name)]

    def _decay(self, train_iters: int | None = None, train_samples: int | None = None) -> _Length | None:
        """How long the decay is: as told here, else as the whole training."""
        training = {"train_samples": train_samples, "train_iters": train_iters}
        told = self._lengths("lr_decay_samples", "lr_decay_iters")
        told += [_Length(name, count, self.whole_training) for name, count in training.items() if count is not None]
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

    def resolve(
        self, global_batch_size: int, train_iters: int | None = None, train_samples: int | None = None
    ) -> "Schedule":
        """What the flags come to.

        Args:
            global_batch_size: samples of an iteration, by which iterations are converted.
            train_iters, train_samples: how long the whole training is; one of them unless the config gives the decay.
        """
        length = self._decay(train_iters, train_samples)
        assert length is not None, "neither the config nor the caller says how long the decay is"
        decay = length.samples(global_batch_size)
        warmups = self._lengths("lr_warmup_iters", "lr_warmup_samples")
        fraction = self.lr_warmup_fraction
        warmup = sum(w.samples(global_batch_size) for w in warmups) if fraction is None else fraction * decay
        return Schedule(self.lr, self.min_lr, self.lr_decay_style, warmup, decay, global_batch_size)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A learning rate over the samples trained on, whatever flags it came from.

    Counted in samples, as Megatron-LM 2.5 does, so that it does not depend on the batch size at the time: the first
    iteration of a warm-up has rate 0.

    Attributes:
        peak: reached at the end of the warm-up.
        minimum: at the end of the decay and after it.
        style: of the decay, one of the choices of `--lr-decay-style`.
        warmup, decay: samples; the decay includes the warm-up.
        batch: samples of an iteration, the shortest warm-up that inverse-square-root reckons with.
    """

    peak: float
    minimum: float
    style: str
    warmup: float
    decay: int
    batch: int

    def rate(self, scheduled_samples: int) -> float:
        """The learning rate of the iteration that starts after `scheduled_samples` samples; skipped ones do not count.

        With `q` the part of the decay after the warm-up that has passed, linear gives `minimum + (1 - q) (peak -
        minimum)` and cosine `minimum + (1 + cos(pi q)) / 2 (peak - minimum)`; inverse-square-root gives `peak
        sqrt(warmup / scheduled_samples)`, where the warm-up is at least one iteration, and never less than `minimum`.
        """
        if scheduled_samples < self.warmup:
            return self.peak * scheduled_samples / self.warmup
        if self.style == "constant":
            return self.peak
        if scheduled_samples >= self.decay:
            # At the very end of a decay that is all warm-up, the rate is still the peak that it has just reached.
            return self.peak if scheduled_samples == self.warmup else self.minimum
        if self.style == "inverse-square-root":
            start = self._start()
            return max(self.minimum, self.peak * math.sqrt(start / max(scheduled_samples, start)))
        passed = (scheduled_samples - self.warmup) / (self.decay - self.warmup)
        left = 1.0 - passed if self.style == "linear" else (1.0 + math.cos(math.pi * passed)) / 2.0
        return self.minimum + left * (self.peak - self.minimum)

    def _start(self) -> float:
        """Where inverse-square-root begins to fall."""
        return max(self.warmup, self.batch)

    def differences(self, before: "Schedule") -> list[str]:
        """In words, each way in which it is another function of the samples than `before`; none where it is the same.

        A constant one has neither minimum nor decay.
        """
        found: dict[str, tuple[float | str, float | str]] = {
            "the largest learning rate": (self.peak, before.peak),
            "the style of the decay": (self.style, before.style),
            "the warm-up in samples": (self.warmup, before.warmup),
        }
        if self.style != "constant" and before.style != "constant":
            found["the smallest learning rate"] = (self.minimum, before.minimum)
            found["the end of the decay in samples"] = (self.decay, before.decay)
        if self.style == before.style == "inverse-square-root" and self.warmup == before.warmup:
            found["the begin of the decay in samples"] = (self._start(), before._start())
        return [f"{what} is {now} and was {then}" for what, (now, then) in found.items() if not _same(now, then)]


def _same(a: float | str, b: float | str) -> bool:
    """Whether two values are one, or differ by the rounding of a warm-up that was given as a fraction."""
    return a == b or (not isinstance(a, str) and not isinstance(b, str) and math.isclose(a, b, rel_tol=1e-9))
