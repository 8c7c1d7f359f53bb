"""What is kept of a forward pass until its backward pass: the two ends of its graph, not the tensors that passed them.

Every output is handed on to another rank, so holding it here would cost memory for nothing. The graph keeps what
backward needs; nothing else does, so that an output which is a view of the input, or saved by the graph, comes to no
harm: storage is let go of, never emptied.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge


class _Entry(torch.autograd.Function):
    """Forward the identity, backward puts the gradient aside. It makes a node where the received tensor has none.

    A leaf that needs a gradient would do too, but is kept alive by its own graph, whether or not anything else needs
    it (with the saved inputs of a recomputed layer spread over the tensor ranks, nothing does).
    """

    @staticmethod
    def forward(ctx: Any, received: Tensor, anchor: Tensor, caught: list[Tensor]) -> Tensor:
        ctx.caught = caught
        return received.view_as(received)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        ctx.caught.extend(gradients)
        return None, None, None


class Held:
    """The ends of the graph of one forward pass: `enter`, then `leave`, then `backward`, each once."""

    def __init__(self) -> None:
        self._caught: list[Tensor] = []
        self._blank: Tensor | None = None  # of the input's shape, without memory of its own
        self._exit: GradientEdge | None = None

    def enter(self, received: Tensor) -> Tensor:
        """The input of the forward pass: `received` with a node of the graph, at which its gradient is caught."""
        self._blank = received.new_zeros(()).expand(received.shape)
        return _Entry.apply(received, received.new_empty(0).requires_grad_(), self._caught)

    def leave(self, output: Tensor) -> None:
        """Keep the place where the graph of `output` begins; the tensor itself may go as soon as it has been sent."""
        if output.requires_grad:
            # The view's node owns the graph. That of a Python function would not, up to PyTorch 2.9.
            self._exit = get_gradient_edge(output.view_as(output))

    def backward(self, gradient: Tensor | None) -> Tensor | None:
        """Run the backward pass; None for the gradient of a scalar loss. Returns the gradient of the input, if any.

        An output that depends on nothing here that needs a gradient has no backward pass, and its input's is zero.
        Raises RuntimeError for a loss of that kind.
        """
        if self._exit is not None:
            torch.autograd.backward(self._exit, gradient)
        elif gradient is None:
            raise RuntimeError("the loss that the last stage returned needs no gradient: there is no backward pass")
        self._exit = None
        if self._caught:
            return self._caught.pop()
        return None if self._blank is None else self._blank.contiguous()
