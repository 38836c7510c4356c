"""Where things live: every import points down, and no module uses the private names of another."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
from collections.abc import Container
from pathlib import Path

import pytest

import fewshot_mahalanobis

PACKAGE = Path(fewshot_mahalanobis.__file__).parent
#: Methods of the model that are only another way to say what a function of ``checkpoints`` does.
DOORS = {
    "from_published_state_dict": {"checkpoints.published"},
    "save_pretrained": {"checkpoints.folder"},
    "push_to_hub": {"checkpoints.hub"},
    "from_pretrained": {"checkpoints.load"},
}
#: The same of the classifier of feature vectors.
FEATURE_DOORS = {
    "save": {"checkpoints.classifier_file"},
    "load": {"checkpoints.classifier_file"},
    "export_onnx": {"export.graph"},
}
#: What the mathematics of the head must not know.
IMAGES = ("images", "networks", "checkpoints", "export", "classifier", "research", "apps", "plotting")


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


def imported(tree: ast.AST, known: Container[str]) -> set[str]:
    """Modules of the package that a tree imports: at the top, in functions, for type checkers alone."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    own = {name.removeprefix("fewshot_mahalanobis.") for name in names if name.startswith("fewshot_mahalanobis.")}
    return {name for name in own if name in known}


def graph() -> dict[str, set[str]]:
    known = modules()
    return {name: imported(parsed(file), known) - {name} for name, file in known.items()}


def doors(file: Path, known: Container[str]) -> dict[str, set[str]]:
    """Functions of a file that import a module, call it once and do nothing else -> what they import."""
    functions = [node for node in ast.walk(parsed(file)) if isinstance(node, ast.FunctionDef)]
    bodies = {node.name: node.body[ast.get_docstring(node) is not None :] for node in functions}
    return {
        name: imported(body[0], known)
        for name, body in bodies.items()
        if len(body) == 2 and isinstance(body[0], ast.ImportFrom) and isinstance(body[1], (ast.Return, ast.Expr))
    }


def circles(arrows: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import each other, directly or through others."""
    reach = {name: set(targets) for name, targets in arrows.items()}
    for middle in reach:
        for targets in reach.values():
            if middle in targets:
                targets |= reach[middle]
    groups = {tuple(sorted(b for b in reach[a] if a in reach[b])) for a in reach if a in reach[a]}
    return [list(group) for group in sorted(groups)]


def test_the_search_for_circles_finds_them() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}, "e": set()}) == [["a", "b", "c"]]
    assert circles({"a": {"b"}, "b": {"c"}, "c": set()}) == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    arrows = graph()
    assert len(arrows) > 50
    assert "heads" in arrows["networks.simple_cnaps"]
    own_doors = doors(modules()["networks.simple_cnaps"], modules())
    assert own_doors == DOORS
    arrows["networks.simple_cnaps"] -= {target for targets in own_doors.values() for target in targets}
    assert circles(arrows) == []


def test_simple_cnaps_shows_a_user_no_more_than_this() -> None:
    shown = {name for name in vars(fewshot_mahalanobis.SimpleCNAPS) if not name.startswith("_")}
    assert shown == {*DOORS, "from_backbone", "forward", "adapt", "at_size", "train"}


def test_networks_know_no_file() -> None:
    for name, targets in graph().items():
        if name.startswith("networks."):
            files = {target for target in targets if target.split(".")[0] == "checkpoints"}
            assert files == (set().union(*DOORS.values()) if name == "networks.simple_cnaps" else set()), name


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
        if node.attr not in names[name] and any(node.attr in others for others in names.values())
    ]
    assert private == []


@pytest.mark.parametrize("room", ["gaussians", "heads", "support_set", "feature_classifier"])
def test_the_mathematics_knows_nothing_of_images(room: str) -> None:
    arrows = graph()
    own_doors = doors(modules()["feature_classifier"], modules())
    assert own_doors == FEATURE_DOORS
    arrows["feature_classifier"] -= {target for targets in own_doors.values() for target in targets}
    for name, targets in arrows.items():
        if name.split(".")[0] == room:
            assert not {target for target in targets if target.split(".")[0] in IMAGES}, name


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
