"""A client as it is: models of `transformers` with attention by this package and written out."""

from __future__ import annotations

import pytest
import torch

import flash_attn

transformers = pytest.importorskip("transformers")

import transformers.modeling_flash_attention_utils as client  # noqa: E402

SIZES = dict(
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=99,
    max_position_embeddings=128,
    pad_token_id=0,
)
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=7),
    "gemma2": lambda: transformers.Gemma2Config(
        **SIZES, sliding_window=5, attn_logit_softcapping=2.0, query_pre_attn_scalar=16
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **SIZES, sliding_window=6, num_local_experts=2, num_experts_per_tok=1
    ),
}
LENGTHS = [23, 9, 16]


@pytest.fixture
def models(request, device, monkeypatch):
    """(written out, by this package): the same weights, float32 on the CPU, bfloat16 on a GPU."""
    # Its own check asks for a GPU and for an installed distribution.
    monkeypatch.setattr(client, "is_flash_attn_2_available", lambda *args: True)
    monkeypatch.setattr(client, "_loaded_implementation", None)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    torch.manual_seed(0)
    config = CONFIGS[request.param]()
    config.dtype = dtype
    config._attn_implementation = "eager"
    eager = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).to(device)
    for name, parameter in eager.named_parameters():
        if "sinks" in name:
            torch.nn.init.normal_(parameter)
    ours = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).to(device)
    ours.load_state_dict(eager.state_dict())
    ours.config._attn_implementation = "flash_attention_2"
    yield eager, ours
    assert client._flash_fn is flash_attn.flash_attn_func, "the client took something else"


def assert_same(ours: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = 2e-5 if ours.dtype == torch.float32 else 5e-2
    torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)


def batch(device, left: bool = False) -> dict[str, torch.Tensor]:
    """Token ids and mask (b, s) of sequences of LENGTHS, padded on the right or the left."""
    longest = max(LENGTHS)
    mask = torch.zeros(len(LENGTHS), longest, dtype=torch.long)
    for row, length in zip(mask, LENGTHS, strict=True):
        row[longest - length if left else 0 : None if left else length] = 1
    ids = torch.randint(1, SIZES["vocab_size"], mask.shape) * mask
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


every_model = pytest.mark.parametrize("models", CONFIGS, indirect=True)


@every_model
def test_training_with_padding(models, device, needs):
    """Through unpad_input, flash_attn_varlen_func and pad_input; gradients of every parameter."""
    x = batch(device)
    used = x["attention_mask"].bool()
    logits = []
    with needs("backward"):
        for model in models:
            out = model(**x).logits
            out[used].float().square().mean().backward()
            logits.append(out)
        assert_same(logits[1][used], logits[0][used])
        for (name, ours), expected in zip(
            models[1].named_parameters(), models[0].parameters(), strict=True
        ):
            assert (ours.grad is None) == (expected.grad is None), name
            if ours.grad is not None:
                assert_same(ours.grad, expected.grad)


@every_model
def test_without_padding(models, device, needs):
    ids = batch(device)["input_ids"][:1]
    with torch.no_grad():
        assert_same(models[1](input_ids=ids).logits, models[0](input_ids=ids).logits)


@pytest.mark.parametrize("models", ["llama", "mistral"], indirect=True)
def test_packed_sequences(models, device):
    """Sequences in one row, told apart by their positions alone."""
    ids = batch(device)["input_ids"]
    parts = [row[:length] for row, length in zip(ids, LENGTHS, strict=True)]
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None].to(device)
    with torch.no_grad():
        packed = models[1](input_ids=torch.cat(parts)[None], position_ids=positions).logits[0]
        apart = [models[0](input_ids=part[None]).logits[0] for part in parts]
    assert_same(packed, torch.cat(apart))


@every_model
def test_generation(models, device):
    """Greedy tokens after prompts padded on the left; logits, for ties differ in half precision."""
    x = batch(device, left=True)
    texts = [
        model.generate(
            **x, max_new_tokens=6, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
        for model in models
    ]
    if device == "cpu":
        assert torch.equal(texts[0].sequences, texts[1].sequences)
    assert_same(texts[1].logits[0], texts[0].logits[0])
