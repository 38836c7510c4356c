"""Every text that lists the heads lists those of ``HEADS``."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
from typer.main import get_command

from fewshot_mahalanobis import MahalanobisClassifier, SimpleCNAPS, SimpleCNAPSClassifier
from fewshot_mahalanobis.apps.cli import app
from fewshot_mahalanobis.heads import HEADS

PAGE = Path(__file__).parents[2] / "docs" / "evaluation.md"


def documented(owner: object) -> str:
    """What a docstring says of the parameter ``head``."""
    return re.split(r"\n\w+ : ", str(inspect.getdoc(owner)).split("\nhead : ")[1])[0]


def texts() -> dict[str, str]:
    options = get_command(app).commands["fit"].params  # type: ignore[attr-defined]
    return {
        "SimpleCNAPSClassifier": documented(SimpleCNAPSClassifier),
        "SimpleCNAPS": documented(SimpleCNAPS),
        "the page": PAGE.read_text().split("| these heads: ")[1].split(" |")[0],
        "MahalanobisClassifier": documented(MahalanobisClassifier),
        "from_backbone": documented(SimpleCNAPS.from_backbone),
        "the command": next(option.help for option in options if option.name == "head"),
    }


@pytest.mark.parametrize("place", texts())
def test_a_text_that_lists_the_heads_has_all_of_them_in_one_order(place: str) -> None:
    unlearned = place in ("MahalanobisClassifier", "from_backbone", "the command")
    names = [*dict.fromkeys(re.findall(rf"\b(?:{'|'.join(HEADS)})\b", texts()[place]))]
    assert names == [name for name in HEADS if name != "linear" or not unlearned]
