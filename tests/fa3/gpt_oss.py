"""A small gpt-oss on a kernel that `kernels` loads from the folder of LOCAL_KERNELS.

`python -m tests.fa3.gpt_oss cpu` compares it with attention written out: logits, gradients, text.
"""

from __future__ import annotations

import dataclasses
import sys

import torch
import transformers
from transformers import modeling_flash_attention_utils as client
from transformers.utils import import_utils

import flash_attn_interface as fa3
from flash_attn_3.local_kernel import REPOSITORY
from tests.clients.models import FAMILIES, batch
from tests.clients.no_worse import assert_no_worse, error, norm, step

FAMILY = dataclasses.replace(FAMILIES["gpt_oss"], listed=True)
TEXT = dict(do_sample=False, max_new_tokens=8)


def main(device: str) -> None:
    if not import_utils.is_kernels_available():
        least = getattr(import_utils, "KERNELS_MIN_VERSION", "another version")
        print(f"skipped: transformers {transformers.__version__} wants kernels {least}")
        return
    half, single = torch.bfloat16, torch.float32
    weights = FAMILY.build("eager", half, "cpu").state_dict()

    def build(implementation: str, dtype: torch.dtype) -> torch.nn.Module:
        return FAMILY.build(implementation, dtype, device, weights)

    models = (build("eager", single), build("eager", half), build(REPOSITORY, half))
    reference, _, ours = models
    assert ours.config._attn_implementation == REPOSITORY
    assert client._flash_fn is fa3.flash_attn_func
    assert client._flash_varlen_fn is fa3.flash_attn_varlen_func

    for side in ("right", "left"):  # packed, by the mask
        x = batch(device, side)
        used = x["attention_mask"].bool()
        results = [step(model, model(**x).logits, used) for model in models]
        assert any(name.endswith("sinks") for name in results[0])
        assert_no_worse(*results)
        print(f"padding on the {side}: logits", *shown(results))

    ids = batch(device)["input_ids"][:1]  # dense, longer than the window
    with torch.no_grad():
        results = [{"outputs": model(input_ids=ids).logits} for model in models]
    assert_no_worse(*({**x, "logits": x["outputs"]} for x in results))
    print("dense: logits", *shown(results))

    prompts = batch(device, "left")
    if device == "cpu":  # kernels take half precision, in which greedy tokens may part
        ours = build(REPOSITORY, single)
    text, expected = (model.generate(**prompts, **TEXT) for model in (ours, reference))
    text, expected = (x[:, prompts["input_ids"].shape[1] :] for x in (text, expected))
    same = (text == expected).sum().item()
    assert text[:, 0].tolist() == likely(reference, prompts, text[:, 0])
    assert device != "cpu" or same == text.numel()
    print(f"text: {same} of {text.numel()} tokens as written out")


def shown(results: list[dict[str, torch.Tensor]]) -> list[str]:
    """What bfloat16 is off by: written out, by this package."""
    exact, *others = (x["outputs"].detach().float() for x in results)
    return [f"{error(x, exact) / norm(exact):.1%}" for x in others]


def likely(reference: torch.nn.Module, prompts: dict, first: torch.Tensor) -> list[int]:
    """The first token of each text, or -1 where another one is better by more than rounding."""
    with torch.no_grad():
        logits = reference(**prompts).logits[:, -1]
    close = logits.gather(1, first[:, None])[:, 0] > logits.amax(1) - 0.05 * logits.abs().amax(1)
    return first.where(close, -1).tolist()


if __name__ == "__main__":
    main(sys.argv[1])
