"""A model in half precision is at most twice as wrong as with attention written out."""

from __future__ import annotations

import torch
from torch import Tensor


def step(model: torch.nn.Module, outputs: Tensor, used: Tensor | None = None) -> dict[str, Tensor]:
    """The outputs that are used, and gradients of a weighted sum of them, by name."""
    generator = torch.Generator().manual_seed(3)
    dout = torch.randn(outputs.shape, generator=generator).to(outputs)
    if used is not None:
        outputs, dout = outputs[used], dout[used]
    (outputs * dout).sum().backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {"outputs": outputs.detach(), **gradients}


def assert_no_worse(
    reference: dict[str, Tensor], written_out: dict[str, Tensor], ours: dict[str, Tensor]
) -> None:
    """What ``step`` returned in float32, and in half precision: written out, by this package."""
    assert reference.keys() == written_out.keys() == ours.keys()
    for name, exact in reference.items():
        sibling = reference.get(name.replace("k_proj.bias", "k_proj.weight"))
        if name.endswith("k_proj.bias") and exact.norm() < 1e-5 * sibling.norm():
            # It adds the same to every score of a row, so what there is of a gradient is rounding.
            assert ours[name].norm() < 1e-2 * sibling.norm(), name
            continue
        theirs, mine = error(written_out[name], exact), error(ours[name], exact)
        assert mine <= 2 * theirs + 1e-5, f"{name}: error {mine}, written out {theirs}"


def error(x: Tensor, reference: Tensor) -> float:
    return (x.double() - reference.double()).norm().item()
