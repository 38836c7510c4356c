"""Where things live: every import points down, no module is long."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import fewshot_mahalanobis

PACKAGE = Path(fewshot_mahalanobis.__file__).parent
LONGEST_MODULE, LONGEST_PACKAGE = 550, 18_000
#: What the mathematics of the head must not know.
IMAGES = ("images", "networks", "data", "episodes", "checkpoints", "classifier", "folders")


def modules() -> dict[str, Path]:
    """Name without the package's, "" for the package itself -> file."""
    names = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        parts = file.relative_to(PACKAGE).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return names


def typing_only(tree: ast.Module) -> set[ast.AST]:
    """Nodes below ``if TYPE_CHECKING:``, which never run."""
    blocks = (node for node in ast.walk(tree) if isinstance(node, ast.If))
    found = (block for block in blocks if isinstance(block.test, ast.Name) and block.test.id == "TYPE_CHECKING")
    return {node for block in found for statement in block.body for node in ast.walk(statement)}


def imported(file: Path, known: dict[str, Path]) -> set[str]:
    """Modules of the package that a file imports, wherever in it: at the top or in a function."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    names = set()
    for node in set(ast.walk(tree)) - typing_only(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: imports are absolute"
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    own = {name.removeprefix("fewshot_mahalanobis.") for name in names if name.startswith("fewshot_mahalanobis.")}
    return own & known.keys()


def graph() -> dict[str, set[str]]:
    known = modules()
    return {name: imported(file, known) - {name} for name, file in known.items()}


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
    assert circles(arrows) == []


@pytest.mark.parametrize("room", ["gaussians", "heads", "calibration", "rejection", "feature_classifier"])
def test_the_mathematics_knows_nothing_of_images(room: str) -> None:
    for name, targets in graph().items():
        if name.split(".")[0] == room:
            assert not {target for target in targets if target.split(".")[0] in IMAGES}, name


def test_no_module_is_long_and_the_package_is_not() -> None:
    lengths = {name: len(file.read_text(encoding="utf-8").splitlines()) for name, file in modules().items()}
    assert {name: lines for name, lines in lengths.items() if lines > LONGEST_MODULE} == {}
    assert sum(lengths.values()) <= LONGEST_PACKAGE


def test_public_names_are_those_that_type_checkers_see() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
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
