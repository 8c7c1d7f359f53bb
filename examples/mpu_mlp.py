"""A two-layer MLP cut over all ranks, equal to nn.Linear: torchrun --nproc-per-node 2 examples/mpu_mlp.py"""

import torch
import torch.distributed as dist
from torch import nn

from megatron import mpu

dist.init_process_group("gloo")
mpu.initialize_model_parallel(dist.get_world_size())  # every rank holds a part of one model
mpu.model_parallel_manual_seed(1234)

# Columns, then rows: the ranks meet once forwards (in `second`) and once backwards (in `first`).
first = mpu.ColumnParallelLinear(32, 128, gather_output=False, keep_master_weight_for_test=True)
second = mpu.RowParallelLinear(128, 32, input_is_parallel=True, keep_master_weight_for_test=True)
x = torch.randn(8, 32, requires_grad=True)  # the same on every rank
hidden, _ = first(x)  # [8, 128 / ranks]
output, _ = second(nn.functional.gelu(hidden))  # [8, 32]
output.square().mean().backward()

whole = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))
for linear, layer in ((whole[0], first), (whole[2], second)):
    linear.load_state_dict({"weight": layer.master_weight, "bias": torch.zeros(linear.out_features)})
y = x.detach().clone().requires_grad_()
expected = whole(y)
expected.square().mean().backward()

pairs = ((output, expected), (x.grad, y.grad))
difference = max((a - b).abs().max().item() / b.abs().max().item() for a, b in pairs)
if dist.get_rank() == 0:
    print(f"{dist.get_world_size()} ranks, largest relative difference from nn.Linear: {difference:.1e}")
dist.destroy_process_group()
