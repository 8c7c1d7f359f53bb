"""What the first rank, which hears the user, tells the other ranks to do."""

import datetime
import json
from typing import Any

import torch
import torch.distributed as dist

# A user may say nothing for a while. A rank that ends is noticed at once, whatever this is.
_PATIENCE = datetime.timedelta(days=365)


class Control:
    """Hands plain values from the first rank of the world to all. Making one is collective.

    They go by gloo on every device, so that ranks which wait for the user keep no accelerator busy, and no collective
    of the model's groups times out meanwhile.
    """

    def __init__(self) -> None:
        self.first = dist.get_rank() == 0
        self._group = dist.new_group(backend="gloo", timeout=_PATIENCE) if dist.get_world_size() > 1 else None

    def share(self, value: Any = None) -> Any:
        """The first rank's `value`, as JSON gives it back, on every rank. Two broadcasts."""
        words = json.dumps(value).encode()
        if self._group is None:
            return json.loads(words)
        size = torch.tensor([len(words)])
        dist.broadcast(size, group=self._group, group_src=0)
        sent = torch.frombuffer(bytearray(words), dtype=torch.uint8) if self.first else None
        held = torch.empty(int(size), dtype=torch.uint8) if sent is None else sent
        dist.broadcast(held, group=self._group, group_src=0)
        return json.loads(held.numpy().tobytes())
