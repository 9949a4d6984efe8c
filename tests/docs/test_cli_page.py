"""docs/cli.md says what --help says."""

import runpy
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_is_what_the_options_say():
    page = runpy.run_path(str(DOCS / "make_cli.py"))["page"]()
    assert (DOCS / "cli.md").read_text("utf-8") == page, "run: python docs/make_cli.py"
