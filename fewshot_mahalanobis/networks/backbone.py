"""Any frozen network as the feature extractor: a network of timm or torchvision, or a module of one's own.

What :class:`~fewshot_mahalanobis.networks.resnet.FilmResNet18` is to Simple CNAPS, :class:`Backbone` is to
:meth:`SimpleCNAPS.from_backbone <fewshot_mahalanobis.SimpleCNAPS.from_backbone>`: images in [-1, 1] go in, features
come out. The code of the network stays with the library that it comes from. So a file has its weights, for timm's
networks the name under which timm makes the same network again, and features by which the network is recognised.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from fewshot_mahalanobis.networks.extractor import FrozenNetwork
from fewshot_mahalanobis.networks.film import Film
from fewshot_mahalanobis.networks.norms import affine_norms, default_positions, trace_norms

#: How far features may lie from what they should be, as a share of their length: weights that were stored in bfloat16
#: or another device's arithmetic move them less, another activation or another pooling moves them more.
_TOLERANCE = 0.05
#: The same for a folded network, whose rounding alone differs.
_FOLDING_TOLERANCE = 1e-3
#: With this mean and standard deviation, images in [-1, 1] are normalised already.
_HALF = (0.5, 0.5, 0.5)


class Backbone(FrozenNetwork):
    """A frozen network behind the normalisation of its images.

    Parameters
    ----------
    network : nn.Module
        Normalised images (n, 3, s, s) -> features (n, d) or (n, d, 1, 1). It is taken, not copied: its parameters lose
        their gradient, and it runs in evaluation mode whatever mode is set.
    out_features : int
        d.
    image_size : int
        s, in pixels.
    mean, std : sequences of 3 floats
        By channel, of images from 0 to 1: the network reads (image - mean) / std.
    origin : str, optional
        Name by which timm makes this network; None for any other network.
    positions : sequence of str, optional
        Normalisation layers that FiLM follows; none by default.

    Attributes
    ----------
    fingerprint : Tensor of shape (d,)
        Features of a fixed test image, by which a network that comes back from a file is recognised.

    Raises
    ------
    ValueError
        ``mean`` or ``std`` is not three finite numbers, a ``std`` is not positive, or a position is no such layer.
    """

    scale: Tensor
    shift: Tensor
    fingerprint: Tensor

    def __init__(
        self,
        network: nn.Module,
        out_features: int,
        *,
        image_size: int,
        mean: Sequence[float],
        std: Sequence[float],
        origin: str | None = None,
        positions: Sequence[str] = (),
    ) -> None:
        super().__init__(network, image_size)
        self.mean, self.std = _three_numbers("mean", mean), _three_numbers("std", std)
        if min(self.std) <= 0:
            raise ValueError(f"std must be positive, not {self.std}")
        self.origin = origin
        self._affine = [*affine_norms(network)]  # until a forward pass shows which are called once
        self._default_positions: list[str] = []
        self.film_positions = self._checked_positions(positions)
        # From [-1, 1] by way of [0, 1] to the network's normalisation, in one product and one sum.
        centre, spread = (torch.tensor(values, dtype=torch.float64)[:, None, None] for values in (self.mean, self.std))
        self.register_buffer("scale", (0.5 / spread).float(), persistent=False)
        self.register_buffer("shift", ((0.5 - centre) / spread).float(), persistent=False)
        self.register_buffer("fingerprint", torch.zeros(out_features))

    @property
    def out_features(self) -> int:
        """Entries d of a feature vector."""
        return len(self.fingerprint)

    @property
    def description(self) -> dict[str, Any]:
        """Entry ``backbone`` of ``config.json``."""
        colours = {"mean": list(self.mean), "std": list(self.std)}
        description = {"origin": self.origin, "features": self.out_features, **colours}
        return {**description, "positions": list(self.film_positions)} if self.film_positions else description

    # ---------------------------------------------------------------- making one

    @classmethod
    def from_module(
        cls,
        module: nn.Module,
        *,
        image_size: int | None,
        mean: Sequence[float] | None,
        std: Sequence[float] | None,
        positions: Sequence[str] | None = (),
    ) -> Backbone:
        """Wrap a copy of ``module``, in float32; see :meth:`SimpleCNAPS.from_backbone` for what is refused."""
        if image_size is None or mean is None or std is None:
            needed = {"image_size": image_size, "mean": mean, "std": std}
            missing = ", ".join(f"{name}=" for name, value in needed.items() if value is None)
            raise ValueError(
                f"a module does not say how its images were prepared when it was trained: give {missing} too. For "
                "weights of torchvision, weights.transforms() shows them; ImageNet's usual ones are image_size=224, "
                "mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)"
            )
        check_image_size(image_size)
        try:
            network = copy.deepcopy(module).float()
        except (RuntimeError, TypeError, ValueError) as error:
            raise ValueError(f"the backbone, a {type(module).__name__}, cannot be copied: {error}") from error
        *_, (name, last) = network.named_modules()
        if isinstance(last, nn.Linear):
            warnings.warn(
                f"the last module of the backbone, {name!r}, is a Linear layer with {last.out_features} outputs. If "
                f"that is its classification layer, its outputs are poor features: put nn.Identity() in its place",
                stacklevel=3,
            )
        return cls.wrap(network, image_size=image_size, mean=mean, std=std, positions=positions)

    @classmethod
    def wrap(
        cls,
        network: nn.Module,
        *,
        image_size: int,
        mean: Sequence[float],
        std: Sequence[float],
        origin: str | None = None,
        positions: Sequence[str] | None = (),
    ) -> Backbone:
        """Wrap a network and run it once, to find d and its norms and to refuse one that cannot serve.

        Parameters
        ----------
        network, image_size, mean, std, origin
            As for the class.
        positions : sequence of str, optional
            Normalisation layers that FiLM follows; None finds them by rule.

        Raises
        ------
        ValueError
            The network cannot read such images; its features are not finite, or depend on the other images of a batch;
            or FiLM cannot follow one of ``positions``.
        """
        backbone = cls(network, 0, image_size=image_size, mean=mean, std=std, origin=origin)
        features = backbone._traced_features()
        if not torch.isfinite(features).all():
            raise ValueError("the backbone gives NaN or infinite features")
        if not _alike(backbone._features_of_test_images(slice(1))[0], features[0]):
            raise ValueError(
                "the backbone's features of an image depend on the other images in its batch, or on chance: does it "
                "have a BatchNorm without running statistics, or a Dropout that is never off?"
            )
        backbone.fingerprint = features[0].clone()
        if positions is None:
            positions = backbone._default_positions
            if not positions:
                raise ValueError("the backbone has no normalisation layer with a scale and a shift for FiLM to follow")
        backbone.film_positions = backbone._checked_positions(positions)
        return backbone

    def check_fingerprint(self) -> None:
        """Raise ValueError unless the network computes what it did when it was first wrapped."""
        features = self._traced_features()[0]
        self._checked_positions([*self.film_positions])
        if features.shape != self.fingerprint.shape or not _alike(features, self.fingerprint):
            whose = "the network that was given" if self.origin is None else f"timm's {self.origin!r} in this version"
            raise ValueError(f"{whose} computes other features from the saved weights than the network that was saved")

    def _checked_positions(self, positions: Sequence[str]) -> dict[str, int]:
        """Positions of FiLM and their numbers of feature maps."""
        if unknown := [name for name in positions if name not in self._affine]:
            raise ValueError(
                f"FiLM cannot follow {unknown[0]!r}: the layers with a scale and a shift that the network uses once "
                f"are {', '.join(self._affine) or 'none'}"
            )
        widths = affine_norms(self.network)
        return {name: widths[name] for name in positions}

    def _traced_features(self) -> Tensor:
        """Compute features (2, d) of the test images; on the way, learn which BatchNorms can be folded."""
        runs: list[Tensor] = []
        calls = trace_norms(self.network, lambda: runs.append(self._features_of_test_images()))
        features = runs[0]
        self._affine, self._default_positions, self.foldable = calls.affine, default_positions(calls), calls.foldable
        if self.foldable:
            try:
                folded = self.for_inference()._features_of_test_images()
                folds = float((folded - features).norm()) <= _FOLDING_TOLERANCE * float(features.norm())
            except ValueError:  # it cannot read channels_last
                folds = False
            if not folds:
                self.foldable = []
        return features

    @torch.no_grad()
    def _features_of_test_images(self, which: slice = slice(None)) -> Tensor:
        """Compute features (2, d) of two fixed images, or of some of them."""
        side = self.image_size
        waves = torch.sin(torch.arange(3 * side * side, dtype=torch.float64).sqrt() * 3).float().view(1, 3, side, side)
        images = torch.cat([waves, 0.5 * waves.flip(3)])[which].to(self.scale.device)
        try:
            features = self(images)
        except ValueError:
            raise
        except Exception as error:  # of any type: the network's code is not ours
            raise ValueError(
                f"the backbone cannot read images of shape {tuple(images.shape)}, float32 on {images.device}: {error}. "
                "Is image_size the one that it was made for?"
            ) from error
        if len(features) != len(images):
            raise ValueError(f"the backbone gives {len(features)} rows of features for {len(images)} images")
        return features

    # ---------------------------------------------------------------- using it

    def prepared(self, images: Tensor) -> Tensor:
        """Images (n, 3, s, s) in [-1, 1] -> normalised images."""
        return images if self.mean == self.std == _HALF else images * self.scale + self.shift

    def for_inference(self, film: Film | None = None, dtype: torch.dtype | None = None) -> Backbone:
        """Return an independent module: moving one does not move the other.

        Convolutions absorb FiLM and BatchNorm where they can; other tensors are shared. The weights stay in float32, as
        the network runs as its authors wrote it, under autocast for bfloat16.
        """
        ready = Backbone(
            self.folded(film),
            self.out_features,
            image_size=self.image_size,
            mean=self.mean,
            std=self.std,
            origin=self.origin,
        ).to(self.scale.device)
        ready.foldable = self.foldable
        return ready


def check_image_size(image_size: int, smallest: int = 1) -> None:
    """Raise ValueError unless the side of the images is a whole number from ``smallest`` to 1024 pixels."""
    if not isinstance(image_size, Integral) or not smallest <= image_size <= 1024:
        raise ValueError(f"image_size must be a whole number from {smallest} to 1024 pixels, not {image_size!r}")


def _alike(features: Tensor, wanted: Tensor) -> bool:
    """Whether two feature vectors (d,) are the same but for rounding."""
    return float((features - wanted).norm()) <= _TOLERANCE * float(wanted.norm())


def _three_numbers(name: str, values: Sequence[float]) -> tuple[float, ...]:
    try:
        numbers = tuple(float(value) for value in values)
    except (TypeError, ValueError):
        numbers = ()
    if len(numbers) != 3 or not all(map(math.isfinite, numbers)):
        raise ValueError(f"{name} must be three numbers, for red, green and blue, not {values!r}")
    return numbers
