"""NVIDIA's apex, where it is installed: told from the unrelated package of the same name, and loaded piece by piece."""

import importlib
import importlib.util
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from megatron.base.complaints import raise_joined

_logger = logging.getLogger(__name__)

# A file that NVIDIA's apex has had in every version; the package that `pip install apex` fetches has nothing like it.
_MARK = Path("optimizers", "fused_adam.py")


def apex_kind() -> Literal["none", "nvidia", "unrelated"]:
    """Whose the package is that `import apex` would find; told by its files, nothing of it is run."""
    spec = importlib.util.find_spec("apex")
    if spec is None or spec.origin is None:  # a folder without __init__.py, such as a clone, is no package
        return "none"
    places = spec.submodule_search_locations or []
    return "nvidia" if any((Path(place) / _MARK).is_file() for place in places) else "unrelated"


def apex_problems() -> list[str]:
    """A sentence where the package called apex is not NVIDIA's."""
    if apex_kind() != "unrelated":
        return []
    return [
        "the installed package apex is not NVIDIA's but another of that name, which `pip install apex` fetches: remove "
        "it by `pip uninstall apex`, and where fused GPU kernels are wanted build https://github.com/NVIDIA/apex"
    ]


def refuse_unrelated_apex() -> None:
    """Raise `ConfigError` where the package called apex is not NVIDIA's."""
    raise_joined(apex_problems())


def load_from_apex(module: str, name: str, problem_of: Callable[[Any], str | None]) -> Any | None:
    """`apex.MODULE.NAME` where it works; None where there is no apex or, with a warning, where NVIDIA's does not work.

    Args:
        module, name: what is wanted.
        problem_of: tries what was found, and says what is wrong with it, None if nothing; it may raise anything.

    Raises `ConfigError` where the package called apex is not NVIDIA's.
    """
    refuse_unrelated_apex()
    if apex_kind() == "none":
        return None
    try:
        found = getattr(importlib.import_module(f"apex.{module}"), name)
        problem = problem_of(found)
    except Exception as error:  # whatever a package built for another PyTorch or device may raise
        problem = f"{type(error).__name__}: {error}"
    if problem is None:
        return found
    _logger.warning("apex.%s.%s does not work here (%s); PyTorch's own is used instead", module, name, problem)
    return None
