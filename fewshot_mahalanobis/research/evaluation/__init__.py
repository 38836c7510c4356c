"""Evaluation: episodes -> accuracies with 95 % intervals, tables and plots."""

from fewshot_mahalanobis.research.evaluation.accuracy import Variant, evaluate_source
from fewshot_mahalanobis.research.evaluation.result import Accuracy

__all__ = ["Accuracy", "Variant", "evaluate_source"]
