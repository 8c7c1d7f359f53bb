"""What it means for a run that goes on that its data is not what it was: which samples come again or are left out."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from megatron.base.config import flag_name
from megatron.data.identity import SetPart
from megatron.data.splits import SPLIT_NAMES
from megatron.training.data_facts import DataFacts


@dataclasses.dataclass(frozen=True)
class DataChanges:
    """Sentences, one a change.

    Attributes:
        to_accept: other data than before, which the user must agree to.
        to_tell: what follows from training for longer or shorter, which the user has asked for.
    """

    to_accept: list[str]
    to_tell: list[str]


def data_changes(before: DataFacts, now: DataFacts, consumed_samples: int) -> DataChanges:
    """What is other than `before`, the checkpoint, for a run that has consumed so many samples.

    What one of them does not know is not compared, and nothing is where no sample has been consumed.
    """
    if consumed_samples == 0:
        return DataChanges([], [])
    another = (
        f"it goes on at sample {consumed_samples} (from 0) of another order, so that samples which were seen may come "
        "again, and those before it in that order are left out"
    )
    to_accept = _sets(before, now, consumed_samples, another)
    to_accept += [_other_set(before, now, name) for name in SPLIT_NAMES[1:] if _is_other_set(before, now, name)]
    to_accept += _cut(before, now, another) + _batches(before, now, consumed_samples)
    return DataChanges(to_accept, _length(before, now, another))


def _sets(before: DataFacts, now: DataFacts, consumed: int, another: str) -> list[str]:
    """Changes of what the training set draws from."""
    old, new = before.sets.get("train"), now.sets.get("train")
    if old is None or new is None:
        return _names(before, now, another)
    if [part.content for part in old] != [part.content for part in new]:
        return [f"the training set is {_listed(new)} and was {_listed(old)}: {another}"]
    pairs = list(zip(old, new, strict=True))
    found = [
        f"--split: of {b.name} the documents {b.begin} to {b.end - 1} are trained on, and {a.begin} to {a.end - 1} "
        f"were: {another}"
        for a, b in pairs
        if a.span != b.span
    ]
    return found + [_share(a, b, consumed) for a, b in pairs if a.share != b.share]


def _names(before: DataFacts, now: DataFacts, another: str) -> list[str]:
    """Changes of the flags, where it is not known what the sets hold: the folders that they lie in do not count."""
    found = []
    if None not in (before.names, now.names) and before.names != now.names:
        found.append(f"the token sets are {_flags(now)} and were {_flags(before)}: {another}")
    if None not in (before.split, now.split) and before.split != now.split:
        found.append(f"--split is {now.split} and was {before.split}, as parts: {another}")
    return found


def _flags(facts: DataFacts) -> str:
    return "; ".join(
        f"{flag} {' '.join(f'{share:g} {name}' for share, name in sets)}" for flag, sets in (facts.names or {}).items()
    )


def _share(before: SetPart, now: SetPart, consumed: int) -> str:
    seen, goes_on = round(before.share * consumed), round(now.share * consumed)
    difference = abs(goes_on - seen)
    what = f"{difference} are left out" if goes_on > seen else f"{difference} come again"
    return (
        f"{now.name} gives {now.share:.4%} of the samples and gave {before.share:.4%}: about {seen} of its samples are "
        f"seen, and it goes on at about its sample {goes_on}, so that {what}"
    )


def _is_other_set(before: DataFacts, now: DataFacts, name: str) -> bool:
    """Whether the validation or test set draws from something else; how many samples are asked of it does not count."""
    old, new = before.sets.get(name), now.sets.get(name)
    if old is None or new is None:
        return False
    drawn = [[(part.content, part.span, part.share) for part in parts] for parts in (old, new)]
    return drawn[0] != drawn[1]


def _other_set(before: DataFacts, now: DataFacts, name: str) -> str:
    return (
        f"the {name} set is {_listed(now.sets[name])} and was {_listed(before.sets[name])}: "
        "its losses are not to be compared with those before"
    )


def _listed(parts: Sequence[SetPart]) -> str:
    named = [f"{part}, {part.begin} to {part.end - 1}" for part in parts[:3]]
    return " and ".join(named) + (f" and {len(parts) - 3} more" if len(parts) > 3 else "")


def _cut(before: DataFacts, now: DataFacts, another: str) -> list[str]:
    """Changes of how samples are cut and shuffled."""
    how: dict[str, tuple[Any, Any]] = {
        f"--seq-length is {now.seq_length} and was {before.seq_length}, so samples are cut anew": (
            before.seq_length,
            now.seq_length,
        ),
        f"--seed is {now.seed} and was {before.seed}, so samples are shuffled anew": (before.seed, now.seed),
    }
    for name in sorted(before.making.keys() & now.making.keys()):
        words = f"{flag_name(name)} is {now.making[name]} and was {before.making[name]}, so samples are made anew"
        how[words] = (before.making[name], now.making[name])
    return [f"{words}: {another}" for words, pair in how.items() if None not in pair and pair[0] != pair[1]]


def _batches(before: DataFacts, now: DataFacts, consumed: int) -> list[str]:
    """Changes of how many samples an iteration takes, which by themselves change no order."""
    old, new = (_batch(facts) for facts in (before, now))
    if old is None or new is None or old == new:
        return []
    return [
        f"the batches are {new} and were {old}: the next one begins with sample {consumed} (from 0) all the same, so "
        "that for this no sample comes again or is left out"
    ]


def _batch(facts: DataFacts) -> str | None:
    if facts.global_batch_size is None or facts.rampup_batch_size is None:
        return None
    ramp = " ".join(map(str, facts.rampup_batch_size))
    return f"--global-batch-size {facts.global_batch_size}" + (f" with --rampup-batch-size {ramp}" if ramp else "")


def _length(before: DataFacts, now: DataFacts, another: str) -> list[str]:
    """What another number of samples to train on means: documents are shuffled over all passes that it takes."""
    if None in (before.train_samples, now.train_samples) or before.train_samples == now.train_samples:
        return []
    old, new = before.sets.get("train"), now.sets.get("train")
    asked = f"the training set is asked for {now.train_samples} samples and was for {before.train_samples}"
    if old is None or new is None:
        return [f"{asked}: whether that changes their order only the set can tell"]
    if [part.content for part in old] != [part.content for part in new]:
        return []
    passes = [
        f"{b.name} is shuffled over {b.epochs} passes and was over {a.epochs}"
        + (", the last by itself" if b.last_apart else "")
        for a, b in zip(old, new, strict=True)
        if a.passes != b.passes
    ]
    return [f"{asked}, and {', '.join(passes)}: {another}" if passes else f"{asked}, in the same order"]
