"""Evaluation: episodes -> accuracies with 95 % intervals, tables and plots."""

from fewshot_mahalanobis.evaluation.accuracy import Accuracy, Variant, evaluate_source

__all__ = ["Accuracy", "Variant", "evaluate_source"]
