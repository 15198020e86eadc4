"""A picture of loss curves."""

import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Any


def draw_losses(path: str | os.PathLike, rows: Sequence[Mapping[str, Any]]) -> None:
    """Draws the training loss of every run as a line and the held-out losses as dots, and writes a PNG.

    A later run is drawn thinner and dashed, so that the earlier one shows through where the two are equal.

    Args:
      path: the file.
      rows: as in a metrics file, see `dsv4_fusions.training.metrics`; loss in nats a byte.

    Raises:
      OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure  # not pyplot: it would look for a screen

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    styles = ({"linewidth": 4, "alpha": 0.4}, {"linewidth": 1.5, "linestyle": "--"})
    for (name, run), style in zip(itertools.groupby(rows, lambda row: row["run"]), itertools.cycle(styles)):
        run = list(run)
        (line,) = axes.plot(*_points(run, "loss"), label=name, **style)
        steps, losses = _points(run, "held_out_loss")
        if losses:
            axes.plot(
                steps, losses, "o", color=line.get_color(), label=f"{name}, held out", markersize=style["linewidth"] + 4
            )
    axes.set(xlabel="step", ylabel="loss (nats a byte)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, format="png", dpi=150)


def _points(rows, column):
    points = [(int(row["step"]), float(row[column])) for row in rows if row[column] not in (None, "")]
    return [step for step, _ in points], [value for _, value in points]
