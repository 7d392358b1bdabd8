# SPDX-License-Identifier: AGPL-3.0-only
"""Who may import whom, read from every `import` of the package, those inside functions and for type checkers too."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import spark_py
from tests.child import environment

PACKAGE = Path(spark_py.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
STANDARD = sys.stdlib_module_names
CONCRETE = {"spark_py.runtime." + name for name in ("cuda", "host", "emulated", "_driver")}

# Part of the package -> the parts it may import, and what it may of other distributions. What is not here stands on
# top of all.
LAYERS: dict[str, tuple[set[str], set[str]]] = {
    "reference": (set(), {"numpy", "ml_dtypes"}),
    "catalog": ({"reference"}, {"numpy", "ml_dtypes"}),
    "emulator": ({"catalog", "runtime"}, {"numpy", "ml_dtypes", "filelock", "platformdirs", "cuda"}),
    "runtime": (
        {"catalog", "reference", "emulator"},
        {"numpy", "ml_dtypes", "safetensors", "filelock", "platformdirs", "cuda", "cupy", "cupy_backends"},
    ),
    "ops": ({"runtime"}, {"numpy", "ml_dtypes"}),
    "model": ({"runtime", "ops"}, {"numpy", "ml_dtypes", "safetensors"}),
}


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """(line, absolute module) of each import in a file; `from m import n` gives m.n where that is a module, else m."""
    package = [PACKAGE.name, *path.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                below = PACKAGE.parent.joinpath(*module.split("."), alias.name)
                is_module = below.with_suffix(".py").exists() or (below / "__init__.py").exists()
                yield node.lineno, f"{module}.{alias.name}" if is_module else module
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            argument = node.args[0]
            if isinstance(argument, ast.Constant):
                yield node.lineno, str(argument.value)
            else:
                assert package[1] == "cli", f"{path}:{node.lineno}: the name of an import is computed"


def part_of(module: str) -> str:
    """ "runtime" of spark_py.runtime.gpu, "" of anything that is not this package's."""
    names = module.split(".")
    return names[1] if names[0] == PACKAGE.name and len(names) > 1 else ""


def id_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


@pytest.mark.parametrize("part", LAYERS)
def test_a_part_imports_itself_and_those_below(part: str) -> None:
    parts, distributions = LAYERS[part]
    for path, line, module in (
        (p, *i) for p in FILES if p.relative_to(PACKAGE).parts[0] == part for i in imports_of(p)
    ):
        root = module.partition(".")[0]
        if root == PACKAGE.name:
            assert part_of(module) in {part, *parts}, f"{path}:{line} imports {module}"
        else:
            assert root in STANDARD or root in distributions, f"{path}:{line} imports {module}"


def test_cupy_has_one_home() -> None:
    """CuPy in cuda.py, its NVRTC in modules.py, libcuda in _driver.py."""
    users = {id_of(path) for path in FILES for _, m in imports_of(path) if m.startswith(("cupy", "cupy_backends"))}
    assert users == {"runtime/cuda.py", "runtime/modules.py"}
    nvrtc = {m for _, m in imports_of(PACKAGE / "runtime" / "modules.py") if m.startswith("cupy")}
    assert nvrtc == {"cupy_backends.cuda.libs.nvrtc"}
    assert {id_of(path) for path in FILES if "libcuda.so" in path.read_text(encoding="utf-8")} == {"runtime/_driver.py"}


def test_model_and_ops_see_the_interface_alone() -> None:
    for path in FILES:
        if path.relative_to(PACKAGE).parts[0] in ("model", "ops"):
            for line, module in imports_of(path):
                assert module not in CONCRETE, f"{path}:{line} imports {module}"


def test_importing_everything_touches_no_gpu() -> None:
    """Neither CuPy nor torch is imported, nor libcuda loaded, by importing each module of the package."""
    names = [".".join(p.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__") for p in FILES]
    script = f"import importlib, sys\nfor name in {names!r}: importlib.import_module(name)\n"
    script += "print(*sorted({'cupy', 'cupy_backends', 'torch'} & set(sys.modules)))\n"
    script += "print('libcuda' in open('/proc/self/maps').read())\n" if Path("/proc/self/maps").exists() else ""
    env = environment(PACKAGE.parent)
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() in ([], ["False"])
