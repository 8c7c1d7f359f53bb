"""EleutherAI's evaluation harness on a trained GPT: `torchrun --nproc-per-node N -m megatron.tasks.harness FLAGS`.

The only file that needs `lm_eval`, which is optional. `HarnessModel` is a model for it, for programs that call it
themselves; `python -m megatron.tasks.harness --load DIR --tasks NAME ...` does that, at any tensor and pipeline size.
"""

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, ClassVar

from megatron.base.config import Config, flag, minimum_problems
from megatron.base.console import say
from megatron.base.files import atomic_write, file_problem
from megatron.tasks.answers import Answers, Wish
from megatron.tasks.next_token import SplitGPT
from megatron.tasks.sampling import SamplingConfig
from megatron.tasks.trained import Trained, TrainedRequest, opened, parse_request
from megatron.training.failure import mistakes, user_errors

try:
    import lm_eval
    import lm_eval.tasks
    from lm_eval.api.model import LM
except ImportError:
    lm_eval = None
    LM = object

_INSTALL = 'the evaluation harness needs the package lm-eval: pip install "megatron[lm-eval]"'


class HarnessModel(LM):  # type: ignore[misc]
    """A model for `lm_eval.simple_evaluate(model=...)`, to be called alike on every rank of the model.

    To the harness each rank is alone: all get all requests, and the ranks share the work among themselves.

    Args:
        trained: what `megatron.tasks.trained.opened` gives.
        micro_batch_size: requests that are read at the same time.
        length: tokens that are written where a request does not say it.
    """

    def __init__(self, trained: Trained, micro_batch_size: int = 8, length: int = 256) -> None:
        if lm_eval is None:
            raise ValueError(_INSTALL)
        super().__init__()
        self.was_asked = False  # anything yet
        self._answers = Answers(SplitGPT(trained.model, trained.world.device), trained.tokenizer, micro_batch_size)
        self._length = length

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        """See `Answers.likelihoods`."""
        self.was_asked = True
        return self._answers.likelihoods([request.args for request in requests])

    def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
        """See `Answers.whole_texts`."""
        self.was_asked = True
        return self._answers.whole_texts([request.args[0] for request in requests])

    def generate_until(self, requests: list[Any]) -> list[str]:
        """See `Answers.written`, and `wish_of`."""
        self.was_asked = True
        asked = [request.args for request in requests]
        return self._answers.written([wish_of(context, kwargs, self._length) for context, kwargs in asked])


# How a task says how many tokens are written at most; of several the first one counts.
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_KINDS: dict[str, type[Any] | UnionType] = {
    "until": str | list,
    "do_sample": bool,
    "temperature": int | float,
    "top_k": int,
    "top_p": int | float,
    **dict.fromkeys(_LENGTHS, int),
}


def wish_of(context: str, asked: Mapping[str, Any], length: int) -> Wish:
    """What a task's `generation_kwargs` ask for behind a context, `length` tokens where they do not say it.

    Raises ValueError for what is not known here, which would give other texts than the task means, or of a wrong kind.
    """
    given = {name: value for name, value in asked.items() if value is not None}
    if given.get("num_beams") == 1:
        del given["num_beams"]
    for name, value in given.items():
        if name not in _KINDS:
            raise ValueError(f"generation_kwargs {name} {value!r}: accepted are {', '.join(_KINDS)}")
        if not isinstance(value, _KINDS[name]) or (isinstance(value, bool) and name != "do_sample"):
            raise ValueError(f"generation_kwargs {name} {value!r}: it is of a wrong kind")
    until = given.get("until", [])
    stop = [until] if isinstance(until, str) else until
    tokens = next((given[name] for name in _LENGTHS if name in given), length)
    if tokens < 0:
        raise ValueError(f"generation_kwargs: {tokens} tokens: they must be at least 0")
    sampling = SamplingConfig(
        temperature=given.get("temperature", 1.0),
        greedy=not given.get("do_sample", given.get("temperature", 0) > 0),
        top_k=given.get("top_k", 0),
        top_p=given.get("top_p", 0.0),
    )
    return Wish(context, tokens, tuple(str(one) for one in stop if one), sampling)


@dataclasses.dataclass(frozen=True)
class HarnessConfig(Config):
    """What the harness evaluates."""

    tasks: tuple[str, ...] = flag(dataclasses.MISSING, "tasks of the harness, by name, or YAML files of tasks")
    include_path: str | None = flag(None, "folder with further YAML files of tasks")
    num_fewshot: int | None = flag(None, "examples in front of each question; the task's own number if not given")
    limit: int | None = flag(None, "questions of each task, the first; all if not given")
    micro_batch_size: int = flag(
        8, "requests that the model reads at the same time", aliases=("batch-size", "batch_size")
    )
    output_path: str | None = flag(None, "file for the results, JSON")

    def problems(self) -> list[str]:
        return minimum_problems(self, 1, "limit", "micro_batch_size") + minimum_problems(self, 0, "num_fewshot")

    def input_problems(self) -> list[str]:
        """Whether the harness is installed, and the files can be read and written."""
        found = [] if lm_eval is not None else [_INSTALL]
        found += [
            f"--tasks {task}: there is no such file"
            for task in self.tasks
            if task.endswith((".yaml", ".yml")) and not Path(task).is_file()
        ]
        if self.include_path is not None and not Path(self.include_path).is_dir():
            found.append(f"--include-path {self.include_path}: there is no such folder")
        if self.output_path is not None and (why := file_problem(self.output_path)):
            found.append(f"--output-path {self.output_path}: {why}")
        return found


@dataclasses.dataclass(frozen=True)
class HarnessRequest(TrainedRequest):
    """Evaluate a trained GPT with EleutherAI's evaluation harness."""

    harness: HarnessConfig

    data_parallel: ClassVar[bool] = True


def evaluate(request: HarnessRequest) -> dict[str, dict[str, Any]]:
    """The harness's results by task, and by metric, on the ranks that it gives them to; the first rank prints them."""
    asked = request.harness
    with opened(request) as trained:
        manager = lm_eval.tasks.TaskManager(include_path=asked.include_path)
        with mistakes():
            unknown = [task for task in asked.tasks if not _is_file(task) and not manager.match_tasks([task])]
            if unknown:
                raise ValueError(f"--tasks {' '.join(unknown)}: the harness knows no such task")
            found = _simple_evaluate(HarnessModel(trained, asked.micro_batch_size), asked, manager)
        results: dict[str, dict[str, Any]] = {} if found is None else found["results"]
        if trained.world.rank == 0:
            _tell(results, asked.output_path)
        return results


def _simple_evaluate(model: HarnessModel, asked: HarnessConfig, manager: Any) -> Any:
    """What the harness finds. Whatever it stumbles over before it asks the model lies in the tasks: ValueError."""
    try:
        return lm_eval.simple_evaluate(
            model=model,
            tasks=list(asked.tasks),
            num_fewshot=asked.num_fewshot,
            limit=asked.limit,
            task_manager=manager,
        )
    except Exception as error:
        if model.was_asked:
            raise
        told = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"--tasks {' '.join(asked.tasks)}: the harness cannot begin with it: {told}") from error


def _tell(results: dict[str, dict[str, Any]], output: str | None) -> None:
    """Print a line for each number, and write all to the file `output` where that is given."""
    for task, metrics in results.items():
        for name, value in metrics.items():
            if isinstance(value, int | float):
                say(f"{task}: {name} {value:.6g}")
    if output is not None:
        with atomic_write(output) as stream:
            json.dump(results, stream, indent=2, default=str)


def _is_file(task: str) -> bool:
    return task.endswith((".yaml", ".yml"))


def main(argv: Sequence[str] | None = None) -> None:
    """Read the flags and evaluate; the user's mistakes end it with exit code 2 and a sentence for each."""
    with user_errors():
        evaluate(parse_request(HarnessRequest, argv, prog="megatron.tasks.harness"))


if __name__ == "__main__":
    main(sys.argv[1:])
