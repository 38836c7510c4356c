"""
With scikit-learn
=================

:class:`~fewshot_mahalanobis.SimpleCNAPSClassifier` is a scikit-learn classifier whose samples are images. So
scikit-learn's tools work with it: cross-validation, grid search, pipelines, calibration, stacking.
"""

# %%
# Four digits, five images of each to learn from.

import numpy as np
from sklearn.datasets import load_digits

from fewshot_mahalanobis import SimpleCNAPSClassifier

digits = load_digits(n_class=4)
images, targets = np.round(digits.images * (255 / 16)).astype(np.uint8), digits.target
support = np.concatenate([np.flatnonzero(targets == digit)[:5] for digit in range(4)])
query = np.concatenate([np.flatnonzero(targets == digit)[5:15] for digit in range(4)])
X, y, X_query, y_query = images[support], targets[support], images[query], targets[query]

# %%
# The diagram of a notebook
# -------------------------
#
# An estimator at the end of a cell shows its parameters and whether it is fitted.

classifier = SimpleCNAPSClassifier().fit(X, y)
classifier

# %%
# Cross-validation and grid search
# --------------------------------
#
# Each fold adapts the network to its own support images.

from sklearn.model_selection import GridSearchCV, cross_val_score

cross_val_score(SimpleCNAPSClassifier(), X, y, cv=2)

# %%

search = GridSearchCV(SimpleCNAPSClassifier(), {"head": ["auto", "euclidean"]}, cv=2).fit(X, y)
search.cv_results_["mean_test_score"]

# %%
# Pipelines
# ---------
#
# At the end of a pipeline the classifier follows steps that prepare the images. This one crops a column on each side.

from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer


def middle(images):
    """Crop images (n, h, w) by one column on each side."""
    return images[:, :, 1:-1]


make_pipeline(FunctionTransformer(middle), SimpleCNAPSClassifier()).fit(X, y).score(X_query, y_query)

# %%
# Elsewhere in a pipeline it is a transformer: images in, adapted features (n, d) out.

from sklearn.svm import SVC

make_pipeline(SimpleCNAPSClassifier(), SVC()).fit(X, y).score(X_query, y_query)

# %%
# Features as a data frame
# ------------------------
#
# ``set_output`` returns the features as pandas or polars data frames with column names.

frames = SimpleCNAPSClassifier().set_output(transform="pandas").fit(X, y)
frames.transform(X_query).iloc[:3, :4]

# %%
# Calibrated probabilities
# ------------------------
#
# scikit-learn calibrates the probabilities on the support images of each left-out fold.

from sklearn.calibration import CalibratedClassifierCV
from sklearn.metrics import log_loss

calibrated = CalibratedClassifierCV(SimpleCNAPSClassifier(), method="sigmoid", cv=2, ensemble=False).fit(X, y)
{
    "not calibrated": log_loss(y_query, classifier.predict_proba(X_query)),
    "calibrated": log_loss(y_query, calibrated.predict_proba(X_query)),
}

# %%
# Stacking
# --------
#
# Two classifiers on the features of :meth:`~fewshot_mahalanobis.SimpleCNAPSClassifier.transform`, combined by a
# logistic regression.

from sklearn.ensemble import StackingClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier

from fewshot_mahalanobis import MahalanobisClassifier

stack = StackingClassifier(
    [("gaussians", MahalanobisClassifier()), ("neighbours", KNeighborsClassifier(3))], LogisticRegression(), cv=2
)
make_pipeline(SimpleCNAPSClassifier(), stack).fit(X, y).score(X_query, y_query)

# %%
# The image classifier can also be one of the stacked classifiers, next to one of raw pixels.


def flat(images):
    """Images (n, h, w) as vectors (n, h w)."""
    return images.reshape(len(images), -1)


stack = StackingClassifier(
    [
        ("network", SimpleCNAPSClassifier()),
        ("pixels", make_pipeline(FunctionTransformer(flat), MahalanobisClassifier())),
    ],
    LogisticRegression(),
    cv=2,
)
stack.fit(X, y).score(X_query, y_query)

# %%
# Metadata
# --------
#
# Metadata routing passes sample weights to ``score``, for example through cross-validation.

import sklearn
from sklearn.model_selection import cross_validate

with sklearn.config_context(enable_metadata_routing=True):
    weighted = SimpleCNAPSClassifier().set_score_request(sample_weight=True)
    scores = cross_validate(weighted, X, y, cv=2, params={"sample_weight": np.where(y == 0, 5.0, 1.0)})
scores["test_score"]
