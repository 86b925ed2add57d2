"""The floor plan: who may import whom, how long files are, what linters and type checker say."""

import ast
import subprocess
import sys

import pytest

ALLOWED = {
    "optim": {"optim"},
    "training": {"training", "optim"},
    "data": {"data", "hub"},
    "models": {"models", "hub"},
    "evaluation": {"evaluation", "hub"},
    "plots": set(),
    "hub": set(),
}
TORCH_ONLY = {"optim"}


def imports(path):
    """Every module that a file imports, at any depth of the file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module


@pytest.fixture(scope="module")
def files(root):
    package = root / "mars_hf"
    found = {path: path.relative_to(package).parts[0].removesuffix(".py") for path in package.rglob("*.py")}
    assert len(found) > 20
    return {path: floor for path, floor in found.items() if floor != "__init__"}


def test_arrows_go_one_way(files):
    for path, floor in files.items():
        for module in imports(path):
            if module == "mars_hf" or module.startswith("mars_hf."):
                assert module.split(".")[1:2] and module.split(".")[1] in ALLOWED[floor], f"{path} imports {module}"


def test_the_optimizer_imports_torch_alone(files):
    for path, floor in files.items():
        if floor in TORCH_ONLY:
            outside = {m.split(".")[0] for m in imports(path)} - {"torch", "mars_hf"} - sys.stdlib_module_names
            assert not outside, f"{path} imports {outside}"


def test_files_can_be_read_in_one_sitting(root):
    lengths = {
        str(path.relative_to(root)): len(path.read_text().splitlines())
        for folder in ("mars_hf", "recipes")
        for path in (root / folder).rglob("*.py")
    }
    assert not {path: length for path, length in lengths.items() if length > 400}


def test_nothing_else_at_the_top_level(root):
    tracked = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("not a git checkout")
    top = {line.split("/")[0] for line in tracked.stdout.splitlines()}
    folders = {"mars_hf", "recipes", "tests", "accelerate_configs", ".ci"}
    files = {"pyproject.toml", "README.md", "LICENSE", "CONTRIBUTING.md", "constraints.txt"}
    assert top <= folders | files | {".gitignore", ".pre-commit-config.yaml"}


@pytest.mark.parametrize("command", [["ruff", "check"], ["ruff", "format", "--check"], ["mypy"]], ids=" ".join)
def test_linters_and_types(root, command):
    done = subprocess.run([sys.executable, "-m", *command], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
