"""
Several labels on one picture
=============================

A photograph may show a cat and a sofa. Then each label is a question of its own: is it there or not?
:class:`~fewshot_mahalanobis.AdaptedFeatures` gives features of the pictures, and scikit-learn's
``MultiOutputClassifier`` asks every question of them.
"""

# %%
# Sixteen pictures to learn from and sixty to ask about, drawn here. Each shows some of three shapes, in any colour and
# place, or none of them.

import numpy as np
from PIL import Image, ImageDraw

LABELS = ["disc", "cross", "stripes"]


def draw(shown, rng):
    """A picture of 96 x 96 pixels with the shapes that ``shown`` (3,) names."""
    picture = Image.new("RGB", (96, 96), tuple(rng.integers(190, 256, 3)))
    pen = ImageDraw.Draw(picture)
    corners = rng.permutation([(4, 4), (52, 4), (4, 52), (52, 52)])[:3] + rng.integers(-3, 4, (3, 2))
    for (x, y), label in zip(corners.tolist(), np.array(LABELS)[shown], strict=False):
        colour = tuple(rng.integers(0, 150, 3))
        if label == "disc":
            pen.ellipse((x, y, x + 40, y + 40), fill=colour)
        elif label == "cross":
            pen.line((x, y, x + 40, y + 40), fill=colour, width=9)
            pen.line((x + 40, y, x, y + 40), fill=colour, width=9)
        else:
            for row in range(0, 44, 8):
                pen.line((x, y + row, x + 40, y + row), fill=colour, width=4)
    return picture


rng = np.random.default_rng(0)
y = rng.random((76, 3)) < 0.5
pictures = [draw(shown, rng) for shown in y]
X, y_train, X_query, y_query = pictures[:16], y[:16], pictures[16:], y[16:]

# %%
# The network adapts to the pictures without their labels. Behind it, one classifier for each label.

from sklearn.multioutput import MultiOutputClassifier
from sklearn.pipeline import make_pipeline

from fewshot_mahalanobis import AdaptedFeatures, MahalanobisClassifier

model = make_pipeline(AdaptedFeatures(), MultiOutputClassifier(MahalanobisClassifier())).fit(X, y_train)
predicted = model.predict(X_query)
for label, right in zip(LABELS, (predicted == y_query).mean(axis=0), strict=True):
    print(f"{label}: {right:.0%} right")
print(f"all three right: {(predicted == y_query).all(axis=1).mean():.0%}; by guessing 12 %")

# %%
# The first pictures, with the labels that the model gives them.

import matplotlib.pyplot as plt

figure, axes = plt.subplots(2, 5, figsize=(8, 4.2), layout="constrained")
for ax, picture, there in zip(axes.flat, X_query, predicted, strict=False):
    ax.imshow(picture)
    ax.set_title("\n".join(np.array(LABELS)[there]) or "none", fontsize=8)
    ax.axis("off")

# %%
# How sure is it? ``predict_proba`` has two columns for each label: not there, there.

there = np.stack([both[:, 1] for both in model.predict_proba(X_query)], axis=1)
print(np.round(there[:5], 2))

# %%
# Cross-validation adapts the network to the pictures of each fold. Its score is the share of pictures of which every
# label is right.

from sklearn.model_selection import cross_val_score

cross_val_score(model, X, y_train, cv=3)

# %%
# As a table with a named column for each feature:

AdaptedFeatures().set_output(transform="pandas").fit_transform(X).iloc[:3, :4]
