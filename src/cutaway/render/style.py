"""The style sheet of the page: light and dark, wide and narrow, the colours of the plots.

Wide things scroll inside their own box; the page itself never does sideways. Read next: `palette.py`.
"""

from __future__ import annotations

from cutaway.render.palette import SERIES_DARK, SERIES_LIGHT

__all__ = ["STYLE"]


def _variables(colours: tuple[str, ...]) -> str:
    return "".join(f"--s{i}:{c};" for i, c in enumerate(colours))


_SERIES = "".join(
    f".s{i}.line,.s{i}.point{{stroke:var(--s{i})}}.s{i}.bar,.s{i}.point{{fill:var(--s{i})}}"
    for i in range(len(SERIES_LIGHT))
)

_SANS = 'system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans","Noto Sans CJK SC","PingFang SC",sans-serif'
_MONO = 'ui-monospace,"Cascadia Code","DejaVu Sans Mono",Menlo,Consolas,"Noto Sans Mono CJK SC",monospace'

STYLE = f"""
:root{{color-scheme:light dark;--ground:#fbfaf8;--card:#ffffff;--ink:#1d2126;--soft:#5c6570;--line:#e2dfd9;
--accent:#0b5f8f;--warn:#8a4b00;--warnground:#fff4e2;{_variables(SERIES_LIGHT)}}}
@media (prefers-color-scheme:dark){{:root{{--ground:#14171b;--card:#1b1f25;--ink:#e7e9ec;--soft:#a0a9b4;
--line:#323943;--accent:#6fc0ee;--warn:#f3c173;--warnground:#33270f;{_variables(SERIES_DARK)}}}}}
*{{box-sizing:border-box}}
html{{-webkit-text-size-adjust:100%}}
body{{margin:0;background:var(--ground);color:var(--ink);
font:16px/1.6 {_SANS}}}
main{{max-width:860px;margin:0 auto;padding:40px 30px 80px}}
header{{border-bottom:1px solid var(--line);margin-bottom:24px;padding-bottom:12px}}
h1{{font-size:30px;line-height:1.2;margin:0 0 6px;letter-spacing:-.01em;overflow-wrap:anywhere}}
h2{{font-size:21px;line-height:1.3;margin:48px 0 10px;overflow-wrap:anywhere}}
h3{{font-size:17px;margin:30px 0 6px;overflow-wrap:anywhere}}
p{{margin:10px 0;overflow-wrap:anywhere;max-width:72ch}}
.subtitle,.note,.scale{{color:var(--soft);font-size:14px}}
p.warning{{background:var(--warnground);color:var(--warn);border-left:4px solid currentColor;padding:8px 14px;
border-radius:0 6px 6px 0}}
p.warning::before{{content:"⚠ "}}
nav ol{{columns:2;column-gap:32px;padding-left:22px;font-size:14.5px;margin:0}}
nav li{{break-inside:avoid}}
a{{color:var(--accent)}}
figure{{margin:20px 0;background:var(--card);border:1px solid var(--line);border-radius:10px;padding:16px 18px}}
figcaption{{font-weight:600;font-size:15px;margin-bottom:12px;overflow-wrap:anywhere}}
figure .note{{margin:12px 0 0;max-width:none}}
.scroll{{overflow-x:auto;max-width:100%}}
.scroll:focus-visible{{outline:2px solid var(--accent);outline-offset:2px}}
table{{border-collapse:collapse;font-size:14px;line-height:1.45;font-variant-numeric:tabular-nums;min-width:60%}}
th,td{{padding:5px 14px 5px 0;text-align:left;
vertical-align:top;white-space:nowrap;border-bottom:1px solid var(--line)}}
th{{color:var(--soft);font-weight:600;vertical-align:bottom;white-space:normal}}
th.n,td.n{{text-align:right}}
td.w{{white-space:pre-wrap;overflow-wrap:anywhere;min-width:14em}}
th:last-child,td:last-child{{padding-right:2px}}
tr:last-child td{{border-bottom:0}}
tr.strong td{{font-weight:650}}
pre{{margin:0;white-space:pre-wrap;overflow-wrap:anywhere;font:13.5px/1.5 {_MONO}}}
svg{{display:block;max-width:100%;height:auto;font-family:inherit;overflow:visible}}
.heat svg{{max-width:none}}
svg text{{fill:var(--soft);font-size:12px}}
svg text.name,svg text.value{{fill:var(--ink)}}
svg text.mark{{fill:var(--ink);font-style:italic;paint-order:stroke;stroke:var(--card);stroke-width:3px}}
.grid{{stroke:var(--line);stroke-width:1}}
.axis{{stroke:var(--soft);stroke-width:1}}
.reference{{stroke:var(--ink);stroke-width:1.2;stroke-dasharray:5 4}}
.line{{fill:none;stroke-width:2.2;stroke-linejoin:round;stroke-linecap:round}}
.point{{stroke:var(--card)!important;stroke-width:1.2}}
{_SERIES}
.narrow{{display:none}}
.toggle{{accent-color:var(--accent);margin:0 6px 14px 0;vertical-align:middle}}
.toggle+label{{font-size:14px;color:var(--soft);cursor:pointer;vertical-align:top;line-height:1}}
.without,.toggle:checked~.with{{display:none}}
.toggle:checked~.without{{display:block}}
.tokens{{font:14px/2.05 {_MONO};white-space:pre-wrap;overflow-wrap:anywhere}}
.token{{unicode-bidi:isolate;padding:3px 1px;border-radius:3px;margin-right:2px;box-shadow:inset 0 -1px 0 var(--line);
-webkit-box-decoration-break:clone;box-decoration-break:clone}}
i[data-sign]{{font-style:normal;font-size:0}}
i[data-sign]::before{{content:attr(data-sign);font-size:13px;opacity:.6}}
.ramp{{display:inline-block;width:140px;height:10px;border-radius:3px;vertical-align:middle}}
@media (max-width:640px){{
body{{font-size:15.5px}}
main{{padding:24px 12px 60px}}
h1{{font-size:24px}}
nav ol{{columns:1}}
figure{{padding:12px 12px;border-radius:8px}}
.wide{{display:none}}
.narrow{{display:block}}
}}
@media print{{figure{{break-inside:avoid}}}}
""".strip()
