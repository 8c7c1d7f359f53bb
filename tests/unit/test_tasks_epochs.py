"""Every epoch has its own order of all examples, and an evaluation has every example exactly once."""

import pickle
from collections import Counter

import numpy as np
import pytest

from megatron.data import GlobalBatchSampler
from megatron.tasks.epochs import Epochs, OncePadded
from megatron.tasks.examples import Example, ExampleSet, PairIds


def examples(count: int) -> ExampleSet:
    ids = [np.array([10 + i], np.int32) for i in range(count)]
    return ExampleSet([Example(str(i), "middle", i % 4, ((a, a),)) for i, a in enumerate(ids)], 8, PairIds(1, 2, 0))


def numbers(samples: Epochs, epoch: int, per_epoch: int) -> list[int]:
    return [int(samples[epoch * per_epoch + i]["number"]) for i in range(per_epoch)]


@pytest.mark.parametrize(("count", "batch", "whole", "filled"), [(12, 4, 12, 0), (11, 4, 8, 1), (3, 4, 0, 1)])
def test_an_epoch_is_a_permutation(count: int, batch: int, whole: int, filled: int) -> None:
    """Whole batches of distinct examples; with `keep_last` all examples, and filling that weighs nothing."""
    dropping = Epochs(examples(count), 3, batch=batch, seed=1)
    keeping = Epochs(examples(count), 3, batch=batch, seed=1, keep_last=True)
    assert len(dropping) == 3 * whole and len(keeping) == 3 * (count + filled)
    for epoch in range(3):
        assert len(set(numbers(dropping, epoch, whole)) - {-1}) == whole
        kept = Counter(numbers(keeping, epoch, count + filled))
        assert kept == Counter({**dict.fromkeys(range(count), 1), -1: filled}) - Counter()
        assert numbers(keeping, epoch, count + filled)[:whole] == numbers(dropping, epoch, whole)
    for i in range(len(keeping)):
        sample = keeping[i]
        assert sample["weight"] == (sample["number"] >= 0)
        assert sample["tokens"][1] == 10 + max(int(sample["number"]), 0)


def test_orders_differ_by_epoch_and_seed_and_by_nothing_else() -> None:
    first = Epochs(examples(20), 3, batch=4, seed=1)
    orders = [numbers(first, epoch, 20) for epoch in (2, 0, 1)]
    orders.append(numbers(Epochs(examples(20), 1, batch=4, seed=2), 0, 20))
    assert len({tuple(order) for order in orders}) == 4
    other = pickle.loads(pickle.dumps(Epochs(examples(20), 9, batch=10, seed=1)))  # as a spawned worker has it
    assert numbers(other, 2, 20) == orders[0]


@pytest.mark.parametrize(("count", "micro", "data"), [(7, 2, 2), (9, 1, 3), (8, 2, 2), (1, 2, 3)])
def test_data_ranks_evaluate_every_example_once(count: int, micro: int, data: int) -> None:
    samples = OncePadded(examples(count), batch=micro * data)
    seen: Counter[int] = Counter()
    batches = set()
    for rank in range(data):
        sampler = GlobalBatchSampler(len(samples), 0, micro, micro * data, data_rank=rank, data_size=data)
        mine = [[samples[i] for i in batch] for batch in sampler]
        batches.add(len(mine))
        seen.update(int(s["number"]) for batch in mine for s in batch if s["weight"])
    assert seen == dict.fromkeys(range(count), 1)
    assert batches == {-(-count // (micro * data))}
