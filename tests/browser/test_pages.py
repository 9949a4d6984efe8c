"""Every page looked at in Chromium: no fault, no request, nothing past its box, light and dark, wide and narrow."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from glass_documents import HOSTILE, TOKENS, everything
from glass_llm import GlassLLM

from cutaway.engine.sampling import SamplingParams
from cutaway.experiments import kv, kv_bench, kv_quality, report, sampler
from cutaway.experiments.compare import Condition, compare
from cutaway.experiments.score import score
from cutaway.experiments.trace import trace
from cutaway.render import save
from cutaway.render.document import Document
from cutaway.render.views import compare as compare_view
from cutaway.render.views import kv as kv_view
from cutaway.render.views import report as report_view
from cutaway.render.views import sampler as sampler_view
from cutaway.render.views import score as score_view
from cutaway.render.views import trace as trace_view

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")

PROMPT = "The <b>quick</b> & brown fox"
SIZES = [(1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")]

OVERFLOWING = """() => {
  const width = document.documentElement.clientWidth, found = [];
  if (document.documentElement.scrollWidth > width) found.push('the page scrolls sideways');
  for (const e of document.querySelectorAll('main *')) {
    if (e.closest('.scroll') && !e.matches('.scroll')) continue;
    const box = e.getBoundingClientRect();
    if (box.width && (box.right > width + 0.5 || box.left < -0.5))
      found.push(e.tagName + ' ' + e.textContent.slice(0, 40));
  }
  return found;
}"""

CUT_LABELS = """() => {
  const found = [];
  for (const svg of document.querySelectorAll('svg')) {
    const box = svg.getBoundingClientRect();
    if (!box.width) continue;
    for (const text of svg.querySelectorAll('text')) {
      const own = text.getBoundingClientRect();
      if (own.left < box.left - 3 || own.right > box.right + 3 || own.top < box.top - 3 || own.bottom > box.bottom + 3)
        found.push(svg.getAttribute('aria-label').slice(0, 30) + ': ' + text.textContent.slice(0, 30));
    }
  }
  return found;
}"""

TOUCHING_TICKS = """() => {
  const found = [];
  for (const svg of document.querySelectorAll('svg')) {
    if (!svg.getBoundingClientRect().width) continue;
    const level = [...svg.querySelectorAll('text:not([transform])')];
    const boxes = level.map(t => [t.textContent, t.getBoundingClientRect()]);
    for (let i = 0; i < boxes.length; i++) for (let j = i + 1; j < boxes.length; j++) {
      const [a, p] = boxes[i], [b, q] = boxes[j];
      const across = Math.min(p.right, q.right) - Math.max(p.left, q.left);
      const down = Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top);
      if (across > 2 && down > 5) found.push(svg.getAttribute('aria-label').slice(0, 30) + ': ' + a + ' / ' + b);
    }
  }
  return found;
}"""

CONTRAST = """() => {
  const channel = v => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const rgb = c => c.match(/[\\d.]+/g).map(Number);
  const light = c => 0.2126 * channel(c[0]) + 0.7152 * channel(c[1]) + 0.0722 * channel(c[2]);
  const ground = e => {
    for (; e; e = e.parentElement) {
      const c = rgb(getComputedStyle(e).backgroundColor);
      if (c.length === 3 || c[3] === 1) return c;
    }
    return [255, 255, 255];
  };
  const found = [];
  for (const e of document.querySelectorAll('h1,h2,h3,p,td,th,figcaption,pre,a,svg text,.token,label')) {
    if (!e.getBoundingClientRect().width) continue;
    const style = getComputedStyle(e);
    const ink = rgb(e.tagName === 'text' ? style.fill : style.color), under = ground(e);
    const [a, b] = [light(ink), light(under)].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) found.push(e.tagName + ' ' + e.textContent.slice(0, 30) + ' ' + ratio.toFixed(2));
  }
  return found;
}"""

PLOTS = """() => [...document.querySelectorAll('figure.plot')].map(figure => ({
  title: figure.querySelector('figcaption').textContent,
  shown: [...figure.querySelectorAll('svg')].filter(s => s.getBoundingClientRect().width > 0).length,
  least: figure.querySelector('svg .bar') || !figure.querySelector('svg .line,svg rect') ? 1 : 2,
  names: [...figure.querySelectorAll('svg text.name')].filter(t => t.getBoundingClientRect().width > 0).length,
}))"""


def documents() -> dict[str, Callable[[], tuple[Document, Any]]]:
    """Every page the program makes, on a tiny model, with the data it carries."""
    llm = GlassLLM()
    params = SamplingParams(temperature=1.2, top_k=40, top_p=0.95, seed=1, max_tokens=8, ignore_eos=True)
    made: dict[str, Callable[[], tuple[Document, Any]]] = {"blocks": lambda: (everything(), {"prompt": HOSTILE})}

    def page(name: str, compute: Callable[[], Any], view: Callable[..., Document], *more: Any) -> None:
        def make() -> tuple[Document, Any]:
            result = compute()
            return view(result, *more), result

        made[name] = make

    page("kv plan", lambda: kv.plan(llm.config, 400 << 20, model=HOSTILE), kv_view.plan)
    page("kv bench", lambda: kv_bench.bench(llm, PROMPT, (8, 16, 32)), kv_view.bench)
    page("kv quality", lambda: kv_quality.quality(llm, PROMPT * 4), kv_view.quality, "zh")
    page("sample", lambda: sampler.sample(llm, PROMPT, params), sampler_view.sampled)
    page("temperatures", lambda: sampler.temperatures(llm, PROMPT, [0.3, 1.5], params), sampler_view.temperatures)
    page("dialects", lambda: sampler.dialects(llm, PROMPT, params), sampler_view.dialects)
    page("trace", lambda: trace(llm, PROMPT, ["layers.*"], attention=[(0, 1), (1, None)]), trace_view.trace)
    page("score", lambda: score(llm, PROMPT), score_view.score)
    sides = Condition(llm, "chat template"), Condition(llm, HOSTILE, chat=False)
    page("compare", lambda: compare(*sides, PROMPT, max_tokens=12), compare_view.compare)
    short = report.Settings(tokens=8, lengths=(4, 8, 16), continuations=2)
    page("report", lambda: report.report(llm, PROMPT, short), report_view.report)
    page("report zh", lambda: report.report(llm, PROMPT, short), report_view.report, "zh")
    return made


PAGES = documents()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pages")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as runner:
        found = runner.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


class Seen:
    """A page in a tab, and what went wrong in it."""

    def __init__(self, browser: Any, path: Path, width: int, scheme: str) -> None:
        self.faults: list[str] = []
        self.tab = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.tab.on("console", lambda message: self.faults.append(message.text))
        self.tab.on("pageerror", lambda error: self.faults.append(str(error)))
        self.tab.on(
            "request", lambda request: self.faults.append(request.url) if request.url != path.as_uri() else None
        )
        self.tab.goto(path.as_uri())


def written(folder: Path, name: str) -> Path:
    path = folder / f"{name}.html"
    if not path.exists():
        document, data = PAGES[name]()
        save(document, path, data=data)
    return path


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_sound(browser: Any, folder: Path, name: str) -> None:
    path = written(folder, name)
    grounds = {}
    for width, scheme in SIZES:
        seen = Seen(browser, path, width, scheme)
        where = f"{name} at {width}, {scheme}"
        assert seen.faults == [], where
        assert seen.tab.evaluate(OVERFLOWING) == [], where
        assert seen.tab.evaluate(CUT_LABELS) == [], where
        assert seen.tab.evaluate(TOUCHING_TICKS) == [], where
        assert seen.tab.evaluate(CONTRAST) == [], where
        for plot in seen.tab.evaluate(PLOTS):
            assert plot["title"], where
            assert plot["shown"] == 1, (where, plot)
            assert plot["names"] >= plot["least"], (where, plot)  # the axes say what they are
        grounds[scheme] = seen.tab.evaluate("getComputedStyle(document.body).backgroundColor")
        seen.tab.close()
    assert grounds["light"] != grounds["dark"]


def test_hostile_text_stays_text(browser: Any, folder: Path) -> None:
    seen = Seen(browser, written(folder, "blocks"), 1280, "light")
    assert seen.tab.evaluate("document.images.length") == 0
    assert seen.tab.evaluate("document.scripts.length") == 1
    shown = seen.tab.evaluate("[...document.querySelectorAll('.token')].map(e => [e.textContent, e.dataset.token])")
    expected = [token.replace("\0", "\ufffd") for token in TOKENS]
    assert [text for text, _ in shown[: len(TOKENS)]] == expected
    assert [token for _, token in shown[: len(TOKENS)]] == expected
    assert seen.tab.evaluate("JSON.parse(document.getElementById('data').textContent).prompt") == HOSTILE


def test_whitespace_can_be_seen(browser: Any, folder: Path) -> None:
    seen = Seen(browser, written(folder, "blocks"), 390, "dark")
    signs = seen.tab.evaluate("""() => [...document.querySelectorAll('.token i')].map(e =>
      [e.dataset.sign, getComputedStyle(e, '::before').content, getComputedStyle(e, '::before').fontSize])""")
    assert {sign for sign, _, _ in signs} >= {"·", "⏎", "→", "␍", "\\u{202e}", "␛"}
    assert all(content.replace("\\\\", "\\") == f'"{sign}"' and size == "13px" for sign, content, size in signs)


def test_the_first_column_of_a_heat_map_hides(browser: Any, folder: Path) -> None:
    seen = Seen(browser, written(folder, "trace"), 1280, "light")
    figure = seen.tab.locator("figure.heat", has=seen.tab.locator("input.toggle")).first
    assert figure.locator(".with").is_visible()
    assert not figure.locator(".without").is_visible()
    figure.locator("input.toggle").check()
    assert not figure.locator(".with").is_visible()
    assert figure.locator(".without").is_visible()
