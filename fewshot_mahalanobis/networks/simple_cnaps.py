"""Simple CNAPS as a whole: set encoder, FiLM generator, FiLM ResNet18 and head (Bateni et al., CVPR 2020, figure 4).

Every variant of the paper is a setting of the one model:

==================  ========================================================
Simple CNAPS        the default
Simple AR-CNAPS     ``adaptation="auto-regressive"``
No adaptation       ``adaptation="none"``
Metric ablations    ``head="euclidean" | "manhattan" | "cosine" | "dot_product"``
Simple CNAPS -TR    ``task_covariance=False``
Simple CNAPS +P     ``projection=True``
CNAPS, AR-CNAPS     ``head="linear"``
Equation 2 as is    ``scale=0.5``
==================  ========================================================

:meth:`SimpleCNAPS.from_backbone` replaces the ResNet18 by any other frozen network.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fewshot_mahalanobis.cores import one_thread
from fewshot_mahalanobis.gaussians.support import full_precision
from fewshot_mahalanobis.heads import Head, LinearHead, make_head
from fewshot_mahalanobis.networks.backbone import Backbone, check_image_size
from fewshot_mahalanobis.networks.devices import device_of
from fewshot_mahalanobis.networks.efficientnet import EfficientNet
from fewshot_mahalanobis.networks.extractor import FeatureExtractor
from fewshot_mahalanobis.networks.film import Film
from fewshot_mahalanobis.networks.generators import (
    AutoregressiveFilmGenerator,
    FilmGenerator,
    LayerwiseFilmGenerator,
    NetworkFilmGenerator,
)
from fewshot_mahalanobis.networks.pretrained import pretrained_extractor
from fewshot_mahalanobis.networks.resnet import FilmResNet18
from fewshot_mahalanobis.networks.set_encoder import TASK_FEATURES, SetEncoder, in_batches, mean_over_set
from fewshot_mahalanobis.networks.task import AdaptedNetwork, AdaptedTask, SupportBatches, check_episode
from fewshot_mahalanobis.plain import plain
from fewshot_mahalanobis.support_set.features import Features
from fewshot_mahalanobis.support_set.fitted_head import FittedHead

GENERATORS: dict[str, type[FilmGenerator] | None] = {
    "film": LayerwiseFilmGenerator,
    "auto-regressive": AutoregressiveFilmGenerator,
    "none": None,
}


class ProjectionNetwork(nn.Sequential):
    """W_1 ELU(W_2 ELU(W_3 f)), the "+P" variant (appendix "Projection Networks"); features (n, d) -> (n, d)."""

    def __init__(self, features: int) -> None:
        layers = [nn.Linear(features, features) for _ in range(3)]
        super().__init__(layers[0], nn.ELU(), layers[1], nn.ELU(), layers[2])


class SimpleCNAPS(nn.Module):
    """Few-shot image classifier whose network adapts to the support set in one forward pass.

    Parameters
    ----------
    adaptation : {"film", "auto-regressive", "none"}
        How FiLM parameters are generated from the support set.
    head : {"auto", "mahalanobis", "euclidean", "manhattan", "cosine", "dot_product", "linear"}
        How queries are classified on the adapted features.
    scale : float
        s of the Mahalanobis head's logits, -s (x - mu_k)^T Q_k^-1 (x - mu_k). Equation 2 has 1/2, the
        published code and numbers 1.
    beta : float or "auto"
        Ridge of the covariance estimate, in squared feature units (equation 3); "auto" chooses it on each support set.
    task_covariance : bool
        False sets lambda_k = 1 in equation 3: the "-TR" ablation.
    one_shot_covariance : {"zero", "published"}
        Covariance of a class of one example; see :class:`~fewshot_mahalanobis.RegularizedCovariance`.
    projection : bool
        Put the learned projection of the "+P" variant before the head.
    image_size : int
        Side of the square images the network was trained on, in pixels.
    encoder_size : int, optional
        Side that images are resized to for the set encoder, in pixels. By default they are not resized.
    frozen_features : bool
        Add to the task representation a learned linear map of what the frozen network sees: mean and standard
        deviation of its features over the support set. It costs one more forward pass of the support set.
    backbone : Backbone or EfficientNet, optional
        A frozen network in place of the FiLM ResNet18, as :meth:`from_backbone` makes it.

    Attributes
    ----------
    config : dict
        The arguments above, with a description in place of the backbone: what ``config.json`` of a checkpoint holds.

    Notes
    -----
    The backbone is frozen and its BatchNorms always run in inference mode, in training mode too; the set
    encoder's always use the statistics of the support set. So no forward pass changes the module's state.

    References
    ----------
    Bateni, Goyal, Masrani, Wood, Sigal: Improved Few-Shot Visual Classification. CVPR 2020.
    """

    def __init__(
        self,
        *,
        adaptation: str = "film",
        head: str = "mahalanobis",
        scale: float = 1.0,
        beta: float | str = 1.0,
        task_covariance: bool = True,
        one_shot_covariance: str = "zero",
        projection: bool = False,
        image_size: int = 84,
        encoder_size: int | None = None,
        frozen_features: bool = False,
        backbone: Backbone | EfficientNet | None = None,
    ) -> None:
        super().__init__()
        self.config: dict[str, Any] = {
            "adaptation": adaptation,
            "head": head,
            "scale": scale,
            "beta": beta,
            "task_covariance": task_covariance,
            "one_shot_covariance": one_shot_covariance,
            "projection": projection,
            "image_size": image_size,
        }
        if encoder_size is not None:
            self.config["encoder_size"] = encoder_size
        if frozen_features:
            self.config["frozen_features"] = True
        if backbone is not None:
            self.config["backbone"] = backbone.description
        self.config = plain(self.config)
        _check_settings(self.config, backbone)
        self.image_size = self.config["image_size"]
        self.feature_extractor: FeatureExtractor = (
            FilmResNet18().requires_grad_(False).eval() if backbone is None else backbone
        )
        generator = GENERATORS[adaptation]
        self.set_encoder = SetEncoder() if generator is not None else None
        self.feature_encoder: nn.Linear | None = None
        if frozen_features:
            width = 2 * self.feature_extractor.for_set_encoder.out_features
            self.feature_encoder = nn.Linear(width, TASK_FEATURES, bias=False)
            nn.init.zeros_(self.feature_encoder.weight)  # training starts from the set encoder alone
        self.film_generator: FilmGenerator | None = None
        if generator is not None:
            self.film_generator = generator() if backbone is None else NetworkFilmGenerator(backbone.film_positions)
        self.projection = ProjectionNetwork(FilmResNet18.out_features) if projection else None
        self.head: Head = (
            LinearHead(self.feature_extractor.out_features) if head == LinearHead.name else make_head(head, self.config)
        )

    def train(self, mode: bool = True) -> SimpleCNAPS:
        """Set training mode everywhere but in the frozen backbone."""
        super().train(mode)
        self.feature_extractor.eval()
        return self

    def at_size(self, image_size: int) -> SimpleCNAPS:
        """Return this model for images of another size; it shares the weights.

        Parameters
        ----------
        image_size : int
            Side of the images in pixels, from 32 to 1024.

        Raises
        ------
        ValueError
            The size is out of range, or the backbone came by :meth:`from_backbone`, which takes ``image_size`` itself.
        """
        if isinstance(self.feature_extractor, Backbone):
            raise ValueError("the size of a network of your own is set where it is made: from_backbone(image_size=...)")
        check_image_size(image_size, 32)
        # New parameters over the same memory: moving one model does not move the other.
        shared: dict[int, Any] = {id(p): nn.Parameter(p.detach(), p.requires_grad) for p in self.parameters()}
        model = copy.deepcopy(self, shared | {id(buffer): buffer for buffer in self.buffers()})
        model.image_size = model.config["image_size"] = plain(image_size)
        return model

    # ---------------------------------------------------------------- the method

    def forward(self, support_images: Tensor, support_labels: Tensor, query_images: Tensor) -> Tensor:
        """Logits of one episode, differentiable with respect to every trained parameter.

        Parameters
        ----------
        support_images : Tensor of shape (n, 3, h, w)
            In [-1, 1].
        support_labels : int64 Tensor of shape (n,)
            Classes 0 to k - 1, each with at least one image.
        query_images : Tensor of shape (m, 3, h, w)
            In [-1, 1].

        Returns
        -------
        Tensor of shape (m, k)
            Their softmax is equation 1.

        Raises
        ------
        ValueError
            Shapes or labels do not fit, or a class has no image.

        See Also
        --------
        adapt : the faster way to many queries of one task, without gradients.
        """
        check_episode(support_images, support_labels)
        film = film_parameters(self, support_images)
        features = self.feature_extractor(torch.cat([support_images, query_images]), film)
        if self.projection is not None:
            features = self.projection(features)
        support_features, query_features = features.split([len(support_images), len(query_images)])
        return self.head(support_features, support_labels, query_features)

    @torch.no_grad()
    def adapt(
        self,
        support_images: Tensor,
        support_labels: Tensor,
        *,
        head: Head | None = None,
        adapt: bool = True,
        dtype: torch.dtype = torch.float32,
        batch_size: int = 64,
    ) -> AdaptedTask:
        """Adapt to a support set: one forward pass, no gradient step, no change to this module.

        Parameters
        ----------
        support_images : Tensor of shape (n, 3, h, w)
            In [-1, 1]; on any device.
        support_labels : int64 Tensor of shape (n,)
            Classes 0 to k - 1, each with at least one image.
        head : Head, optional
            Another head than the model's own.
        adapt : bool
            False leaves the network as pretrained ("No Adaptation").
        dtype : {torch.float32, torch.bfloat16}
            Precision of the convolutions; the head computes in float32 or better.
        batch_size : int
            Images processed at a time; it bounds memory.

        Returns
        -------
        AdaptedTask
            Serves any number of queries.
        """
        check_episode(support_images, support_labels)
        network = adapted_network(self, support_images, adapt=adapt, dtype=dtype, batch_size=batch_size)
        support = Features(network.features(support_images, batch_size))
        return AdaptedTask(network, FittedHead.fit(self.head if head is None else head, support, support_labels))

    # ---------------------------------------------------------------- weights

    @classmethod
    def from_backbone(
        cls,
        backbone: nn.Module | str,
        *,
        image_size: int | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        head: str = "mahalanobis",
        scale: float = 1.0,
        beta: float | str = "auto",
        task_covariance: bool = True,
        adaptation: str = "none",
        positions: Sequence[str] | None = None,
    ) -> SimpleCNAPS:
        """Put the head on another frozen network: of timm, of torchvision, or of your own.

        Parameters
        ----------
        backbone : str or nn.Module
            Name of a pretrained network of timm ("resnet18.a1_in1k"), whose weights timm fetches;
            "efficientnet-lite0", whose weights are a dependency; or any module that turns normalised images
            (n, 3, s, s) into features (n, d) or (n, d, 1, 1), without its classification layer. A module is copied, in
            float32; the copy always runs in evaluation mode, without gradients of its parameters.
        image_size : int
            Side s of the square that images are resized to, in pixels. For a name, the default is timm's.
        mean, std : sequences of 3 floats
            Per channel, for images from 0 to 1: the network reads (image - mean) / std. For a name, the defaults are
            timm's.
        head : {"auto", "mahalanobis", "euclidean", "manhattan", "cosine", "dot_product"}
        scale : float
            As for the class.
        beta : float or "auto"
            Ridge in squared feature units. The default suits features of any scale: it is chosen on each support set by
            exact leave-one-out (:func:`~fewshot_mahalanobis.gaussians.leave_out.choose_beta`).
        task_covariance : bool
            As for the class.
        adaptation : {"none", "film"}
            "film" adds a set encoder and a FiLM generator with random weights, to be trained by ``meta-train``.
        positions : sequence of str, optional
            Normalisation layers that FiLM follows, as ``named_modules()`` of the network names them. By default, in a
            convolutional network, the first one, those behind convolutions larger than 1 x 1, and the last one; in a
            transformer, every one.

        Returns
        -------
        SimpleCNAPS
            In evaluation mode. It reads images in [-1, 1] as every model does, and normalises them itself.

        Raises
        ------
        ImportError
            ``backbone`` is a name of timm, which is not installed.
        ValueError
            timm has no such network or cannot fetch it; ``image_size``, ``mean`` or ``std`` of a module is missing; the
            module cannot be copied or cannot read such images; its output is not features, not finite, or depends on
            the other images of a batch; or FiLM cannot follow one of ``positions``.

        Warns
        -----
        UserWarning
            ``image_size`` is missing, and a network of timm reads images of more than 300 pixels.
        """
        settings: Any = {"image_size": image_size, "mean": mean, "std": std}
        settings["positions"] = positions if adaptation == "film" else ()
        if isinstance(backbone, str):
            extractor: Backbone | EfficientNet = pretrained_extractor(backbone, **settings)
        else:
            extractor = Backbone.from_module(backbone, **settings)
        return cls(
            adaptation=adaptation,
            head=head,
            scale=scale,
            beta=beta,
            task_covariance=task_covariance,
            image_size=extractor.image_size,
            backbone=extractor,
        ).eval()

    @classmethod
    def from_published_state_dict(cls, state_dict: Mapping[str, Any], *, image_size: int = 224) -> SimpleCNAPS:
        """Read the weights of the authors' implementation, with its conventions.

        Parameters
        ----------
        state_dict : mapping of str to Tensor
            Weights of Simple CNAPS, Simple AR-CNAPS, their "no adaptation" form, CNAPS, AR-CNAPS, the bare pretrained
            ResNet18 (read as "no adaptation"), or LITE's Simple CNAPS on EfficientNet-B0 (Bronskill et al.,
            NeurIPS 2021). The keys tell which.
        image_size : int
            Side of the images that LITE's weights were trained on, in pixels; other models do not use it.

        Returns
        -------
        SimpleCNAPS
            In evaluation mode, with s = 1 and ``one_shot_covariance="published"``.

        Raises
        ------
        ValueError
            A key is missing or unknown, or a shape differs.
        """
        from fewshot_mahalanobis.checkpoints.published import model_from_published_state_dict

        return model_from_published_state_dict(state_dict, image_size)

    def save_pretrained(self, save_directory: str | Path) -> None:
        """Write this model as a checkpoint: ``config.json``, ``model.safetensors`` and ``README.md``.

        Parameters
        ----------
        save_directory : str or path
            Made if absent; a checkpoint in it is replaced, but its ``README.md`` is kept.

        Raises
        ------
        CheckpointError
            A weight is NaN or infinite, or the folder cannot be written.
        """
        from fewshot_mahalanobis.checkpoints.folder import save_checkpoint

        save_checkpoint(self, save_directory)

    def push_to_hub(self, repo_id: str, *, private: bool | None = None, token: str | bool | None = None) -> str:
        """Put this model into a repository of the Hugging Face Hub as a checkpoint; returns the address of the commit.

        Parameters
        ----------
        repo_id : str
            ``"user/repo"``; made if it is absent.
        private : bool, optional
            Visibility of a new repository; default: the account's setting.
        token : str or bool, optional
            With write permission; default: that of ``hf auth login``.

        Raises
        ------
        CheckpointError
            As for :meth:`save_pretrained`; UploadError if the repository cannot be written, which then is what it was.
        ImportError
            The packages of the extra ``hub`` are absent.
        """
        from fewshot_mahalanobis.checkpoints.hub import upload_checkpoint

        return upload_checkpoint(self, repo_id, private=private, token=token)

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | Path, *, backbone: nn.Module | None = None, **hub_options: Any
    ) -> SimpleCNAPS:
        """Load a checkpoint, as :func:`~fewshot_mahalanobis.load_checkpoint` does.

        Parameters
        ----------
        pretrained_model_name_or_path : str or path
            A named checkpoint, a folder, or a repository of the Hugging Face Hub, "user/repo" or "user/repo@revision".
        backbone : nn.Module, optional
            The network, for a checkpoint of :meth:`from_backbone` on a module.
        **hub_options
            ``revision``, ``cache_dir``, ``force_download``, ``local_files_only`` and ``token``.

        Returns
        -------
        SimpleCNAPS
            On the CPU, in float32, in evaluation mode.

        Raises
        ------
        CheckpointError, ValueError
            As :func:`~fewshot_mahalanobis.load_checkpoint`.
        """
        from fewshot_mahalanobis.checkpoints.load import load_checkpoint

        return load_checkpoint(pretrained_model_name_or_path, backbone, **hub_options)


def film_parameters(
    model: SimpleCNAPS, support_images: Tensor | Iterable[Tensor], batch_size: int | None = None
) -> Film | None:
    """FiLM parameters psi_phi(g_phi(S)) for a support set; None for a model that does not adapt.

    Parameters
    ----------
    model : SimpleCNAPS
    support_images : Tensor of shape (n, 3, h, w), or iterable of such batches of it
        In [-1, 1]. An auto-regressive generator iterates over them twice.
    batch_size : int, optional
        Process at most this many images of a tensor at a time, to bound memory.
    """
    if model.film_generator is None:
        return None
    z = _task_representation(model, in_batches(support_images, batch_size))
    return model.film_generator(z, in_batches(support_images, batch_size), model.feature_extractor)


def _task_representation(model: SimpleCNAPS, batches: Iterable[Tensor]) -> Tensor:
    """Task representation z = g_phi(S), shape (64,); each batch of the support set is read once."""
    assert model.set_encoder is not None
    small, frozen, network = list[Tensor](), list[Tensor](), None
    for images in batches:
        if model.feature_encoder is not None:
            network = network or _frozen_network(model, images)
            frozen.append(network.features(images, len(images)))
        small.append(_resized(images, model.config.get("encoder_size")))
    z: Tensor = model.set_encoder(small)
    return z if model.feature_encoder is None else z + _encoded_features(model.feature_encoder, torch.cat(frozen))


def _frozen_network(model: SimpleCNAPS, images: Tensor) -> AdaptedNetwork:
    """The network as pretrained, as the set encoder reads it, for a support set that begins with these images."""
    dtype = torch.bfloat16 if torch.is_autocast_enabled(device_of(model).type) else torch.float32
    return AdaptedNetwork(model.feature_extractor.for_set_encoder, dtype=dtype, pixels=images[:, 0].numel())


def _resized(images: Tensor, side: int | None) -> Tensor:
    """Images (n, 3, h, w) as the set encoder reads them, (n, 3, side, side)."""
    if side is None or tuple(images.shape[2:]) == (side, side):
        return images
    return F.interpolate(images.float(), (side, side), mode="bilinear", antialias=True).to(images.dtype)


def _encoded_features(feature_encoder: nn.Linear, features: Tensor) -> Tensor:
    """Map mean and standard deviation of the frozen network's features of a support set (n, d) to shape (64,)."""
    mean = mean_over_set(features)
    deviation = mean_over_set((features - mean).square()).sqrt()
    with full_precision(mean):
        encoded: Tensor = feature_encoder(torch.cat([mean, deviation]))
    return encoded


@torch.no_grad()
@one_thread()
def adapted_network(
    model: SimpleCNAPS,
    support_images: Tensor | Iterable[Tensor],
    *,
    adapt: bool = True,
    dtype: torch.dtype = torch.float32,
    batch_size: int = 64,
) -> AdaptedNetwork:
    """Adapt the feature extractor of a model alone; the arguments are those of :meth:`SimpleCNAPS.adapt`.

    The support images may come as an iterable of batches (b, 3, h, w), which is iterated over once (twice for an
    auto-regressive generator, not at all without adaptation). No batch is kept, but what the set encoder reads.
    """
    film, device = None, device_of(model)
    if adapt:
        with torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
            film = film_parameters(model, SupportBatches(support_images, batch_size, device, dtype), batch_size)
    return AdaptedNetwork(model.feature_extractor, film, dtype, model.projection)


def _check_settings(config: Mapping[str, Any], backbone: Backbone | EfficientNet | None) -> None:
    """ValueError unless the settings of a model fit together, and its backbone."""
    adaptation, encoder_size = config["adaptation"], config.get("encoder_size")
    if adaptation not in GENERATORS:
        raise ValueError(f"adaptation must be one of {sorted(GENERATORS)}, not {adaptation!r}")
    # The set encoder halves an image five times, so 32 pixels are the least for it.
    check_image_size(config["image_size"], 32 if backbone is None or adaptation != "none" else 1)
    if encoder_size is not None and (adaptation == "none" or not 32 <= encoder_size <= 1024):
        raise ValueError(f"encoder_size, of a model that adapts, is from 32 to 1024 pixels, not {encoder_size!r}")
    if config.get("frozen_features") and adaptation == "none":
        raise ValueError("frozen_features=True needs adaptation")
    if backbone is None:
        return
    if adaptation == "auto-regressive" or config["head"] == LinearHead.name or config["projection"]:
        raise ValueError(
            "a backbone takes no auto-regressive adaptation, linear head or projection: use adaptation='film' or "
            "'none', projection=False and another head"
        )
    if (adaptation == "film") != bool(backbone.film_positions):
        raise ValueError("a backbone has positions for FiLM where adaptation is 'film', and nowhere else")
