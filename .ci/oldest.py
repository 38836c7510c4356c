"""Constraints that pin each direct dependency to the oldest version that pyproject.toml allows.

    python .ci/oldest.py EXTRA... > constraints.txt

Those of the package itself and of the named extras; where two floors are given for one, the higher holds. What the
dependencies depend on is left to pip, which takes the newest: nobody promises that those have old versions.
"""

import re
import sys
from pathlib import Path

import tomllib

project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]


def floors(requirements: list[str]) -> dict[str, str]:
    """Package -> lowest version, the package's own extras followed."""
    found: dict[str, str] = {}
    for requirement in requirements:
        bare = requirement.split(";")[0].strip()
        name = re.match(r"[\w.-]+", bare)[0]
        if name == project["name"]:
            inner = floors([r for extra in re.findall(r"[\w-]+", bare[len(name) :]) for r in extras[extra]])
        else:
            floor = re.search(r">=\s*([\d.]+)", bare)
            inner = {name: floor[1]} if floor else {}
        for name, floor in inner.items():
            found[name] = max(found.get(name, "0"), floor, key=lambda version: [int(n) for n in version.split(".")])
    return found


extras = project["optional-dependencies"]
pins = floors(project["dependencies"] + [r for extra in sys.argv[1:] for r in extras[extra]])
print("\n".join(f"{name}=={floor}" for name, floor in sorted(pins.items())))
