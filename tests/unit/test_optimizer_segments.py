"""Layout of buckets and shards at sizes that no machine here has: every element in one place, aligned, once."""

from hypothesis import given
from hypothesis import strategies as st

from megatron.optimizer.segments import ALIGNMENT, Entry, Layout, Range, plan

kinds = st.sampled_from(["half", "float"])
entries = st.lists(st.tuples(st.integers(0, 700), kinds, st.integers(0, 2)), min_size=1, max_size=12).map(
    lambda sizes: [Entry(f"p{i}", *of_one) for i, of_one in enumerate(sizes)]
)
ranks = st.sampled_from([1, 2, 3, 8, 512])


def elements(runs: list[Range]) -> list[int]:
    return [i for run in runs for i in range(run.begin, run.end)]


def names(layouts: list[Layout]) -> list[list[str]]:
    return [[slot.name for slot in layout.slots] for layout in layouts]


@given(entries, ranks, st.integers(1, 1500), st.sets(st.sampled_from(["p0", "p3", "p5"])))
def test_every_parameter_lies_once_in_a_bucket_of_its_kind(
    given: list[Entry], ranks: int, size: int, own: set[str]
) -> None:
    layouts = plan(given, size, ranks, own)
    by_name = {entry.name: entry for entry in given}
    assert sorted(slot.name for layout in layouts for slot in layout.slots) == sorted(by_name)
    assert names(layouts) == names(plan(given, size, 1, own))  # the boundaries do not depend on the ranks
    for layout in layouts:
        assert layout.size % (ALIGNMENT * ranks) == 0
        assert len({(by_name[slot.name].kind, by_name[slot.name].part) for slot in layout.slots}) == 1
        assert len(layout.slots) == 1 or not {slot.name for slot in layout.slots} & own
        end = 0
        for slot in layout.slots:
            assert slot.range.size == by_name[slot.name].size
            assert slot.range.begin % ALIGNMENT == 0 and end <= slot.range.begin < end + ALIGNMENT
            end = slot.range.end
        assert end <= layout.size < max(end, 1) + ALIGNMENT * ranks
        assert sum(by_name[slot.name].size for slot in layout.slots[:-1]) < size


@given(entries, st.integers(1, 1500))
def test_buckets_follow_the_backward_pass(given: list[Entry], size: int) -> None:
    backward = [entry for part in (2, 1, 0) for entry in reversed(given) if entry.part == part]
    for kind in ("half", "float"):
        order = [entry.name for entry in backward if entry.kind == kind]
        assert [n for group in names(plan(given, size, 2)) for n in group if n in order] == order


@given(entries, ranks, st.sets(st.sampled_from([f"p{i}" for i in range(12)])))
def test_shards_cut_parameters_without_loss(given: list[Entry], ranks: int, counted: set[str]) -> None:
    (layout, *_) = plan(given, 10**9, ranks)
    shards = [layout.shard(rank, ranks) for rank in range(ranks)]
    assert elements(shards) == list(range(layout.size))
    for slot in layout.slots:
        found = [s for shard in shards for s in layout.segments(shard) if s.name == slot.name]
        assert elements([s.range for s in found]) == elements([slot.range])
        assert elements([s.part for s in found]) == list(range(slot.range.size))
        assert all(s.range.size > 0 and s.part.begin % ALIGNMENT == 0 for s in found)
    runs = [run for shard in shards for run in layout.runs(counted, shard)]
    wanted = {i for slot in layout.slots if slot.name in counted for i in elements([slot.range])}
    others = {i for slot in layout.slots if slot.name not in counted for i in elements([slot.range])}
    covered = elements(runs)
    assert len(covered) == len(set(covered)) and wanted <= set(covered) and not others & set(covered)


def test_runs_of_all_parameters_are_one_run() -> None:
    (layout,) = plan([Entry(f"p{i}", 100) for i in range(9)], 10**9, 4)
    assert layout.runs({f"p{i}" for i in range(9)}, layout.shard(1, 4)) == [layout.shard(1, 4)]


def test_the_published_8_billion_model_over_512_data_ranks() -> None:
    """Padding of the flat buffers is nothing beside a bucket of 40M elements."""
    h, t = 3072, 8
    layer = [h, h, 3 * h * h // t, 3 * h // t, h * h // t, h, h, h, 4 * h * h // t, 4 * h // t, 4 * h * h // t, h]
    sizes = [51200 * h // t, 1024 * h, *layer * 72, h, h]
    layouts = plan([Entry(str(i), size) for i, size in enumerate(sizes)], 40_000_000, 512, own={"0"})
    assert names(layouts)[-1] == ["0"]
    padding = sum(layout.size for layout in layouts) - sum(sizes)
    assert 0 <= padding < 1e-3 * sum(sizes)
    shares = [sum(layout.shard(rank, 512).size for layout in layouts) for rank in (0, 511)]
    assert shares[0] == shares[1] < sum(sizes) / 512 * 1.001
