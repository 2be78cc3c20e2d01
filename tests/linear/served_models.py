"""Run as a program: tiny models of transformers on its own torch path, then on what ``serve_fla``
serves, with the same weights. Prints a JSON object: by family, the largest differences."""

from __future__ import annotations

import importlib
import json
import sys

import torch
import transformers

from flash_attn.linear import serve_fla

SIZES = dict(
    vocab_size=99, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    tie_word_embeddings=False,
)  # fmt: skip
DELTA = dict(
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
    linear_value_head_dim=8, layer_types=["linear_attention", "full_attention"], head_dim=16,
)  # fmt: skip
MOE = dict(
    num_experts=2, num_experts_per_tok=2, moe_intermediate_size=32,
    shared_expert_intermediate_size=32,
)  # fmt: skip
MAMBA = dict(
    mamba_n_heads=8, mamba_d_head=16, mamba_n_groups=2, mamba_d_state=16, mamba_chunk_size=16
)  # fmt: skip
BUT_LAYERS = {name: size for name, size in SIZES.items() if name != "num_hidden_layers"}
# Family → modelling module, model, configuration.
FAMILIES = {
    "mamba2": (
        "mamba2.modeling_mamba2", "Mamba2ForCausalLM",
        lambda: transformers.Mamba2Config(
            vocab_size=99, hidden_size=64, num_hidden_layers=2, state_size=16, num_heads=8,
            head_dim=16, n_groups=2, chunk_size=16, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        ),
    ),
    "bamba": (
        "bamba.modeling_bamba", "BambaForCausalLM",
        lambda: transformers.BambaConfig(
            **SIZES, **MAMBA, attn_layer_indices=[1],
        ),
    ),
    "falcon_h1": (
        "falcon_h1.modeling_falcon_h1", "FalconH1ForCausalLM",
        lambda: transformers.FalconH1Config(**SIZES, **MAMBA, mamba_d_ssm=128),
    ),
    "granitemoehybrid": (
        "granitemoehybrid.modeling_granitemoehybrid", "GraniteMoeHybridForCausalLM",
        lambda: transformers.GraniteMoeHybridConfig(
            **SIZES, **MAMBA, layer_types=["mamba", "attention"], num_local_experts=2,
            num_experts_per_tok=2, shared_intermediate_size=32,
        ),
    ),
    "nemotron_h": (
        "nemotron_h.modeling_nemotron_h", "NemotronHForCausalLM",
        lambda: transformers.NemotronHConfig(
            **BUT_LAYERS, hybrid_override_pattern="M*", mamba_num_heads=8, mamba_head_dim=16,
            n_groups=2, ssm_state_size=16, chunk_size=16, head_dim=16,
        ),
    ),
    "zamba2": (
        "zamba2.modeling_zamba2", "Zamba2ForCausalLM",
        lambda: transformers.Zamba2Config(
            **SIZES, mamba_d_state=16, mamba_ngroups=2, n_mamba_heads=8, chunk_size=16,
            num_mem_blocks=1, hybrid_layer_ids=[1], layers_block_type=["mamba", "hybrid"],
        ),
    ),
    "qwen3_5": (
        "qwen3_5.modeling_qwen3_5", "Qwen3_5ForCausalLM",
        lambda: transformers.Qwen3_5TextConfig(**SIZES, **DELTA),
    ),
    "olmo_hybrid": (
        "olmo_hybrid.modeling_olmo_hybrid", "OlmoHybridForCausalLM",
        lambda: transformers.OlmoHybridConfig(
            **SIZES, **{name: x for name, x in DELTA.items() if name != "head_dim"}
        ),
    ),
    "qwen3_next": (
        "qwen3_next.modeling_qwen3_next", "Qwen3NextForCausalLM",
        lambda: transformers.Qwen3NextConfig(**SIZES, **DELTA, **MOE),
    ),
}  # fmt: skip

# Models whose attention layers do not tell packed sequences apart.
PACKS_NOTHING = ("granitemoehybrid",)


def build(family: str, weights: dict | None) -> torch.nn.Module:
    module, name, config = FAMILIES[family]
    torch.manual_seed(0)
    modeling = importlib.import_module(f"transformers.models.{module}")
    model = getattr(modeling, name)._from_config(config(), dtype=torch.float32)
    if weights is not None:
        model.load_state_dict(weights)
    return model


def results(model: torch.nn.Module, family: str) -> dict[str, torch.Tensor]:
    """Logits, generated tokens, a gradient."""
    torch.manual_seed(1)
    ids = torch.randint(3, 99, (2, 37))
    found = {}
    model.eval()
    with torch.no_grad():
        found["logits"] = model(ids).logits
        mask = torch.ones_like(ids)
        mask[1, :9] = 0
        padded = model(ids * mask, attention_mask=mask).logits
        found["padded"] = padded * mask[..., None]
        options = dict(max_new_tokens=5, do_sample=False, attention_mask=torch.ones_like(ids))
        found["generated"] = model.generate(ids, **options).float()
    model.train()
    model(ids, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        if any(part in name for part in ("A_log", "dt_bias", "conv1d.weight", "mixer.D")):
            found[f"gradient of {name}"] = parameter.grad
    return found


def packed(model: torch.nn.Module, family: str) -> torch.Tensor:
    """Logits (or hidden states) of two sequences in one row, less those of each alone."""
    torch.manual_seed(2)
    ids = torch.randint(3, 99, (1, 30))
    model.eval()
    lengths = (11, 19)
    edges = torch.tensor([0, 11, 30], dtype=torch.int32)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    seq_idx = torch.repeat_interleave(torch.arange(2), torch.tensor(lengths))[None].int()
    options = dict(position_ids=positions, seq_idx=seq_idx, cu_seq_lens_q=edges)
    options |= dict(cu_seq_lens_k=edges, max_length_q=19, max_length_k=19)
    if family == "mamba2":  # whose head keeps seq_idx from the layers
        model, options = model.backbone, dict(seq_idx=seq_idx)
    with torch.no_grad():
        together = model(ids, **options, use_cache=False)[0]
        alone = [model(part, use_cache=False)[0] for part in ids.split(lengths, 1)]
    return together - torch.cat(alone, 1)


def main() -> None:
    own = {family: build(family, None) for family in FAMILIES}
    for model in own.values():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                torch.nn.init.normal_(parameter, std=0.15)
    want = {family: results(model, family) for family, model in own.items()}
    serve_fla()
    report: dict[str, dict[str, float]] = {}
    for family, (module, _, _) in FAMILIES.items():
        importlib.reload(sys.modules[f"transformers.models.{module}"])
        model = build(family, own[family].state_dict())
        got = results(model, family)
        report[family] = {
            name: float((got[name] - x).abs().max() / x.abs().max())
            for name, x in want[family].items()
        }
        if family not in PACKS_NOTHING:
            report[family]["packed"] = float(packed(model, family).abs().max())
    print(json.dumps(report))


if __name__ == "__main__":
    main()
