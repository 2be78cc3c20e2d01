"""A client as it is: continuous batching of `transformers`, over a paged cache."""

from __future__ import annotations

import pytest
import torch

from tests.clients.batches import generate_batch

transformers = pytest.importorskip("transformers")

import transformers.modeling_flash_attention_utils as client  # noqa: E402

NEW_TOKENS = 24


def make_model(implementation: str, device: str):
    config = transformers.LlamaConfig(
        hidden_size=256, intermediate_size=256, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=2, head_dim=64, vocab_size=500, max_position_embeddings=2048,
        pad_token_id=0, eos_token_id=None, bos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    config._attn_implementation = implementation
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.to(device).eval()


def test_the_likeliest_tokens(cuda, monkeypatch):
    """Of prompts that differ in length, some longer than a step's budget: each token that comes is,
    to the written out model, the likeliest or as good as that."""
    monkeypatch.setattr(client, "is_flash_attn_2_available", lambda *args: True)
    monkeypatch.setattr(client, "_loaded_implementation", None)
    prompts = [torch.randint(1, 500, (n,)).tolist() for n in (5, 700, 64, 1, 300, 17, 33, 128)]
    config = transformers.GenerationConfig(
        max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    outputs = generate_batch(make_model("flash_attention_2", cuda), prompts, config)
    assert len(outputs) == len(prompts)
    eager = make_model("eager", cuda)
    for output in outputs:
        prompt, new = list(output.prompt_ids), list(output.generated_tokens)
        assert len(new) == NEW_TOKENS
        ids = torch.tensor([prompt + new], device=cuda)
        with torch.no_grad():
            logits = eager(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()
        taken = logits.gather(1, ids[0, len(prompt) :, None])[:, 0]
        assert (taken > logits.max(dim=1).values - 0.1).all()
