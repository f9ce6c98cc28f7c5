"""Chart of the results: env-steps/s by way and number of envs, a row for each env."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from side_by_side.contest import Measurement
from side_by_side.entrant import ALONE, ASYNC, IPC, PRIVATE, PRIVATE_WIRE, SYNC, TCP, sized
from side_by_side.report import times

SUFFIXES = (".png", ".svg")
# Okabe and Ito's colours, which most kinds of colour blindness tell apart.
ENVHUB, GYMNASIUM, RIVAL, YARDSTICK = "#0072B2", "#E69F00", "#009E73", "#999999"
OWN = dict.fromkeys((PRIVATE, PRIVATE_WIRE, IPC, TCP), ENVHUB)
COLOURS = OWN | {ASYNC: GYMNASIUM, SYNC: GYMNASIUM, ALONE: YARDSTICK}
LEGEND = {"EnvHub": ENVHUB, "Gymnasium": GYMNASIUM, "other packages": RIVAL, "one env, one core": YARDSTICK}
CHART_WIDTH, BAR_HEIGHT, ROW_MARGIN, LABEL_WIDTH = 3.6, 0.26, 0.9, 1.6  # inches
CAPTION_HEIGHT = 0.9
ROOM = 0.6  # of the length of the longest bar, to the right of it, for the numbers

Results = Mapping[str, Sequence[Mapping[str, Measurement]]]  # by env, for each number of envs the results by way


def check(path: Path) -> None:
    """Find out before anything is measured whether it can be drawn.

    Raises:
        ValueError: the name says no format that is known, or the folder is not there.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"--plot takes a file that ends in {' or '.join(SUFFIXES)}, got {path}")
    if not path.parent.is_dir():
        raise ValueError(f"--plot: there is no folder {path.parent}")


def draw(path: Path, results: Results, caption: str) -> None:
    """Draw all results into a file, whose name says the format and which is replaced, with ``caption`` below."""
    import matplotlib
    from matplotlib.figure import Figure

    columns = max(len(by_size) for by_size in results.values())
    bars = {env: max(len(_stepping(by_way)) for by_way in by_size) for env, by_size in results.items()}
    heights = [ROW_MARGIN + BAR_HEIGHT * number for number in bars.values()]
    width, height = LABEL_WIDTH + CHART_WIDTH * columns, sum(heights) + CAPTION_HEIGHT
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.get_layout_engine().set(rect=(0, CAPTION_HEIGHT / height, 1, 1 - CAPTION_HEIGHT / height))  # type: ignore[union-attr, call-arg]
    grid = figure.subplots(len(results), columns, squeeze=False, height_ratios=heights)
    for row, (env, by_size) in zip(grid, results.items(), strict=True):
        limits = _limits(by_size)
        for axes, by_way in zip(row, by_size, strict=False):
            _chart(axes, env, by_way, limits)
        for axes in row[len(by_size) :]:
            axes.set_axis_off()
    _legend(figure, caption, height)
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # letters, which are smaller than their outlines
        figure.savefig(path, dpi=130)


def _stepping(by_way: Mapping[str, Measurement]) -> dict[str, Measurement]:
    return {way: result for way, result in by_way.items() if result.processes is not None}


def _limits(by_size: Sequence[Mapping[str, Measurement]]) -> tuple[float, float]:
    summaries = [result.summary for by_way in by_size for result in _stepping(by_way).values()]
    all_rates = [rate for summary in summaries for rate in summary.rates]
    least, most = min(all_rates) / 2, max(all_rates)
    return least, most * (most / least) ** ROOM  # on a logarithmic scale


def _chart(axes: Any, env: str, by_way: Mapping[str, Measurement], limits: tuple[float, float]) -> None:
    stepping = _stepping(by_way)
    summaries = [result.summary for result in stepping.values()]
    rates = [summary.rate for summary in summaries]
    spread = list(zip(*((one.rate - min(one.rates), max(one.rates) - one.rate) for one in summaries), strict=True))
    colours = [COLOURS.get(way, RIVAL) for way in stepping]
    axes.barh(list(stepping), rates, xerr=spread, color=colours, ecolor="#333333", capsize=2, height=0.75)
    asynchronous = by_way[ASYNC].summary.rate if ASYNC in by_way else None
    for place, summary in enumerate(summaries):
        ratio = f"  {times(summary.rate / asynchronous)}" if asynchronous and summary.rate != asynchronous else ""
        number = axes.text(max(summary.rates) * 1.15, place, f"{summary.rate:,.0f}{ratio}", va="center", fontsize=8)
        number.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.5})
    if asynchronous:
        axes.axvline(asynchronous, color=GYMNASIUM, linewidth=0.8, linestyle="--", zorder=0)
    num_envs = next(iter(stepping.values())).num_envs
    axes.set_title(f"{env}, {sized(num_envs)}", fontsize=10)
    axes.set_xscale("log")
    axes.set_xlim(*limits)
    axes.invert_yaxis()
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def _legend(figure: Any, caption: str, height: float) -> None:
    patches: Any = importlib.import_module("matplotlib.patches")
    figure.legend(
        handles=[patches.Patch(color=colour, label=label) for label, colour in LEGEND.items()],
        loc="lower center",
        bbox_to_anchor=(0.5, 0.55 / height),
        ncols=len(LEGEND),
        fontsize=9,
        frameon=False,
    )
    text = (
        "env-steps/s on a logarithmic scale: the median of interleaved repeats, and as whiskers the slowest and the "
        f"fastest of them. x: to {ASYNC} (dashed) in the same run. EnvPool steps C++ envs of its own.\n{caption}"
    )
    figure.text(0.5, 0.1 / height, text, ha="center", va="bottom", fontsize=8, color="#444444", wrap=True)
