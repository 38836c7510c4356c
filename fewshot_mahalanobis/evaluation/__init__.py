"""Evaluation: episodes -> accuracies with 95 % intervals, tables and plots."""

from fewshot_mahalanobis.evaluation.evaluate import Accuracy, Variant, evaluate_source

__all__ = ["Accuracy", "Variant", "evaluate_source"]
