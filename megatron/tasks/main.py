"""Tasks of a trained model: `torchrun --nproc-per-node N -m megatron.tasks.main --task TASK FLAGS`.

RACE, MNLI and QQP fine-tune a BERT; WIKITEXT103 and LAMBADA evaluate a GPT. The --help behind a task tells its flags.
"""

import sys
from collections.abc import Sequence

from megatron.base.complaints import ConfigError
from megatron.tasks.config import TASKS, FinetuneConfig
from megatron.tasks.finetune import finetune
from megatron.tasks.trained import parse_request
from megatron.tasks.zero_shot import ZERO_SHOT_TASKS, ZeroShotRequest, evaluate
from megatron.training.arguments import Parser, parse_composed, with_config_file
from megatron.training.failure import TRAINING_LOST, user_errors

_PROG = "megatron.tasks.main"
_KNOWN = [*TASKS, *ZERO_SHOT_TASKS]


def main(argv: Sequence[str] | None = None) -> None:
    """Read the flags, fine-tune or evaluate; the user's mistakes end it with exit code 2 and a sentence for each."""
    with user_errors():
        words = list(sys.argv[1:] if argv is None else argv)
        task = _task(words)
        if task is None and not {"-h", "--help"} & set(words):
            raise ConfigError([f"--task is not given: accepted are {', '.join(_KNOWN)}"])
        if task in ZERO_SHOT_TASKS:
            evaluate(parse_request(ZeroShotRequest, argv, prog=_PROG))
            return
    with user_errors(TRAINING_LOST):
        finetune(parse_composed(FinetuneConfig, argv, prog=_PROG))


def _task(words: list[str]) -> str | None:
    """The task that is asked for, None where no flag says it. Raises `ConfigError` for one that is not known."""
    parser = Parser(add_help=False)
    parser.add_argument("--task", nargs="?")
    task: str | None = parser.parse_known_args(with_config_file(words))[0].task
    if task is not None and task not in _KNOWN:
        raise ConfigError([f"--task {task}: accepted are {', '.join(_KNOWN)}"])
    return task


if __name__ == "__main__":
    main(sys.argv[1:])
