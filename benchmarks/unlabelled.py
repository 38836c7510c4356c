"""Accuracy gained by unlabelled examples, by what they are of: docs/unlabelled.md.

Both heads that learn from them are measured with and without on the same 5-way episodes, and beside peers on the same
features: scikit-learn's semi-supervised classifiers and easyfsl's transductive methods. Unlabelled examples are 20 of
each class at most. They are balanced; unbalanced, half as many whose shares are drawn from a flat Dirichlet
distribution; of two of the classes; of one; or all and half as many from up to three classes that have no support
example. Accuracy counts the unlabelled examples of the five classes. That of other queries, of the same shares, which
nothing learns from, is beside it.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.semi_supervised import LabelSpreading, SelfTrainingClassifier
from torch import Tensor, nn

from benchmarks.feature_peers import gain
from benchmarks.feature_tasks import Features, classes_of, extractors, measure, test_sets
from benchmarks.record import Record, Table
from fewshot_mahalanobis.gaussians.pool import Pool
from fewshot_mahalanobis.gaussians.unlabelled import memberships
from fewshot_mahalanobis.heads import AutoHead, Head, MahalanobisHead
from fewshot_mahalanobis.research.data.sources import ImageSource
from fewshot_mahalanobis.research.episodes.sampling import Episode, episode_rng

WAYS, SHOTS, UNLABELLED, QUERIES, FOREIGN = 5, (1, 5), 20, 5, 3
#: Fewest images of a class beside its shots.
FEWEST = 10
KINDS = ("balanced", "unbalanced", "of two classes", "of one class", "with foreign ones")

#: Of one method and one kind: accuracy of the unlabelled examples, of others, and mean probability of the former.
Values = tuple[float, float, float]
#: Support features, labels, unlabelled features, queries -> logits of the latter two.
Method = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def run(record: Record) -> list[Table]:
    tables: list[Table] = []
    for extractor in extractors(record) if record.data is not None else ():
        for shots in SHOTS:
            found: dict[str, dict[str, list[Values]]] = {}
            for name, source in test_sets(record, extractor.size).items():
                if classes_of(source, shots + FEWEST, WAYS) is None:
                    continue
                found[name] = measure(record, extractor, source, f"{shots} shots", _drawn(source, shots), values)
            if found:
                tables += [_gains(extractor.name, shots, found), _confidence(extractor.name, shots, found)]
    return tables


def _drawn(source: ImageSource, shots: int) -> Callable[[int], Sequence[Episode]]:
    classes = classes_of(source, shots + FEWEST, WAYS)
    assert classes is not None
    ways = min(WAYS, len(classes))

    def draw(index: int) -> Sequence[Episode]:
        rng = episode_rng("unlabelled", source.name, str(shots), index)
        chosen = rng.choice(len(classes), min(ways + FOREIGN, len(classes)), replace=False)
        drawn = [rng.permutation(classes[k])[: shots + UNLABELLED + QUERIES] for k in chosen]
        support = np.concatenate([images[:shots] for images in drawn[:ways]])
        others = [images[shots:] for images in drawn]
        labels = np.repeat(np.arange(len(drawn)), [len(images) for images in others])
        return [Episode(support, np.repeat(np.arange(ways), shots), np.concatenate(others), labels)]

    return draw


def unlabelled_of(labels: NDArray[np.int64], ways: int, rng: np.random.Generator) -> dict[str, NDArray[np.int64]]:
    """Unlabelled examples of each kind, as indices into examples whose ``labels`` are sorted; the last are queries."""
    of_class = [np.flatnonzero(labels == k)[:-QUERIES] for k in range(labels.max() + 1)]
    own, foreign = of_class[:ways], of_class[ways:]
    every = np.concatenate(own)
    numbers = np.round(rng.dirichlet(np.ones(ways)) * len(every) / 2).astype(int)
    kinds = [every, np.concatenate([some[:n] for some, n in zip(own, numbers)]), np.concatenate(own[:2]), own[0]]
    if foreign:
        kinds.append(np.concatenate([every, rng.permutation(np.concatenate(foreign))[: len(every) // 2]]))
    return dict(zip(KINDS, kinds))


def values(episode: Sequence[Features]) -> dict[str, Values]:
    """What each method reaches with the unlabelled examples of each kind, and our heads without any."""
    (features,) = episode
    support, labels, others = features.tensors()
    truth, ways = torch.from_numpy(features.query_labels), int(labels.max()) + 1
    rng = np.random.default_rng(zlib.crc32(features.support.tobytes()))
    held_out = torch.cat([(truth == k).nonzero()[-QUERIES:, 0] for k in range(ways)])
    found = {}
    for kind, chosen in unlabelled_of(features.query_labels, ways, rng).items():
        pool = torch.from_numpy(chosen)
        own = truth[pool] < ways
        shares = truth[pool][own].bincount(minlength=ways) / own.sum()
        for name, method in METHODS.items():
            of_pool, of_others = method(support, labels, others[pool], others[held_out])
            right = (of_others.argmax(dim=1) == truth[held_out]).double()
            found[f"{name}, {kind}"] = (
                float((of_pool.argmax(dim=1) == truth[pool])[own].double().mean()),
                float((right * (shares / QUERIES)[truth[held_out]]).sum()),
                float(of_pool.double().softmax(dim=1).amax(dim=1)[own].mean()),
            )
    return found


# -------------------------------------------------------------------- methods


def _alone(head: Head, support: Tensor, labels: Tensor, pool: Tensor, queries: Tensor) -> tuple[Tensor, Tensor]:
    state = head.fit(support, labels)
    return head.logits(state, pool), head.logits(state, queries)


def _with_pool(head: Head, support: Tensor, labels: Tensor, pool: Tensor, queries: Tensor) -> tuple[Tensor, Tensor]:
    settings = head.unlabelled_settings(support, labels, None)
    found = Pool(pool, memberships(settings, support, labels, None, pool))
    state, log_shares = head.fit_pool(support, labels, None, found), found.shares().log()
    return head.logits(state, pool) + log_shares, head.logits(state, queries) + log_shares


def _by_sklearn(make: Callable[[], object], *parts: Tensor) -> tuple[Tensor, Tensor]:
    """On features of unit length, which suit these classifiers better."""
    support, labels, pool, queries = parts
    x, u, q = (nn.functional.normalize(part - support.mean(dim=0), dim=1).numpy() for part in (support, pool, queries))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fitted = make().fit(np.concatenate([x, u]), np.concatenate([labels.numpy(), np.full(len(u), -1)]))
    return tuple(torch.from_numpy(fitted.predict_proba(part)).clamp(min=1e-12).log() for part in (u, q))


def _by_easyfsl(name: str, *parts: Tensor) -> tuple[Tensor, Tensor]:
    """Transductive: others than the pool are classified together with it."""
    from easyfsl import methods

    support, labels, pool, queries = parts
    method = getattr(methods, name)(nn.Identity(), feature_centering=support.mean(dim=0), feature_normalization=2)
    method.process_support_set(support, labels)
    return method(pool).detach(), method(torch.cat([pool, queries])).detach()[len(pool) :]


METHODS: dict[str, Method] = {
    "auto": partial(_alone, AutoHead()),
    "auto, unlabelled": partial(_with_pool, AutoHead()),
    "mahalanobis": partial(_alone, MahalanobisHead()),
    "mahalanobis, unlabelled": partial(_with_pool, MahalanobisHead()),
    "LabelSpreading": partial(_by_sklearn, lambda: LabelSpreading(kernel="knn", n_neighbors=7, max_iter=100)),
    "SelfTraining, LogisticRegression": partial(_by_sklearn, lambda: SelfTrainingClassifier(LogisticRegression(C=10))),
    "BD-CSPN": partial(_by_easyfsl, "BDCSPN"),
    "LaplacianShot": partial(_by_easyfsl, "LaplacianShot"),
    "TIM-GD": partial(_by_easyfsl, "TIM"),
}


# -------------------------------------------------------------------- tables


def _gains(features: str, shots: int, found: dict[str, dict[str, list[Values]]]) -> Table:
    rows = []
    for name in METHODS:
        base = "mahalanobis" if name.startswith("mahalanobis") else "auto"
        if name == base:
            continue
        for kind in KINDS:
            pairs = {
                of: [([v[column] for v in values[f"{each}, {kind}"]]) for each in (name, base) for column in (0, 1)]
                for of, values in found.items()
                if f"{name}, {kind}" in values
            }
            if not pairs:
                continue
            without, with_ = (100 * np.mean([np.mean(parts[i]) for parts in pairs.values()]) for i in (2, 0))
            of_sets = {of: 100 * (np.mean(parts[0]) - np.mean(parts[2])) for of, parts in pairs.items()}
            least = min(of_sets, key=of_sets.__getitem__)
            rows.append([
                f"{name}, {kind}", f"{without:.1f}", f"{with_:.1f}",
                gain({of: (parts[0], parts[2]) for of, parts in pairs.items()}),
                gain({of: (parts[1], parts[3]) for of, parts in pairs.items()}),
                f"{of_sets[least]:+.1f} ({least})",
            ])  # fmt: skip
    header = ["method, unlabelled examples", "head alone", "with", "gain", "gain on others", "least of a set"]
    note = f"Sets: {', '.join(found)}. Gains in points within episodes, with 95 % intervals."
    return Table(f"Unlabelled examples, {features} features, 5-way {shots}-shot", header, rows, note)


def _confidence(features: str, shots: int, found: dict[str, dict[str, list[Values]]]) -> Table:
    rows = []
    for kind in KINDS:
        cells = []
        for name in ("auto", "auto, unlabelled"):
            of = [v for values in found.values() for v in values.get(f"{name}, {kind}", [])]
            if of:
                cells.append(f"{100 * np.mean([v[0] for v in of]):.1f} / {100 * np.mean([v[2] for v in of]):.1f}")
        if cells:
            rows.append([kind, *cells])
    header = ["unlabelled examples", "auto: right / sure", "with them: right / sure"]
    return Table(f"Confidence with unlabelled examples, {features} features, 5-way {shots}-shot", header, rows)
