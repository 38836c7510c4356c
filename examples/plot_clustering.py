"""
What is in this folder?
=======================

Nobody has labelled the pictures yet. :class:`~fewshot_mahalanobis.AdaptedFeatures` adapts the network to them without
labels, and a clustering of scikit-learn puts those together that look alike. What it finds is a start: name a few
clusters, and you have a support set.
"""

# %%
# A folder of sixty pictures, drawn here: five kinds of patterns in all colours, in no order and with meaningless names.

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from PIL import Image

rng = np.random.default_rng(0)
x, y = np.meshgrid(np.linspace(-1, 1, 96), np.linspace(-1, 1, 96))


def draw(kind):
    """A picture (96, 96, 3) of one of five kinds, of any size, place, rotation and colours."""
    angle, scale, (u, v) = rng.uniform(0, np.pi), rng.uniform(8, 14), rng.uniform(-0.5, 0.5, 2)
    a = scale * (np.cos(angle) * (x - u) + np.sin(angle) * (y - v))
    b = scale * (np.cos(angle) * (y - v) - np.sin(angle) * (x - u))
    radius, bearing = np.hypot(a, b), np.arctan2(b, a)
    wave = [np.sin(a), np.sin(radius), np.sin(a) * np.sin(b), np.sin(8 * bearing), np.sin(a + 2 * np.sin(b))][kind]
    light, dark = rng.integers(130, 256, 3), rng.integers(0, 120, 3)
    pixels = np.where(wave[:, :, None] > 0, light, dark) + rng.normal(0, 10, (96, 96, 3))
    return pixels.clip(0, 255).astype(np.uint8)


truth = rng.permutation(np.repeat(range(5), 12))
pictures = [draw(kind) for kind in truth]
folder = TemporaryDirectory()
for number, picture in enumerate(pictures):
    Image.fromarray(picture).save(Path(folder.name) / f"{number:03}.png")
paths = sorted(Path(folder.name).glob("*.png"))

# %%
# Files go in, the number of a cluster comes out for each.

from sklearn.cluster import KMeans
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import Normalizer

from fewshot_mahalanobis import AdaptedFeatures

model = make_pipeline(AdaptedFeatures(), Normalizer(), KMeans(5, n_init=10, random_state=0))
clusters = model.fit_predict(paths)

# %%
# One row for each cluster.

import matplotlib.pyplot as plt

figure, axes = plt.subplots(5, 12, figsize=(8, 3.6), layout="constrained")
for ax in axes.flat:
    ax.axis("off")
for row, cluster in zip(axes, range(5), strict=True):
    for ax, index in zip(row, np.flatnonzero(clusters == cluster), strict=False):
        ax.imshow(pictures[index])

# %%
# The kinds are known here, so the clusters can be compared with them. The adjusted Rand index is 0 by chance and 1 for
# the same groups.

from sklearn.metrics import adjusted_rand_score

k_means = KMeans(5, n_init=10, random_state=0)
pretrained = make_pipeline(AdaptedFeatures(adapt=False), Normalizer(), k_means)
print(f"pixels: {adjusted_rand_score(truth, k_means.fit_predict(np.reshape(pictures, (60, -1)))):.2f}")
print(f"network as pretrained: {adjusted_rand_score(truth, pretrained.fit_predict(paths)):.2f}")
print(f"adapted: {adjusted_rand_score(truth, clusters):.2f}")

# %%
# How many clusters are there? The silhouette needs no labels: it is largest where clusters are compact and apart.

from sklearn.metrics import silhouette_score

features = model[:-1].transform(paths)
for k in range(2, 9):
    labels = KMeans(k, n_init=10, random_state=0).fit_predict(features)
    print(k, round(silhouette_score(features, labels), 3))

# %%
# From clusters to classes: one picture of each cluster gets a name, and a classifier learns from these five alone.

from fewshot_mahalanobis import SimpleCNAPSClassifier

named = np.array([np.flatnonzero(clusters == cluster)[0] for cluster in range(5)])
others = np.setdiff1d(np.arange(60), named)
classifier = SimpleCNAPSClassifier().fit([paths[i] for i in named], truth[named])
print(f"right of the others: {classifier.score([paths[i] for i in others], truth[others]):.0%}")
folder.cleanup()
