"""Classes that nobody has named yet: rejected queries that look like one another.

Queries of no class are clustered by average linkage (Sokal, Michener, "A statistical method for evaluating systematic
relationships", 1958). In the model of the default head (``gaussians/plda.py``) examples of all classes have the
covariance P within their class. The distance of two queries is one minus the cosine of the angle between them, as seen
from the centre of the class means, where P is the identity.

How near two pictures of one new class lie is known from the support set: two of its classes at a time are left out of
the metric, as if nobody had named them. The mean distance of pairs of one class, and of pairs of different ones, are
where a tree joins examples of one class, and where it joins classes. It is cut between, nearer to the former. With
fewer than four classes too little remains: then the cut is a share of k / (k + 1), the distance of different new
classes in the model, whose means are spread about the same place as those of the k known ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import squareform
from torch import Tensor

from fewshot_mahalanobis.gaussians.plda import PldaSettings
from fewshot_mahalanobis.support_set.caller_warnings import warn_caller
from fewshot_mahalanobis.support_set.copies import group_means, joined
from fewshot_mahalanobis.support_set.fitted_head import FittedHead
from fewshot_mahalanobis.support_set.witnesses import ClassMetric

#: Fewest different examples of a proposed class.
LEAST = 3
#: Where the tree is cut, as the share of the way from the mean distance of pairs of one class to that of different
#: ones; where the support set does not show these, as a share of the latter in the model. From validation classes.
_SHARE, _OF_DIFFERENT = 0.3, 0.7
#: Most pairs of classes that are left out.
_MOST_PAIRS = 10
#: Most queries that are clustered; the others join the clusters that they are near to.
_MOST = 5000


def check_proposes(fitted: FittedHead, noun: str) -> None:
    """Raise ValueError unless the classifier rejects queries, which it calls ``noun``."""
    if fitted.outliers is None:
        raise ValueError(
            f"new classes are proposed among {noun}s of no class, and this classifier rejects none: set unknown_label "
            "and fit (on the command line `fit --unknown-label`)"
        )


def proposed_classes(
    fitted: FittedHead,
    features: Tensor,
    unknown: NDArray[np.bool_],
    copies: NDArray[np.int64],
    group_names: Sequence[Any] | None = None,
) -> NDArray[np.int64]:
    """Classes (m,) proposed for queries as by :func:`new_classes`, -1 for those that are not ``unknown``.

    Parameters
    ----------
    fitted : FittedHead
    features : Tensor of shape (m, d)
        Adapted features.
    unknown : bool ndarray of shape (m,)
        Which ones it has rejected.
    copies : int64 ndarray of shape (p, 2)
        Pairs of copies, which count once.
    group_names : sequence of m, optional
        Queries of one group count once.
    """
    found = np.full(len(features), -1)
    rows = np.flatnonzero(unknown)
    groups = joined(len(features), copies, [None] * len(features) if group_names is None else group_names)
    chosen = torch.from_numpy(rows)
    found[rows] = new_classes(fitted, features[chosen.to(features.device)], None if groups is None else groups[chosen])
    return found


def new_classes(fitted: FittedHead, features: Tensor, copies: Tensor | None = None) -> NDArray[np.int64]:
    """Cluster queries of no class.

    Parameters
    ----------
    fitted : FittedHead
        The classifier that rejected them.
    features : Tensor of shape (m, d)
        Their adapted features.
    copies : int64 Tensor of shape (m,), optional
        Queries of equal number count as one.

    Returns
    -------
    int64 ndarray of shape (m,)
        The class that is proposed for each: 0, 1, 2, ..., the tightest first, or -1 for none.

    Warns
    -----
    UserWarning
        They are more than 5,000. 5,000 of them, evenly spread, are clustered, and the others join them.
    """
    rows = torch.arange(len(features)) if copies is None else copies.unique(return_inverse=True)[1].cpu()
    if len(features) == 0 or int(rows.max()) + 1 < LEAST:
        return np.full(len(features), -1)
    metric = fitted.metric()
    x = group_means(_directions(metric, features), rows).numpy()
    height = _height(fitted, metric.settings)
    some = np.linspace(0, len(x) - 1, min(len(x), _MOST)).round().astype(np.int64)
    clusters = _tightest_first(x[some], height)
    if len(some) < len(x):
        warn_caller(
            f"{len(x)} queries are of no class: {_MOST} of them, evenly spread, are clustered, and the others join"
        )
        clusters = _joining(x, x[some], clusters, height)
    return clusters[rows.numpy()]


def _directions(metric: ClassMetric, features: Tensor) -> Tensor:
    """Unit vectors (m, r), as seen from the centre of the classes, of features (m, d), float64 on the CPU."""
    return torch.nn.functional.normalize(metric(features), dim=1).double().cpu()


def _height(fitted: FittedHead, settings: PldaSettings) -> float:
    """Mean distance of clusters up to which they are joined, from pairs of classes that are left out of the metric."""
    labels, features = fitted.labels, fitted.support.adapted
    groups = torch.arange(len(labels)) if fitted.groups is None else fitted.groups.cpu()
    pairs = [*combinations(range(len(fitted.classes)), 2)] if len(fitted.classes) >= 4 else []
    some = np.linspace(0, len(pairs) - 1, min(len(pairs), _MOST_PAIRS)).round().astype(np.int64)
    within, between = list[Any](), list[Any]()
    for pair in (pairs[index] for index in some.tolist()):
        out = torch.isin(labels, torch.tensor(pair, device=labels.device))
        rest = labels[~out].unique(return_inverse=True)[1]
        metric = ClassMetric(features[~out], rest, settings)
        distances = _distances(_directions(metric, features[out]).numpy())
        of, group = labels[out].cpu().numpy(), groups[out.cpu()].numpy()
        same, upper = of[:, None] == of, np.triu(group[:, None] != group)
        within.append(distances[same & upper])
        between.append(distances[~same & upper])
    same_class, different = np.concatenate([[], *within]), np.concatenate([[], *between])
    if not (len(same_class) and len(different)):
        k = len(fitted.classes)  # the centre of k classes is as uncertain as that, so others lie on one side of it
        return _OF_DIFFERENT * k / (k + 1)
    return float(same_class.mean() + _SHARE * (different.mean() - same_class.mean()))


def _distances(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """One minus the cosine (n, n) of unit vectors (n, r), zero on the diagonal."""
    found: NDArray[np.float64] = (1 - x @ x.T).clip(min=0)  # a matrix product: five times as fast as ``pdist``
    np.fill_diagonal(found, 0)
    return found


def _tightest_first(x: NDArray[np.float64], height: float) -> NDArray[np.int64]:
    """Clusters (n,) of unit vectors (n, r), -1 for none."""
    distances, spread = _distances(x), dict[int, float]()
    found = fcluster(linkage(squareform(distances, checks=False), "average"), height, "distance")
    for cluster in np.flatnonzero(np.bincount(found) >= LEAST).tolist():
        members = np.flatnonzero(found == cluster)
        spread[cluster] = float(distances[np.ix_(members, members)].sum()) / (len(members) * (len(members) - 1))
    number = {cluster: place for place, cluster in enumerate(sorted(spread, key=lambda each: spread[each]))}
    return np.array([number.get(cluster, -1) for cluster in found.tolist()])


def _joining(
    x: NDArray[np.float64], known: NDArray[np.float64], clusters: NDArray[np.int64], height: float
) -> NDArray[np.int64]:
    """Cluster (m,) of the least mean distance to unit vectors (m, r), -1 above the height, by ``known`` ones (n, r)."""
    if clusters.max() < 0:
        return np.full(len(x), -1)
    means = np.stack([known[clusters == cluster].mean(axis=0) for cluster in range(clusters.max() + 1)])
    distances = 1 - x @ means.T
    return np.where(distances.min(axis=1) <= height, distances.argmin(axis=1), -1)
