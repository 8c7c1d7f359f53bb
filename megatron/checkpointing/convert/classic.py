"""Megatron-LM's classic checkpoint folders: one file for each tensor and pipeline rank, read as one model."""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron.checkpointing.convert.deferred import Deferred, Readable, same_values
from megatron.checkpointing.convert.kinds import check_matrices, check_record, check_tensors
from megatron.checkpointing.convert.mapping import RowOrder, refuse_left_overs
from megatron.checkpointing.convert.restricted import Namespace
from megatron.checkpointing.convert.torch_files import FileTensor, read_torch_file
from megatron.checkpointing.folders import LONGEST_TRACKER, TRACKER, none_there, read_whole
from megatron.checkpointing.untrusted import shown

_FILE = "model_optim_rng.pt"
_RANK = re.compile(r"mp_rank_([0-9]{2,})(?:_([0-9]{3,}))?")
_LAYER = re.compile(r"(encoder\.layers\.)([0-9]+)(\..+)")
_ORDERS: dict[int, RowOrder] = {0: "3nd", 1: "nd3", 2: "n3d", 3: "n3d"}

# The word embeddings, and the copy of them that a last stage has for its output projection.
WORDS = "embedding.word_embeddings.weight"
COPY = "word_embeddings_for_head.weight"


@dataclasses.dataclass(frozen=True)
class ClassicFile:
    """What one rank wrote: `chunks` are its stages of the model, each tensors by name, in the order of the file."""

    record: Mapping[str, Any]
    chunks: Sequence[Mapping[str, FileTensor]]


@dataclasses.dataclass(frozen=True)
class ClassicCheckpoint:
    """A whole checkpoint, whose tensors are not read yet.

    Attributes:
        folder: where it lies.
        files: what each rank wrote, by (pipeline rank, tensor rank).
        tensor_size, pipeline_size: numbers of ranks.
    """

    folder: Path
    files: Mapping[tuple[int, int], ClassicFile]
    tensor_size: int
    pipeline_size: int

    @property
    def record(self) -> Mapping[str, Any]:
        """What the first rank wrote."""
        return self.files[0, 0].record

    @property
    def args(self) -> dict[str, Any]:
        """The flags of the program that wrote it; empty where it did not keep them."""
        args = self.record.get("args")
        return args.values if isinstance(args, Namespace) else {}

    @property
    def version(self) -> float:
        """Of the format; 0 where it has no number."""
        return float(self.record.get("checkpoint_version", 0))

    @property
    def order(self) -> RowOrder:
        """Of the rows of query, key and value on each rank. ValueError for a version that is not known."""
        try:
            return _ORDERS[int(self.version)]
        except KeyError:
            raise ValueError(f"{self.folder}: checkpoint_version {self.version:g}; known are 0 to 3") from None

    @property
    def iteration(self) -> int:
        """When it was saved; 0 where it does not say."""
        record = self.record
        return int(record.get("iteration", record.get("total_iters", 0)))

    def stages(self) -> list[tuple[int, int]]:
        """Every stage of the model in order, as (pipeline rank, chunk)."""
        chunks = len(self.files[0, 0].chunks)
        return [(rank, chunk) for chunk in range(chunks) for rank in range(self.pipeline_size)]

    @property
    def num_layers(self) -> int:
        """Of all stages."""
        return sum(layer_count(self.files[rank, 0].chunks[chunk]) for rank, chunk in self.stages())

    def layers_before(self) -> dict[tuple[int, int], int]:
        """For each stage the layers of those before it."""
        found, total = {}, 0
        for rank, chunk in self.stages():
            found[rank, chunk] = total
            total += layer_count(self.files[rank, 0].chunks[chunk])
        return found

    def weights(self) -> dict[str, list[Readable]]:
        """For each tensor of the whole model its pieces on the tensor ranks; layers are numbered through the model.

        The copy of the word embeddings on a last stage is left out, and compared when the embeddings are read.
        """
        weights = pieces_of_model(self, {place: file.chunks for place, file in self.files.items()})
        copies = weights.pop(COPY, None)
        if copies is not None:
            if WORDS not in weights:
                raise ValueError(f"{self.folder}: the first pipeline stage has no {WORDS}")
            weights[WORDS] = [_equal(*pair, self.folder) for pair in zip(weights[WORDS], copies, strict=True)]
        return weights


def _equal(tensor: Readable, copy: Readable, folder: Path) -> Readable:
    """`tensor`, which raises ValueError when it is read and is not equal to `copy`."""

    def make() -> torch.Tensor:
        if not same_values(tensor, copy):
            raise ValueError(f"{folder}: {WORDS}: the first and the last pipeline stage do not have the same")
        return tensor.read()

    return Deferred(tensor.dtype, tensor.shape, make)


def layer_count(chunk: Mapping[str, Any]) -> int:
    """The layers of a stage."""
    return len({match[2] for match in map(_LAYER.fullmatch, chunk) if match})


def pieces_of_model(
    checkpoint: ClassicCheckpoint, chunks: Mapping[tuple[int, int], Sequence[Mapping[str, FileTensor]]]
) -> dict[str, list[Readable]]:
    """Tensors of the whole model from those of each rank's stages: by name, a piece for each tensor rank.

    `chunks` are by (pipeline rank, tensor rank). Raises ValueError where tensor ranks have other names, or two stages
    have the same one.
    """
    found: dict[str, list[Readable]] = {}
    for (pipeline, chunk), first in checkpoint.layers_before().items():
        ranks = [chunks[pipeline, tensor][chunk] for tensor in range(checkpoint.tensor_size)]
        for names in ranks[1:]:
            refuse_left_overs(names, ranks[0], "of another tensor rank")
        for name in ranks[0]:
            whole = _renumbered(name, first)
            if whole in found:
                raise ValueError(f"{checkpoint.folder}: two pipeline stages have {whole}")
            found[whole] = [rank[name] for rank in ranks]
    return found


def _renumbered(name: str, layers_before: int) -> str:
    match = _LAYER.fullmatch(name)
    return name if match is None else f"{match[1]}{int(match[2]) + layers_before}{match[3]}"


def open_classic(directory: Path, step: int | None = None) -> ClassicCheckpoint:
    """Open the checkpoint below `directory` that its tracker names, or that of iteration `step`.

    Raises ValueError naming the folder or file where there is none, ranks are missing, or files do not belong together.
    """
    folder = directory / _folder_name(directory, step)
    if not folder.is_dir():
        raise ValueError(f"{folder}: there is no such folder")
    places: dict[tuple[int, int], Path] = {}
    for place, path in sorted(_rank_folders(folder), key=lambda found: found[1]):
        if place in places:
            raise ValueError(f"{folder}: {places[place].name} and {path.name} are both of tensor rank {place[1]}")
        places[place] = path
    if not places:
        raise ValueError(f"{folder}: there is no folder mp_rank_00 or mp_rank_00_000 in it")
    pipeline, tensor = (1 + max(place[axis] for place in places) for axis in (0, 1))
    missing = next(((p, t) for p in range(pipeline) for t in range(tensor) if (p, t) not in places), None)
    if missing is not None:
        raise ValueError(f"{folder}: the folder of tensor rank {missing[1]}, pipeline rank {missing[0]} is missing")
    files = {place: _open_file(path / _FILE) for place, path in sorted(places.items())}
    checkpoint = ClassicCheckpoint(folder, files, tensor, pipeline)
    _check_together(checkpoint)
    return checkpoint


def _folder_name(directory: Path, step: int | None) -> str:
    if step is not None:
        return f"iter_{step:07d}"
    path = directory / TRACKER
    if not path.exists():
        raise ValueError(f"{directory}: {none_there(directory)}")
    text = read_whole(path, LONGEST_TRACKER).strip()
    if text == b"release":
        return text.decode()
    if not text.isdigit():
        raise ValueError(f"{path}: it must hold the number of an iteration, or the word release")
    return f"iter_{int(text):07d}"


def _rank_folders(folder: Path) -> Iterator[tuple[tuple[int, int], Path]]:
    """Each rank's folder by (pipeline rank, tensor rank)."""
    for path in folder.iterdir():
        match = _RANK.fullmatch(path.name)
        if match:
            yield (int(match[2] or 0), int(match[1])), path


def _open_file(path: Path) -> ClassicFile:
    if not path.is_file():
        raise ValueError(f"{path}: the file is missing")
    record = read_torch_file(path)
    try:
        check_record(record)
    except ValueError as error:
        raise ValueError(f"{path}: it is no checkpoint that can be read: {error}") from error
    names = ["model"] if "model" in record else [f"model{i}" for i in range(len(record)) if f"model{i}" in record]
    if not names:
        raise ValueError(f"{path}: it is no checkpoint of Megatron-LM: it has no entry model")
    return ClassicFile(record, [_chunk(record[name], path) for name in names])


def _chunk(model: Any, path: Path) -> dict[str, FileTensor]:
    """The tensors of a stage."""
    found: dict[str, FileTensor] = {}
    for name, tensor in _flat(model, path):
        if name in found:
            raise ValueError(f"{path}: two tensors have the name {shown(name)}")
        found[name] = tensor
    try:
        check_tensors(found)
        check_matrices(found)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return found


def _flat(model: Any, path: Path, prefix: str = "") -> Iterator[tuple[str, FileTensor]]:
    """The tensors of a nested model by one name each, as the newer versions spell it."""
    where = f"{path}: {shown(prefix) or 'model'}"
    if not isinstance(model, dict):
        raise ValueError(f"{where} is a {type(model).__name__} where tensors by name are expected")
    for key, value in model.items():
        if not isinstance(key, str):
            raise ValueError(f"{where} has a {type(key).__name__} as a name, which must be text")
        name = f"{prefix}{key}"
        if isinstance(value, FileTensor):
            yield _modern(name), value
        else:
            yield from _flat(value, path, f"{name}.")


def _modern(name: str) -> str:
    name = re.sub(r"^language_model\.", "", name)
    name = re.sub(r"^transformer\.", "encoder.", name)
    return re.sub(r"^(encoder\.layers\.[0-9]+)\.attention\.", r"\1.self_attention.", name)


def _check_together(checkpoint: ClassicCheckpoint) -> None:
    """Raise ValueError where the ranks' files are not of one iteration, version and number of stages, or not all."""
    kinds = {
        (file.record.get("iteration"), file.record.get("checkpoint_version", 0), len(file.chunks))
        for file in checkpoint.files.values()
    }
    if len(kinds) > 1:
        raise ValueError(f"{checkpoint.folder}: the files are not of one iteration, version and number of chunks")
    if not checkpoint.num_layers:
        raise ValueError(
            f"{checkpoint.folder}: it has no layer of a classic transformer, such as encoder.layers.0; models of "
            "Megatron Core, whose tensors have other names, are not converted"
        )
    for name, found, what in (
        ("tensor_model_parallel_size", checkpoint.tensor_size, "files of {} ranks"),
        ("pipeline_model_parallel_size", checkpoint.pipeline_size, "files of {} ranks"),
        ("model_parallel_size", checkpoint.tensor_size, "files of {} ranks"),
        ("num_layers", checkpoint.num_layers, "{} layers"),
    ):
        if checkpoint.args.get(name, found) not in (found, None):
            raise ValueError(
                f"{checkpoint.folder}: there are {what.format(found)}, and it was saved with {name} "
                f"{checkpoint.args[name]!r}"
            )
