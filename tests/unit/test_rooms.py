"""The rooms of the house: who may import whom, read from the source."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import cutaway

PACKAGE = Path(cutaway.__file__).parent

# A room may import from the floors below its own, and from its own room. Rooms on one floor do not know each other.
FLOORS = [
    {"errors"},
    {"config", "quant", "text"},
    {"files"},
    {"forward"},
    {"engine"},
    {"results"},
    {"llm"},
    {"experiments"},
    {"render"},
    {"server", "train"},
    {"cli"},
    {"__main__"},
]
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
SOURCES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")
OPENERS = {"open", "mmap", "memmap", "fromfile", "read_text", "read_bytes", "loadtxt", "safe_open"}


def room_of(module: str) -> str:
    """`cutaway.files.gguf` -> `files`"""
    return module.split(".")[1]


def module_of(path: Path) -> str:
    return ".".join(["cutaway", *path.relative_to(PACKAGE).with_suffix("").parts])


def imports(tree: ast.AST, module: str, is_package: bool = False) -> Iterator[str]:
    """Every module of the package the source imports, in full, wherever in the file the import stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".") if is_package else module.split(".")[:-1]
                base = ".".join(parts[: len(parts) - node.level + 1] + ([base] if base else []))
            names = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name for name in names if name == "cutaway" or name.startswith("cutaway."))


def faults(source: str, module: str) -> list[str]:
    """What a source file of `module` imports or does that its room must not."""
    tree, room = ast.parse(source), room_of(module)
    found = []
    for name in imports(tree, module):
        if name.startswith("cutaway._native"):
            if module != "cutaway.forward.native":
                found.append(f"{module} imports {name}: only forward/native.py may")
            continue
        other = room_of(name + ".")
        if other not in FLOOR_OF:
            continue  # `from cutaway import __version__`, or the package's own public names
        if other != room and FLOOR_OF[other] >= FLOOR_OF[room]:
            found.append(f"{module} imports {name}: {other} is not below {room}")
        if room == "engine" and other == "text":
            found.append(f"{module} imports {name}: the engine never sees text")
        if room == "server" and name.split(".")[1:2] in (["forward"], ["quant"]):
            found.append(f"{module} imports {name}: the server never sees an array")
    if room == "forward":
        calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
        names = {f.id if isinstance(f, ast.Name) else f.attr for f in calls if isinstance(f, (ast.Name, ast.Attribute))}
        found += [f"{module} calls {name}(): forward opens no file" for name in sorted(names & OPENERS)]
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: module_of(path).removeprefix("cutaway."))
def test_a_file_imports_only_from_the_rooms_below_it(path):
    assert faults(path.read_text("utf-8"), module_of(path)) == []


def test_every_room_has_a_floor():
    rooms = {room_of(module_of(path)) for path in SOURCES}
    assert rooms <= set(FLOOR_OF)


def test_no_room_is_called_utils_or_common():
    assert not [path for path in SOURCES if path.stem in ("utils", "common", "helpers", "misc")]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("cutaway.config", "from cutaway.quant import Weight"),
        ("cutaway.forward.reference", "from cutaway.engine.kv_cache import KVCache"),
        ("cutaway.forward.decoder", "def f():\n    import cutaway.llm"),
        ("cutaway.forward.decoder", "from cutaway import llm"),
        ("cutaway.forward.decoder", "from ..engine import engine"),
        ("cutaway.forward.decoder", "from .. import engine"),
        ("cutaway.engine.engine", "from cutaway.text.tokenizer import Tokenizer"),
        ("cutaway.engine.engine", "from cutaway import _native"),
        ("cutaway.forward.torch", "import cutaway._native.kernels"),
        ("cutaway.forward.decoder", "weights = open('w')"),
        ("cutaway.forward.decoder", "weights = np.memmap('w')"),
        ("cutaway.server.app", "from cutaway.train import loop"),
        ("cutaway.server.app", "from cutaway.forward.program import TopLogits"),
        ("cutaway.render.html", "from cutaway.cli import main"),
    ],
)
def test_the_rule_catches_what_breaks_it(module, source):
    assert faults(source, module)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("cutaway.forward.native", "from cutaway import _native"),
        ("cutaway.forward.native", "from cutaway.forward.program import Op"),
        ("cutaway.engine.engine", "from cutaway.forward.taps import Taps"),
        ("cutaway.cli.run", "from cutaway import __version__, LLM"),
        ("cutaway.forward.reference", "from . import rope"),
    ],
)
def test_the_rule_lets_pass_what_keeps_it(module, source):
    assert faults(source, module) == []
