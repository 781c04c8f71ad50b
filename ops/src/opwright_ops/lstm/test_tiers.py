"""`lstm_tier` for GPUs that are not here; tests/gpu hold it against what a GPU does."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from opwright_ops.lstm import lstm_tier

bf16, f16, f32, f64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
H200 = {"major": 9, "multi_processor_count": 132}


@pytest.mark.parametrize(
    ("gpu", "H", "B", "dtype", "options", "tier"),
    [
        (H200, 256, 1, bf16, {}, "cluster"),
        (H200, 257, 1, bf16, {}, "grid"),
        (H200, 256, 240, bf16, {}, "cluster"),
        (H200, 256, 241, bf16, {}, "grid"),
        (H200, 256, 512, f16, {}, "grid"),
        (H200, 256, 513, f16, {}, "cluster"),
        (H200, 128, 256, f32, {}, "grid"),
        (H200, 120, 256, f32, {}, "cluster"),
        (H200, 128, 480, f32, {"fp32_precision": "tf32"}, "cluster"),
        (H200, 128, 481, f32, {"fp32_precision": "tf32"}, "cluster"),
        (H200, 0, 8, bf16, {}, "cluster"),
        (H200, 0, 600, bf16, {}, "step"),
        (H200, 0, 8, bf16, {"layer_norm": True}, "step"),
        (H200, 128, 1000, f32, {"fp32_precision": "tf32"}, "cluster"),
        (H200, 1024, 32, f32, {"fp32_precision": "tf32"}, "grid"),
        (H200, 1025, 1, f32, {"fp32_precision": "tf32"}, "grid"),
        (H200, 1536, 64, f32, {"fp32_precision": "tf32"}, "grid"),
        (H200, 1536, 65, f32, {"fp32_precision": "tf32"}, "step"),
        (H200, 1537, 1, f32, {"fp32_precision": "tf32"}, "step"),
        (H200, 128, 1, f32, {}, "cluster"),
        (H200, 129, 1, f32, {}, "grid"),
        (H200, 1024, 64, f32, {}, "grid"),
        (H200, 1024, 65, f32, {}, "step"),
        (H200, 1025, 1, f32, {}, "step"),
        (H200, 128, 1, f64, {}, "step"),
        (H200, 2048, 64, f16, {}, "grid"),
        (H200, 2048, 65, f16, {}, "step"),
        (H200, 1024, 128, bf16, {}, "grid"),
        (H200, 1024, 129, bf16, {}, "step"),
        (H200, 2049, 1, bf16, {}, "step"),
        (H200, 512, 8, bf16, {"layer_norm": True}, "cluster"),
        (H200, 513, 8, bf16, {"layer_norm": True}, "step"),
        (H200, 64, 8, f32, {"layer_norm": True}, "step"),
        ({"major": 9, "multi_processor_count": 60}, 1024, 8, bf16, {}, "step"),
        ({"major": 9, "multi_processor_count": 14}, 128, 8, bf16, {}, "grid"),
        ({"major": 9, "multi_processor_count": 14}, 64, 8, bf16, {}, "cluster"),
        ({"major": 9, "multi_processor_count": 16}, 256, 8, bf16, {}, "cluster"),
        ({"major": 8, "multi_processor_count": 108}, 128, 8, bf16, {}, "step"),
    ],
)
def test_what_fits(monkeypatch: pytest.MonkeyPatch, gpu, H, B, dtype, options, tier) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**gpu))
    assert lstm_tier(H, B, dtype, "cuda:0", **options) == tier


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="CUDA device"):
        lstm_tier(256, 1, bf16)
    with pytest.raises(RuntimeError, match="cpu"):
        lstm_tier(256, 1, bf16, "cpu")
