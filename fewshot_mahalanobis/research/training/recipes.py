"""Settings of the two trainings: checked dataclasses, and the files and assignments that fill them.

Nothing here needs PyTorch: the command line takes its defaults from these classes.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from fewshot_mahalanobis.extras import install_command

Sources = Annotated[tuple[str, ...], Meta(min_length=1)]
Count = Annotated[int, Meta(ge=1)]
Share = Annotated[float, Meta(ge=0, le=1)]
NotNegative = Annotated[float, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
#: (share of training, side of its images in pixels), in order.
Phases = tuple[tuple[Share, Count], ...]
#: Precision of the convolutions.
Precision = Literal["auto", "float32", "bfloat16"]
EpisodeKind = Literal["variable", "fixed", "small"]
Schedule = Literal["constant", "cosine"]


class _Checked:
    """A dataclass whose fields are checked against their annotations, and converted where nothing is lost."""

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self), include_extras=True).items():
            value = getattr(self, name)
            if get_origin(hint) is Literal and value not in get_args(hint):
                raise ValueError(f"{name} must be {' or '.join(map(repr, get_args(hint)))}, not {value!r}")
            try:
                converted = msgspec.convert(value, hint)
            except msgspec.ValidationError as error:
                raise ValueError(f"{name} = {value!r}: {error}") from error
            object.__setattr__(self, name, converted)


@dataclass(frozen=True)
class PretrainRecipe(_Checked):
    """Settings of :func:`~fewshot_mahalanobis.research.training.pretrain.pretrain`; the defaults suit photographs.

    Attributes
    ----------
    sources : tuple of str
        Training images, see :func:`~fewshot_mahalanobis.research.data.datasets.open_source`.
    validation : str, optional
        Source of other classes to report the accuracy on.
    root : str, optional
        Folder of data sets given by name.
    init : str, optional
        ``backbone.safetensors`` of an earlier run, or a checkpoint, to start from; default: random weights.
    epochs : int
    batch_size : int
        Divided between the processes of a run.
    peak_lr, warmup, momentum, weight_decay, label_smoothing : float
        SGD with Nesterov momentum; the learning rate rises during the share ``warmup`` of training, then falls to zero.
    min_crop_area, colour_jitter, other_domains : float
        Augmentation, see :mod:`~fewshot_mahalanobis.research.training.augment`.
    rotation : float
        Share of images that are rotated by one to three quarter turns. If positive, the network also learns to predict
        the rotation, as a second task on the same images (Gidaris et al., ICCV 2019).
    dense : bool
        Classify every position of the last maps, not their mean (Lifchitz et al., CVPR 2019).
    teacher : str, optional
        Network of timm, or "efficientnet-lite0": its features of the same crops are learned too.
    teacher_size : int
        Side of the images that the teacher gets, in pixels.
    phases : tuple of (float, int)
        Share of training, side of its images in pixels.
    image_size : int
        Side to which images are resized before cropping, in pixels.
    precision : {"auto", "float32", "bfloat16"}
        Precision of the convolutions, in training and validation. "auto" is bfloat16 where the processor or GPU
        computes in it natively, else float32; the run's ``recipe.json`` records which.
    seed : int

    Raises
    ------
    ValueError
        A value has the wrong type or is out of range; the message names the setting.
    """

    sources: Sources
    validation: str | None = None
    root: str | None = None
    init: str | None = None
    epochs: Count = 8
    batch_size: Count = 128
    peak_lr: Positive = 0.2
    warmup: Share = 0.05
    momentum: Share = 0.9
    weight_decay: NotNegative = 5e-4
    label_smoothing: Share = 0.1
    min_crop_area: Share = 0.35
    colour_jitter: NotNegative = 0.3
    other_domains: Share = 0.0
    rotation: Share = 0.0
    dense: bool = False
    teacher: str | None = None
    teacher_size: Count = 128
    phases: Annotated[Phases, Meta(min_length=1)] = ((0.25, 40), (0.32, 48), (0.35, 64), (0.08, 84))
    image_size: Count = 84
    precision: Precision = "auto"
    seed: int = 0


@dataclass(frozen=True)
class MetaTrainRecipe(_Checked):
    """Settings of :func:`~fewshot_mahalanobis.research.training.meta_train.meta_train`; the defaults are the paper's.

    Bateni et al., CVPR 2020, appendix "Experimental details".

    Attributes
    ----------
    sources : tuple of str
        Sources of the tasks, all equally likely; repeat one to draw it more often. See
        :func:`~fewshot_mahalanobis.research.data.datasets.open_source`; "glyphs" are synthetic characters.
    backbone : str
        ``backbone.safetensors``, written by ``pretrain``; a network of timm or "efficientnet-lite0"; or a checkpoint
        (name, folder or Hub repository).
    validation : tuple of str
        Sources to select the best checkpoint on.
    model : mapping
        Arguments of :class:`~fewshot_mahalanobis.SimpleCNAPS`; for a network by name ``mean``, ``std``, ``positions``
        and ``pooling`` too.
    init : str, optional
        Checkpoint of the same ``model`` and ``feature_scale`` whose adaptation networks to start from; default: random
        weights.
    root : str, optional
        Folder of data sets given by name.
    method : str, optional
        Train this method of ``fewshot_mahalanobis.research.baselines.METHODS`` on the FiLM ResNet18, not Simple CNAPS.
    feature_scale : float
        Factor on the features, see :func:`~fewshot_mahalanobis.research.training.starting_learner.scale_features_`.
    tasks : int
        Number of training tasks.
    tasks_per_step : int, optional
        Tasks per gradient step, divided between the processes of a run. Default: 16 as in the paper, 4 on a CPU.
    learning_rate : float
        Adam learning rate.
    learn_scale : bool
        Train the scale s of the Mahalanobis head too.
    learn_pooling : bool
        Train the sigmas and the weights other than 1 of an EfficientNet's pooling too
        (:class:`~fewshot_mahalanobis.research.training.learner.LearnedPooling`).
    average : float
        Share of the steps, at the end, over which the weights are averaged.
    schedule : {"constant", "cosine"}
        Learning rate schedule. "cosine" warms up during a twentieth of the steps and then falls to zero: for short
        runs.
    penalty : float
        Factor of the L2 penalty on the scales of the FiLM generator.
    episodes : {"variable", "fixed", "small"}
        Episode protocol: Meta-Dataset's (``max_way``, ``max_support``), N-way K-shot (``way``, ``shot``), or small
        tasks like a user's (5 to 10 ways, 1 to 6 shots).
    max_way, max_support : int
        Maximum number of classes and of support images per episode (variable protocol).
    way, shot : int
        Number of classes, and of support images per class (fixed protocol).
    queries : int
        Query images per class; the maximum in the variable protocol.
    augment : bool
        Augment every task (:func:`~fewshot_mahalanobis.research.training.augment.augment_task`).
    camera : bool
        With ``augment``, change half of the tasks of photographs in the way cameras do instead
        (:func:`~fewshot_mahalanobis.research.training.augment.camera_task`).
    phases : tuple of (float, int)
        Share of training, side of its images in pixels; empty: the model's image size throughout.
    sizes : tuple of int
        Draw the side of each task's images from these, in pixels, instead of following ``phases``.
    floor : float
        Weight of the excess of the loss over the loss of the network without adaptation, added to the loss: adapting
        should not do harm where the network already gives the right answer.
    lite : int, optional
        LITE: back-propagate through this many random support images per task, to bound memory
        (:mod:`~fewshot_mahalanobis.research.training.bounded_memory`).
    precision : {"auto", "float32", "bfloat16"}
        Precision of the convolutions, in training and validation. "auto" is bfloat16 where the processor or GPU
        computes in it natively, else float32; the run's ``recipe.json`` records which.
    validate_every : int
        Tasks between validations.
    validation_episodes : int
        Episodes per validation source.
    seed : int

    Raises
    ------
    ValueError
        A value has the wrong type or is out of range; the message names the setting.
    """

    sources: Sources
    backbone: str
    validation: tuple[str, ...] = ()
    model: Mapping[str, Any] = field(default_factory=dict)
    init: str | None = None
    root: str | None = None
    method: str | None = None
    feature_scale: Positive = 1.0
    tasks: Count = 110_000
    tasks_per_step: Count | None = None
    learning_rate: Positive = 5e-4
    learn_scale: bool = False
    learn_pooling: bool = False
    average: Share = 0.0
    schedule: Schedule = "constant"
    penalty: NotNegative = 0.001
    episodes: EpisodeKind = "variable"
    max_way: Count = 40
    max_support: Count = 400
    way: Count = 5
    shot: Count = 5
    queries: Count = 10
    augment: bool = False
    camera: bool = False
    phases: Phases = ()
    sizes: tuple[Count, ...] = ()
    floor: NotNegative = 0.0
    lite: Count | None = None
    precision: Precision = "auto"
    validate_every: Count = 10_000
    validation_episodes: Count = 200
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sizes and self.phases:
            raise ValueError("sizes and phases exclude each other: both set the side of the images")
        if self.floor and self.method is not None:
            raise ValueError("floor is for Simple CNAPS: a method has no network without adaptation to compare with")
        if self.tasks_per_step is not None and self.tasks < self.tasks_per_step:
            raise ValueError(f"tasks = {self.tasks} is less than one step of tasks_per_step = {self.tasks_per_step}")

    def on_device(self, kind: str) -> MetaTrainRecipe:
        """The recipe with its tasks per step: unless they are set, 16 as in the paper, and 4 on a "cpu"."""
        return self if self.tasks_per_step is not None else replace(self, tasks_per_step=4 if kind == "cpu" else 16)


def image_size_at(done: float, phases: Sequence[tuple[float, int]]) -> int:
    """Return the side of the training images, in pixels, after the share ``done`` (0 to 1) of the training."""
    end = 0.0
    for share, size in phases:
        end += share
        if done < end:
            return size
    return phases[-1][1]


Recipe = TypeVar("Recipe", PretrainRecipe, MetaTrainRecipe)


def read_recipe(
    kind: type[Recipe],
    file: str | Path | None = None,
    assignments: Sequence[str] = (),
    settings: Mapping[str, Any] | None = None,
) -> Recipe:
    """Make a recipe of a file, assignments and settings by name; later ones override earlier ones.

    Settings of ``model`` are merged one by one.

    Parameters
    ----------
    kind : type
        :class:`PretrainRecipe` or :class:`MetaTrainRecipe`.
    file : path, optional
        TOML, or JSON such as the ``recipe.json`` of a run; keys are the names of the recipe's fields.
    assignments : sequence of str
        ``name=value``, or ``model.name=value`` for a setting of the model. Values are JSON (``0.5``, ``true``,
        ``null``, ``[[1, 84]]``); anything else is a string.
    settings : mapping, optional
        Field name to value.

    Raises
    ------
    ValueError
        The file cannot be parsed, or a setting is unknown, missing or has a bad value; the message names it.
    """
    groups = [_read_settings(Path(file))] if file is not None else []
    groups += [*map(_parse_assignment, assignments), settings or {}]
    fields = {f.name: f for f in dataclasses.fields(kind)}
    merged: dict[str, Any] = {}
    for group in groups:
        for name, value in group.items():
            if name not in fields:
                close = difflib.get_close_matches(name, fields, 1)
                hint = f", did you mean {close[0]!r}?" if close else ""
                raise ValueError(f"unknown setting {name!r}{hint} (settings are {', '.join(fields)})")
            if isinstance(value, Mapping) and isinstance(merged.get(name), Mapping):
                value = {**merged[name], **value}
            merged[name] = value
    for name, f in fields.items():
        if name not in merged and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            raise ValueError(f"{name} is missing: set it on the command line or in the file of --config")
    return kind(**merged)


def _read_settings(file: Path) -> Mapping[str, Any]:
    form = "JSON" if file.suffix == ".json" else "TOML"
    decode = msgspec.json.decode if form == "JSON" else msgspec.toml.decode
    try:
        settings = decode(file.read_bytes())
    except ImportError as error:
        raise ImportError(f"reading TOML needs tomli: {install_command('training')}") from error
    except ValueError as error:
        raise ValueError(f"{file} is not {form}: {error}") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{file} holds no settings by name")
    return settings


def _parse_assignment(assignment: str) -> Mapping[str, Any]:
    name, equals, text = assignment.partition("=")
    if not name or not equals:
        raise ValueError(f"{assignment!r} is not a setting: expected name=value")
    try:
        value = msgspec.json.decode(text)
    except msgspec.DecodeError:
        value = text
    outer, dot, inner = name.partition(".")
    return {outer: {inner: value}} if dot else {name: value}
