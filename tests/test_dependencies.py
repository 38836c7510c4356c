"""What a bare ``pip install`` brings is enough for the library, what needs an extra says which, and conda's agree."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import fewshot_mahalanobis
from fewshot_mahalanobis.extras import install_command

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[1]
PACKAGE = "fewshot-mahalanobis"
#: conda-forge's other names.
OF_CONDA = {"torch": "pytorch", "msgspec": "msgspec-python"}
#: Runs in an interpreter that finds no module of the names in its first argument.
BARE = """
import contextlib, io, json, runpy, sys
from importlib.machinery import PathFinder
from pathlib import Path

class BareFinder(PathFinder):
    hidden = set(json.loads(sys.argv[1]))

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if path is None and name in cls.hidden else PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = BareFinder

import numpy as np
from fewshot_mahalanobis import MahalanobisClassifier, SimpleCNAPSClassifier, load_checkpoint
from fewshot_mahalanobis.research.evaluation import evaluate_source

images = np.random.default_rng(0).integers(0, 256, (8, 32, 32, 3), np.uint8)
labels = ["cat", "dog"] * 4
classifier = SimpleCNAPSClassifier("resnet18", unknown_label="unknown").fit(images, labels)
classifier.partial_fit(images[:2] // 2, labels[:2])
file = Path(sys.argv[2], "classifier.safetensors")
classifier.save(file)
loaded = SimpleCNAPSClassifier.load(file)
str(loaded.summary())
same = (loaded.predict(images) == classifier.predict(images)).all()
load_checkpoint("default")
MahalanobisClassifier().fit(images.reshape(8, -1) / 255, labels).predict(images.reshape(8, -1) / 255)

def message(call):
    try:
        call()
    except (ImportError, SystemExit) as error:
        return str(error)

print(json.dumps({
    "same": bool(same),
    "compiler": "torch._dynamo" in sys.modules,
    "hub": message(lambda: load_checkpoint("user/repo")),
    "published": message(lambda: load_checkpoint("simple-cnaps-meta-dataset")),
    "push": message(lambda: classifier.push_to_hub("user/repo")),
    "push model": message(lambda: classifier.model_.push_to_hub("user/repo")),
    "command": message(lambda: runpy.run_module("fewshot_mahalanobis", run_name="__main__")),
    "tables": message(lambda: __import__("fewshot_mahalanobis.research.evaluation.result_tables")),
}))
"""


def brought_by(package: str) -> set[str]:
    """Names of everything that ``pip install package`` brings, the package's own among them."""
    names, seen, waiting = set(), set(), [Requirement(package)]
    while waiting:
        requirement = waiting.pop()
        name, extras = canonicalize_name(requirement.name), frozenset(requirement.extras or {""})
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        names.add(name)
        for text in metadata.requires(name) or ():
            needed = Requirement(text)
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras):
                waiting.append(needed)
    return names


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the script above prints, in an interpreter with the packages of a bare installation."""
    kept = brought_by(PACKAGE)
    hidden = [
        module
        for module, packages in metadata.packages_distributions().items()
        if not kept & {canonicalize_name(name) for name in packages} and module != "fewshot_mahalanobis"
    ]
    folder = tmp_path_factory.mktemp("bare")
    command = [sys.executable, "-c", BARE, json.dumps(hidden), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    answers: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return answers


@pytest.mark.slow
def test_a_bare_installation_fits_predicts_saves_and_loads(bare: dict[str, str]) -> None:
    assert bare["same"] is True


@pytest.mark.slow
def test_no_call_waits_for_the_import_of_torchs_compiler(bare: dict[str, str]) -> None:
    assert bare["compiler"] is False


@pytest.mark.parametrize(
    ("what", "extra"),
    [
        ("hub", "hub"),
        ("published", "hub"),
        ("push", "hub"),
        ("push model", "hub"),
        ("command", "cli"),
        ("tables", "cli"),
    ],
)
@pytest.mark.slow
def test_what_needs_an_extra_says_which(bare: dict[str, str], what: str, extra: str) -> None:
    assert install_command(extra) in bare[what]


def test_an_extra_is_installed_from_the_index_or_from_a_clone() -> None:
    assert install_command("hub") == 'pip install "fewshot-mahalanobis[hub]", in a clone pip install ".[hub]"'


def test_every_extra_that_a_message_names_exists_and_no_message_words_the_command_itself() -> None:
    folder = Path(fewshot_mahalanobis.__file__).parent
    sources = {file: file.read_text(encoding="utf-8") for file in folder.rglob("*.py")}
    extras = {name for source in sources.values() for name in re.findall(r"install_command\([\"'](\w+)", source)}
    assert extras
    assert extras <= set(metadata.metadata(PACKAGE).get_all("Provides-Extra") or ())
    assert [file.name for file, source in sources.items() if f"{PACKAGE}[" in source] == ["extras.py"]


def test_a_bare_installation_brings_a_dozen_packages_beside_those_of_torch() -> None:
    others = brought_by(PACKAGE) - brought_by("torch")
    assert len(others) <= 14, others


def test_the_recipe_for_conda_has_the_version_the_dependencies_and_the_command_of_the_package() -> None:
    yaml = pytest.importorskip("yaml")
    recipe = ROOT / ".github" / "conda-forge" / "recipe.yaml"
    if not recipe.exists():
        pytest.skip("the tests are away from the repository")
    content = yaml.safe_load(recipe.read_text())
    context = content["context"]
    assert context["version"] == fewshot_mahalanobis.__version__ == metadata.version(PACKAGE)
    distribution = metadata.metadata(PACKAGE)
    assert (context["name"], f">={context['python_min']}") == (distribution["Name"], distribution["Requires-Python"])
    assert content["about"]["summary"] == distribution["Summary"]
    needed = [Requirement(text) for text in metadata.requires(PACKAGE) or ()]
    expected = {
        f"{OF_CONDA.get(requirement.name, requirement.name)} {requirement.specifier}"
        for requirement in needed
        if requirement.marker is None or requirement.marker.evaluate({"extra": "cli"})
    }
    assert set(content["requirements"]["run"]) == expected | {"python >=${{ python_min }}"}
    (command,) = metadata.entry_points(group="console_scripts", name=PACKAGE)
    assert content["build"]["python"]["entry_points"] == [f"{command.name} = {command.value}"]
