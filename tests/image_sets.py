"""The project's image sets, which lie beside the checkout or in the folder FEWSHOT_MAHALANOBIS_DATA."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

DATA = Path(os.environ.get("FEWSHOT_MAHALANOBIS_DATA", Path(__file__).parents[2] / "shared" / "data"))


def is_set(variable: str) -> bool:
    """Whether an environment variable says yes: any text but "", "0", "no" and "false"."""
    return os.environ.get(variable, "").strip().lower() not in ("", "0", "no", "false")


#: Skips a test where the image sets are absent, unless FEWSHOT_MAHALANOBIS_REQUIRE_DATA makes that an error.
needs_data = pytest.mark.skipif(
    not DATA.is_dir() and not is_set("FEWSHOT_MAHALANOBIS_REQUIRE_DATA"),
    reason="the project's image sets are not here (FEWSHOT_MAHALANOBIS_DATA names their folder)",
)
