"""Any frozen network as the feature extractor: a network of timm or torchvision, or a module of one's own.

What :class:`~fewshot_mahalanobis.networks.resnet.FilmResNet18` is to Simple CNAPS, :class:`Backbone` is to
:meth:`SimpleCNAPS.from_backbone <fewshot_mahalanobis.SimpleCNAPS.from_backbone>`: images in [-1, 1] go in, features
come out. Nothing in it is adapted or trained. Its code stays with the library that it comes from, so what is saved are
its weights and, for timm's networks, the name under which timm makes the same network again.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fewshot_mahalanobis.networks.film import Film

#: How far features may lie from what they should be, as a share of their length: weights that were stored in bfloat16
#: or another device's arithmetic move them less, another activation or another pooling moves them more.
_TOLERANCE = 0.05


class FeatureExtractor(Protocol):
    """What Simple CNAPS asks of the module that turns images into features, beside being an ``nn.Module``.

    :class:`~fewshot_mahalanobis.networks.resnet.FilmResNet18` is one, :class:`Backbone` another.
    """

    @property
    def out_features(self) -> int:
        """Entries d of a feature vector."""

    @property
    def film_positions(self) -> Mapping[str, int]:
        """Names of the layers that take FiLM parameters -> their numbers of feature maps; empty if there are none."""

    def __call__(self, images: Tensor, film: Film | None = None) -> Tensor:
        """Images (n, 3, s, s) in [-1, 1] -> features (n, d), float32; differentiable with respect to ``film``."""

    def for_inference(self, film: Film | None = None, dtype: torch.dtype | None = None) -> nn.Module:
        """A module of its own, images -> features, adapted for good and computing in ``dtype``."""

    def eval(self) -> Any:
        """As of any ``nn.Module``."""


class Backbone(nn.Module):
    """A frozen network behind the normalisation of its images.

    Parameters
    ----------
    network : nn.Module
        Normalised images (n, 3, s, s) -> features (n, d) or (n, d, 1, 1). It is taken, not copied: its parameters lose
        their gradient, and it runs in evaluation mode whatever mode it is told.
    out_features : int
        d.
    image_size : int
        s, in pixels.
    mean, std : sequences of 3 floats
        By channel, of images from 0 to 1: the network reads (image - mean) / std.
    timm : str, optional
        The name by which timm makes this network; None for any other.

    Attributes
    ----------
    fingerprint : Tensor of shape (d,)
        Features of a fixed test image, by which a network that comes back from a file is recognised.

    Raises
    ------
    ValueError
        ``mean`` or ``std`` is not three finite numbers, or a ``std`` is not positive.
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
        timm: str | None = None,
    ) -> None:
        super().__init__()
        self.network = network.requires_grad_(False).eval()
        self.image_size = image_size
        self.mean, self.std = _three_numbers("mean", mean), _three_numbers("std", std)
        if min(self.std) <= 0:
            raise ValueError(f"std must be positive, not {self.std}")
        self.timm = timm
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
    def film_positions(self) -> dict[str, int]:
        """None: it is not adapted."""
        return {}

    @property
    def description(self) -> dict[str, Any]:
        """What ``config.json`` says of the backbone."""
        return {"timm": self.timm, "features": self.out_features, "mean": list(self.mean), "std": list(self.std)}

    # ---------------------------------------------------------------- making one

    @classmethod
    def from_module(
        cls,
        module: nn.Module,
        *,
        image_size: int | None,
        mean: Sequence[float] | None,
        std: Sequence[float] | None,
    ) -> Backbone:
        """Wrap a copy of ``module``, in float32; see :meth:`SimpleCNAPS.from_backbone` for what is refused."""
        if image_size is None or mean is None or std is None:
            given = {"image_size": image_size, "mean": mean, "std": std}
            missing = ", ".join(f"{name}=" for name, value in given.items() if value is None)
            raise ValueError(
                f"a module does not say how its images were prepared when it was trained: give {missing} too. For "
                "weights of torchvision, weights.transforms() shows them; ImageNet's usual ones are image_size=224, "
                "mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)"
            )
        try:
            network = copy.deepcopy(module).float()
        except (RuntimeError, TypeError, ValueError) as error:
            raise ValueError(f"the backbone, a {type(module).__name__}, cannot be copied: {error}") from error
        return cls(network, 0, image_size=image_size, mean=mean, std=std)._tried()

    @classmethod
    def from_timm(
        cls,
        name: str,
        *,
        image_size: int | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
    ) -> Backbone:
        """Let timm make a pretrained network without its classification layer; timm fetches the weights."""
        network = _timm_network(name, image_size, pretrained=True)
        from timm.data import resolve_model_data_config

        data, origin = resolve_model_data_config(network), network.pretrained_cfg
        known = _timm().is_model(name)
        return cls(
            network.float(),
            0,
            image_size=data["input_size"][-1] if image_size is None else image_size,
            mean=data["mean"] if mean is None else mean,
            std=data["std"] if std is None else std,
            # In full, as the weights that a bare name stands for may change from one version of timm to the next.
            timm=".".join(filter(None, (origin.get("architecture"), origin.get("tag")))) if known else None,
        )._tried()

    @classmethod
    def described(cls, description: Mapping[str, Any], image_size: int, network: nn.Module | None = None) -> Backbone:
        """The backbone that ``description`` tells of, its weights yet to be loaded.

        Parameters
        ----------
        description : mapping
            As :attr:`description`, its types checked.
        image_size : int
        network : nn.Module, optional
            The network itself, of which a copy is used. Without it timm makes one of shapes alone, to compare a file
            with, and :meth:`materialise` another with memory.
        """
        timm = description["timm"]
        if network is None:
            # "hf-hub:..." and "local-dir:...", which a file from somebody else may say, make timm read and fetch.
            if timm is None or not _timm().is_model(timm):
                raise ValueError(f"timm {_timm().__version__} has no network {timm!r}: upgrade timm")
            with torch.device("meta"):
                network = _timm_network(timm, image_size, pretrained=False)
        else:
            network = copy.deepcopy(network).float()
        return cls(
            network,
            description["features"],
            image_size=image_size,
            mean=description["mean"],
            std=description["std"],
            timm=timm,
        )

    def materialise(self) -> None:
        """Give a network of shapes alone its memory."""
        if self.timm is not None and any(parameter.is_meta for parameter in self.network.parameters()):
            network = _timm_network(self.timm, self.image_size, pretrained=False)
            self.network = network.requires_grad_(False).eval()

    def check_fingerprint(self) -> None:
        """Raise ValueError unless the network computes what it did when it was first wrapped."""
        found = self._features_of_test_images()[0]
        if found.shape != self.fingerprint.shape or not _alike(found, self.fingerprint):
            whose = "the network that was given" if self.timm is None else f"timm's {self.timm!r} in this version"
            raise ValueError(f"{whose} computes other features from the saved weights than the network that was saved")

    def _tried(self) -> Backbone:
        """Run the network once, to learn d and to refuse what could not serve."""
        found = self._features_of_test_images()
        if not torch.isfinite(found).all():
            raise ValueError("the backbone gives NaN or infinite features")
        if not _alike(self._features_of_test_images(slice(1))[0], found[0]):
            raise ValueError(
                "the backbone's features of an image depend on the other images in its batch, or on chance: does it "
                "have a BatchNorm without running statistics, or a Dropout that is never off?"
            )
        self.fingerprint = found[0].clone()
        return self

    @torch.no_grad()
    def _features_of_test_images(self, which: slice = slice(None)) -> Tensor:
        """Features (2, d) of two fixed images, or of some of them."""
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

    def train(self, mode: bool = True) -> Backbone:
        """Stay in evaluation mode."""
        return super().train(False)

    def forward(self, images: Tensor, film: Film | None = None) -> Tensor:
        """Images -> features.

        Parameters
        ----------
        images : Tensor of shape (n, 3, s, s)
            In [-1, 1]. Where they are bfloat16 the network runs under autocast: modules that were not written for
            bfloat16 throughout work all the same.
        film : None
            A backbone takes no FiLM parameters.

        Returns
        -------
        Tensor of shape (n, d)
            float32.

        Raises
        ------
        ValueError
            The network's output is no tensor (n, d) or (n, d, 1, 1).
        """
        # Contiguous, as a network of unknown origin may call ``view``.
        normalised = (images.float() * self.scale + self.shift).contiguous()
        if images.dtype == torch.bfloat16:
            with torch.autocast(images.device.type, torch.bfloat16):
                return _vectors(self.network(normalised))
        return _vectors(self.network(normalised))

    def for_inference(self, film: Film | None = None, dtype: torch.dtype | None = None) -> Backbone:
        """A module of its own that shares the weights: moving this one does not move the other.

        They stay in float32, as the network runs as its authors wrote it, under autocast for bfloat16.
        """
        shared: dict[int, Any] = {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in self.parameters()}
        shared |= {id(buffer): buffer for buffer in self.buffers()}
        return copy.deepcopy(self, shared)


def _vectors(output: Any) -> Tensor:
    """The network's output as features (n, d), float32."""
    remedy = "wrap the network in a module that returns features (n, d)"
    if not isinstance(output, Tensor):
        raise ValueError(f"the backbone gives a {type(output).__name__}, not one tensor: {remedy}")
    if output.ndim == 4 and output.shape[2] == output.shape[3] == 1:
        output = output.flatten(1)
    if output.ndim != 2 or output.shape[1] == 0:
        if output.ndim == 4:
            remedy = "for maps (n, d, h, w) use nn.Sequential(network, nn.AdaptiveAvgPool2d(1))"
        raise ValueError(f"the backbone gives a tensor of shape {tuple(output.shape)}, not features (n, d): {remedy}")
    return output.float()


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


def _timm() -> Any:
    try:
        import timm
    except ImportError as error:
        raise ImportError("this backbone is made by timm: pip install fewshot-mahalanobis[backbones]") from error
    return timm


def _check_connection(repository: str, *files: str | None) -> None:
    """Ask the Hub once whether it answers, unless one of the files is in its cache.

    timm's own requests repeat for most of a minute where there is no network.
    """
    import huggingface_hub

    cached = (huggingface_hub.try_to_load_from_cache(repository, file) for file in files if file)
    if any(isinstance(path, str) for path in cached):
        return
    try:
        huggingface_hub.HfApi().model_info(repository, timeout=10)
    except huggingface_hub.errors.HfHubHTTPError:
        raise  # it answers, and says why not
    except Exception as error:  # the transport's, which varies
        raise ConnectionError(f"no connection to {huggingface_hub.constants.ENDPOINT} ({error})") from error


def _timm_network(name: str, image_size: int | None, *, pretrained: bool) -> Any:
    """A network of timm without classification layer, so that it gives pooled features."""
    timm = _timm()
    try:
        settings = timm.get_pretrained_cfg(name) if timm.is_model(name) else None
        size = {}
        if settings is not None and settings.fixed_input_size and image_size not in (None, settings.input_size[-1]):
            size = {"img_size": image_size}  # position embeddings fix it; timm resamples them
        if pretrained and settings is not None and settings.hf_hub_id:
            _check_connection(settings.hf_hub_id, settings.hf_hub_filename, "model.safetensors", "pytorch_model.bin")
        if name.startswith("hf-hub:"):
            _check_connection(name.removeprefix("hf-hub:"), "config.json")
        with torch.random.fork_rng(devices=[]):  # for initial weights, soon replaced
            return timm.create_model(name, pretrained=pretrained, num_classes=0, **size)
    except Exception as error:  # timm lets those of its transports through
        raise ValueError(
            f"timm could not make {name!r}: {error}. timm.list_models(pretrained=True) lists the names; weights are "
            "downloaded when first used"
        ) from error
