"""Is it the installed package that is imported, and does it lack nothing but other packages, those of extras?

    cd somewhere/else && path/to/python -I .ci/installed.py

Imports every module. What only an extra brings may be missing, nothing of the package itself.
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
        missing = error if isinstance(error, ModuleNotFoundError) else error.__cause__
        assert isinstance(missing, ModuleNotFoundError), f"{module.name} cannot be imported: {error!r}"
        assert not str(missing.name).startswith("fewshot_mahalanobis"), f"{module.name} misses {missing.name}"
        lacking.append(module.name)
print(f"{at.parent} {fewshot_mahalanobis.__version__}; without their extras: {', '.join(lacking) or 'none'}")
