"""What the training commands are asked for: two dataclasses, and the TOML files that fill them.

Nothing here needs PyTorch: the command line takes its defaults from these classes.
"""

from __future__ import annotations

import difflib
import sys
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

#: (share of training, side of its images in pixels), in order.
Phases = tuple[tuple[float, int], ...]

#: Precision of the convolutions: of both commands, in the order that messages name them.
PRECISIONS = ("bfloat16", "float32")
EPISODES = ("variable", "fixed", "small")
SCHEDULES = ("constant", "cosine")


@dataclass(frozen=True)
class PretrainRecipe:
    """Settings of :func:`~fewshot_mahalanobis.training.pretrain.pretrain`, for ImageNet-like photographs by default.

    Attributes
    ----------
    sources : tuple of str
        Where the images are, as :func:`~fewshot_mahalanobis.data.datasets.open_source` takes it.
    validation : str, optional
        Source of other classes to report on.
    root : str, optional
        Folder of the data sets that are given by name.
    init : str, optional
        ``backbone.safetensors`` of an earlier run to start from instead of random weights.
    epochs, batch_size : int
        A batch is divided between the processes of a run.
    peak_lr, warmup, momentum, weight_decay, label_smoothing : float
        SGD with Nesterov momentum; the learning rate rises for the share ``warmup`` of training, then falls to zero.
    min_crop_area, colour_jitter : float
        Augmentation, see :mod:`~fewshot_mahalanobis.training.augment`.
    rotation : float
        Share of images that are turned by one to three quarters. Where it is positive the network learns to tell the
        turn as well, a second task on the same images (Gidaris et al., ICCV 2019).
    phases : tuple of (float, int)
        Share of training, image side in pixels.
    image_size : int
        Side that images are resized to before they are cropped, in pixels.
    precision : {"bfloat16", "float32"}
        Of the convolutions.
    seed : int
    """

    sources: tuple[str, ...]
    validation: str | None = None
    root: str | None = None
    init: str | None = None
    epochs: int = 8
    batch_size: int = 128
    peak_lr: float = 0.2
    warmup: float = 0.05
    momentum: float = 0.9
    weight_decay: float = 5e-4
    label_smoothing: float = 0.1
    min_crop_area: float = 0.35
    colour_jitter: float = 0.3
    rotation: float = 0.0
    phases: Phases = ((0.25, 40), (0.32, 48), (0.35, 64), (0.08, 84))
    image_size: int = 84
    precision: str = "bfloat16"
    seed: int = 0

    def __post_init__(self) -> None:
        _check_sources(self.sources)
        _check_choice("precision", self.precision, PRECISIONS)
        _check_counts(self, "epochs", "batch_size", "image_size")
        if not 0 <= self.rotation <= 1:
            raise ValueError(f"rotation is a share of the images, from 0 to 1, not {self.rotation!r}")


@dataclass(frozen=True)
class MetaTrainRecipe:
    """Settings of :func:`~fewshot_mahalanobis.training.meta_train.meta_train`; the defaults are the paper's.

    Bateni et al., CVPR 2020, appendix "Experimental details".

    Attributes
    ----------
    sources : tuple of str
        Where tasks come from, equally often: one that is named twice gives twice as many. As
        :func:`~fewshot_mahalanobis.data.datasets.open_source` takes them, or "glyphs", which is drawn here.
    backbone : str
        ``backbone.safetensors``, which ``pretrain`` wrote, or a checkpoint (name, folder or Hub repository) whose
        backbone is taken as it is.
    validation : tuple of str
        Sources on which the best checkpoint is chosen.
    model : mapping
        Arguments of :class:`~fewshot_mahalanobis.SimpleCNAPS`.
    init : str, optional
        Checkpoint of the same ``model`` whose adaptation networks to start from instead of random weights.
    root : str, optional
        Folder of the data sets that are given by name.
    feature_scale : float
        Factor on the backbone's features, see :func:`~fewshot_mahalanobis.training.meta_train.scale_features_`.
    tasks, tasks_per_step : int
        The tasks of a step are divided between the processes of a run.
    learning_rate : float
        Adam's.
    schedule : {"constant", "cosine"}
        "cosine" warms up for a twentieth of the steps and falls to zero by half a cosine: for short runs.
    penalty : float
        Times the sum of squares of the scales of the FiLM generator.
    episodes : {"variable", "fixed", "small"}
        Meta-Dataset's (``max_way``, ``max_support``), N-way K-shot (``way``, ``shot``), or like a user's: 5 to 10 ways,
        1 to 6 shots.
    max_way, max_support, way, shot : int
    queries : int
        Query images a class; at most so many where shots vary.
    augment : bool
        See every task through a random camera (:mod:`~fewshot_mahalanobis.training.camera`).
    phases : tuple of (float, int)
        Share of training, image side in pixels; none: the model's own image size throughout.
    lite : int, optional
        Back-propagate through this many support images of a task, drawn at random, and hold no more activations
        than theirs (:mod:`~fewshot_mahalanobis.training.lite`).
    precision : {"bfloat16", "float32"}
        Of the convolutions; the head computes in float32 or better.
    validate_every : int
        Tasks between validations.
    validation_episodes : int
        Episodes of each validation source.
    seed : int
    """

    sources: tuple[str, ...]
    backbone: str
    validation: tuple[str, ...] = ()
    model: Mapping[str, Any] = field(default_factory=dict)
    init: str | None = None
    root: str | None = None
    feature_scale: float = 1.0
    tasks: int = 110_000
    tasks_per_step: int = 16
    learning_rate: float = 5e-4
    schedule: str = "constant"
    penalty: float = 0.001
    episodes: str = "variable"
    max_way: int = 40
    max_support: int = 400
    way: int = 5
    shot: int = 5
    queries: int = 10
    augment: bool = False
    phases: Phases = ()
    lite: int | None = None
    precision: str = "bfloat16"
    validate_every: int = 10_000
    validation_episodes: int = 200
    seed: int = 0

    def __post_init__(self) -> None:
        _check_sources(self.sources)
        _check_choice("episodes", self.episodes, EPISODES)
        _check_choice("schedule", self.schedule, SCHEDULES)
        _check_choice("precision", self.precision, PRECISIONS)
        counts = ("tasks", "tasks_per_step", "way", "shot", "queries", "validate_every", "validation_episodes")
        _check_counts(self, *counts, *(("lite",) if self.lite is not None else ()))
        if self.tasks < self.tasks_per_step:
            raise ValueError(f"tasks = {self.tasks} is less than one step of tasks_per_step = {self.tasks_per_step}")


def _check_sources(sources: tuple[str, ...]) -> None:
    if not sources:
        raise ValueError("sources is empty: at least one is needed")


def _check_choice(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name} must be {' or '.join(map(repr, known))}, not {value!r}")


def _check_counts(recipe: Any, *names: str) -> None:
    for name in names:
        if getattr(recipe, name) < 1:
            raise ValueError(f"{name} must be positive, not {getattr(recipe, name)!r}")


def read_settings(file: str | Path, recipe: type) -> dict[str, Any]:
    """Fields of a recipe that a TOML file sets.

    Parameters
    ----------
    file : path
    recipe : type
        :class:`PretrainRecipe` or :class:`MetaTrainRecipe`; keys are the names of its fields.

    Returns
    -------
    dict
        Arguments of ``recipe``.

    Raises
    ------
    ValueError
        The file is no TOML, a key is unknown, or a value has another type than the field; the message names it.
    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        try:
            import tomli as tomllib
        except ImportError as error:
            raise ImportError('reading TOML needs tomli: pip install "fewshot-mahalanobis[training]"') from error
    try:
        found = tomllib.loads(Path(file).read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not TOML: {error}") from error
    hints = get_type_hints(recipe)
    for key in found:
        if key not in hints:
            close = difflib.get_close_matches(key, hints, 1)
            raise ValueError(
                f"{file}: unknown key {key!r}{f', did you mean {close[0]!r}?' if close else ''} "
                f"(keys are {', '.join(hints)})"
            )
    return {key: _converted(value, hints[key], f"{file}: {key}") for key, value in found.items()}


def _converted(value: Any, hint: Any, where: str) -> Any:
    """A TOML value in the type of a field: arrays become tuples, whole numbers floats where those are asked for."""
    for option in get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,):
        parts = get_args(option)
        if get_origin(option) is tuple and isinstance(value, list):
            inner = [parts[0]] * len(value) if parts[-1] is Ellipsis else parts
            if len(inner) == len(value):
                return tuple(_converted(v, i, where) for v, i in zip(value, inner, strict=True))
        elif get_origin(option) is Mapping and isinstance(value, dict):
            return value
        elif option is float and type(value) in (int, float):
            return float(value)
        elif type(value) is option:  # not isinstance: True is an int
            return value
    name = hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint)
    raise ValueError(f"{where} must be of type {name}, not {value!r}")
