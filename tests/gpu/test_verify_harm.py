"""Callables for a GPU that do harm: each is a finding with its name, the run goes on, and the caller's GPU works."""

from __future__ import annotations

import pytest
import torch
from candidate_modules import ACTING

import opwright
from opwright.verify.child_processes import children

pytestmark = pytest.mark.alone
LOST = "the GPU accepts no more work after this call"
HARM = {
    "crash": ("ctypes.string_at(0)", "SIGSEGV (Segmentation fault)"),
    "os._exit": ("os._exit(3)", "ended the process, with exit code 3"),
    "hang of the host": ("time.sleep(600)", "did not return within 5 s"),
    # Eight seconds: what is killed on a GPU may have to end there first.
    "hang of the GPU": ("torch.cuda._sleep(15_000_000_000)", "did not return within 5 s"),
    "index out of range": ("TABLE.to(x.device)[torch.full_like(x, 1 << 40).long()]", LOST),
    "index out of range, waited for": (
        "TABLE.to(x.device)[torch.full_like(x, 1 << 40).long()]; torch.cuda.synchronize()",
        LOST,
    ),
    "memory": ("torch.empty(1 << 50, dtype=torch.uint8, device=x.device)", "OutOfMemoryError"),
    "another stream": (
        "HERE['s'] = torch.cuda.Stream(x.device); torch.cuda.set_stream(HERE['s'])",
        "torch.cuda.current_stream() was",
    ),
    "TF32": (
        "torch.backends.cuda.matmul.allow_tf32 = not torch.backends.cuda.matmul.allow_tf32",
        "torch.get_float32_matmul_precision() was highest",
    ),
    "benchmark": (
        "torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark",
        "torch.backends.cudnn.benchmark was False",
    ),
    "attention": ("torch.backends.cuda.enable_flash_sdp(False)", "torch.backends.cuda.flash_sdp_enabled() was True"),
    "autocast": ("torch.set_autocast_enabled('cuda', True)", "torch.is_autocast_enabled('cuda') was False"),
}


@pytest.mark.parametrize("kind", HARM)
def test_harm_is_a_finding_and_the_run_goes_on(kind: str, module) -> None:
    action, text = HARM[kind]
    made = module(ACTING.format(action=action))
    before = children()
    samples = [(torch.linspace(-3, 3, 35, device="cuda").view(5, 7),), (torch.linspace(-2, 2, 16, device="cuda"),)]
    record = opwright.verify(
        made.candidate,
        reference=made.reference,
        samples=samples,
        checks=["numerics", "determinism", "graph"],
        expand=False,
        timeout_s=5.0,
    )
    assert record.in_process == ""
    assert {c.device for c in record.checks} == {"cuda:0"}
    by_check = {f.check: f for f in record.failures}
    assert text in by_check["numerics"].message
    assert by_check["numerics"].case.endswith("f32[5, 7] cuda:0 (sample 0)")
    assert all(c.reason != "not run" and "has ended" not in c.reason for c in record.checks)
    assert by_check.keys() >= {"numerics", "determinism"}, record.checks
    assert children() == before
    assert made.HERE == {}  # none of this was here
    assert torch.ones(3, device="cuda").sum().item() == 3
