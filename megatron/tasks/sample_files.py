"""Files of prompts and of the texts that were written to them."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron.base.files import atomic_write
from megatron.tasks.text_files import read_lines, read_objects

_FLAG = "--sample-input-file"


def read_prompts(path: str) -> list[dict[str, Any]]:
    """The prompts of a file, each a dict whose "prompt" is a text, and which may hold more.

    A file whose name ends in .jsonl or .json has such an object on each line; of any other file each line is a prompt.
    Lines of blanks are passed over. Raises ValueError naming the file, and the line where it is one that is wrong.
    """
    if Path(path).suffix in (".jsonl", ".json"):
        prompts = [value for _, value in read_objects(_FLAG, path, "prompt")]
    else:
        prompts = [{"prompt": line.text.rstrip("\r")} for line in read_lines(_FLAG, path)]
    if not prompts:
        raise ValueError(f"{_FLAG} {path}: there is no prompt in it")
    return prompts


def write_lines(path: str, lines: Iterable[Mapping[str, Any]]) -> None:
    """One JSON object a line; the file takes its name when all of it is written."""
    with atomic_write(path) as stream:
        for line in lines:
            stream.write(json.dumps(line, ensure_ascii=False) + "\n")
