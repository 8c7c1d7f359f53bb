"""What decides which samples a run sees, from its config and datasets or out of a checkpoint."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any, Self

from megatron.base.config import flag_name
from megatron.data import parse_split
from megatron.data.blend import parse_blend
from megatron.data.identity import SetPart
from megatron.data.splits import SPLIT_NAMES
from megatron.training.config import RunConfig

_PATHS = ("data_path", "train_data_path", "valid_data_path", "test_data_path")


@dataclasses.dataclass(frozen=True)
class DataFacts:
    """What decides which samples a run sees, and in which iteration; None where it is not known.

    Attributes:
        seq_length, seed, global_batch_size: as the flags give them, the batch after the ramp-up.
        rampup_batch_size: start, increment and samples; empty where there is none.
        train_samples: for how many the training set was asked.
        split: weights of the three shares of `--data-path`.
        names: by flag, weight and last part of the name of each token set.
        making: by field what else says how samples are made, of a BERT.
        sets: by split, what its dataset draws from, where it says so.
    """

    seq_length: int | None = None
    seed: int | None = None
    global_batch_size: int | None = None
    rampup_batch_size: list[int] | None = None
    train_samples: int | None = None
    split: list[float] | None = None
    names: Mapping[str, list[list[Any]]] | None = None
    making: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    sets: Mapping[str, list[SetPart]] = dataclasses.field(default_factory=dict)

    @classmethod
    def of_run(cls, config: RunConfig, ranks: int, train_samples: int, datasets: Sequence[Any]) -> Self:
        """Those of a run on so many ranks; `datasets` for training, validation and test may have an `identity()`."""
        sets = {
            name: list(dataset.identity())
            for name, dataset in zip(SPLIT_NAMES, datasets, strict=True)
            if hasattr(dataset, "identity")
        }
        return cls(
            config.data.seq_length,
            config.training.seed,
            config.batch_schedule(ranks).global_batch_size,
            list(config.training.rampup_batch_size or ()),
            train_samples,
            list(parse_split(config.data.split)),
            _names(dataclasses.asdict(config.data)),
            dataclasses.asdict(config).get("bert", {}),
            sets,
        )

    @classmethod
    def of_checkpoint(cls, state: Mapping[str, Any]) -> Self:
        """Those that a checkpoint's plain values tell; of a converted one what its flags do."""
        if "data" in state:
            told = dict(state["data"])
            told["sets"] = {name: [SetPart(**part) for part in parts] for name, parts in told["sets"].items()}
            return cls(**told)
        data, training = (state.get("config", {}).get(section, {}) for section in ("data", "training"))
        return cls(
            seq_length=data.get("seq_length"),
            seed=training.get("seed"),
            global_batch_size=training.get("global_batch_size"),
            rampup_batch_size=list(training.get("rampup_batch_size") or ()) if training else None,
            split=list(parse_split(data["split"])) if "split" in data else None,
            names=_names(data),
        )


def _names(data: Mapping[str, Any]) -> dict[str, list[list[Any]]] | None:
    """By flag, share and name of each token set that the fields of a `DataConfig` tell; None if there are none."""
    found = {}
    for name in _PATHS:
        if data.get(name):
            blend = parse_blend(data[name], flag_name(name))
            bases = (os.path.basename(prefix) for prefix in blend.prefixes)
            found[flag_name(name)] = [list(pair) for pair in zip(blend.shares(), bases, strict=True)]
    return found or None
