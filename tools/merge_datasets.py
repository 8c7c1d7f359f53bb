"""Token sets put one behind another: `python tools/merge_datasets.py --input A B ... --output-prefix C`.

Nothing is tokenised again; documents keep their sequences and their order. The sets must have one element type, and
should have been made with one tokenizer, which the files do not tell.
"""

import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from megatron.base.complaints import raise_joined
from megatron.base.compose import ComposedConfig
from megatron.base.config import Config, flag
from megatron.data.indexed import IndexedDataset, IndexedWriter
from megatron.data.merging import append_set
from megatron.training.arguments import parse_composed
from megatron.training.failure import print_problems


@dataclasses.dataclass(frozen=True)
class MergeConfig(Config):
    """What is read and written."""

    input: tuple[str, ...] = flag(
        dataclasses.MISSING, "names without extension of the token sets, in order; a folder is all sets in it by name"
    )
    output_prefix: str = flag(dataclasses.MISSING, "name without extension of the set that is written")

    def problems(self) -> list[str]:
        prefixes = self.prefixes()
        found = [f"--input {path}: the folder holds no token set" for path in self.input if _sets_in(path) == []]
        places = [os.path.realpath(prefix) for prefix in prefixes]
        repeated = sorted({prefix for prefix, place in zip(prefixes, places, strict=True) if places.count(place) > 1})
        found += [f"--input {prefix}: it is named twice" for prefix in repeated]
        if os.path.realpath(self.output_prefix) in places:
            found.append(f"--output-prefix {self.output_prefix}: it is one of the inputs")
        return found

    def prefixes(self) -> list[str]:
        """The sets in their order."""
        return [prefix for path in self.input for prefix in _sets_in(path) or [path] if not os.path.isdir(prefix)]


def _sets_in(path: str) -> list[str] | None:
    """The names of the sets in a folder, None where `path` is none."""
    if not os.path.isdir(path):
        return None
    return sorted(str(file.with_suffix("")) for file in Path(path).glob("*.idx"))


@dataclasses.dataclass(frozen=True)
class MergeRun(ComposedConfig):
    """Put token sets one behind another."""

    files: MergeConfig


def open_all(prefixes: Sequence[str]) -> list[IndexedDataset]:
    """The sets, all checked, with one complaint for each that cannot be used."""
    opened: list[IndexedDataset] = []
    found = []
    for prefix in prefixes:
        try:
            opened.append(IndexedDataset(prefix))
        except ValueError as error:
            found.append(f"--input {error}")
    first = opened[:1]
    found += [
        f"--input {other.prefix} holds {other.dtype.name}, {first[0].prefix} {first[0].dtype.name}: tokenise one again"
        for other in opened[1:]
        if other.dtype != first[0].dtype
    ]
    raise_joined(found)
    return opened


def merge(config: MergeConfig) -> None:
    """Do what `config` asks for and say what was done."""
    datasets = open_all(config.prefixes())
    Path(config.output_prefix).parent.mkdir(parents=True, exist_ok=True)
    with IndexedWriter(config.output_prefix, datasets[0].dtype) as writer:
        for dataset in tqdm(datasets, unit="set", desc="merging"):
            append_set(writer, dataset)
    print(
        f"{writer.prefix}.bin: {writer.documents:,} documents in {writer.sequences:,} sequences, {writer.tokens:,} "
        f"tokens of {writer.dtype.name} from {len(datasets)} sets"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 2 for the user's mistakes, 130 when interrupted."""
    try:
        merge(parse_composed(MergeRun, argv, world_size=1, prog="merge_datasets.py").files)
    except (ValueError, OSError) as error:
        print_problems(error)
        return 2
    except KeyboardInterrupt:
        print("error: interrupted; nothing was written", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
