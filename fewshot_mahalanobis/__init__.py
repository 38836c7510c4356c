"""Few-shot image classification with Simple CNAPS (Bateni et al., CVPR 2020)."""

from fewshot_mahalanobis.checkpoints import available_checkpoints, load_checkpoint
from fewshot_mahalanobis.classifier import SimpleCNAPSClassifier
from fewshot_mahalanobis.gaussians.covariance import RegularizedCovariance
from fewshot_mahalanobis.feature_classifier import MahalanobisClassifier
from fewshot_mahalanobis.heads import (
    CosineHead,
    DotProductHead,
    EuclideanHead,
    LinearHead,
    MahalanobisHead,
    ManhattanHead,
)
from fewshot_mahalanobis.networks.simple_cnaps import SimpleCNAPS

__all__ = [
    "CosineHead",
    "DotProductHead",
    "EuclideanHead",
    "LinearHead",
    "MahalanobisClassifier",
    "MahalanobisHead",
    "ManhattanHead",
    "RegularizedCovariance",
    "SimpleCNAPS",
    "SimpleCNAPSClassifier",
    "available_checkpoints",
    "load_checkpoint",
]
__version__ = "0.1.0"
