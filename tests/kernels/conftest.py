"""Makes `raw.py` importable, whatever pytest's import mode."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("cutaway._native", exc_type=ImportError)
sys.path.insert(0, str(Path(__file__).parent))
