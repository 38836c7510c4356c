"""
A number from a picture
=======================

How much of the ground is covered, how rusty is the plate, how ripe is the fruit? With
:class:`~fewshot_mahalanobis.AdaptedFeatures`, a regression of scikit-learn learns a number from twenty pictures. It
should be one of what is seen and how much of it: the features are averages over the picture, so they say little of
where things are, such as the hand of a gauge.
"""

# %%
# Ground with leaves, drawn here: twenty pictures of known cover, thirty to be judged. The light differs from picture to
# picture, and so does the size of the leaves.

import numpy as np
from PIL import Image, ImageDraw


def draw(leaves, rng):
    """Ground with leaves, (96, 96, 3), and the share of it that they cover, in per cent."""
    mask = Image.new("L", (96, 96))
    pen, length = ImageDraw.Draw(mask), rng.uniform(8, 13)
    for x, y, angle in rng.uniform((0, 0, 0), (96, 96, np.pi), (leaves, 3)):
        u, v = length * np.cos(angle), length * np.sin(angle)
        pen.polygon([(x + u, y + v), (x - v / 2, y + u / 2), (x - u, y - v), (x + v / 2, y - u / 2)], fill=255)
    covered = (np.asarray(mask) > 0)[:, :, None]
    pixels = rng.uniform(0.7, 1.2) * np.where(covered, (70, 140, 60), (150, 110, 70)) + rng.normal(0, 15, (96, 96, 3))
    return pixels.clip(0, 255).astype(np.uint8), 100 * covered.mean()


rng = np.random.default_rng(0)
pictures, cover = zip(*[draw(leaves, rng) for leaves in rng.integers(0, 120, 50)], strict=True)
X, y, X_query, y_query = pictures[:20], np.array(cover[:20]), pictures[20:], np.array(cover[20:])

# %%
# Partial least squares suits many features of few pictures: it finds the directions that go with the number. Do not
# standardise the features first: of twenty pictures, some of them hardly vary.

from sklearn.cross_decomposition import PLSRegression
from sklearn.metrics import mean_absolute_error
from sklearn.pipeline import make_pipeline

from fewshot_mahalanobis import AdaptedFeatures

model = make_pipeline(AdaptedFeatures(), PLSRegression(2, scale=False)).fit(X, y)
predicted = model.predict(X_query)
print(f"mean error: {mean_absolute_error(y_query, predicted):.1f} points of cover")
print(f"mean error of always saying {y.mean():.0f} %: {np.abs(y_query - y.mean()).mean():.1f}")

# %%

import matplotlib.pyplot as plt

figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.6), layout="constrained", width_ratios=(1.2, 1))
left.imshow(np.vstack([np.hstack(X_query[i : i + 4]) for i in (0, 4, 8)]))
left.axis("off")
right.plot([0, 100], [0, 100], color="grey", linewidth=1)
right.scatter(y_query, predicted, s=14)
right.set(xlabel="cover, %", ylabel="predicted", title="thirty pictures, learned from twenty")

# %%
# Is adapting the network worth it here, and how many directions are best? A grid search answers from twenty pictures
# alone. ``memory`` keeps the features, which many settings behind them share.

from tempfile import TemporaryDirectory

from sklearn.model_selection import GridSearchCV, KFold, cross_val_score

folds = KFold(4, shuffle=True, random_state=0)
with TemporaryDirectory() as memory:
    cached = make_pipeline(AdaptedFeatures(), PLSRegression(scale=False), memory=memory)
    grid = {"adaptedfeatures__adapt": [True, False], "plsregression__n_components": [1, 2, 3]}
    search = GridSearchCV(cached, grid, cv=folds, scoring="neg_mean_absolute_error").fit(X, y)
for setting, score in zip(search.cv_results_["params"], search.cv_results_["mean_test_score"], strict=True):
    print(f"{setting}: mean error {-score:.1f}")

# %%
# How much of the differences between the twenty pictures does it explain? Cross-validation, from 1 downwards:

cross_val_score(model, X, y, cv=folds, scoring="r2")

# %%
# With ``set_output`` the features come as a data frame, beside other columns that you know of each picture.

AdaptedFeatures().set_output(transform="pandas").fit_transform(X).assign(cover=y).iloc[:3, -4:]
