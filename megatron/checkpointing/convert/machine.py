"""A machine that runs the opcodes of a pickle on plain values, and can do nothing else.

What a pickle names or refers to is given by two functions of the caller. The memory and the time that it takes are
bounded by the length of the pickle, whatever it asks for.
"""

import io
import pickletools
from collections.abc import Callable, Iterable, Sequence
from typing import IO, Any

from megatron.checkpointing.untrusted import shown

_COPIED = (str, bytes, bytearray, tuple, list, dict)
_MOST_BITS = 512  # of a whole number
_MOST_NESTED = 100
# Bytes of a pickle, each of which can become 70 in memory (10,000 tensors take a million), and marks open at a time.
LONGEST_PICKLE, _MOST_MARKS = 2**24, 1000
_LONGEST_KEY = 16  # of a tuple
# What a small pickle may take; a large one this much for each of its bytes.
_LEAST_WORK, _WORK_OF_A_BYTE = 2 * 10**5, 16


class Inert:
    """Stands for an object that is not rebuilt.

    Attributes:
        name: what the pickle calls its class or function.
        values: the plain values that are kept of it; none, but for those that know better.
    """

    __slots__ = ("name", "values")
    values: dict[str, Any]

    def __init__(self, name: str) -> None:
        self.name = name
        self.values = {}

    def build(self, state: Any) -> None:
        """Nothing is kept of the attributes that the pickle gives it."""

    def __repr__(self) -> str:
        return f"<{shown(self.name)}, not rebuilt>"


class StandIn:
    """A function of ours that a pickle may call, and can change in no way."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)


class Machine:
    """Runs one pickle.

    Args:
        find: gives what a name stands for, by module and name: a `StandIn`, or anything that is not called.
        refer: gives the object for what the pickle refers to outside of itself.
    """

    def __init__(self, find: Callable[[str, str], Any], refer: Callable[[Any], Any]) -> None:
        self._find, self._refer = find, refer
        self._stack: list[Any] = []
        self._marked: list[list[Any]] = []  # what lies below each mark
        self._memo: dict[int, Any] = {}
        self._work, self._room = 0, _LEAST_WORK

    def run(self, stream: IO[bytes]) -> Any:
        """The value of the pickle at the stream's position. Fails with any exception where it is none, or too much."""
        begin = stream.tell()
        window = io.BytesIO(stream.read(LONGEST_PICKLE))  # an opcode can ask for as much as there is
        for opcode, argument, position in pickletools.genops(window):
            self._room = max(_LEAST_WORK, _WORK_OF_A_BYTE * (position or 0))
            if opcode.name in _STEPS:
                _STEPS[opcode.name](self, argument)
            elif opcode.name not in _IGNORED:
                raise ValueError(f"it has the opcode {opcode.name}")
        stream.seek(begin + window.tell())
        value = self.popped(1)[0]
        self._check_nesting(value)
        return value

    def push(self, value: Any) -> None:
        """Onto the stack."""
        if isinstance(value, int) and value.bit_length() > _MOST_BITS:
            raise ValueError(f"a number has {value.bit_length()} bits")
        self._stack.append(value)

    def push_tuple(self, count: int) -> None:
        """Of the last values."""
        self.push(tuple(self.popped(count)))

    def push_marked(self, kind: Callable[[list[Any]], Any]) -> None:
        """What `kind` makes of the values behind the last mark."""
        self.push(kind(self.popped_to_mark()))

    def push_named(self, module: Any, name: Any) -> None:
        """What a name stands for."""
        if not isinstance(module, str) or not isinstance(name, str):
            raise ValueError("a name is no text")
        self.push(self._find(module, name))

    def mark(self) -> None:
        """Remember how high the stack is."""
        if len(self._marked) >= _MOST_MARKS:
            raise ValueError("its values are nested too deep")
        self._marked.append(self._stack)
        self._stack = []

    def pop(self) -> None:
        """Take away the last value, or the mark behind which there is none."""
        if self._stack:
            self._stack.pop()
        else:
            self.popped_to_mark()

    def memoize(self, number: int | None) -> None:
        """Remember the last value as `number`, by default the next one."""
        self._memo[len(self._memo) if number is None else number] = self._stack[-1]

    def recall(self, number: int | None) -> None:
        """Push what is remembered as `number`, by default the last value."""
        self._stack.append(self._stack[-1] if number is None else self._memo[number])

    def call(self, function: Any, args: Any) -> None:
        """Push what `function` gives, if it is one of ours."""
        if not isinstance(args, tuple | list):
            raise ValueError("what a function is called with is no tuple")
        self._charge(args)
        name = getattr(function, "name", type(function).__name__)
        self.push(function(*args) if isinstance(function, StandIn) else Inert(name))

    def call_last(self, with_names: bool = False) -> None:
        """Call with the last value as arguments; those that have names are left out."""
        function, args, *_ = self.popped(3 if with_names else 2)
        self.call(function, args)

    def call_marked(self, named: str | None) -> None:
        """Call with the values behind the last mark; the first of them is the function if that is not `named`."""
        args = self.popped_to_mark()
        self.call(args.pop(0) if named is None else self._find(*named.split(" ", 1)), args)

    def refer(self, identity: Any) -> None:
        """Push what is outside."""
        self.push(self._refer(identity))

    def build(self) -> None:
        """Give the second to last value its attributes, the last one; those of a dict are left out."""
        target, state = self._stack[-2], self.popped(1)[0]
        self._charge(state if isinstance(state, tuple) else [state])
        if hasattr(type(target), "build"):
            target.build(state)
        elif not isinstance(target, dict):
            raise ValueError(f"it tries to change a {type(target).__name__}")

    def extend(self, values: list[Any]) -> None:
        """Append to the list that is last."""
        target = self._stack[-1]
        if isinstance(target, list):
            target.extend(values)
        elif not isinstance(target, Inert):
            raise ValueError(f"it appends to a {type(target).__name__}")

    def update(self, values: list[Any]) -> None:
        """Set keys and values, in turn, of the dict that is last."""
        target = self._stack[-1]
        if isinstance(target, dict):
            target.update(plain_dict(values))
        elif not isinstance(target, Inert):
            raise ValueError(f"it sets an item of a {type(target).__name__}")

    def popped_to_mark(self) -> list[Any]:
        """The values behind the last mark, taken off the stack."""
        items, self._stack = self._stack, self._marked.pop()
        return items

    def popped(self, count: int) -> list[Any]:
        """The last values, taken off the stack."""
        if len(self._stack) < count:
            raise ValueError("its stack is empty")
        items = self._stack[len(self._stack) - count :]
        del self._stack[len(self._stack) - count :]
        return items

    def _charge(self, values: Iterable[Any]) -> None:
        """Count what it may cost to copy `values`, and refuse more than there is room for."""
        self._work += _cost(values)
        if self._work > self._room:
            raise ValueError("it copies the same again and again")

    def _check_nesting(self, value: Any) -> None:
        """Refuse what takes far longer to walk through than to read: it holds the same again and again, or itself."""
        walked = 0
        left: list[tuple[Any, int]] = [([value], 0)]
        while left:
            holder, depth = left.pop()
            inner = _inner(holder)
            walked += 1 + _cost(inner)
            if walked > self._room or depth > _MOST_NESTED:
                raise ValueError("its values hold one another again and again")
            left += [(entry, depth + 1) for entry in inner if isinstance(entry, list | tuple | dict | Inert)]


def _cost(values: Iterable[Any]) -> int:
    """Of copying them."""
    return sum(1 + (len(value) if isinstance(value, _COPIED) else 0) for value in values)


def _inner(holder: Any) -> Sequence[Any]:
    """What a list, tuple, dict or object holds."""
    if isinstance(holder, Inert):
        holder = holder.values
    return [*holder, *holder.values()] if isinstance(holder, dict) else holder


def plain_dict(items: Sequence[Any]) -> dict[Any, Any]:
    """Of keys and values in turn."""
    return {_key(key): value for key, value in zip(items[::2], items[1::2], strict=True)}


def _key(value: Any) -> Any:
    """A key; one that is no plain value, and could take long to compare, is not rebuilt."""
    plain = (str, bytes, int, float, type(None))
    short = isinstance(value, tuple) and len(value) <= _LONGEST_KEY and all(isinstance(entry, plain) for entry in value)
    return value if isinstance(value, plain) or short else Inert("a key")


Step = Callable[[Machine, Any], object]
_PUSHES_ARGUMENT = (
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
    *("SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BYTEARRAY8"),
)
_STEPS: dict[str, Step] = {
    **dict.fromkeys(_PUSHES_ARGUMENT, Machine.push),
    "NONE": lambda machine, _: machine.push(None),
    "NEWTRUE": lambda machine, _: machine.push(True),
    "NEWFALSE": lambda machine, _: machine.push(False),
    "EMPTY_LIST": lambda machine, _: machine.push([]),
    "EMPTY_DICT": lambda machine, _: machine.push({}),
    "EMPTY_TUPLE": lambda machine, _: machine.push(()),
    "EMPTY_SET": lambda machine, _: machine.push(Inert("set")),
    "TUPLE1": lambda machine, _: machine.push_tuple(1),
    "TUPLE2": lambda machine, _: machine.push_tuple(2),
    "TUPLE3": lambda machine, _: machine.push_tuple(3),
    "TUPLE": lambda machine, _: machine.push_marked(tuple),
    "LIST": lambda machine, _: machine.push_marked(list),
    "DICT": lambda machine, _: machine.push_marked(plain_dict),
    "FROZENSET": lambda machine, _: machine.push_marked(lambda _: Inert("frozenset")),
    "APPEND": lambda machine, _: machine.extend(machine.popped(1)),
    "APPENDS": lambda machine, _: machine.extend(machine.popped_to_mark()),
    "ADDITEMS": lambda machine, _: machine.extend(machine.popped_to_mark()),
    "SETITEM": lambda machine, _: machine.update(machine.popped(2)),
    "SETITEMS": lambda machine, _: machine.update(machine.popped_to_mark()),
    "MARK": lambda machine, _: machine.mark(),
    "POP": lambda machine, _: machine.pop(),
    "POP_MARK": lambda machine, _: machine.popped_to_mark(),
    "DUP": lambda machine, _: machine.recall(None),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), Machine.recall),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"), Machine.memoize),
    "GLOBAL": lambda machine, names: machine.push_named(*names.split(" ", 1)),
    "STACK_GLOBAL": lambda machine, _: machine.push_named(*machine.popped(2)),
    "REDUCE": lambda machine, _: machine.call_last(),
    "NEWOBJ": lambda machine, _: machine.call_last(),
    "NEWOBJ_EX": lambda machine, _: machine.call_last(with_names=True),
    "INST": Machine.call_marked,
    "OBJ": Machine.call_marked,
    "BUILD": lambda machine, _: machine.build(),
    "PERSID": Machine.refer,
    "BINPERSID": lambda machine, _: machine.refer(machine.popped(1)[0]),
}
_IGNORED = ("PROTO", "FRAME", "STOP")
