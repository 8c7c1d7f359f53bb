"""A timeline drawn as a picture. The only file that imports `matplotlib`, which is optional."""

import importlib
from fractions import Fraction
from typing import Any

from megatron.pipeline.grid import label
from megatron.pipeline.simulate import Timeline

# Light to dark over the chunks.
_COLOURS = {"forward": "Blues", "backward": "Oranges"}
_LABELLED = 800  # passes of all ranks; more of them leave no room for text
_EDGED = 1500  # passes of a rank; more of them are narrower than the line between them


def new_figure(width: float, height: float, asked: str = "--png") -> tuple[Any, Any, Any]:
    """A figure of so many inches that needs no display, its axes, and the colour maps.

    Raises ValueError with what was `asked` for where matplotlib is absent.
    """
    try:
        figure_module = importlib.import_module("matplotlib.figure")
        colormaps = importlib.import_module("matplotlib").colormaps
    except ImportError:
        raise ValueError(f"{asked} needs the package matplotlib: pip install matplotlib") from None
    figure = figure_module.Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot(), colormaps


def draw(timeline: Timeline, path: str, title: str, unit: Fraction) -> None:
    """Write the timeline to the PNG file `path`; `unit` is what a time of 1 in it stands for.

    Raises ValueError where matplotlib is absent, OSError from writing.
    """
    schedule = timeline.schedule
    passes = max(map(len, schedule.actions))
    figure, axes, colormaps = new_figure(min(40, max(8, passes * 0.4)), 1.2 + 0.35 * schedule.pipeline_size)
    shades = [0.25 + 0.4 * chunk / max(1, schedule.virtual_size - 1) for chunk in range(schedule.virtual_size)]
    palette = {kind: [colormaps[name](shade) for shade in shades] for kind, name in _COLOURS.items()}
    edge = 1.0 if passes <= _EDGED else 0.0
    one = float(unit)
    for rank, actions in enumerate(schedule.actions):
        starts, ends = ([float(time) * one for time in times[rank]] for times in (timeline.starts, timeline.ends))
        bars = [(start, end - start) for start, end in zip(starts, ends, strict=True)]
        colours = [palette[action.kind][action.chunk] for action in actions]
        # One collection for all passes of a rank: hundreds of thousands of artists take minutes.
        axes.broken_barh(bars, (rank - 0.45, 0.9), facecolors=colours, edgecolors="white", linewidth=edge)
        if passes * schedule.pipeline_size <= _LABELLED:
            for action, start, (_, width) in zip(actions, starts, bars, strict=True):
                text = label(action, schedule.virtual_size)
                axes.text(start + width / 2, rank, text, ha="center", va="center", fontsize=6)
    axes.set(title=title, xlabel="time", xlim=(0, float(timeline.makespan) * one))
    axes.set(ylabel="pipeline rank", yticks=range(schedule.pipeline_size), ylim=(-0.6, schedule.pipeline_size - 0.4))
    axes.invert_yaxis()
    figure.savefig(path, format="png", dpi=150)
