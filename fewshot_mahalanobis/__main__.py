"""``python -m fewshot_mahalanobis``."""

from fewshot_mahalanobis.apps.cli import app

app(prog_name="fewshot-mahalanobis")
