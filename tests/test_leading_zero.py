"""cu_seqlens without its leading 0, as lengths.cumsum(0) has none, is said; a slice is not."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F

from flash_attn import backend, flash_attn_varlen_func, flash_attn_varlen_qkvpacked_func
from flash_attn.api import leading_zero, warn

LENGTHS = torch.tensor([3, 0, 5])
ENDS = F.pad(LENGTHS.cumsum(0), (1, 0)).int()
FORGOTTEN = {
    "cumsum": LENGTHS.cumsum(0).int(),
    "cumsum of int32": LENGTHS.int().cumsum(0, dtype=torch.int32),
    "one sequence": torch.tensor([8], dtype=torch.int32),
    "a list": torch.tensor([3, 8], dtype=torch.int32),
}
FINE = {
    "whole": ENDS,
    "a slice to the end": ENDS[1:],
    "a slice from the middle": ENDS[1:3],
    "a copy of a slice from the middle": ENDS[1:3].clone(),
    "a slice from the beginning": ENDS[:2],
    "no sequence, at 0": ENDS[:1],
}
SAID = r"cu_seqlens_q begins at 3, not at 0: rows 0 to 2 are in no sequence.*pad\(lengths"


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch):
    monkeypatch.setattr(warn, "_said", set())
    monkeypatch.setattr(leading_zero, "_looked_at", set())


def call(ends: torch.Tensor, device: str = "cpu", ends_k: torch.Tensor | None = None):
    x = torch.randn(8, 2, 32, device=device, dtype=torch.bfloat16)
    ends = ends if ends.device.type == device else ends.to(device)
    return flash_attn_varlen_func(x, x, x, ends, ends if ends_k is None else ends_k, 8, 8)


@pytest.mark.parametrize("ends", FORGOTTEN.values(), ids=FORGOTTEN)
def test_a_cpu_warns_once(ends):
    with pytest.warns(UserWarning, match="not at 0: rows 0 to") as raised:
        call(ends)
    (warning,) = raised
    assert warning.filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(ends)


@pytest.mark.parametrize("ends", FINE.values(), ids=FINE)
def test_slices_and_whole_batches_do_not_warn(ends):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(ends)


def test_keys_alone():
    two = torch.tensor([0, 4, 8], dtype=torch.int32)
    with pytest.warns(UserWarning, match="cu_seqlens_k begins at 3"):
        call(two, ends_k=torch.tensor([3, 5, 8], dtype=torch.int32))


def test_numbers_of_keys_in_pages_start_anywhere():
    """With block_table only differences of cu_seqlens_k count."""
    q, pages = torch.randn(8, 2, 32), torch.randn(2, 8, 2, 32)
    ends_k, table = torch.tensor([8, 16], dtype=torch.int32), torch.tensor([[1]]).int()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flash_attn_varlen_func(q, pages, pages, ENDS[[0, 3]], ends_k, 8, 8, block_table=table)


def test_checks_of_contents_warn(device, checking):
    """On a GPU, with FLASH_ATTN_CHECK=1."""
    with pytest.warns(UserWarning, match=SAID):
        call(FORGOTTEN["cumsum"], device)


def test_a_compiled_graph_warns():
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    with pytest.warns(UserWarning, match=SAID):
        compiled(FORGOTTEN["cumsum"])


@pytest.fixture
def logged(monkeypatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(backend, "LOG", True)
    monkeypatch.setattr(backend, "trace", lines.append)
    return lines


def test_the_log_says_it(device, logged):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        call(FORGOTTEN["cumsum"], device)
        call(FORGOTTEN["cumsum"], device)
    assert sum("begins at 3" in line for line in logged) == 1


def test_the_log_says_nothing_of_slices(device, logged):
    for ends in FINE.values():
        leading_zero._looked_at.clear()
        ends = ends if device == "cpu" else ENDS.to(device)[1:]
        call(ends, device)
    assert logged
    assert not any("not at 0" in line for line in logged)


def test_the_log_does_not_look_at_tensors_without_contents(logged):
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode() as mode:
        x = torch.empty(8, 2, 32)
        ends = mode.from_tensor(FORGOTTEN["cumsum"])
        flash_attn_varlen_func(x, x, x, ends, ends, 8, 8)
    x, ends = torch.empty(8, 2, 32, device="meta"), ENDS.to("meta")
    flash_attn_varlen_func(x, x, x, ends, ends, 8, 8)
    assert not any("not at 0" in line for line in logged)


def test_the_right_line():
    """That of the message."""
    qkv = torch.randn(8, 3, 2, 32, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = flash_attn_varlen_qkvpacked_func(qkv, F.pad(LENGTHS.cumsum(0), (1, 0)).int(), 5)
    assert out.detach().abs().amin(dim=(1, 2)).bool().all()
