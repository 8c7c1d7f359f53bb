"""Where parameters lie in flat buckets, and which parts of them the equal shards of a bucket hold: arithmetic only."""

import dataclasses
from collections.abc import Collection, Hashable, Iterable
from typing import NamedTuple

# Parameters and shards begin at multiples of this many elements. Vector instructions see the same lanes wherever a
# parameter is cut, and rows of this length hold elements of one parameter only.
ALIGNMENT = 64


class Range(NamedTuple):
    """The elements from `begin` up to, not including, `end`."""

    begin: int
    end: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.end - self.begin

    @property
    def slice(self) -> slice:
        """How to index it."""
        return slice(self.begin, self.end)

    def within(self, other: "Range") -> "Range":
        """The elements that `other` has too; of size 0 where there are none."""
        begin = max(self.begin, other.begin)
        return Range(begin, max(begin, min(self.end, other.end)))

    def relative_to(self, origin: int) -> "Range":
        """The same elements counted from `origin`."""
        return Range(self.begin - origin, self.end - origin)


@dataclasses.dataclass(frozen=True)
class Entry:
    """A parameter that is to be laid out; those of one bucket are of one kind (dtype and device) and one part.

    A part is what one backward pass goes through: a chunk of the rank's model in an interleaved pipeline.
    """

    name: str
    size: int
    kind: Hashable = None
    part: int = 0


@dataclasses.dataclass(frozen=True)
class Slot:
    """The place of a whole parameter in its bucket."""

    name: str
    range: Range


@dataclasses.dataclass(frozen=True)
class Segment:
    """The part of a parameter that lies in some range of its bucket.

    Attributes:
        name: of the parameter.
        range: in the bucket.
        part: in the flattened parameter.
    """

    name: str
    range: Range
    part: Range


@dataclasses.dataclass(frozen=True)
class Layout:
    """The parameters of a bucket in its order, and its size; what is in no slot is padding."""

    slots: tuple[Slot, ...]
    size: int

    def shard(self, rank: int, ranks: int) -> Range:
        """The share of `rank`: one of `ranks` equal ranges."""
        share = self.size // ranks
        return Range(rank * share, (rank + 1) * share)

    def segments(self, within: Range) -> list[Segment]:
        """The parts of parameters in a range, in order; those without an element are left out."""
        cut = ((slot, slot.range.within(within)) for slot in self.slots)
        return [Segment(slot.name, r, r.relative_to(slot.range.begin)) for slot, r in cut if r.size]

    def runs(self, names: Collection[str], within: Range) -> list[Range]:
        """Ranges inside of `within` that hold the parameters `names`, padding, and nothing else.

        Neighbours are one range: few and long ones where most parameters are named.
        """
        found: list[Range] = []
        ends = [slot.range.begin for slot in self.slots[1:]] + [self.size]
        last = None
        for number, (slot, end) in enumerate(zip(self.slots, ends, strict=True)):
            part = Range(slot.range.begin, end).within(within)
            if slot.name not in names or not part.size:
                continue
            if last is not None and last == number - 1:
                part = Range(found.pop().begin, part.end)
            found.append(part)
            last = number
        return found


def plan(entries: Iterable[Entry], bucket_size: int, ranks: int, own: Collection[str] = ()) -> list[Layout]:
    """Lay parameters out in buckets, in the order in which backward completes their gradients: the last part first.

    Args:
        entries: the parameters in the model's order; the buckets take them from the last to the first.
        bucket_size: a bucket is full once its parameters have this many elements; none is cut.
        ranks: every bucket is padded so that it can be cut in this many aligned shards.
        own: names of parameters that get a bucket of their own.

    The buckets depend on `ranks` only in their padding.
    """
    return [_layout(group, ranks) for group in _groups(entries, bucket_size, own)]


def _groups(entries: Iterable[Entry], bucket_size: int, own: Collection[str]) -> list[list[Entry]]:
    """The entries of each bucket; first those that backward completes first."""
    backward = list(reversed(list(entries)))
    groups: list[list[Entry]] = []
    running: dict[tuple[Hashable, int], list[Entry]] = {}
    for entry in backward:
        if entry.name in own:
            groups.append([entry])
            continue
        group = running.setdefault((entry.kind, entry.part), [])
        group.append(entry)
        if sum(e.size for e in group) >= bucket_size:
            groups.append(running.pop((entry.kind, entry.part)))
    places = {entry.name: (-entry.part, place) for place, entry in enumerate(backward)}
    return sorted([*groups, *running.values()], key=lambda group: places[group[-1].name])


def _layout(group: list[Entry], ranks: int) -> Layout:
    slots, end = [], 0
    for entry in group:
        begin = _round_up(end, ALIGNMENT)
        end = begin + entry.size
        slots.append(Slot(entry.name, Range(begin, end)))
    return Layout(tuple(slots), _round_up(max(end, 1), ALIGNMENT * ranks))


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
