"""Any frozen network as the feature extractor: a network of timm or torchvision, or a module of one's own.

What :class:`~fewshot_mahalanobis.networks.resnet.FilmResNet18` is to Simple CNAPS, :class:`Backbone` is to
:meth:`SimpleCNAPS.from_backbone <fewshot_mahalanobis.SimpleCNAPS.from_backbone>`: images in [-1, 1] go in, features
come out. It is frozen; FiLM may follow its normalisation layers. Its code stays with the library that it comes from, so
what is saved are its weights and, for timm's networks, the name under which timm makes the same network again. Weights
that a dependency brings are not saved.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fewshot_mahalanobis.networks.efficientnet import (
    LITE0,
    MEAN,
    OWN_NETWORKS,
    STD,
    EfficientNet,
    lite0_weights,
    load_in_order_,
)
from fewshot_mahalanobis.networks.film import Film, fold_network, modulated_parameters
from fewshot_mahalanobis.networks.folded_lite0 import FoldedLite0
from fewshot_mahalanobis.networks.norms import NormCalls, affine_norms, default_positions, trace_norms

#: How far features may lie from what they should be, as a share of their length: weights that were stored in bfloat16
#: or another device's arithmetic move them less, another activation or another pooling moves them more.
_TOLERANCE = 0.05
#: The same of a folded network, which only rounds otherwise.
_FOLDING_TOLERANCE = 1e-3


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
        timm: str | None = None,
        positions: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.network = network.requires_grad_(False).eval()
        self.image_size = image_size
        self.mean, self.std = _three_numbers("mean", mean), _three_numbers("std", std)
        if min(self.std) <= 0:
            raise ValueError(f"std must be positive, not {self.std}")
        self.timm = timm
        self._calls = NormCalls([*affine_norms(network)], [], [])  # until a forward pass tells more
        self.film_positions = self._checked_positions(positions)
        self._partly_folded: list[nn.Module] = []
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
        """What ``config.json`` says of the backbone."""
        said = {"timm": self.timm, "features": self.out_features, "mean": list(self.mean), "std": list(self.std)}
        return {**said, "positions": list(self.film_positions)} if self.film_positions else said

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
        return cls(network, 0, image_size=image_size, mean=mean, std=std)._tried(positions)

    @classmethod
    def from_timm(
        cls,
        name: str,
        *,
        image_size: int | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        positions: Sequence[str] | None = (),
    ) -> Backbone:
        """Let timm make a pretrained network without its classification layer; timm fetches the weights.

        Those of "efficientnet-lite0" are a dependency.
        """
        if name == LITE0:
            if mean is not None or std is not None:
                raise ValueError(f"{name!r} has a known normalisation of its images: leave out mean and std")
            return cls.own(name, image_size or 224, lite0_weights(), positions)
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
        )._tried(positions)

    @classmethod
    def own(
        cls, name: str, image_size: int, weights: Mapping[str, Tensor], positions: Sequence[str] | None = None
    ) -> Backbone:
        """One of the networks with names of our own, filled with weights in the order of its entries."""
        network = _network(name, image_size)
        load_in_order_(network, weights)
        return cls(network, 0, image_size=image_size, mean=MEAN, std=STD, timm=name)._tried(positions)

    @classmethod
    def described(cls, description: Mapping[str, Any], image_size: int, network: nn.Module | None = None) -> Backbone:
        """The backbone that ``description``, its types checked, tells of; its weights are yet to be loaded.

        A copy of ``network`` is used. Without it timm makes one of shapes alone, to compare a file with, and
        :meth:`materialise` another with memory.
        """
        timm = description["timm"]
        if network is None:
            # "hf-hub:..." and "local-dir:...", which a file from somebody else may say, make timm read and fetch.
            if timm is None or not (timm in OWN_NETWORKS or _timm().is_model(timm)):
                raise ValueError(f"timm {_timm().__version__} has no network {timm!r}: upgrade timm")
            with torch.device("meta"):
                network = _network(timm, image_size)
        else:
            network = copy.deepcopy(network).float()
        return cls(
            network,
            description["features"],
            image_size=image_size,
            mean=description["mean"],
            std=description["std"],
            timm=timm,
            positions=description.get("positions", ()),
        )

    def materialise(self) -> None:
        """Give a network of shapes alone its memory."""
        if self.timm is not None and any(parameter.is_meta for parameter in self.network.parameters()):
            network = _network(self.timm, self.image_size)
            if self.timm == LITE0:
                load_in_order_(network, lite0_weights())
            self.network = network.requires_grad_(False).eval()

    def check_fingerprint(self) -> None:
        """Raise ValueError unless the network computes what it did when it was first wrapped."""
        found = self._traced_features()[0]
        self._checked_positions([*self.film_positions])
        if found.shape != self.fingerprint.shape or not _alike(found, self.fingerprint):
            whose = "the network that was given" if self.timm is None else f"timm's {self.timm!r} in this version"
            raise ValueError(f"{whose} computes other features from the saved weights than the network that was saved")

    def _tried(self, positions: Sequence[str] | None = ()) -> Backbone:
        """Run the network once, to learn d and its norms, and to refuse what could not serve.

        ``positions`` are those of FiLM; None finds them by rule.
        """
        found = self._traced_features()
        if not torch.isfinite(found).all():
            raise ValueError("the backbone gives NaN or infinite features")
        if not _alike(self._features_of_test_images(slice(1))[0], found[0]):
            raise ValueError(
                "the backbone's features of an image depend on the other images in its batch, or on chance: does it "
                "have a BatchNorm without running statistics, or a Dropout that is never off?"
            )
        self.fingerprint = found[0].clone()
        if positions is None:
            positions = default_positions(self._calls)
            if not positions:
                raise ValueError("the backbone has no normalisation layer with a scale and a shift for FiLM to follow")
        self.film_positions = self._checked_positions(positions)
        return self

    def _checked_positions(self, positions: Sequence[str]) -> dict[str, int]:
        """Positions of FiLM and their numbers of feature maps."""
        if unknown := [name for name in positions if name not in self._calls.affine]:
            raise ValueError(
                f"FiLM cannot follow {unknown[0]!r}: the layers with a scale and a shift that the network uses once "
                f"are {', '.join(self._calls.affine) or 'none'}"
            )
        widths = affine_norms(self.network)
        return {name: widths[name] for name in positions}

    def _traced_features(self) -> Tensor:
        """Features of the test images; on the way, learn which BatchNorms can be folded."""
        found: list[Tensor] = []
        self._calls = trace_norms(self.network, lambda: found.append(self._features_of_test_images()))
        if self._calls.foldable:
            try:
                folded = self.for_inference()._features_of_test_images()
                folds = float((folded - found[0]).norm()) <= _FOLDING_TOLERANCE * float(found[0].norm())
            except ValueError:  # it cannot read channels_last
                folds = False
            if not folds:
                self._calls = self._calls._replace(foldable=[])
        return found[0]

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
        film : Film, optional
            At :attr:`film_positions`; gradients flow to it.

        Returns
        -------
        Tensor of shape (n, d)
            float32.

        Raises
        ------
        ValueError
            The network's output is no tensor (n, d) or (n, d, 1, 1).
        """
        # Not every network can read channels_last: it may call ``view``. One that folds has been tried.
        layout = torch.channels_last if self._calls.foldable else torch.contiguous_format
        normalised = images.float()
        if (self.mean, self.std) != (MEAN, STD):  # as images in [-1, 1] are
            normalised = normalised * self.scale + self.shift
        normalised = normalised.contiguous(memory_format=layout)
        bfloat16 = images.dtype == torch.bfloat16
        with torch.autocast(images.device.type, torch.bfloat16) if bfloat16 else nullcontext():
            if film is None:
                return _vectors(self.network(normalised))
            if not self._partly_folded:  # the other BatchNorms are constant: a third of the time
                keep = [*self.film_positions]
                self._partly_folded.append(fold_network(self.network, self._calls.foldable, keep=keep))
            network = self._partly_folded[0]
            return _vectors(functional_call(network, modulated_parameters(network, film), (normalised,)))

    def _apply(self, fn: Any, recurse: bool = True) -> Backbone:
        self._partly_folded.clear()
        return super()._apply(fn, recurse)

    # Weights that a dependency brings are no part of the state.

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The weights and the fingerprint; of EfficientNet-Lite0 the fingerprint alone."""
        state = super().state_dict(*args, **kwargs)
        if self.timm == LITE0:
            start = kwargs.get("prefix", "") + "network."
            for name in [name for name in state if name.startswith(start)]:
                del state[name]
        return state

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        if self.timm == LITE0:
            state_dict.update({f"{prefix}network.{name}": value for name, value in self.network.state_dict().items()})
        super()._load_from_state_dict(state_dict, prefix, *args)

    def for_inference(self, film: Film | None = None, dtype: torch.dtype | None = None) -> Backbone:
        """A module of its own: moving this one does not move the other.

        Convolutions absorb FiLM and BatchNorm where they can; other tensors are shared. The weights stay in float32, as
        the network runs as its authors wrote it, under autocast for bfloat16. EfficientNet-Lite0's are in ``dtype``.
        """
        if isinstance(self.network, EfficientNet) and not self.network.of_lite:
            network: nn.Module = FoldedLite0(self.network, film, dtype)
        else:
            network = fold_network(self.network, self._calls.foldable, film)
            if self._calls.foldable:
                network = network.to(memory_format=torch.channels_last)
        ready = Backbone(
            network, self.out_features, image_size=self.image_size, mean=self.mean, std=self.std, timm=self.timm
        ).to(self.scale.device)
        ready._calls = self._calls
        return ready


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


def _network(name: str, image_size: int) -> Any:
    """A network of a name of our own or of timm's, its weights yet to come."""
    if name in OWN_NETWORKS:
        with torch.random.fork_rng(devices=[]):  # for initial weights, soon replaced
            return EfficientNet(name)
    return _timm_network(name, image_size, pretrained=False)


def is_network_name(name: str) -> bool:
    """Whether :meth:`Backbone.from_timm` knows the name; no error where timm is absent."""
    try:
        return name == LITE0 or bool(_timm().is_model(name))
    except ImportError:
        return False


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
