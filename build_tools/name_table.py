"""The table of names in docs/porting.md: `--check` or `--write`.

What is here is asked of the package itself; what is not, and what to use instead, comes from
``flash_attn.compat.names``. ``NAMES`` are those of the 2.8 package that its documentation has or
that clients import; a name that is neither here nor refused is an error.
"""

from __future__ import annotations

import importlib
import sys

from build_tools.page_table import DOCS, Table

NAMES: dict[str, str] = {
    "flash_attn": """__version__ flash_attn_func flash_attn_kvpacked_func flash_attn_qkvpacked_func
        flash_attn_varlen_func flash_attn_varlen_kvpacked_func flash_attn_varlen_qkvpacked_func
        flash_attn_with_kvcache""",
    "flash_attn.flash_attn_interface": """flash_attn_func flash_attn_kvpacked_func
        flash_attn_qkvpacked_func flash_attn_varlen_func flash_attn_varlen_kvpacked_func
        flash_attn_varlen_qkvpacked_func flash_attn_with_kvcache _flash_attn_forward
        _flash_attn_backward _flash_attn_varlen_forward _flash_attn_varlen_backward
        _wrapped_flash_attn_forward _wrapped_flash_attn_backward
        _wrapped_flash_attn_varlen_forward _wrapped_flash_attn_varlen_backward flash_attn_gpu
        FlashAttnFunc FlashAttnKVPackedFunc FlashAttnQKVPackedFunc FlashAttnVarlenFunc
        FlashAttnVarlenKVPackedFunc FlashAttnVarlenQKVPackedFunc maybe_contiguous round_multiple
        USE_TRITON_ROCM _get_block_size_n""",
    "flash_attn_2_cuda": "fwd bwd varlen_fwd varlen_bwd fwd_kvcache",
    "flash_attn.bert_padding": """IndexFirstAxis IndexFirstAxisResidual IndexPutFirstAxis
        index_first_axis index_first_axis_residual index_put_first_axis pad_input unpad_input
        unpad_input_for_concatenated_sequences""",
    "flash_attn.layers.rotary": """ApplyRotaryEmb ApplyRotaryEmbKV_ ApplyRotaryEmbQKV_
        RotaryEmbedding apply_rotary_emb apply_rotary_emb_func apply_rotary_emb_kv_
        apply_rotary_emb_qkv_ apply_rotary_emb_torch rotate_half""",
    "flash_attn.layers.patch_embed": "PatchEmbed",
    "flash_attn.losses.cross_entropy": "CrossEntropyLoss",
    "flash_attn.modules.mha": """MHA ParallelMHA SelfAttention CrossAttention FlashSelfAttention
        FlashCrossAttention LinearResidual get_alibi_slopes""",
    "flash_attn.modules.mlp": """Mlp ParallelMLP GatedMlp ParallelGatedMlp FusedMLP
        ParallelFusedMLP""",
    "flash_attn.modules.block": "Block ParallelBlock StochasticDepth",
    "flash_attn.modules.embedding": """GPT2Embeddings BertEmbeddings VocabParallelEmbedding
        ColumnParallelEmbedding ParallelGPT2Embeddings""",
    "flash_attn.ops.activations": """bias_gelu bias_gelu_back bias_gelu_impl fast_gelu_impl gelu_fwd
        gelu_bwd relu_bwd sqrelu_fwd sqrelu_bwd swiglu swiglu_fwd swiglu_bwd""",
    "flash_attn.ops.fused_dense": """ColumnParallelLinear FusedDense FusedDenseFunc FusedMLP
        FusedMLPFunc ParallelFusedMLP RowParallelLinear fused_dense_func fused_mlp_func""",
    "flash_attn.ops.layer_norm": """DropoutAddLayerNorm DropoutAddLayerNormFn
        DropoutAddLayerNormSubsetFn DropoutAddLayerNormParallelResidualFn dropout_add_layer_norm
        dropout_add_layer_norm_subset dropout_add_layer_norm_parallel_residual layer_norm""",
    "flash_attn.ops.rms_norm": """DropoutAddRMSNorm RMSNorm dropout_add_rms_norm
        dropout_add_rms_norm_subset dropout_add_rms_norm_parallel_residual rms_norm""",
    "flash_attn.ops.triton.cross_entropy": """CrossEntropyLoss cross_entropy_loss
        cross_entropy_fwd_kernel cross_entropy_bwd_kernel""",
    "flash_attn.ops.triton.layer_norm": """LayerNormFn LayerNormLinearFn RMSNorm layer_norm_fn
        layer_norm_linear_fn layer_norm_ref rms_norm_fn rms_norm_ref _layer_norm_fwd
        _layer_norm_bwd""",
    "flash_attn.ops.triton.mlp": "FusedDenseSqreluDense fused_dense_sqrelu_dense_function",
    "flash_attn.ops.triton.rotary": "apply_rotary rotary_kernel",
    "flash_attn.utils.benchmark": """benchmark_all benchmark_backward benchmark_combined
        benchmark_forward benchmark_fwd_bwd benchmark_memory pytorch_profiler""",
    "flash_attn.utils.distributed": """AllGatherFunc AllReduceFunc ReduceScatterFunc all_gather
        all_gather_raw all_reduce all_reduce_raw allreduce_sequence_parallel_grad
        get_dim_for_local_rank reduce_scatter reduce_scatter_raw sync_shared_params""",
    "flash_attn.utils.generation": """DecodingCGCache GenerationMixin InferenceParams capture_graph
        decode decode_speculative modify_logits_for_top_k_filtering
        modify_logits_for_top_p_filtering sample sample_speculative update_graph_cache""",
    "flash_attn.utils.library": "triton_op",
    "flash_attn.utils.pretrained": "state_dict_from_pretrained",
    "flash_attn.utils.testing": """attention_ref construct_local_mask generate_qkv
        generate_random_padding_mask""",
    "flash_attn.utils.torch": "custom_fwd custom_bwd",
}


def decided(module: str) -> tuple[list[str], dict[str, str]]:
    """(names that are here, name → what to use instead), of a module of ``NAMES``."""
    from flash_attn.compat import names as others

    found = importlib.import_module(module)
    here = [*getattr(found, "__all__", [])]
    refused = others.NAMES.get(module, {})
    for name in NAMES[module].split():
        if name in refused or name in here:
            continue
        if name not in vars(found):
            raise LookupError(f"{module}.{name} is neither here nor in flash_attn.compat.names")
        here.append(name)
    return here, refused


def table() -> str:
    from flash_attn.compat import names as others

    lines = ["| module | here | not here: use instead |", "|---|---|---|"]
    for module in NAMES:
        here, refused = decided(module)
        names = ", ".join(f"`{name}`" for name in here)
        uses = dict.fromkeys(refused.values())
        instead = "; ".join(
            ", ".join(f"`{name}`" for name in refused if refused[name] == use) + f": {use}"
            for use in uses
        )
        lines.append(f"| `{module}` | {names} | {instead} |")
    for module, use in others.MODULES.items():
        lines.append(f"| `{module}` | | all of it: {use} |")
    for module, why in others.ABSENT.items():
        lines.append(f"| `{module}` | | no such module: {why} |")
    return "\n".join(lines)


TABLE = Table("name_table", DOCS / "porting.md", "names", table)

if __name__ == "__main__":
    sys.exit(TABLE.main(sys.argv[1:]))
