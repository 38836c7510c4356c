"""Is it the installed package that is imported, and does every module of it say what it lacks?

    cd somewhere/else && path/to/python -I .ci/installed.py

Imports every module. One that needs an extra which is not installed must name it.
"""

import importlib
import pkgutil
import sys
from pathlib import Path

import fewshot_mahalanobis

at = Path(fewshot_mahalanobis.__file__)
assert at.is_relative_to(sys.prefix), f"{at} is not the installed package: that would be below {sys.prefix}"

lacking = []
for module in pkgutil.walk_packages(fewshot_mahalanobis.__path__, "fewshot_mahalanobis."):
    if module.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(module.name)
    except ImportError as error:
        assert "fewshot-mahalanobis[" in str(error), f"{module.name} fails without naming an extra: {error!r}"
        lacking.append(module.name)
print(f"{at.parent} {fewshot_mahalanobis.__version__}; without their extras: {', '.join(lacking) or 'none'}")
