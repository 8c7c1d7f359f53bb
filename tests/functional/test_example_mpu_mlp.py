"""The model builder's example: started by torchrun, it equals nn.Linear."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_example_equals_nn_linear(repository: Path, ranks: int) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    path = os.pathsep.join(filter(None, [str(repository), os.environ.get("PYTHONPATH")]))
    result = subprocess.run(
        [*launch, str(repository / "examples" / "mpu_mlp.py")],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert result.returncode == 0, result.stderr
    found = re.fullmatch(rf"{ranks} ranks, largest relative difference from nn.Linear: (\S+)\n", result.stdout)
    assert found, result.stdout
    assert float(found[1]) <= 1e-6
