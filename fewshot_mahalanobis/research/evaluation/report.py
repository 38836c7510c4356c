"""Evaluation of checkpoints on many sources, kept in a JSON file that a stopped run continues."""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from tqdm.auto import tqdm

from fewshot_mahalanobis.checkpoints.load import load_checkpoint
from fewshot_mahalanobis.images.memory import remembered_in
from fewshot_mahalanobis.networks.devices import choose_device, choose_dtype, precision_name
from fewshot_mahalanobis.networks.simple_cnaps import SimpleCNAPS
from fewshot_mahalanobis.research.baselines import METHODS
from fewshot_mahalanobis.research.baselines.baseline import Baseline, EpisodicModel, read_baseline
from fewshot_mahalanobis.research.data.datasets import open_source
from fewshot_mahalanobis.research.data.sources import ImageSource
from fewshot_mahalanobis.research.episodes.meta_dataset import EVALUATION, VariableEpisodes
from fewshot_mahalanobis.research.episodes.sampling import Episode, FixedEpisodes, evaluation_episodes
from fewshot_mahalanobis.research.evaluation.accuracy import UnadaptedFeatures, Variant, evaluate_episodes, head_of
from fewshot_mahalanobis.research.evaluation.averages import averages, check_in_domain
from fewshot_mahalanobis.research.evaluation.compare import differences, headings, joined
from fewshot_mahalanobis.research.evaluation.paper_figures import IN_DOMAIN, published_method
from fewshot_mahalanobis.research.evaluation.result import Protocol, Result, read_results, write_results
from fewshot_mahalanobis.research.evaluation.result_tables import to_json, to_latex, to_markdown
from fewshot_mahalanobis.research.evaluation.shots_and_ways import plot_curves

#: Forms of the table of results.
FORMS: dict[str, Callable[..., str]] = {"markdown": to_markdown, "latex": to_latex, "json": to_json}
#: Sources of at most this many images are decoded once into memory: 21 kB per image of 84 x 84 pixels.
_IN_MEMORY = 100_000


@dataclass(frozen=True)
class Settings:
    """Which episodes to evaluate on.

    Attributes
    ----------
    protocol : {"fixed", "variable"}
        N-way K-shot, or as Meta-Dataset draws them for evaluation.
    shots : tuple of int
        Support images per class (fixed protocol); each is an evaluation of its own.
    way : int
        Classes per episode (fixed protocol). A source with fewer is evaluated with those it has.
    queries : int
        Query images per class; those that are left where a class has fewer.
    episodes : int
        Episodes per source.
    seed : int
    precision : {"auto", "float32", "bfloat16"}
        Precision of the convolutions, see :class:`~fewshot_mahalanobis.SimpleCNAPSClassifier`.

    Raises
    ------
    ValueError
        ``protocol`` is something else, or ``shots`` has a number below 1.
    """

    protocol: Protocol = "fixed"
    shots: tuple[int, ...] = (1, 5)
    way: int = 5
    queries: int = 10
    episodes: int = 600
    seed: int = 0
    precision: str = "auto"

    def __post_init__(self) -> None:
        if self.protocol not in ("fixed", "variable"):
            raise ValueError(f'protocol must be "fixed" or "variable", got {self.protocol!r}')
        if min(self.shots, default=1) < 1:
            raise ValueError(f"shots must be 1 or more, got {min(self.shots)}")


def variants_of(
    model: EpisodicModel,
    heads: Sequence[str] = (),
    adapt: bool | None = None,
    *,
    task_covariance: bool = True,
    projection: bool = True,
) -> dict[str, Variant]:
    """Variants of a model to compare, by their titles.

    ``heads`` are by default the model's own, "mahalanobis" and "euclidean"; ``adapt`` only with or only without
    adaptation, by default both if the model adapts. ``task_covariance=False`` adds the Mahalanobis head without the
    task covariance ("-TR"), ``projection=False`` every variant without the model's projection. ValueError if the model
    has no such head, no adaptation or no projection.
    """
    adapts = model.film_generator is not None
    if adapt and not adapts:
        raise ValueError("the checkpoint has no adaptation: leave out --adapt")
    if not projection and model.projection is None:
        raise ValueError("the checkpoint has no projection to leave out")
    heads = heads or (model.config["head"], "mahalanobis", "euclidean")
    ways = (adapt,) if adapt is not None else (True, False) if adapts else (False,)
    variants = [
        Variant(adapted, head, with_task, projected)
        for projected in ((True,) if projection else (True, False))
        for head in heads
        for with_task in ((True,) if task_covariance or head != "mahalanobis" else (True, False))
        for adapted in ways
    ]
    for variant in variants:
        head_of(model, variant)
    return {variant.title: variant for variant in variants}


def evaluate(
    model: EpisodicModel,
    sources: Sequence[str],
    settings: Settings | None = None,
    *,
    variants: Mapping[str, Variant] | None = None,
    root: str | Path | None = None,
    file: str | Path | None = None,
    memory: str | Path | None = None,
    progress: bool = True,
) -> list[Result]:
    """Evaluate one model on every source, at every number of shots or with variable ways and shots.

    Parameters
    ----------
    model : SimpleCNAPS
    sources : sequence of str
        As :func:`~fewshot_mahalanobis.research.data.datasets.open_source` takes them.
    settings : Settings, optional
    variants : mapping of str to Variant, optional
        By the headings of their columns. Default: :func:`variants_of` the model.
    root : path, optional
        Folder of the data sets that are given by name.
    file : path, optional
        JSON file of results, written after every source. What it already holds of this model, on the same episodes,
        is not computed again.
    memory : path, optional
        Folder in which pictures are remembered, as ``memory`` of :class:`~fewshot_mahalanobis.SimpleCNAPSClassifier`.
    progress : bool
        Show progress bars.

    Returns
    -------
    list of Result
        One for each source and number of shots.

    Raises
    ------
    ValueError
        Two sources have one name, a source has too few classes or images or one that cannot be read, a variant does
        not exist, or ``file`` holds something else.
    FileNotFoundError
        A source does not exist.
    """
    settings = Settings() if settings is None else settings
    variants = variants_of(model) if variants is None else variants
    stored = {}
    if file is not None and Path(file).exists():
        stored = {result.key: result for result in read_results(file)}
    digest, dtype = _digest(model), choose_dtype(settings.precision, model.feature_extractor)
    remembered, results = remembered_in(memory), list[Result]()
    opened = [source.remembering(remembered) for source in open_sources(sources, root, model.image_size)]
    if settings.protocol == "fixed":
        _check_sizes(opened, settings)
    for source in tqdm(opened, desc="sources", disable=not progress):
        evaluation = _Evaluation(model, source, dtype)
        for planned in _planned(source, settings, model=digest, precision=precision_name(dtype)):
            result = stored.get(planned.key, planned)
            missing = {title: variant for title, variant in variants.items() if title not in result.scores}
            if missing:
                result = stored[result.key] = evaluation.with_scores(result, missing, progress=progress)
                if file is not None:
                    write_results(file, list(stored.values()))
            results.append(replace(result, scores={title: result.scores[title] for title in variants}))
    return results


def _planned(source: ImageSource, settings: Settings, *, model: str, precision: str) -> list[Result]:
    """Results of a source that are still without scores: one for each number of shots."""
    shots: tuple[int | None, ...] = settings.shots if settings.protocol == "fixed" else (None,)
    images, way = _digest_of_source(source), _ways(source, settings)
    return [
        Result(
            source=source.name,
            protocol=settings.protocol,
            way=way,
            shot=shot,
            queries=settings.queries,
            episodes=settings.episodes,
            seed=settings.seed,
            precision=precision,
            model=model,
            images=images,
        )
        for shot in dict.fromkeys(shots)
    ]


class _Evaluation:
    """A model on a source, whose images are decoded and go through the network without adaptation once, when needed."""

    def __init__(self, model: EpisodicModel, source: ImageSource, dtype: torch.dtype) -> None:
        self._model, self._source, self._dtype = model, source, dtype

    @cached_property
    def _images(self) -> ImageSource:
        return self._source.in_memory() if len(self._source.images) <= _IN_MEMORY else self._source

    @cached_property
    def _features(self) -> UnadaptedFeatures:
        return UnadaptedFeatures(self._model, self._images, dtype=self._dtype)

    def with_scores(self, result: Result, variants: Mapping[str, Variant], *, progress: bool) -> Result:
        """Add the accuracies of variants, by their titles, on the episodes of a result."""
        accuracies = evaluate_episodes(
            self._model,
            self._images,
            variants.values(),
            _drawing(self._images, result),
            result.episodes,
            dtype=self._dtype,
            plain_features=None if all(variant.adapt for variant in variants.values()) else self._features,
            description=result.title if progress else None,
        )
        added = {title: accuracies[variant] for title, variant in variants.items()}
        return replace(result, scores={**result.scores, **added})


@dataclass(frozen=True)
class Compared:
    """What is compared on the same episodes.

    Attributes
    ----------
    checkpoints : sequence of str
        As :func:`~fewshot_mahalanobis.load_checkpoint` takes them. The first is the one that others are compared with.
    methods : sequence of str
        Methods to compare with: a name of ``fewshot_mahalanobis.research.baselines.METHODS`` on the first checkpoint's
        network without adaptation, or the folder of one that ``meta-train --method`` trained. The table then has a row
        for each method.
    heads : sequence of str
        By default, a single checkpoint is evaluated with its own head, "mahalanobis" and "euclidean"; several
        checkpoints, or checkpoints beside methods, with their own.
    adapt, task_covariance, projection
        As for :func:`variants_of`. By default only the first of several checkpoints is evaluated without adaptation.
    image_size : int, optional
        Side of the images in pixels; default: each checkpoint's own.
    """

    checkpoints: Sequence[str]
    methods: Sequence[str] = ()
    heads: Sequence[str] = ()
    adapt: bool | None = None
    task_covariance: bool = True
    projection: bool = True
    image_size: int | None = None

    @property
    def names(self) -> list[str]:
        """The checkpoints, each once."""
        return list(dict.fromkeys(self.checkpoints))

    @property
    def several(self) -> bool:
        """Whether there is more than one checkpoint."""
        return len(self.names) > 1 or bool(self.methods)

    def variants(self, name: str, model: SimpleCNAPS) -> dict[str, Variant]:
        """Variants of a checkpoint, by their titles."""
        others = name != self.names[0] and model.film_generator is not None
        return variants_of(
            model,
            self.heads or ((model.config["head"],) if self.several else ()),
            True if self.adapt is None and others else self.adapt,
            task_covariance=self.task_covariance,
            projection=self.projection,
        )


@dataclass
class _Columns:
    """Models with their variants, and where these stand in the table.

    Attributes
    ----------
    models : dict of str to EpisodicModel
        Checkpoints and trained methods.
    variants : dict of str to dict of str to Variant
        Variants of each model, by their titles.
    headings : dict of str to dict of str to str
        Heading of the column of each variant of each model.
    published : dict of str to str
        Heading -> the paper's name of the method, if it has figures for it.
    """

    models: dict[str, EpisodicModel]
    variants: dict[str, dict[str, Variant]]
    headings: dict[str, dict[str, str]]
    published: dict[str, str]


def evaluate_checkpoints(
    compared: Compared,
    sources: Sequence[str],
    settings: Settings | None = None,
    *,
    in_domain: Sequence[str] | None = None,
    root: str | Path | None = None,
    file: str | Path | None = None,
    memory: str | Path | None = None,
    plots: str | Path | None = None,
    device: str = "auto",
    form: str = "markdown",
) -> str:
    """Evaluate checkpoints on the same episodes. The command ``evaluate`` calls this function.

    Parameters
    ----------
    compared : Compared
    sources, settings, root, file, memory
        As for :func:`evaluate`.
    in_domain : sequence of str, optional
        Data sets that a checkpoint was trained on, for the averages. Known for a single named checkpoint.
    plots : path, optional
        Folder for plots of accuracy against shots and ways.
    device : str
    form : {"markdown", "latex", "json"}

    Returns
    -------
    str
        The table of the results and averages. With several checkpoints or methods it also has the differences from
        the first column.

    Raises
    ------
    ValueError
        As for :func:`evaluate`; a method is unknown, not trained or named twice; a domain belongs to no source; or
        there is nothing to plot against.
    CheckpointError
        A checkpoint cannot be loaded.
    """
    settings = Settings() if settings is None else settings
    if plots is not None:
        _prepare_plots(Path(plots), settings)
    columns, first = _columns(compared, choose_device(device)), compared.names[0]
    if in_domain is not None:
        size = columns.models[first].image_size
        check_in_domain(in_domain, [source.name for source in open_sources(sources, root, size)])
    elif len(compared.names) == 1:
        in_domain = IN_DOMAIN.get(first)
    evaluated = {
        name: evaluate(model, sources, settings, variants=columns.variants[name], root=root, file=file, memory=memory)
        for name, model in columns.models.items()
    }
    results, gains = evaluated[first], []
    if compared.several:
        results = joined(evaluated, columns.headings)
        gains = differences(results, next(iter(columns.headings[first].values())), in_domain)
    if plots is not None:
        plot_curves(results, plots)
    by_method = bool(compared.methods)
    means = averages(results, in_domain) if len(sources) > 1 else []  # of one source they are its own figures
    return FORMS[form](results, means, gains, columns.published, by_method=by_method)


def _prepare_plots(folder: Path, settings: Settings) -> None:
    """Make the folder of plots; an error if there is nothing to plot, or nothing to plot it with."""
    if settings.protocol == "fixed" and len(set(settings.shots)) < 2:
        raise ValueError("--plots needs --protocol variable, or several --shot")
    importlib.import_module("fewshot_mahalanobis.plotting")  # an error at once if matplotlib is missing
    folder.mkdir(parents=True, exist_ok=True)


def _columns(compared: Compared, device: torch.device) -> _Columns:
    """Load what is compared."""
    frozen, trained = _open_methods(compared.methods)
    if trained and compared.image_size is not None:
        raise ValueError("--image-size is for checkpoints: a trained method has the size that it was trained at")
    checkpoints: dict[str, SimpleCNAPS] = {name: load_checkpoint(name).to(device) for name in compared.names}
    if compared.image_size is not None:
        checkpoints = {name: model.at_size(compared.image_size) for name, model in checkpoints.items()}
    variants = {name: compared.variants(name, model) for name, model in checkpoints.items()}
    first = compared.names[0]
    titles = {first: {title: title for title in variants[first]}}
    columns = _Columns({**checkpoints}, variants, headings(checkpoints, variants) if compared.several else titles, {})
    for name, model in checkpoints.items():
        for title, variant in variants[name].items():
            if (method := published_method(model.config, variant)) is not None:
                columns.published[columns.headings[name][title]] = method
    _add_methods(columns, first, frozen, {title: baseline.to(device) for title, baseline in trained.items()})
    return columns


def _open_methods(methods: Sequence[str]) -> tuple[dict[str, Variant], dict[str, Baseline]]:
    """Open methods for a checkpoint's frozen network, and trained methods, both by the headings of their rows.

    Each is a name of ``METHODS`` or the folder of a method that ``meta-train --method`` trained. ValueError if it is
    neither, needs training, or is named twice; CheckpointError if the folder cannot be read.
    """
    frozen: dict[str, Variant] = {}
    trained: dict[str, Baseline] = {}
    for method in methods:
        kind = METHODS.get(method)
        if kind is None and not Path(method).is_dir():
            raise ValueError(f"there is no method {method!r} and no such folder: methods are {', '.join(METHODS)}")
        if kind is not None and kind.needs_training:
            raise ValueError(
                f"{method} needs training: `meta-train --method {method} -o RUN`, then `--method RUN/best`"
            )
        if kind is None:
            baseline = read_baseline(Path(method))
            title = baseline.head.title
            twice = title in trained
            trained[title] = baseline
        else:
            title = f"{kind.title}, frozen network" if kind.trains_network else kind.title
            twice = title in frozen
            frozen[title] = Variant(False, method)
        if twice:
            raise ValueError(f"two methods are called {title!r}: evaluate them one by one")
    return frozen, trained


def _add_methods(columns: _Columns, first: str, frozen: dict[str, Variant], trained: dict[str, Baseline]) -> None:
    """Add methods on the frozen network of the first checkpoint, and trained ones."""
    kinds = {title: METHODS[str(variant.head)] for title, variant in frozen.items()}
    # The paper trains the network of other methods, so it has no figures for them on a frozen one.
    kinds = {title: kind for title, kind in kinds.items() if not kind.trains_network}
    columns.variants[first] |= frozen
    columns.headings[first] |= {title: title for title in frozen}
    for title, baseline in trained.items():
        columns.models[title] = baseline
        columns.variants[title] = {title: Variant(baseline.head.adaptation != "none", baseline.config["head"])}
        columns.headings[title] = {title: title}
        kinds[title] = type(baseline.head)
    columns.published |= {title: kind.paper_title for title, kind in kinds.items() if kind.paper_title}


def open_sources(sources: Sequence[str], root: str | Path | None, size: int) -> list[ImageSource]:
    """Open sources without decoding an image; ValueError if two have the same name."""
    opened: dict[str, ImageSource] = {}
    for path in sources:
        source = open_source(path, root=root, size=size)
        if source.name in opened:
            raise ValueError(f"two sources are called {source.name!r}: rename one of them")
        opened[source.name] = source
    return list(opened.values())


def _check_sizes(sources: Sequence[ImageSource], settings: Settings) -> None:
    """ValueError if a source is too small for the episodes, before any work."""
    for source in sources:
        try:
            FixedEpisodes(source, min(settings.way, len(source.class_names)), max(settings.shots)).draw(0)
        except ValueError as error:
            raise ValueError(f"{source.name}: {error}. Leave it out, or give smaller --shot") from error


def _ways(source: ImageSource, settings: Settings) -> int | None:
    """Return the number of ways of every episode of a source; None if it varies."""
    classes = len(source.class_names)
    if settings.protocol == "fixed":
        return min(settings.way, classes)
    return None if classes >= EVALUATION.min_way else classes


def _drawing(source: ImageSource, result: Result) -> Callable[[int], Episode]:
    """Return the function from index to episode for the settings of a result."""
    if result.way is None or result.shot is None:
        fewest = min(EVALUATION.min_way, len(source.class_names))
        limits = replace(EVALUATION, min_way=fewest, max_queries=result.queries)
        return VariableEpisodes(source, limits, seed=result.seed).draw
    return evaluation_episodes(source, result.way, result.shot, result.queries, seed=result.seed)


def _digest_of_source(source: ImageSource) -> str:
    """Hash a source's classes and their numbers of images."""
    classes = json.dumps([source.class_names, np.bincount(source.labels).tolist()])
    return hashlib.sha256(classes.encode()).hexdigest()[:16]


def _digest(model: EpisodicModel) -> str:
    """Hash a model's settings and weights."""
    digest = hashlib.sha256(json.dumps(model.config, sort_keys=True, default=str).encode())
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()[:16]
