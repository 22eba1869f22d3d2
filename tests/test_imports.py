"""Who may import whom, and what must answer without torch: ARCHITECTURE.md's order, read from the source."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from ranks import ROOT

# A package imports only what stands to its left, and itself.
ORDER = ["conf", "pipeline", "comparing", "models", "planning", "training"]
# conf fills nulls and refuses by asking these, inside functions; models and pipeline never meet
ALSO = {"conf": {"pipeline", "models", "planning"}, "pipeline": {"conf"}}
NEVER = {("pipeline", "models"), ("models", "pipeline"), ("pipeline", "training"), ("planning", "training")}
NEVER |= {("models", "comparing"), ("planning", "comparing"), ("comparing", "models")}


def _imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


def _modules() -> list[Path]:
    return [path for package in ORDER for path in sorted((ROOT / package).rglob("*.py"))]


@pytest.mark.parametrize("path", _modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_left_only(path):
    package = path.relative_to(ROOT).parts[0]
    allowed = set(ORDER[: ORDER.index(package) + 1]) | ALSO.get(package, set())
    for name in _imports(path):
        top = name.partition(".")[0]
        if top in ORDER:
            assert top in allowed and (package, top) not in NEVER, f"{path.name} imports {name}"


def test_there_is_no_import_cycle_between_modules():
    graph = {}
    for path in _modules():
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        top_level = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)]
        graph[module] = {
            name
            for node in top_level
            for name in ([a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""])
        }
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join([*path, module])
        if module in graph and module not in done:
            for name in graph[module]:
                visit(name, (*path, module))
            done.add(module)

    for module in graph:
        visit(module, ())


LIGHT = [
    "conf.schema",
    "conf.typed",
    "conf.check",
    "conf.resolve",
    "models.describe",
    "pipeline.schedule",
    "pipeline.simulate",
    "pipeline.partition",
    "comparing.front",
    "planning.memory",
    "training.front",
    "training.verification",
]


def test_what_must_answer_at_once_imports_no_torch():
    code = f"import sys, importlib\nfor name in {LIGHT!r}: importlib.import_module(name)\n"
    code += "assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_private_parts_of_torch_pipelining_are_touched_in_one_file():
    touching = [
        path.name
        for path in _modules()
        if any(name.startswith("torch.distributed.pipelining.") for name in _imports(path))
    ]
    assert touching == ["torch_runtime.py"]
