"""Imports point one way, and only to what is declared. Read from the source of every module."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import krnl

PACKAGE = Path(krnl.__file__).parent
FILES = sorted(path for path in PACKAGE.rglob("*.py"))
LONGEST = 400  # lines
FRAMEWORKS = {"torch", "transformers", "peft", "mlx", "jax", "tensorflow", "accelerate"}
# Not needed to start, nor by every command. They take a while to import.
HEAVY = {"matplotlib", "huggingface_hub", "tokenizers", "jinja2"}
DECLARED = {
    "numpy", "ml_dtypes", "tokenizers", "huggingface_hub", "jinja2", "yaml", "tyro", "rich",
    "matplotlib",
}  # fmt: skip
# Each belongs to one device, and is imported only by what drives it.
DEVICE_ONLY = {"backends/metal.py": {"Metal", "objc"}, "backends/cuda_driver.py": {"cuda"}}

BASE = {"dtypes", "errors", "strict_json"}
PLAN = {"plan", *BASE}
OPS = {"ops", *PLAN}
PARTS = {"models", "data", "formats", "backends", "kernels", *OPS}
WHOLE = {"model", "devices", *PARTS}
# These may use one another, in one direction: there are no cycles.
APPLICATION = {
    "answering", "api", "bench", "doctor", "generator", "merge", "options", "planning", "profile",
    "profile_names", "profile_report", "training",
}  # fmt: skip
# What each module or sub-package may import beside itself.
ALLOWED = {
    "": {"cli", *APPLICATION, *WHOLE},
    "__main__": {"cli"},
    "cli": {*APPLICATION, *WHOLE},
    **{name: {*APPLICATION, *WHOLE} for name in APPLICATION},
    "model": PARTS,
    "devices": PARTS,
    "models": OPS,
    "data": BASE,
    "formats": BASE,
    "backends": {"kernels", "formats", *OPS},
    "kernels": OPS,
    "ops": PLAN,
    "plan": BASE,
    "dtypes": {"errors"},
    "errors": set(),
    "strict_json": set(),
}


def module_name(path: Path) -> str:
    """Dotted, below krnl; the package itself is the empty string."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in FILES}


@cache
def imports(path: Path) -> frozenset[str]:
    """Every module that the file imports, anywhere in it; `from a import b` gives a.b."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(found)


def own(path: Path) -> Iterator[str]:
    """The modules of krnl that a file imports. The version is anybody's."""
    for name in imports(path):
        package, _, rest = name.partition(".")
        if package == "krnl" and rest != "__version__":
            while rest not in MODULES:  # a name inside a module
                rest = rest.rpartition(".")[0]
            yield rest


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_one_way(module: str) -> None:
    part = module.split(".")[0]
    assert part in ALLOWED, f"{module} has no place in the layers; give it one here"
    for target in own(MODULES[module]):
        other = target.split(".")[0]
        assert other == part or other in ALLOWED[part], f"{module} imports {target}"


def test_backends_see_tables_targets_and_sources_only() -> None:
    """Kernels are known by name inside their own folder alone."""
    for module, path in MODULES.items():
        for target in own(path):
            if not target.startswith("kernels.") or target == "kernels.launch":
                continue
            device, _, part = target.removeprefix("kernels.").partition(".")
            # What launches of all GPUs share lies beside their folders.
            inside = module.startswith(f"kernels.{device}." if part else "kernels.")
            known = ("table", "target", "sources")
            below = module.split("_")[0] == f"backends.{device}" and part in known
            # The report's experiments are measured, and are no engine's.
            measured = module.startswith("bench.") and part == "variants"
            assert inside or below or measured, f"{module} imports {target}"


def test_no_module_imports_itself_through_others() -> None:
    """Raises CycleError, which names the cycle. The package's own list of names is left out."""
    graph = {name: {m for m in own(path) if m} - {name} for name, path in MODULES.items() if name}
    TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("module", MODULES)
def test_only_declared_packages_are_imported(module: str) -> None:
    outside = {name.split(".")[0] for name in imports(MODULES[module])}
    outside -= {"krnl", *sys.stdlib_module_names}
    assert not outside & FRAMEWORKS
    device = DEVICE_ONLY.get(MODULES[module].relative_to(PACKAGE).as_posix(), set())
    assert outside <= DECLARED | device


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_files_are_short(path: Path) -> None:
    text = path.read_text("utf-8")
    if path.name == "__init__.py" and path.parent != PACKAGE:
        assert text == "", "the __init__.py of a sub-package is empty"
    assert len(text.splitlines()) <= LONGEST


@pytest.mark.parametrize("module", ["krnl", "krnl.cli"])
def test_starting_imports_nothing_heavy(module: str) -> None:
    """In a process of its own, as this one has imported everything."""
    code = f"import {module}, sys; print(*sys.modules)"
    command = [sys.executable, "-c", code]
    environment = {"PYTHONPATH": str(PACKAGE.parent), "PATH": ""}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    loaded = {name.split(".")[0] for name in result.stdout.split()}
    assert "krnl" in loaded
    assert not loaded & (HEAVY | FRAMEWORKS)
