"""Is everything in the source archive, and in the wheel that was built from it?

    python .ci/complete.py DIST

Compares, byte by byte, the sdist with the files that git tracks, and the wheel with those of the package.
"""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

root, dist = Path(__file__).parents[1], Path(sys.argv[1])
(sdist,), (wheel,) = dist.glob("*.tar.gz"), dist.glob("*.whl")

listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, check=True, capture_output=True, text=True).stdout
tracked = {name: (root / name).read_bytes() for name in filter(None, listed.split("\0"))}
published = {name: content for name, content in tracked.items() if not name.startswith(".ci/")}
package = {name: content for name, content in tracked.items() if name.startswith("fewshot_mahalanobis/")}

with tarfile.open(sdist) as archive:
    inside = {
        member.name.partition("/")[2]: archive.extractfile(member).read() for member in archive if member.isfile()
    }
with zipfile.ZipFile(wheel) as archive:
    installed = {name: archive.read(name) for name in archive.namelist()}


def compare(where: str, found: dict[str, bytes], expected: dict[str, bytes], made: set[str]) -> None:
    """Stop unless ``found`` is ``expected`` and the files that the build makes."""
    problems = [
        *(f"{name} is missing" for name in expected.keys() - found.keys()),
        *(f"{name} should not be there" for name in found.keys() - expected.keys() - made),
        *(f"{name} differs" for name in expected.keys() & found.keys() if expected[name] != found[name]),
    ]
    if problems:
        sys.exit(f"{where}:\n  " + "\n  ".join(sorted(problems)))
    print(f"{where}: {len(expected)} files, all as they are in git")


compare(sdist.name, inside, published, {"PKG-INFO"})
info = next(name for name in installed if name.endswith(".dist-info/METADATA")).removesuffix("METADATA")
licences = {f"{info}licenses/{name}": tracked[name] for name in ("LICENSE", "THIRD_PARTY_NOTICES.md")}
made = {info + name for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt")}
compare(wheel.name, installed, package | licences, made)
if missing := made - installed.keys():
    sys.exit(f"{wheel.name} has no {sorted(missing)}")
for folder in ("tests/", "docs/", "examples/"):
    assert any(name.startswith(folder) for name in inside), folder
