"""Where things live. That every import points down is a contract in pyproject.toml, for `lint-imports`."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
from pathlib import Path

import grimp
import pytest

import fewshot_mahalanobis

PACKAGE = Path(fewshot_mahalanobis.__file__).parent
#: Methods that are only another way to say what a function further up does: pyproject.toml lets them import it.
DOORS = {
    "networks.simple_cnaps": {"from_published_state_dict", "save_pretrained", "push_to_hub", "from_pretrained"},
    "feature_classifier": {"save", "load", "export_onnx"},
}


def modules() -> dict[str, Path]:
    """Name without the package's, "" for the package itself -> file."""
    names = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        parts = file.relative_to(PACKAGE).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return names


def test_the_only_pictures_in_the_repository_are_drawn_by_its_scripts() -> None:
    root = Path(__file__).parents[1]
    if not (root / ".git").exists():
        pytest.skip("an archive: what is in it comes from the repository")
    listed = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True, check=True).stdout
    endings = re.compile(r"\.(png|jpe?g|gif|webp|bmp|tiff?|heic|avif)$", re.IGNORECASE)
    pictures = {name for name in listed.splitlines() if endings.search(name)}
    drawn = {"docs/first_task.png", "docs/gaussians.png", "docs/teaching_page.png"}
    assert pictures == {"benchmarks/results/scaling.png", *drawn}


def test_the_top_folder_is_the_table_of_contributing() -> None:
    entries = {entry.name for entry in PACKAGE.iterdir()} - {"py.typed", "__pycache__"}
    contents = (
        (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text().split("## Where things live")[1].split("\n## ")[0]
    )
    listed = {
        name.rstrip("/") for row in re.findall(r"^\| (`.*?) \|", contents, re.M) for name in re.findall("`(.*?)`", row)
    }
    assert entries == listed | {"__init__.py", "__main__.py"}


def typing_only(tree: ast.Module) -> set[ast.AST]:
    """Nodes below ``if TYPE_CHECKING:``, which never run."""
    blocks = (node for node in ast.walk(tree) if isinstance(node, ast.If))
    found = (block for block in blocks if isinstance(block.test, ast.Name) and block.test.id == "TYPE_CHECKING")
    return {node for block in found for statement in block.body for node in ast.walk(statement)}


@functools.cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", DOORS)
def test_doors_import_a_function_call_it_once_and_do_nothing_else(name: str) -> None:
    functions = [node for node in ast.walk(parsed(modules()[name])) if isinstance(node, ast.FunctionDef)]
    bodies = {node.name: node.body[ast.get_docstring(node) is not None :] for node in functions}
    doors = {
        name
        for name, body in bodies.items()
        if len(body) == 2 and isinstance(body[0], ast.ImportFrom) and isinstance(body[1], (ast.Return, ast.Expr))
    }
    assert doors == DOORS[name]


def test_no_module_and_a_package_that_it_is_in_import_each_other() -> None:
    """The circles that `lint-imports` does not look for."""
    graph = grimp.build_graph("fewshot_mahalanobis")
    circles = {
        (name, imported)
        for name in graph.modules
        for imported in graph.find_modules_directly_imported_by(name) - {"fewshot_mahalanobis"}
        if name.startswith(f"{imported}.") and graph.chain_exists(importer=imported, imported=name)
    }
    assert circles == set()


def test_simple_cnaps_shows_a_user_no_more_than_this() -> None:
    shown = {name for name in vars(fewshot_mahalanobis.SimpleCNAPS) if not name.startswith("_")}
    assert shown == {*DOORS["networks.simple_cnaps"], "from_backbone", "forward", "adapt", "at_size", "train"}


def test_no_module_imports_a_private_name_of_another() -> None:
    private = [
        f"{name}: from {node.module} import {alias.name}"
        for name, file in modules().items()
        for node in ast.walk(parsed(file))
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("fewshot_mahalanobis")
        for alias in node.names
        if alias.name.startswith("_") and not alias.name.startswith("__")
    ]
    assert private == []


def own_names(tree: ast.AST) -> set[str]:
    """Names that a file gives to functions, classes, variables and attributes of ``self``."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
            names.add(node.attr)
    return names


def test_no_module_uses_a_private_attribute_that_another_defines() -> None:
    names = {name: own_names(parsed(file)) for name, file in modules().items()}
    private = [
        f"{name}: {ast.unparse(node)}"
        for name, file in modules().items()
        for node in ast.walk(parsed(file))
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__")
        if node.attr not in {"_asdict", "_fields", "_replace"}  # which every NamedTuple has
        if node.attr not in names[name] and any(node.attr in others for others in names.values())
    ]
    assert private == []


def test_public_names_are_those_that_type_checkers_see() -> None:
    tree = parsed(PACKAGE / "__init__.py")
    seen = {
        alias.name: node.module.removeprefix("fewshot_mahalanobis.")
        for node in typing_only(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == fewshot_mahalanobis._MODULES
    assert {*fewshot_mahalanobis.__all__} <= {*dir(fewshot_mahalanobis)}
    for name in fewshot_mahalanobis.__all__:
        assert getattr(fewshot_mahalanobis, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'SimpleCNAP'"):
        fewshot_mahalanobis.SimpleCNAP  # noqa: B018
