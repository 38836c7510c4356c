"""AdaptedFeatures as a scikit-learn transformer."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.base import clone
from sklearn.cluster import KMeans
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.multioutput import MultiOutputClassifier
from sklearn.pipeline import make_pipeline
from sklearn.utils import estimator_checks

from fewshot_mahalanobis import AdaptedFeatures, MahalanobisClassifier, SimpleCNAPSClassifier
from fewshot_mahalanobis.checkpoints import save_checkpoint
from fewshot_mahalanobis.images.errors import ImageError
from tests.tiny import (
    QUERY_LABELS,
    SUPPORT_LABELS,
    TinyExtractor,
    adapting_model,
    drawn,
    pictures,
    tiny_model,
)

pytestmark = pytest.mark.usefixtures("narrow_resnet18")

SUPPORT, QUERIES = drawn(SUPPORT_LABELS, 1), drawn(QUERY_LABELS, 2)
#: scikit-learn's checks of an estimator that need no feature vectors.
CHECKS = [
    "check_estimator_cloneable",
    "check_estimator_repr",
    "check_estimator_tags_renamed",
    "check_get_params_invariance",
    "check_mixin_order",
    "check_no_attributes_set_in_init",
    "check_parameters_default_constructible",
    "check_set_params",
    "check_valid_tag_types",
]


@pytest.mark.parametrize("check", CHECKS)
def test_scikit_learns_checks_that_need_no_feature_vectors_pass(check: str) -> None:
    if not hasattr(estimator_checks, check):
        pytest.skip("this version of scikit-learn lacks it")
    getattr(estimator_checks, check)("AdaptedFeatures", AdaptedFeatures(image_size=96))


@pytest.mark.parametrize("adapt", [True, False])
def test_its_features_are_those_of_the_classifier(adapt: bool) -> None:
    model = adapting_model()
    classifier = SimpleCNAPSClassifier(model, device="cpu", adapt=adapt).fit(SUPPORT, SUPPORT_LABELS)
    features = AdaptedFeatures(model, device="cpu", adapt=adapt).fit(SUPPORT)
    assert np.array_equal(features.transform(QUERIES), classifier.transform(QUERIES))
    assert features.transform(QUERIES).dtype == np.float32
    assert features.n_features_out_ == classifier.n_features_out_ == 64


def test_labels_change_nothing_and_the_images_do() -> None:
    transformer = AdaptedFeatures(adapting_model(), device="cpu")
    alone = transformer.fit(SUPPORT).transform(QUERIES)
    assert np.array_equal(transformer.fit(SUPPORT, SUPPORT_LABELS).transform(QUERIES), alone)
    assert np.array_equal(transformer.fit(SUPPORT, np.zeros((8, 3))).transform(QUERIES), alone)
    assert not np.allclose(transformer.fit(SUPPORT[:3]).transform(QUERIES), alone, rtol=1e-3)


def test_without_adaptation_the_features_of_an_image_depend_on_no_other() -> None:
    transformer = AdaptedFeatures(adapting_model(), device="cpu", adapt=False)
    first = transformer.fit(SUPPORT).transform(QUERIES)
    assert np.array_equal(transformer.fit(SUPPORT[:1]).transform(QUERIES), first)


def test_one_image_is_enough_to_fit() -> None:
    assert AdaptedFeatures(adapting_model(), device="cpu").fit(SUPPORT[:1]).transform(QUERIES).shape == (7, 64)


@pytest.mark.parametrize("settings", [{"image_size": 48}, {"batch_size": 3}, {"n_jobs": 2}, {"precision": "float32"}])
def test_the_settings_of_the_network_mean_what_they_mean_for_the_classifier(settings: dict[str, Any]) -> None:
    arguments = {"device": "cpu", **settings}
    transformer = AdaptedFeatures(adapting_model(), **arguments).fit(SUPPORT)
    classifier = SimpleCNAPSClassifier(adapting_model(), **arguments).fit(SUPPORT, SUPPORT_LABELS)
    assert np.array_equal(transformer.transform(QUERIES), classifier.transform(QUERIES))
    assert transformer.model_.image_size == settings.get("image_size", 32)


def test_a_value_range_is_that_of_images_to_fit_and_to_transform() -> None:
    deep = drawn(SUPPORT_LABELS, 1).astype(np.uint16) * 16
    by_range = AdaptedFeatures(adapting_model(), device="cpu", value_range=(0, 255 * 16)).fit(deep)
    plain = AdaptedFeatures(adapting_model(), device="cpu").fit(drawn(SUPPORT_LABELS, 1))
    np.testing.assert_allclose(by_range.transform(deep), plain.transform(SUPPORT), rtol=1e-3, atol=1e-3)


def test_data_frames_have_the_names_of_the_features() -> None:
    pandas = pytest.importorskip("pandas")
    transformer = AdaptedFeatures(adapting_model(), device="cpu")
    with pytest.raises(NotFittedError):
        transformer.get_feature_names_out()
    frame = clone(transformer).set_output(transform="pandas").fit_transform(SUPPORT)
    assert isinstance(frame, pandas.DataFrame)
    names = transformer.fit(SUPPORT).get_feature_names_out()
    assert frame.columns.tolist() == names.tolist() == [f"adaptedfeatures{i}" for i in range(64)]
    assert np.array_equal(frame.to_numpy(), transformer.transform(SUPPORT))


def test_it_serves_regression_several_labels_and_clustering_in_pipelines() -> None:
    images, labels = drawn(SUPPORT_LABELS * 2, 3), np.array(SUPPORT_LABELS * 2)
    features = AdaptedFeatures(adapting_model(), device="cpu")
    redness = images[:, :, :, 0].mean(axis=(1, 2))
    scores = cross_val_score(make_pipeline(features, Ridge()), images, redness, cv=2)
    assert scores.shape == (2,)
    assert scores.min() > 0.5
    clusters = make_pipeline(features, KMeans(3, random_state=0)).fit_predict(images)
    assert len({*zip(labels.tolist(), clusters.tolist(), strict=True)}) == 3  # a cluster for each colour
    both = np.stack([labels == "red", labels != "blue"], axis=1)
    several = make_pipeline(features, MultiOutputClassifier(MahalanobisClassifier())).fit(images, both)
    assert cross_val_score(several, images, both, cv=2).min() > 0.8
    assert several.predict(QUERIES).tolist() == [[label == "red", label != "blue"] for label in QUERY_LABELS]


def test_a_grid_search_with_memory_adapts_once_to_each_fold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapted: list[int] = []
    fit = AdaptedFeatures.fit

    def counted(self: AdaptedFeatures, X: Any, y: Any = None) -> AdaptedFeatures:
        adapted.append(len(X))
        return fit(self, X, y)

    monkeypatch.setattr(AdaptedFeatures, "fit", counted)
    save_checkpoint(adapting_model(), tmp_path / "checkpoint")
    steps = AdaptedFeatures(str(tmp_path / "checkpoint"), device="cpu"), LogisticRegression()
    pipeline = make_pipeline(*steps, memory=joblib.Memory(tmp_path / "memory", verbose=0))
    grid = {"logisticregression__C": [0.01, 1.0, 100.0]}
    images, labels = drawn(SUPPORT_LABELS * 2, 3), SUPPORT_LABELS * 2
    search = GridSearchCV(pipeline, grid, cv=2, refit=False).fit(images, labels)
    assert adapted == [8, 8]
    without = GridSearchCV(make_pipeline(*steps), grid, cv=2, refit=False).fit(images, labels)
    assert search.cv_results_["mean_test_score"].tolist() == without.cv_results_["mean_test_score"].tolist()
    choices = GridSearchCV(pipeline, {"adaptedfeatures__adapt": [True, False]}, cv=2).fit(images, labels)
    assert choices.predict(QUERIES).tolist() == QUERY_LABELS


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_copies_and_pickles_give_the_same_features(again: Any) -> None:
    transformer = AdaptedFeatures(adapting_model(), device="cpu").fit(SUPPORT)
    other = again(transformer)
    assert np.array_equal(other.transform(QUERIES), transformer.transform(QUERIES))
    other.fit(SUPPORT[:3])
    assert not np.array_equal(other.transform(QUERIES), transformer.transform(QUERIES))


@pytest.mark.process
@pytest.mark.slow
def test_a_pickle_opens_in_another_process(tmp_path: Path) -> None:
    transformer = AdaptedFeatures(image_size=64, device="cpu").fit(SUPPORT)
    joblib.dump(transformer, tmp_path / "features.joblib")
    np.save(tmp_path / "queries.npy", QUERIES)
    code = (
        "import sys, joblib, numpy; folder = sys.argv[1]; "
        "transformer = joblib.load(f'{folder}/features.joblib'); "
        "numpy.save(f'{folder}/features.npy', transformer.transform(numpy.load(f'{folder}/queries.npy')))"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    np.testing.assert_allclose(np.load(tmp_path / "features.npy"), transformer.transform(QUERIES), atol=1e-5)


def test_a_pickle_from_an_absent_device_opens_on_the_cpu() -> None:
    transformer = AdaptedFeatures(adapting_model(), device="cpu").fit(SUPPORT)
    object.__setattr__(transformer._fitted, "device", torch.device("cuda:99"))
    data = pickle.dumps(transformer)
    with pytest.warns(UserWarning, match="no device cuda:99 here"):
        other = pickle.loads(data)
    assert other.device_ == torch.device("cpu")
    assert np.array_equal(other.transform(QUERIES), transformer.transform(QUERIES))


def test_it_must_be_fitted_before_it_transforms() -> None:
    with pytest.raises(NotFittedError):
        AdaptedFeatures().transform(SUPPORT)
    assert "Not fitted" in AdaptedFeatures()._repr_html_()


@pytest.mark.parametrize(
    ("settings", "images", "message"),
    [
        ({}, [], "empty"),
        ({}, ["absent.png"], "absent.png"),
        ({}, np.zeros((4, 7)), "image"),
        ({"device": "moon"}, SUPPORT, "moon"),
        ({"precision": "int8"}, SUPPORT, "int8"),
        ({"batch_size": 0}, SUPPORT, "batch_size"),
        ({"image_size": 5}, SUPPORT, "image_size"),
        ({"checkpoint": TinyExtractor()}, SUPPORT, "TinyExtractor"),
    ],
    ids=str,
)
def test_what_cannot_be_used_is_named_and_leaves_what_was_fitted(
    settings: dict[str, Any], images: Any, message: str
) -> None:
    transformer = AdaptedFeatures(adapting_model(), device="cpu").fit(SUPPORT)
    before = transformer._fitted
    with pytest.raises((ValueError, ImageError), match=message):
        transformer.set_params(**settings).fit(images)
    assert transformer._fitted is before


def test_images_are_streamed_in_batches() -> None:
    transformer = AdaptedFeatures(tiny_model(), device="cpu", batch_size=2).fit(pictures(3, 1))
    transformer.transform(pictures(5, 2))
    extractor: Any = transformer.model_.feature_extractor
    assert max(extractor.batches) <= 2
    assert sum(extractor.batches) == 5


def test_files_and_pil_images_serve_like_arrays(tmp_path: Path) -> None:
    transformer = AdaptedFeatures(adapting_model(), device="cpu").fit(SUPPORT)
    paths = [tmp_path / f"{i}.png" for i in range(7)]
    for path, image in zip(paths, QUERIES, strict=True):
        Image.fromarray(image).save(path)
    expected = transformer.transform(QUERIES)
    assert np.array_equal(transformer.transform(paths), expected)
    assert np.array_equal(transformer.transform([Image.fromarray(image) for image in QUERIES]), expected)
