"""Colours that the colour-blind can tell apart: Okabe-Ito for series, cividis for values.

Source: M. Okabe and K. Ito, "Color Universal Design", 2008; J. Nunez, C. Anderton and R. Renslow, "Optimizing
colormaps with consideration for color vision deficiency", PLoS ONE 2018 (cividis; nine of its points, the rest
interpolated). Read next: `svg.py`.
"""

from __future__ import annotations

__all__ = ["SERIES_DARK", "SERIES_LIGHT", "ink_on", "value_colour"]

# Okabe-Ito, without black and yellow, which vanish on one of the two grounds. The dark set is lifted a little.
SERIES_LIGHT = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#B07D00", "#3A8FC7", "#5A5A5A")
SERIES_DARK = ("#56B4E9", "#F08A4B", "#2FC79A", "#E2A0C4", "#F0C75E", "#8FD0FF", "#B4B4B4")

_CIVIDIS = (
    (0, 34, 78),
    (18, 53, 112),
    (59, 73, 108),
    (87, 93, 109),
    (112, 113, 115),
    (138, 134, 120),
    (165, 156, 116),
    (195, 179, 105),
    (225, 204, 85),
    (253, 231, 55),
)


def _mix(fraction: float) -> tuple[int, int, int]:
    place = min(max(fraction, 0.0), 1.0) * (len(_CIVIDIS) - 1)
    i = min(int(place), len(_CIVIDIS) - 2)
    a, b, f = _CIVIDIS[i], _CIVIDIS[i + 1], place - i
    return (round(a[0] + f * (b[0] - a[0])), round(a[1] + f * (b[1] - a[1])), round(a[2] + f * (b[2] - a[2])))


def value_colour(fraction: float) -> str:
    """The colour of a value at `fraction` (0..1) of its range, as `#rrggbb`."""
    return "#{:02x}{:02x}{:02x}".format(*_mix(fraction))


def ink_on(fraction: float) -> str:
    """Black or white, whichever has the greater contrast on `value_colour(fraction)`; it is never under 4.5 to 1.

    Source: WCAG 2.2, relative luminance and contrast ratio.
    """
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in (v / 255 for v in _mix(fraction))]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#ffffff" if 1.05 / (luminance + 0.05) > (luminance + 0.05) / 0.05 else "#000000"
