"""Continue prompts with a trained GPT: `torchrun --nproc-per-node N tools/generate_text.py --load DIR --prompt TEXT`.

Any number of tensor-parallel ranks and stages that divides the model will do: the checkpoint is read at whatever layout
is asked, and sizes and tokenizer come from the checkpoint itself. Without `--prompt`, `--sample-input-file` and
`--num-samples` it asks for prompts.
"""

import dataclasses
import io
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.base.complaints import raise_joined
from megatron.base.config import Config, flag, minimum_problems, range_problems
from megatron.base.console import say
from megatron.base.files import file_problem
from megatron.tasks.control import Control
from megatron.tasks.generation import Continuations, Prompt
from megatron.tasks.next_token import SplitGPT
from megatron.tasks.sample_files import read_prompts, write_lines
from megatron.tasks.sampling import SamplingConfig
from megatron.tasks.trained import Trained, TrainedRequest, end_of_document, opened, parse_request
from megatron.tasks.writer import Written, write
from megatron.training.failure import mistakes, print_problems, user_errors


@dataclasses.dataclass(frozen=True)
class GenerateConfig(Config):
    """What to write."""

    prompt: str | None = flag(None, "text to go on from")
    sample_input_file: str | None = flag(
        None, 'prompts: a JSON object with "prompt" a line where the name ends in .jsonl, else a prompt a line'
    )
    sample_output_file: str | None = flag(
        None, "where their texts go, a JSON object a line; the input's name and .out if not given"
    )
    num_samples: int = flag(0, "texts to write from nothing but the end-of-document token, into --genfile")
    genfile: str | None = flag(None, "where the texts of --num-samples go, a JSON object a line")
    out_seq_length: int = flag(100, "tokens to add at most")
    stop: tuple[str, ...] = flag((), "strings before the first of which a text ends")
    stop_ids: tuple[int, ...] = flag((), "tokens that end a text, besides the end of a document")
    micro_batch_size: int = flag(8, "prompts to continue at the same time", aliases=("batch-size",))
    recompute: bool = flag(False, "read the whole text for every token, and keep no keys and values of it")
    seed: int = flag(1234, "seed of the choices; each prompt's depend on it and on the prompt's number")

    def problems(self) -> list[str]:
        found = minimum_problems(self, 0, "out_seq_length", "num_samples") + minimum_problems(
            self, 1, "micro_batch_size"
        )
        found += range_problems(self, 0, 2**32, "seed")
        sources = {
            "--prompt": self.prompt is not None,
            "--sample-input-file": self.sample_input_file is not None,
            "--num-samples": self.num_samples > 0,
        }
        if sum(sources.values()) > 1:
            found.append(f"{' and '.join(name for name, there in sources.items() if there)}: choose one of them")
        if (self.num_samples > 0) != (self.genfile is not None):
            found.append("--num-samples and --genfile: one needs the other")
        if self.sample_output_file is not None and self.sample_input_file is None:
            found.append("--sample-output-file: it needs --sample-input-file")
        if "" in self.stop:
            found.append("--stop: a string is empty, and would end every text at once")
        return found

    @property
    def output(self) -> str | None:
        """The file that is written."""
        return self.genfile or self.sample_output_file or (self.sample_input_file and f"{self.sample_input_file}.out")

    def input_problems(self) -> list[str]:
        """Whether the files can be read and written."""
        found = []
        source, output = self.sample_input_file, self.output
        named = f"{'--genfile' if self.genfile else '--sample-output-file'} {output}"
        if source is not None and not Path(source).is_file():
            found.append(f"--sample-input-file {source}: there is no such file")
        if source is not None and output is not None and Path(source).resolve() == Path(output).resolve():
            found.append(f"{named}: it is the file of the prompts")
        if output is not None and (why := file_problem(output)):
            found.append(f"{named}: {why}")
        return found


@dataclasses.dataclass(frozen=True)
class Request(TrainedRequest):
    """Continue prompts with a trained GPT."""

    sampling: SamplingConfig
    generate: GenerateConfig


class Generator:
    """A trained model that continues what it is given as the flags say."""

    def __init__(self, request: Request, trained: Trained) -> None:
        self._asked, self._sampling = request.generate, request.sampling
        self.tokenizer, self.world = trained.tokenizer, trained.world
        self.model = SplitGPT(trained.model, trained.world.device)
        eod = end_of_document(trained.tokenizer)
        self.start = [] if eod is None else [eod]
        self._stop_ids = {*self.start, *self._asked.stop_ids}

    def prompt(self, ids: Sequence[int], number: int) -> Prompt:
        """The prompt of this number."""
        return Prompt(ids, self._asked.out_seq_length, self._sampling, self._stop_ids, (self._asked.seed, number))

    def prompt_of(self, text: str) -> Prompt:
        """The prompt that a text is. Raises ValueError, on every rank alike, where it is none for the model."""
        made = self.prompt(self.tokenizer.tokenize(text), 0)
        raise_joined(made.problems(self.model.context, self.model.vocab_size))
        return made

    def write(self, prompts: Sequence[Prompt], aloud: bool = False) -> list[Written]:
        """Their texts; `aloud` prints what comes on the first rank."""
        longest = max((len(prompt.ids) + prompt.length for prompt in prompts), default=1)
        rows = min(self._asked.micro_batch_size, max(1, len(prompts)))
        texts = Continuations(self.model, rows, longest, recompute=self._asked.recompute)
        show = print_piece if aloud and self.world.rank == 0 else silent
        return write(texts, self.tokenizer, prompts, self._asked.stop, show)

    def tell_end(self, written: Written) -> None:
        """Say where the model takes no more."""
        if written.finish == "context" and self.world.rank == 0:
            say(f"the text ends at the model's context of {self.model.context} tokens", sys.stderr)


def print_piece(text: str) -> None:
    """Print a piece of a text as it comes, letters that the terminal's encoding lacks by their numbers.

    They are no error: the rank that prints would raise it alone, in the midst of what all ranks do together.
    """
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding), end="", flush=True)


def silent(text: str) -> None:
    """Print nothing."""


def write_one(generator: Generator, text: str, prompt: Prompt) -> str:
    """Print a prompt, the text of which is given, and what is added to it; all of it is returned, on every rank."""
    if generator.world.rank == 0:
        print_piece(text)
    try:
        (written,) = generator.write([prompt], aloud=True)
    finally:
        if generator.world.rank == 0:
            print(flush=True)
    generator.tell_end(written)
    return text + written.text


def write_file(generator: Generator, asked: GenerateConfig) -> None:
    """Continue each prompt of a file, or write so many texts from nothing, into a file."""
    assert asked.output is not None
    if asked.sample_input_file is not None:
        given = read_prompts(asked.sample_input_file)
        ids = generator.tokenizer.tokenize_batch([one["prompt"] for one in given])
    else:
        if not generator.start:
            raise ValueError("--num-samples: the tokenizer has no end-of-document token for a text to begin behind")
        given, ids = [{}] * asked.num_samples, [generator.start] * asked.num_samples
    results = generator.write([generator.prompt(one, number) for number, one in enumerate(ids)])
    if generator.world.rank == 0:
        ends = [{"text": one.text, "length": one.tokens, "finish_reason": one.finish} for one in results]
        write_lines(asked.output, [one | end for one, end in zip(given, ends, strict=True)])
        say(f"{len(results)} texts are in {asked.output}")


def converse(generator: Generator) -> None:
    """Ask for prompts on the first rank until there are no more."""
    control = Control()
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # a line that is no UTF-8 is told like any other wrong prompt
    while (line := control.share(ask() if control.first else None)) is not None:
        # Only what all ranks raise alike; one alone may lack memory, say, and would leave the others waiting for it.
        try:
            prompt = generator.prompt_of(line)
        except ValueError as error:
            _tell(control, error)
            continue
        try:
            write_one(generator, line, prompt)
        except FloatingPointError as error:
            _tell(control, error)


def _tell(control: Control, error: Exception) -> None:
    if control.first:
        print_problems(error)


def ask() -> str | None:
    """A line of the user's, None at the end of the input."""
    while True:
        try:
            line = input("prompt (Ctrl-D ends)> ")
        except EOFError:
            print(flush=True)
            return None
        if line.strip():
            return line


def run(request: Request) -> str | None:
    """Do what is asked; the text of `--prompt`, on every rank."""
    asked = request.generate
    with opened(request, asked.seed) as trained:
        generator = Generator(request, trained)
        with mistakes():
            if asked.prompt is not None:
                return write_one(generator, asked.prompt, generator.prompt_of(asked.prompt))
            if asked.output is not None:
                write_file(generator, asked)
                return None
        converse(generator)
    return None


def main(argv: Sequence[str] | None = None) -> None:
    """Read the flags and write; the user's mistakes end it with exit code 2."""
    with user_errors():
        run(parse_request(Request, argv, prog="generate_text.py"))


if __name__ == "__main__":
    main()
