"""
The genus where the species is unsure
=====================================

Two species of one genus may look so alike that a picture cannot tell them apart. An answer that is sure of the genus is
then worth more than a guess at the species. The probabilities have it all: that of a genus is the sum of its species'.
"""

# %%
# Flowers of two genera, drawn here. Daisies have pointed petals, roses round ones. The species of a genus differ only
# in the number of petals: 7, 8 or 10. Five pictures of each species to learn from, fifteen to ask about.

import numpy as np
from PIL import Image, ImageDraw

PETALS = {"daisy, 7": 7, "daisy, 8": 8, "daisy, 10": 10, "rose, 7": 7, "rose, 8": 8, "rose, 10": 10}
SPECIES = sorted(PETALS)
GENERA = ["daisy", "rose"]


def draw(species, rng):
    """A flower of 96 x 96 pixels, of any colour, size, place and rotation."""
    picture = Image.new("RGB", (96, 96), tuple(rng.integers((20, 90, 20), (90, 150, 90))))
    pen = ImageDraw.Draw(picture)
    centre, radius = rng.integers(44, 53, 2), rng.uniform(32, 42)
    colour = tuple(rng.integers(150, 256, 3))
    for angle in rng.uniform(0, 2 * np.pi) + np.arange(PETALS[species]) * 2 * np.pi / PETALS[species]:
        ahead, aside = np.array([np.cos(angle), np.sin(angle)]), np.array([-np.sin(angle), np.cos(angle)])
        if species.startswith("daisy"):
            points = [centre, centre + 0.5 * radius * ahead + 5 * aside, centre + radius * ahead]
            pen.polygon([tuple(p) for p in [*points, centre + 0.5 * radius * ahead - 5 * aside]], fill=colour)
        else:
            x, y = centre + 0.72 * radius * ahead
            pen.ellipse((x - 9, y - 9, x + 9, y + 9), fill=colour)
    pen.ellipse((*(centre - 8), *(centre + 8)), fill=(240, 200, 40))
    return picture


rng = np.random.default_rng(0)
y, y_query = np.repeat(SPECIES, 5), np.repeat(SPECIES, 15)
X, X_query = [draw(species, rng) for species in y], [draw(species, rng) for species in y_query]

# %%
# One classifier, of species.

from sklearn.pipeline import make_pipeline

from fewshot_mahalanobis import AdaptedFeatures, MahalanobisClassifier

model = make_pipeline(AdaptedFeatures(), MahalanobisClassifier()).fit(X, y)
probabilities = model.predict_proba(X_query)  # (90, 6)
print(f"right species: {model.score(X_query, y_query):.0%}")

# %%
# The second level is a sum. A species is named if it is probable enough, else the genus if that is, else neither.

of_genus = np.array([[species.startswith(genus) for genus in GENERA] for species in model.classes_])
genera = probabilities @ of_genus  # (90, 2)


def answers(sure):
    """Names for all pictures, each at least as probable as ``sure``."""
    best, genus = probabilities.argmax(axis=1), genera.argmax(axis=1)
    names = np.where(genera.max(axis=1) >= sure, np.array(GENERA)[genus], "?")
    return np.where(probabilities.max(axis=1) >= sure, model.classes_[best], names)


for sure in (0.0, 0.5, 0.6, 0.9):
    names = answers(sure)
    species, said = np.isin(names, SPECIES), names != "?"
    right = np.array([true.startswith(name) for true, name in zip(y_query, names, strict=True)])
    print(
        f"at {sure:.0%}: species named {species.mean():.0%}, genus {(said & ~species).mean():.0%}, neither "
        f"{(~said).mean():.0%}; of the answers {right[said].mean():.0%} are right"
    )

# %%
# Some answers at 60 %.

import matplotlib.pyplot as plt

figure, axes = plt.subplots(2, 6, figsize=(9, 3.6), layout="constrained")
for ax, index in zip(axes.T.flat, [i for k in range(6) for i in (15 * k, 15 * k + 1)], strict=True):
    ax.imshow(X_query[index])
    ax.set_title(f"{answers(0.6)[index]}\n(is {y_query[index]})", fontsize=7)
    ax.axis("off")

# %%
# Cross-validation of both levels, with the pictures to learn from alone:

from sklearn.model_selection import cross_val_predict, cross_val_score

print("species:", cross_val_score(model, X, y, cv=5).mean())
left_out = cross_val_predict(model, X, y, cv=5, method="predict_proba") @ of_genus
print("genus:", np.mean([name.startswith(GENERA[best]) for name, best in zip(y, left_out.argmax(axis=1), strict=True)]))

# %%
# Both levels can also be two columns of one table:

features = AdaptedFeatures().set_output(transform="pandas").fit(X).transform(X_query[::30])
features.iloc[:, :3].assign(species=model.predict(X_query[::30]), genus=np.array(GENERA)[genera[::30].argmax(axis=1)])
