"""What ``precision="auto"`` stands for, and what bfloat16 may change."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch

from fewshot_mahalanobis import SimpleCNAPS, SimpleCNAPSClassifier, load_checkpoint
from fewshot_mahalanobis.networks import devices
from fewshot_mahalanobis.networks.devices import choose_dtype, native_bfloat16
from fewshot_mahalanobis.networks.efficientnet import LITE0, LITE_B0, EfficientNet
from tests.tiny import LABELS, TinyExtractor, pictures

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model() -> SimpleCNAPS:
    return load_checkpoint("resnet18")


@pytest.mark.parametrize(("native", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_auto_is_bfloat16_where_the_device_has_it(
    native: bool, dtype: torch.dtype, model: SimpleCNAPS, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "native_bfloat16", lambda device: native)
    assert SimpleCNAPSClassifier(model, device="cpu").fit(pictures(8, 1), LABELS).task_.network.dtype == dtype


def test_each_network_says_whether_bfloat16_was_measured(model: SimpleCNAPS) -> None:
    network = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 5), torch.nn.AdaptiveAvgPool2d(1))
    other = SimpleCNAPS.from_backbone(network, image_size=32, mean=(0.5,) * 3, std=(0.5,) * 3)
    extractors = (model.feature_extractor, EfficientNet(LITE0), EfficientNet(LITE_B0), other.feature_extractor)
    assert [extractor.bfloat16_measured for extractor in extractors] == [True, True, False, False]


def test_auto_leaves_other_backbones_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "native_bfloat16", lambda device: True)
    for precision, dtype in (("auto", torch.float32), ("bfloat16", torch.bfloat16)):
        assert choose_dtype(precision, TinyExtractor()) == dtype


@pytest.mark.parametrize(
    ("capabilities", "native"),
    [
        ({"avx512_f": True, "avx512_bf16": True}, True),
        ({"avx512_bf16": False, "amx_bf16": True}, True),
        ({"avx512_f": True, "avx512_bf16": False, "amx_bf16": False}, False),
        ({"architecture": "aarch64"}, False),
    ],
)
def test_a_processor_is_asked_for_the_instructions(
    capabilities: dict[str, object], native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    assert native_bfloat16(CPU) is native
    with monkeypatch.context() as patch:  # hidden from the library that computes the convolutions
        patch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
        assert native_bfloat16(CPU) is False
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert native_bfloat16(CPU) is False


def test_older_versions_of_torch_are_asked_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    for bf16, amx in ((True, False), (False, True), (False, False)):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda answer=bf16: answer, raising=False)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda answer=amx: answer, raising=False)
        assert native_bfloat16(CPU) is (bf16 or amx)
    monkeypatch.delattr(torch.cpu, "_is_avx512_bf16_supported")
    monkeypatch.delattr(torch.cpu, "_is_amx_tile_supported")
    assert native_bfloat16(CPU) is False


@pytest.mark.process
@pytest.mark.slow
def test_bfloat16_is_not_native_where_the_environment_hides_its_instructions() -> None:
    program = "import torch; from fewshot_mahalanobis.networks import devices; "
    program += "print(devices.native_bfloat16(torch.device('cpu')), devices.native_dtype('auto', torch.device('cpu')))"
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"}
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert result.stdout.split() == ["False", "torch.float32"], result.stderr


@pytest.mark.parametrize(("any_avx512", "factor"), [(False, 10), (True, 2)])
def test_bfloat16_by_name_where_it_is_emulated_warns_once_with_the_factor(
    any_avx512: bool, factor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "native_bfloat16", lambda device: False)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: any_avx512)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            assert choose_dtype("bfloat16", TinyExtractor()) == torch.bfloat16
            assert choose_dtype("auto", TinyExtractor()) == choose_dtype("float32", TinyExtractor()) == torch.float32
    (warning,) = caught
    assert f"about {factor} times slower than in float32" in str(warning.message)


@pytest.mark.parametrize("adaptation", ["film", "auto-regressive"])
def test_in_bfloat16_order_batch_and_company_change_nothing(adaptation: str, model: SimpleCNAPS) -> None:
    """A last bit that differed would come out as the third digit: FiLM parameters and weights are rounded by it.

    With one number of threads: another may move a last bit of the task's representation (docs/speed.md).
    """
    if adaptation == "film":
        model = model.at_size(40)
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = SimpleCNAPS(adaptation=adaptation, image_size=40).eval()
        for name, parameter in model.named_parameters():
            if ".scales." in name:
                parameter.data.mul_(30)  # fresh scales hardly adapt
    support, queries, order = pictures(9, 1), pictures(3, 2), np.random.default_rng(0).permutation(9)
    labels = np.arange(9) % 3
    classifier = SimpleCNAPSClassifier(model, device="cpu", precision="bfloat16").fit(support, labels)
    expected = classifier.decision_function(queries)
    unadapted = SimpleCNAPSClassifier(model, device="cpu", precision="bfloat16", adapt=False).fit(support, labels)
    assert np.abs(unadapted.decision_function(queries) - expected).max() > 1e-2 * np.abs(expected).max()
    for batch_size in (4, 1):
        other = SimpleCNAPSClassifier(model, device="cpu", precision="bfloat16", batch_size=batch_size)
        other.fit([support[i] for i in order], labels[order])
        for found in (other.decision_function(queries), other.decision_function(queries[:1])):
            np.testing.assert_allclose(found, expected[: len(found)], rtol=1e-5)


def test_bfloat16_moves_features_in_the_second_digit_at_most(model: SimpleCNAPS) -> None:
    features = {
        precision: SimpleCNAPSClassifier(model, device="cpu", precision=precision)
        .fit(pictures(8, 1), LABELS)
        .transform(pictures(2, 2))
        for precision in ("float32", "bfloat16")
    }
    error = np.linalg.norm(features["bfloat16"] - features["float32"], axis=1)
    assert (error < 0.03 * np.linalg.norm(features["float32"], axis=1)).all()
    assert (error > 0).all()
