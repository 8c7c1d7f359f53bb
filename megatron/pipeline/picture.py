"""A timeline drawn as a picture. The only file that needs `matplotlib`, which is optional."""

import importlib
from typing import Any

from megatron.pipeline.grid import label
from megatron.pipeline.simulate import Timeline

_INSTALL = "--png needs the package matplotlib: pip install matplotlib"
# Light to dark over the chunks.
_COLOURS = {"forward": "Blues", "backward": "Oranges"}
_LABELLED = 800  # passes; more of them leave no room for text


def _figure(width: float, height: float) -> tuple[Any, Any, Any]:
    """A figure that needs no display, its axes, and the colour maps."""
    try:
        figure_module = importlib.import_module("matplotlib.figure")
        colormaps = importlib.import_module("matplotlib").colormaps
    except ImportError:
        raise ValueError(_INSTALL) from None
    figure = figure_module.Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot(), colormaps


def draw(timeline: Timeline, path: str, title: str) -> None:
    """Write the timeline to the PNG file `path`. Raises ValueError where matplotlib is absent, OSError from writing."""
    schedule = timeline.schedule
    passes = max(map(len, schedule.actions))
    figure, axes, colormaps = _figure(min(40, max(8, passes * 0.4)), 1.2 + 0.35 * schedule.pipeline_size)
    for rank, actions in enumerate(schedule.actions):
        for action, start, end in zip(actions, timeline.starts[rank], timeline.ends[rank], strict=True):
            shade = 0.25 + 0.4 * action.chunk / max(1, schedule.virtual_size - 1)
            colour = colormaps[_COLOURS[action.kind]](shade)
            axes.barh(rank, float(end - start), left=float(start), height=0.9, color=colour, edgecolor="white")
            if passes * schedule.pipeline_size <= _LABELLED:
                middle = float(start + end) / 2
                axes.text(middle, rank, label(action, schedule.virtual_size), ha="center", va="center", fontsize=6)
    axes.set(title=title, xlabel="time", xlim=(0, float(timeline.makespan)))
    axes.set(ylabel="pipeline rank", yticks=range(schedule.pipeline_size))
    axes.invert_yaxis()
    figure.savefig(path, format="png", dpi=150)
