"""The body of `POST /v1/completions`, in the shape of the OpenAI API: read, checked, and answered."""

import dataclasses
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from megatron.tasks.generation import Prompt
from megatron.tasks.sampling import SamplingConfig
from megatron.tasks.trained import end_of_document
from megatron.tokenizer import Tokenizer

_TAKEN = {"model", "prompt", "max_tokens", "temperature", "top_p", "top_k", "n", "stop", "stop_token_ids", "seed"}
_TAKEN |= {"stream", "user"}  # the last is not looked at
# What the API has and this server has not; each with the value that asks for nothing.
_REFUSED: Mapping[str, Any] = {
    "best_of": 1,
    "echo": False,
    "frequency_penalty": 0,
    "logit_bias": {},
    "logprobs": None,
    "presence_penalty": 0,
    "stream_options": None,
    "suffix": None,
}
_MOST_STOPS = 16


class RequestError(Exception):
    """Why a request is refused: the status of the answer, a sentence, and the field that it is about."""

    def __init__(self, status: int, message: str, field: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.field, self.code = status, field, code

    def body(self) -> dict[str, Any]:
        """The JSON of the answer."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.field, "code": self.code}}


@dataclasses.dataclass(frozen=True)
class Served:
    """What a server has: the model's name and tokenizer, its context, and how much one request may ask for."""

    name: str
    tokenizer: Tokenizer
    context: int
    max_tokens: int
    max_choices: int


@dataclasses.dataclass(frozen=True)
class Completion:
    """A request: the prompts to continue, one for each choice of the answer, and how."""

    prompts: Sequence[Prompt]
    prompt_tokens: int  # of the request; each prompt once
    stop: tuple[str, ...]
    stream: bool
    id: str = dataclasses.field(default_factory=lambda: f"cmpl-{secrets.token_hex(12)}")
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))

    def answer(self, model: str, choices: Sequence[Mapping[str, Any]], usage: int | None = None) -> dict[str, Any]:
        """The JSON of an answer or of a piece of one; `usage` is the number of tokens that were added."""
        shape = {"id": self.id, "object": "text_completion", "created": self.created, "model": model}
        if usage is None:
            return shape | {"choices": list(choices)}
        counts = {"prompt_tokens": self.prompt_tokens, "completion_tokens": usage}
        return shape | {"choices": list(choices), "usage": counts | {"total_tokens": self.prompt_tokens + usage}}


def choice(index: int, text: str, finish: str | None) -> dict[str, Any]:
    """The JSON of one choice; a text that the model's context ended is as long as it could be: "length"."""
    return {
        "index": index,
        "text": text,
        "logprobs": None,
        "finish_reason": "length" if finish == "context" else finish,
    }


def read_completion(body: Any, served: Served) -> Completion:
    """The request that a parsed JSON body makes. Raises `RequestError` for whatever cannot be done."""
    if not isinstance(body, dict):
        raise RequestError(400, "the body must be a JSON object")
    _check_fields(body, served)
    fields = {name: value for name, value in body.items() if value is not None}
    prompts, n = _prompts(fields.get("prompt"), served), _whole(fields, "n", 1, 1, served.max_choices)
    if len(prompts) * n > served.max_choices:
        message = f"{len(prompts)} prompts, {n} times each: this server writes {served.max_choices} texts a request"
        raise RequestError(400, message, "n")
    length = _whole(fields, "max_tokens", min(16, served.max_tokens), 1, served.max_tokens)
    top_p = _number(fields, "top_p", 1.0, 1.0)
    sampling = SamplingConfig(
        temperature=_number(fields, "temperature", 1.0, 1e6),
        greedy=top_p == 0,  # in the API it leaves the likeliest token alone; the flag of that name means all by it
        top_p=top_p,
        top_k=_whole(fields, "top_k", 0, 0, 2**31),
    )
    seed = _whole(fields, "seed", secrets.randbits(62), -(2**63), 2**63 - 1)
    stop_ids = _stop_ids(fields, served)
    made = [
        Prompt(ids, length, sampling, stop_ids, (seed, at))
        for at, ids in enumerate(p for p in prompts for _ in range(n))
    ]
    return Completion(made, sum(map(len, prompts)), _stops(fields), _switch(fields, "stream"))


def _check_fields(body: Mapping[str, Any], served: Served) -> None:
    for name, value in body.items():
        if name in _REFUSED and value not in (None, _REFUSED[name]):
            raise RequestError(400, f"{name}: this server does not have it", name)
        if name not in _TAKEN and name not in _REFUSED:
            raise RequestError(
                400, f"{name!r} is no field of a completion; there are {', '.join(sorted(_TAKEN))}", name
            )
    model = body.get("model")
    if model not in (None, served.name):
        raise RequestError(404, f"model {model!r}: this server has {served.name!r}", "model", "model_not_found")


def _prompts(given: Any, served: Served) -> list[list[int]]:
    """The ids of each prompt: of a text, texts, ids, or lists of ids."""
    if given is None:
        raise RequestError(400, "prompt: it is missing", "prompt")
    if isinstance(given, str) or _is_ids(given):
        given = [given]
    if not isinstance(given, list) or not given or not all(isinstance(one, str) or _is_ids(one) for one in given):
        raise RequestError(400, "prompt: it must be a text, a list of texts, of ids, or of lists of ids", "prompt")
    if len(given) > served.max_choices:
        raise RequestError(400, f"prompt: there are {len(given)}, and {served.max_choices} are accepted", "prompt")
    try:
        found = [served.tokenizer.tokenize(one) if isinstance(one, str) else list(one) for one in given]
    except ValueError as error:
        raise RequestError(400, f"prompt: {error}", "prompt") from None
    for ids in found:
        problems = Prompt(ids, 1).problems(served.context, served.tokenizer.vocab_size)
        if problems:
            code = "context_length_exceeded" if len(ids) > served.context else None
            raise RequestError(400, f"prompt: {'; '.join(problems)}", "prompt", code)
    return found


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(i) is int for i in value)


def _stops(fields: Mapping[str, Any]) -> tuple[str, ...]:
    given = fields.get("stop", [])
    words = [given] if isinstance(given, str) else given
    if not isinstance(words, list) or len(words) > _MOST_STOPS or not all(isinstance(w, str) and w for w in words):
        raise RequestError(400, f"stop: it must be a text or up to {_MOST_STOPS} of them, none empty", "stop")
    return tuple(words)


def _stop_ids(fields: Mapping[str, Any], served: Served) -> list[int]:
    given, size = fields.get("stop_token_ids", []), served.tokenizer.vocab_size
    if not isinstance(given, list) or not all(type(i) is int and 0 <= i < size for i in given):
        message = f"stop_token_ids {given!r:.80}: it must be a list of ids of the vocabulary, 0 to {size - 1}"
        raise RequestError(400, message, "stop_token_ids")
    eod = end_of_document(served.tokenizer)
    return sorted({*given} if eod is None else {*given, eod})


def _whole(fields: Mapping[str, Any], name: str, default: int, low: int, high: int) -> int:
    value = fields.get(name, default)
    if type(value) is not int or not low <= value <= high:
        raise RequestError(400, f"{name} {value!r:.80}: it must be a whole number from {low} to {high}", name)
    return value


def _number(fields: Mapping[str, Any], name: str, default: float, high: float) -> float:
    value = fields.get(name, default)
    if type(value) not in (int, float) or not 0 <= value <= high:
        raise RequestError(400, f"{name} {value!r:.80}: it must be a number from 0 to {high:g}", name)
    return float(value)


def _switch(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name, False)
    if type(value) is not bool:
        raise RequestError(400, f"{name} {value!r:.80}: it must be true or false", name)
    return value
