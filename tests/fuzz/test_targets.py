"""The fuzzer's targets on their own starting inputs, whole and cut: so that they run when they are needed."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from fewshot_mahalanobis.checkpoints import classifier_file
from fewshot_mahalanobis.images import picture as images_module
from tests.fuzz.targets import TARGETS

pytestmark = pytest.mark.usefixtures("narrow_resnet18")


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_starting_inputs_whole_and_cut_keep_every_promise(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, attribute in ((images_module, "MAX_PIXELS"), (classifier_file, "_digest")):
        monkeypatch.setattr(module, attribute, getattr(module, attribute))  # what a target changes comes back
    with warnings.catch_warnings():
        target = TARGETS[name](tmp_path)
        inputs = list(target.seeds())
        assert inputs
        assert all(target.words())
        for seed in inputs:
            assert len(seed) <= target.longest
            for end in (len(seed), len(seed) // 2, len(seed) // 3, 1):
                target(seed[:end])
