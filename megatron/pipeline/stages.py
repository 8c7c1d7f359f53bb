"""What each stage of the pipeline holds: its layers, the embedding, the head with the final norm."""

import dataclasses
from collections.abc import Callable

from megatron.base.complaints import raise_joined
from megatron.base.config import flag_name
from megatron.base.formulas import layer_forward_flops
from megatron.base.stages import StagePart
from megatron.pipeline.nearest import nearest, nearest_words


@dataclasses.dataclass(frozen=True)
class Stage(StagePart):
    """The part of the model that is chunk `chunk` of pipeline rank `rank`."""

    rank: int
    chunk: int


def head_cost(s: int, h: int, V: int, f: int | None = None, projection: int | None = None) -> float:
    """Time of the output projection to `V` tokens over that of one layer, by their floating-point operations."""
    return 2 * s * h * V / layer_forward_flops(s, h, f, projection)


_P = "pipeline_model_parallel_size"
_EACH = "num_layers_per_virtual_pipeline_stage"
_FIRST = "decoder_first_pipeline_num_layers"
_LAST = "decoder_last_pipeline_num_layers"
# What is wrong with a split: the fields that could be changed, and the sentence behind the first one's flag and value.
_Fault = tuple[tuple[str, ...], str]


@dataclasses.dataclass(frozen=True)
class LayerSplit:
    """How `num_layers` are divided over the stages; the fields are named as the flags. Making one checks nothing.

    Each rank has as many layers as any other, except the first or last where their numbers are given; a rank's layers
    are divided evenly over its chunks, `num_layers_per_virtual_pipeline_stage` each (one chunk where it is None).
    With costs (of the embedding and of the head, in layers) the stages are instead made as equal in time as can be:
    they need not divide, and the number for a virtual stage says how many chunks there are, the layers of a rank over
    it, rounded up.
    """

    num_layers: int
    pipeline_model_parallel_size: int = 1
    num_layers_per_virtual_pipeline_stage: int | None = None
    decoder_first_pipeline_num_layers: int | None = None
    decoder_last_pipeline_num_layers: int | None = None
    embedding_cost: float = 0.0
    head_cost: float = 0.0

    def problems(self) -> list[str]:
        """One sentence where the layers cannot be divided, with the nearest values that could be; sizes are from 1."""
        fault = self._fault()
        if fault is None:
            return []
        (field, *others), sentence = fault
        choices = nearest_words(*self._search(field))
        for other in others:
            values = " or ".join(map(str, nearest(*self._search(other))))
            choices += f", or {flag_name(other)} {values}" if values else ""
        return [f"{flag_name(field)} {getattr(self, field)}: {sentence}{choices}"]

    @property
    def virtual_size(self) -> int:
        """`v`, the chunks of a rank."""
        each, l, p = self.num_layers_per_virtual_pipeline_stage, self.num_layers, self.pipeline_model_parallel_size
        if each is None:
            return 1
        return -(-l // (p * each)) if self._balanced else max(1, self._typical_rank // each)

    def stages(self) -> tuple[Stage, ...]:
        """All stages in the order of the model. Raises ConfigError with what `problems` says."""
        raise_joined(self.problems())
        p, v = self.pipeline_model_parallel_size, self.virtual_size
        counts = self._balanced_counts(p * v) if self._balanced else [n // v for n in self._layers_of_ranks()] * v
        ends = [sum(counts[: stage + 1]) for stage in range(p * v)]
        return tuple(
            Stage(
                rank=stage % p,
                chunk=stage // p,
                layers=range(end - count, end),
                embedding=stage == 0,
                head=stage == p * v - 1,
            )
            for stage, (count, end) in enumerate(zip(counts, ends, strict=True))
        )

    @property
    def _balanced(self) -> bool:
        return self.embedding_cost > 0 or self.head_cost > 0

    @property
    def _given(self) -> dict[str, int]:
        """The fields that give a rank its own number of layers, where they do."""
        return {name: getattr(self, name) for name in (_FIRST, _LAST) if getattr(self, name) is not None}

    @property
    def _typical_rank(self) -> int:
        """Layers of a rank that has no number of its own; of the first one where all have."""
        given = self._given
        sharing = self.pipeline_model_parallel_size - len(given)
        return (self.num_layers - sum(given.values())) // sharing if sharing > 0 else next(iter(given.values()))

    def _layers_of_ranks(self) -> list[int]:
        first, last = self.decoder_first_pipeline_num_layers, self.decoder_last_pipeline_num_layers
        counts = [self._typical_rank] * self.pipeline_model_parallel_size
        counts[0] = counts[0] if first is None else first
        counts[-1] = counts[-1] if last is None else last
        return counts

    def _balanced_counts(self, stages: int) -> list[int]:
        """A layer after the other for the stage with least to do; of equals a later one, which holds less at a time."""
        counts, costs = [1] * stages, [1.0] * stages
        costs[0] += self.embedding_cost
        costs[-1] += self.head_cost
        for _ in range(self.num_layers - stages):
            least = min(range(stages), key=lambda stage: (costs[stage], -stage))
            counts[least] += 1
            costs[least] += 1
        return counts

    def _fault(self) -> _Fault | None:
        return self._rank_fault() or self._chunk_fault()

    def _rank_fault(self) -> _Fault | None:
        """Why the layers cannot be divided over the ranks."""
        l, p, given = self.num_layers, self.pipeline_model_parallel_size, self._given
        rest, sharing = l - sum(given.values()), p - len(given)
        if p > l:
            return (_P,), f"each rank needs a layer, and --num-layers is {l}"
        if self._balanced:
            return (tuple(given), "it cannot be given where the layers are balanced by their cost") if given else None
        if not given:
            return (("num_layers", _P), f"it must be a multiple of {flag_name(_P)} {p}") if rest % p else None
        if p == 1:
            return tuple(given), f"it needs {flag_name(_P)} of at least 2"
        if sharing == 0:
            together = f"with {flag_name(_LAST)} {given[_LAST]} it must make"
            return (tuple(given), f"{together} the {l} of --num-layers") if rest else None
        if rest < sharing or rest % sharing:
            what = f"the {sharing} ranks that share what it leaves of --num-layers {l} must get equally many"
            return tuple(given), what
        return None

    def _chunk_fault(self) -> _Fault | None:
        """Why the layers of each rank cannot be divided over its chunks."""
        each = self.num_layers_per_virtual_pipeline_stage
        l, p, v = self.num_layers, self.pipeline_model_parallel_size, self.virtual_size
        if v > 1 and p == 1:
            return (_EACH,), f"virtual stages need {flag_name(_P)} of at least 2"
        if self._balanced:
            return ((_EACH,), f"it makes {p * v} stages of --num-layers {l}") if p * v > l else None
        if each is not None and self._typical_rank % each:
            return (_EACH,), f"it must divide the {self._typical_rank} layers of a pipeline rank"
        for name, layers in self._given.items():
            if layers % v:
                return (name,), f"it must be a multiple of the {v} virtual stages of a rank"
        return None

    def _search(self, field: str) -> tuple[int, Callable[[int], bool], int]:
        """For `nearest`: a field's value, whether the layers could be divided with another one, how far to look."""
        multiple = self.pipeline_model_parallel_size * (self.num_layers_per_virtual_pipeline_stage or 1)
        highest = self.num_layers + (2 * multiple if field == "num_layers" else 0)
        return getattr(self, field), lambda n: dataclasses.replace(self, **{field: n})._fault() is None, highest
