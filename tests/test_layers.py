"""Who may import whom: architecture as a test."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

ALLOWED = {
    "service.errors": (),
    "service.clock": (),
    "service.core": ("service.errors",),
    "service.executor": (
        "service.core.types",
        "service.core.plan",
        "service.core.batch_state",
        "service.errors",
        "graphs.manifest",
        "graphs.ops",
    ),
    "service.engine": ("service.core", "service.executor.api", "service.clock", "service.errors"),
    "service.text": ("service.errors",),
    "service.obs": ("service.core.types", "service.core.plan", "service.engine.observer"),
    "service.report": ("service.errors",),
    "service.sim": ("service.core", "service.clock", "service.executor.simulated", "service.report", "service.errors"),
    "service.api": (
        "service.engine",
        "service.text",
        "service.core.types",
        "service.obs",
        "service.errors",
        "chairlift.inference",
    ),
    "service.bench": (
        "service.core",
        "service.executor",
        "service.errors",
        "service.clock",
        "service.report",
        "service.sim.arrivals",  # the same load for servers and simulations
        "chairlift.inference",
    ),
    "graphs": ("graphs",),
}
"""Package -> what it may import from this project, itself aside. `service.cli`, `service.commands` and
`service.config` may import everything."""

PURE_CORE = {"numpy"}
FREE = ("service.cli", "service.commands", "service.config")


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(path: Path) -> set[str]:
    """Every module that a file names in an import, `from a import b` counted as `a.b` too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def is_under(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


SOURCES = sorted((*ROOT.glob("service/**/*.py"), *ROOT.glob("graphs/**/*.py")))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_module_imports_only_what_its_layer_may(path: Path) -> None:
    name = module_name(path)
    if any(is_under(name, free) for free in FREE):
        return
    layer = next((layer for layer in ALLOWED if is_under(name, layer)), None)
    assert layer is not None or name == "service", f"{name} belongs to no layer"
    if layer is None:
        return
    ours = {found for found in imported_modules(path) if found.split(".")[0] in {"service", "graphs", "chairlift"}}
    forbidden = {
        found
        for found in ours
        if not is_under(found, layer) and not any(is_under(found, allowed) for allowed in ALLOWED[layer])
    }
    assert forbidden == set()


@pytest.mark.parametrize("path", sorted(ROOT.glob("service/core/*.py")), ids=lambda path: path.name)
def test_core_is_pure(path: Path) -> None:
    """The core reads no clock, no file and no socket, and starts no thread."""
    impure = {"time", "threading", "asyncio", "os", "io", "socket", "logging", "random", "pathlib", "subprocess"}
    roots = {name.split(".")[0] for name in imported_modules(path)}
    assert roots & impure == set()


def test_cuda_folder_holds_no_python_file() -> None:
    """An `__init__.py` in cuda/ would hide the namespace package that cuda-python installs into."""
    assert list((ROOT / "cuda").rglob("*.py")) == []


def test_proto_folder_holds_only_protos_and_buf_settings() -> None:
    allowed = {".proto", ".yaml", ".md"}
    assert [path for path in (ROOT / "proto").rglob("*") if path.is_file() and path.suffix not in allowed] == []
