"""Few-shot image classification with Simple CNAPS (Bateni et al., CVPR 2020)."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fewshot_mahalanobis.adapted_features import AdaptedFeatures as AdaptedFeatures
    from fewshot_mahalanobis.checkpoints import available_checkpoints as available_checkpoints
    from fewshot_mahalanobis.checkpoints.load import load_checkpoint as load_checkpoint
    from fewshot_mahalanobis.classifier import SimpleCNAPSClassifier as SimpleCNAPSClassifier
    from fewshot_mahalanobis.feature_classifier import MahalanobisClassifier as MahalanobisClassifier
    from fewshot_mahalanobis.heads import AutoHead as AutoHead
    from fewshot_mahalanobis.heads import CosineHead as CosineHead
    from fewshot_mahalanobis.heads import DotProductHead as DotProductHead
    from fewshot_mahalanobis.heads import EuclideanHead as EuclideanHead
    from fewshot_mahalanobis.heads import LinearHead as LinearHead
    from fewshot_mahalanobis.heads import MahalanobisHead as MahalanobisHead
    from fewshot_mahalanobis.heads import ManhattanHead as ManhattanHead
    from fewshot_mahalanobis.heads.mahalanobis import RegularizedCovariance as RegularizedCovariance
    from fewshot_mahalanobis.images.folders import load_folder as load_folder
    from fewshot_mahalanobis.images.region import Region as Region
    from fewshot_mahalanobis.networks.simple_cnaps import SimpleCNAPS as SimpleCNAPS

#: Public name -> module that has it. It is imported when the name is first used (PEP 562), so that importing the
#: package, and ``fewshot-mahalanobis --help``, does not load PyTorch.
_MODULES = {
    "AdaptedFeatures": "adapted_features",
    "AutoHead": "heads",
    "CosineHead": "heads",
    "DotProductHead": "heads",
    "EuclideanHead": "heads",
    "LinearHead": "heads",
    "MahalanobisClassifier": "feature_classifier",
    "MahalanobisHead": "heads",
    "ManhattanHead": "heads",
    "Region": "images.region",
    "RegularizedCovariance": "heads.mahalanobis",
    "SimpleCNAPS": "networks.simple_cnaps",
    "SimpleCNAPSClassifier": "classifier",
    "available_checkpoints": "checkpoints",
    "load_checkpoint": "checkpoints.load",
    "load_folder": "images.folders",
}
__all__ = list(_MODULES)
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
