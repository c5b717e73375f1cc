"""The package's shape: who may import what, sizes of files and functions, what the wheel holds."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("models", "export", "runtime")
SOURCES = sorted(p for package in PACKAGES for p in (ROOT / package).rglob("*.py"))

# A finder that fails on import of the named packages, as if they were not installed.
BLOCKER = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in {blocked!r}:
            raise ImportError(name + ' is blocked')
sys.meta_path.insert(0, Blocked())
import importlib
for name in {modules!r}:
    importlib.import_module(name)
"""


def import_blocked(modules: list[str], blocked: set[str]) -> subprocess.CompletedProcess[str]:
    """Import modules in a new interpreter where some packages cannot be imported."""
    code = BLOCKER.format(modules=modules, blocked=blocked)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def modules_of(package: str, *, without: str = "\0") -> list[str]:
    """Import names of a package's modules."""
    names = [p.relative_to(ROOT).with_suffix("").parts for p in SOURCES if package in p.parts]
    dotted = [".".join(("dflash_onnx", *n)).removesuffix(".__init__") for n in names]
    return [n for n in dotted if without not in n]


@pytest.mark.parametrize(
    ("package", "without", "blocked"),
    [
        ("runtime", "\0", {"onnx", "torch", "transformers"}),
        ("models", ".graphs", {"onnx", "onnxruntime", "torch", "transformers"}),
        ("models", "\0", {"onnxruntime", "torch", "transformers"}),
        ("export", "\0", {"onnxruntime", "torch", "transformers"}),
    ],
)
def test_packages_import_without(package: str, without: str, blocked: set[str]) -> None:
    """Each package loads on a machine that lacks what it must not need."""
    modules = modules_of(package, without=without)
    assert modules
    done = import_blocked(modules, blocked)
    assert done.returncode == 0, done.stderr


def test_runtime_does_not_import_export_at_load() -> None:
    """Only the export command itself pulls in the exporter."""
    code = (
        "import sys, dflash_onnx.runtime.cli\n"
        "sys.exit(any('dflash_onnx.export' in m for m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_command_line_does_not_wait_for_libraries() -> None:
    """The export begins to read the tokenizer before NumPy and ONNX Runtime are there."""
    code = (
        "import sys, dflash_onnx.runtime.cli as cli, dflash_onnx.export.tokenizer_process\n"
        "cli.build_parser(['export'])\n"
        "sys.exit(bool({'numpy', 'onnx', 'onnxruntime', 'jinja2', 'PIL'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_public_names_are_there() -> None:
    """They are imported when they are asked for; another name is an error as ever."""
    import dflash_onnx.runtime as package

    assert all(getattr(package, name).__name__ == name for name in package.__all__)
    assert not hasattr(package, "Nothing")


def test_position_arithmetic_lives_in_one_file() -> None:
    """Casting an int to a Position or Row is arithmetic; few files outside positions.py do it."""
    allowed = {
        "positions.py", "answer.py", "plan.py", "dflash.py", "draft_cache.py",
        "target_cache.py", "selfcheck.py", "estimate.py", "token_count.py", "mtp.py",
            "probe.py",
    }  # fmt: skip
    users = {p.name for p in SOURCES if "Position(" in p.read_text() or "Row(" in p.read_text()}
    assert users <= allowed


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_and_functions_stay_small(path: Path) -> None:
    """Files up to 250 lines, functions up to 40, a docstring in every module."""
    text = path.read_text()
    assert text.count("\n") <= 250
    tree = ast.parse(text)
    if text:
        assert ast.get_docstring(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name != "add_parser":
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno < 40, f"{node.name} is too long"


def test_wheel_holds_every_module(tmp_path: Path) -> None:
    """A sub-package missing from pyproject's list vanishes from the wheel but not from the tree."""
    # A copy, because a build leaves folders behind that could hide a missing package next time.
    for name in (*PACKAGES, "pyproject.toml", "README.md", "LICENSE"):
        source = ROOT / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tmp_path / name)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "-q", "-w", str(tmp_path), "."]
    subprocess.run(command, cwd=tmp_path, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {n for n in archive.namelist() if n.startswith("dflash_onnx/")}
    tracked = [p for package in PACKAGES for p in (ROOT / package).rglob("*")]
    weights = {".json", ".jinja", ".safetensors"}
    kept = {p for p in tracked if p.suffix in {".py", *weights} or p.name == "py.typed"}
    assert names == {f"dflash_onnx/{p.relative_to(ROOT)}" for p in kept}


def test_no_machine_paths_in_the_tree() -> None:
    """The repository speaks of the project alone."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    words = ("/" + "work/", "/" + "root/", "/" + "farm/")
    for name in listed.stdout.split():
        path = ROOT / name
        if path.suffix in {".py", ".md", ".toml", ".json", ".jinja", ""} and path.is_file():
            text = path.read_text(encoding="utf-8", errors="ignore")
            assert not any(word in text for word in words), name
