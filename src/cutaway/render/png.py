"""The plots of a document as one PNG, drawn by matplotlib (extra `plot`): one panel under another.

Read next: `document.py`.
"""

from __future__ import annotations

import io
import math
from typing import Any

from cutaway.errors import RequestError
from cutaway.render import check_format
from cutaway.render.document import BarPlot, Document, HeatMap, LinePlot
from cutaway.render.numbers import Axis, number, span, whole_numbers
from cutaway.render.palette import SERIES_LIGHT
from cutaway.render.plain import shorten, visible

__all__ = ["png"]

_MARKERS = "os^Dv.P"
_CJK = ("Noto Sans CJK SC", "Noto Sans CJK JP", "WenQuanYi Zen Hei", "Microsoft YaHei", "PingFang SC", "SimHei")


def _unit(title: str, unit: str) -> str:
    return f"{title} ({unit})" if unit else title


def _numbers(values: Any) -> list[float]:
    return [math.nan if v is None else float(v) for v in values]


def _line(axes: Any, plot: LinePlot, formatter: Any) -> None:
    for k, series in enumerate(plot.series):
        marker = _MARKERS[k % 7] if len(series.x) <= 80 else ""
        colour = SERIES_LIGHT[k % 7]
        axes.plot(series.x, _numbers(series.y), marker=marker, color=colour, label=series.name, linewidth=1.8)
    for reference in plot.references:
        axes.axhline(reference.value, linestyle="--", color="#444444", linewidth=1, label=reference.label)
    axes.set_xscale("log" if plot.x_log else "linear")
    positive = any(y is not None and y > 0 for series in plot.series for y in series.y)
    axes.set_yscale("log" if plot.y_log and positive else "linear")
    axes.set_xlabel(_unit(plot.x_title, plot.x_unit))
    axes.set_ylabel(_unit(plot.y_title, plot.y_unit))
    xs = [x for series in plot.series for x in series.x]
    ys = [y for series in plot.series for y in series.y] + [reference.value for reference in plot.references]
    y_log = axes.get_yscale() == "log"
    across = Axis.over(*span(xs, plot.x_log), plot.x_log, 8, plot.x_format, whole=whole_numbers(xs))
    up = Axis.over(*span(ys, y_log, plot.y_from_zero), y_log, 5, plot.y_format)
    _ticks(axes.xaxis, across, plot.x_format, formatter)
    _ticks(axes.yaxis, up, plot.y_format, formatter)
    axes.set_ylim(up.low, up.high)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    if len(plot.series) > 1 or plot.references:
        axes.legend(frameon=False, fontsize=9)


def _ticks(axis: Any, own: Axis, format: str, formatter: Any) -> None:
    """The ticks of the page's axes: round ones, in the unit that is shown."""
    axis.set_ticks(own.ticks)
    axis.set_ticks([], minor=True)
    axis.set_major_formatter(formatter(lambda value, _: number(value, format)))


def _bars(axes: Any, plot: BarPlot, formatter: Any) -> None:
    count, places = len(plot.series), range(len(plot.categories))
    starts = [0.0] * len(plot.categories)
    thick = 0.7 if plot.stacked else 0.8 / max(count, 1)
    for k, series in enumerate(plot.series):
        values = _numbers(series.y)
        ys = [i if plot.stacked else i + (k - (count - 1) / 2) * thick for i in places]
        left = starts if plot.stacked else 0
        bars = axes.barh(ys, values, height=thick, left=left, color=SERIES_LIGHT[k % 7], label=series.name)
        if plot.stacked:
            starts = [a + (0.0 if math.isnan(b) else b) for a, b in zip(starts, values, strict=True)]
        else:
            axes.bar_label(bars, labels=[number(v, plot.format) for v in series.y], padding=3, fontsize=8)
    for reference in plot.references:
        axes.axvline(reference.value, linestyle="--", color="#444444", linewidth=1, label=reference.label)
    axes.set_yticks(list(places), [shorten(visible(c), 40) for c in plot.categories])
    axes.invert_yaxis()
    axes.set_xscale("log" if plot.log else "linear")
    ends = starts if plot.stacked else [v for series in plot.series for v in series.y]
    low, high = span([*ends, *(reference.value for reference in plot.references)], plot.log, zero=True)
    along = Axis.over(low / 10 if plot.log else low, high, plot.log, 6, plot.format)
    _ticks(axes.xaxis, along, plot.format, formatter)
    axes.set_xlim(along.low, along.high * 3 if plot.log else along.high + 0.12 * (along.high - along.low))
    axes.set_xlabel(_unit(plot.value_title, plot.unit))
    if count > 1 or plot.references:
        axes.legend(frameon=False, fontsize=9)


def _heat(figure: Any, axes: Any, plot: HeatMap, formatter: Any) -> None:
    from matplotlib.colors import LogNorm, Normalize

    first = 1 if plot.can_hide_first and len(plot.columns) > 1 else 0
    values = [_numbers(row[first:]) for row in plot.values] or [[math.nan]]
    low, high = span([v for row in values for v in row], plot.scale == "log")
    low, high = plot.low if plot.low is not None else low, plot.high if plot.high is not None else high
    norm = (LogNorm if plot.scale == "log" else Normalize)(vmin=low, vmax=high)
    image = axes.imshow(values, aspect="auto", cmap="cividis", norm=norm, interpolation="nearest")
    columns = plot.columns[first:]
    axes.set_xticks(
        range(len(columns)), [shorten(visible(c), 14) for c in columns], rotation=60, ha="right", fontsize=7
    )
    axes.set_yticks(range(len(plot.rows)), [shorten(visible(r), 18) for r in plot.rows], fontsize=7)
    axes.set_xlabel(plot.column_title + (f" (without {visible(plot.columns[0])})" if first else ""))
    axes.set_ylabel(plot.row_title)
    bar = figure.colorbar(image, ax=axes, label=plot.value_title)
    _ticks(bar.ax.yaxis, Axis.over(low, high, plot.scale == "log", 5, plot.format), plot.format, formatter)
    bar.ax.set_ylim(low, high)


def _bar_count(plot: BarPlot) -> int:
    return len(plot.categories) * (1 if plot.stacked else len(plot.series))


def png(document: Document) -> bytes:
    """All plots of the document, one under another, as the bytes of a PNG file.

    Raises: RequestError where the document has no plot, or matplotlib is not installed.
    """
    plots = [b for b in document.blocks if isinstance(b, (LinePlot, BarPlot, HeatMap))]
    if not plots:
        raise RequestError("this result has no plot, so it has no PNG", expected=".html, .md or .json", param="output")
    check_format("png")
    import matplotlib
    from matplotlib import font_manager
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    heights = [
        4.0 if isinstance(p, LinePlot) else 1.4 + 0.3 * (len(p.rows) if isinstance(p, HeatMap) else _bar_count(p))
        for p in plots
    ]
    known = {font.name for font in font_manager.fontManager.ttflist}
    fonts = ["DejaVu Sans", *(name for name in _CJK if name in known)]
    with matplotlib.rc_context(
        {"font.family": fonts, "axes.spines.top": False, "axes.spines.right": False, "text.parse_math": False}
    ):
        figure = Figure(figsize=(8, sum(heights) + 0.9 * len(plots)), dpi=150, layout="constrained")
        canvas = FigureCanvasAgg(figure)
        rows = figure.subplots(len(plots), 1, squeeze=False, gridspec_kw={"height_ratios": heights})
        for axes, plot in zip(rows[:, 0], plots, strict=True):
            if isinstance(plot, LinePlot):
                _line(axes, plot, FuncFormatter)
            elif isinstance(plot, BarPlot):
                _bars(axes, plot, FuncFormatter)
            else:
                _heat(figure, axes, plot, FuncFormatter)
            axes.set_title(plot.title, fontsize=11, loc="left")
        out = io.BytesIO()
        canvas.print_png(out)
    return out.getvalue()
