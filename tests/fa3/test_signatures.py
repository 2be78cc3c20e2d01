"""Names, signatures and schemas are FA3's; what is refused says so, and what is harmless is."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re

import pytest
import torch
from compare import assert_bitwise

import flash_attn
import flash_attn_3
import flash_attn_interface as fa3
from tests.commands import ROOT

DESCALES = "q_descale=None, k_descale=None, v_descale=None"
FROM_SCALE = (
    f"softmax_scale=None, causal=False, qv=None, {DESCALES}, window_size=(-1, -1), "
    "attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, "
    "sm_margin=0, return_attn_probs=False"
)
#: FA3 3.0.0's, without types; of the functions below them, names and order count.
SIGNATURES = {
    "flash_attn_func": f"q, k, v, {FROM_SCALE}",
    "flash_attn_varlen_func": (
        "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, "
        f"seqused_k=None, {FROM_SCALE}"
    ),
    "flash_attn_qkvpacked_func": (
        f"qkv, softmax_scale=None, causal=False, {DESCALES}, window_size=(-1, -1), "
        "attention_chunk=0, softcap=0.0, deterministic=False, num_heads_q=None, sm_margin=0, "
        "return_attn_probs=False"
    ),
    "flash_attn_with_kvcache": (
        "q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, "
        "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None, "
        "cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None, "
        f"{DESCALES}, softmax_scale=None, causal=False, window_size=(-1, -1), "
        "attention_chunk=0, softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, "
        "num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False"
    ),
    "flash_attn_combine": "out_partial, lse_partial, out=None, out_dtype=None",
    "get_scheduler_metadata": (
        "batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, "
        "cache_seqlens, qkv_dtype=torch.bfloat16, headdim_v=None, cu_seqlens_q=None, "
        "cu_seqlens_k_new=None, cache_leftpad=None, page_size=None, max_seqlen_k_new=0, "
        "causal=False, window_size=(-1, -1), attention_chunk=0, has_softcap=False, num_splits=0, "
        "pack_gqa=None, sm_margin=0"
    ),
}
NAMES = {
    "_flash_attn_forward": (
        "q k v k_new v_new qv out_ cu_seqlens_q cu_seqlens_k cu_seqlens_k_new seqused_q seqused_k "
        "max_seqlen_q max_seqlen_k page_table kv_batch_idx leftpad_k rotary_cos rotary_sin "
        "seqlens_rotary q_descale k_descale v_descale softmax_scale causal window_size_left "
        "window_size_right attention_chunk softcap rotary_interleaved scheduler_metadata "
        "num_splits pack_gqa sm_margin"
    ),
    "_flash_attn_backward": (
        "dout q k v out softmax_lse cu_seqlens_q cu_seqlens_k sequed_q sequed_k max_seqlen_q "
        "max_seqlen_k dq dk dv softmax_scale is_causal window_size_left window_size_right softcap "
        "deterministic sm_margin"
    ),
}
#: What a program compares the operators' with before it takes them.
SCHEMAS = {
    "fwd": (
        "(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new=None, Tensor(v_new!)? v_new=None, "
        "Tensor? q_v=None, Tensor(out!)? out=None, Tensor? cu_seqlens_q=None, Tensor? "
        "cu_seqlens_k=None, Tensor? cu_seqlens_k_new=None, Tensor? seqused_q=None, Tensor? "
        "seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None, Tensor? page_table=None, "
        "Tensor? kv_batch_idx=None, Tensor? leftpad_k=None, Tensor? rotary_cos=None, Tensor? "
        "rotary_sin=None, Tensor? seqlens_rotary=None, Tensor? q_descale=None, Tensor? "
        "k_descale=None, Tensor? v_descale=None, float? softmax_scale=None, bool is_causal=False, "
        "int window_size_left=-1, int window_size_right=-1, int attention_chunk=0, float "
        "softcap=0., bool is_rotary_interleaved=False, Tensor? scheduler_metadata=None, int "
        "num_splits=0, bool? pack_gqa=None, int sm_margin=0) "
        "-> (Tensor(out!), Tensor, Tensor, Tensor)"
    ),
    "bwd": (
        "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(dq!)? "
        "dq=None, Tensor(dk!)? dk=None, Tensor(dv!)? dv=None, Tensor? cu_seqlens_q=None, Tensor? "
        "cu_seqlens_k=None, Tensor? seqused_q=None, Tensor? seqused_k=None, int? "
        "max_seqlen_q=None, int? max_seqlen_k=None, float? softmax_scale=None, bool "
        "is_causal=False, int window_size_left=-1, int window_size_right=-1, float softcap=0., "
        "bool deterministic=False, int sm_margin=0) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
    "fwd_combine": (
        "(Tensor out_partial, Tensor lse_partial, Tensor(out!)? out=None, ScalarType? "
        "out_dtype=None) -> (Tensor(out!), Tensor)"
    ),
    "get_scheduler_metadata": (
        "(int batch_size, int max_seqlen_q, int max_seqlen_k, int num_heads, int num_heads_k, int "
        "headdim, int headdim_v, ScalarType qkv_dtype, Tensor seqused_k, Tensor? "
        "cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? cu_seqlens_k_new=None, Tensor? "
        "seqused_q=None, Tensor? leftpad_k=None, int? page_size=None, int max_seqlen_k_new=0, "
        "bool is_causal=False, int window_size_left=-1, int window_size_right=-1, int "
        "attention_chunk=0, bool has_softcap=False, int num_splits=0, bool? pack_gqa=None, int "
        "sm_margin=0) -> Tensor"
    ),
}


def positional(function) -> list[inspect.Parameter]:
    parameters = inspect.signature(function).parameters.values()
    assert not any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)
    return [p.replace(annotation=p.empty) for p in parameters if p.kind is not p.KEYWORD_ONLY]


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name):
    taken = inspect.Signature(positional(getattr(fa3, name)))
    assert str(taken) == f"({SIGNATURES[name]})"


@pytest.mark.parametrize("name", NAMES)
def test_names_of_a_private_function(name):
    function = getattr(fa3, name)
    assert inspect.isfunction(function)
    assert function._init_fn is function
    assert [p.name for p in positional(function)] == NAMES[name].split()


@pytest.mark.parametrize("name", [*SIGNATURES, *NAMES])
def test_more_is_by_keyword_and_can_be_left_out(name):
    parameters = inspect.signature(getattr(fa3, name)).parameters.values()
    assert all(p.default is not p.empty for p in parameters if p.kind is p.KEYWORD_ONLY)


def test_defaults_of_the_operators_and_of_the_functions_differ_in_two():
    """As they do in FA3."""
    parameters = inspect.signature(fa3._flash_attn_forward).parameters
    python = {"q_v": "qv", "out": "out_", "is_causal": "causal",
              "is_rotary_interleaved": "rotary_interleaved"}  # fmt: skip
    operator = torch.ops.flash_attn_3.fwd.default._schema.arguments[3:]
    pairs = {a.name: (a.default_value, parameters[python.get(a.name, a.name)].default)
             for a in operator}  # fmt: skip
    differ = {name for name, (theirs, ours) in pairs.items() if theirs != ours}
    assert differ == {"is_rotary_interleaved", "num_splits"}


@pytest.mark.parametrize("name", SCHEMAS)
def test_schema(name):
    ours = getattr(torch.ops.flash_attn_3, name).default._schema
    theirs = torch._C.parse_schema(f"flash_attn_3::{name}{SCHEMAS[name]}")
    assert ours.is_backward_compatible_with(theirs)
    fewer = SCHEMAS[name].replace("out=None", "other=None")
    if fewer != SCHEMAS[name]:
        other = torch._C.parse_schema(f"flash_attn_3::{name}{fewer}")
        assert not ours.is_backward_compatible_with(other)


@pytest.mark.parametrize("name", [name for name in SCHEMAS if name != "bwd"])
def test_schema_to_the_letter(name):
    """``bwd`` takes more."""
    ours = getattr(torch.ops.flash_attn_3, name).default._schema
    assert str(ours) == f"flash_attn_3::{name}{SCHEMAS[name]}"


# --- Modules --------------------------------------------------------------------------------------


def test_modules():
    for name in ("flash_attn_interface", "flash_attn_config", "_C"):
        assert importlib.util.find_spec(f"flash_attn_3.{name}") is not None
    inner = importlib.import_module("flash_attn_3.flash_attn_interface")
    for name in (*SIGNATURES, *NAMES, "SERVED_BY"):
        assert getattr(fa3, name) is getattr(inner, name)
    assert fa3.SERVED_BY == "flash_attn"
    assert flash_attn_3.__version__ == "3.0.0"


def test_config(capsys):
    config = importlib.import_module("flash_attn_config")
    assert config.CONFIG is importlib.import_module("flash_attn_3.flash_attn_config").CONFIG
    config.show()
    printed = capsys.readouterr().out
    assert f"served_by: flash_attn {flash_attn.__build__}" in printed
    assert len(printed.splitlines()) == len(config.CONFIG)


# --- Refused and harmless -------------------------------------------------------------------------

DENSE = [torch.randn(2, 6, 2, 16) for _ in "qkv"]
ENDS = torch.tensor([0, 2, 6], dtype=torch.int32)
CALLS = {
    "flash_attn_func": DENSE,
    "flash_attn_varlen_func": [*(x[0] for x in DENSE), ENDS, ENDS, 4, 4],
    "flash_attn_qkvpacked_func": [torch.stack(DENSE, 2)],
    "flash_attn_with_kvcache": DENSE,
    "_flash_attn_forward": DENSE,
}
ONE = torch.ones(2, 2)
OF_CODES = {"q_descale": ONE, "k_descale": ONE, "v_descale": ONE, "fp8_products": True}
HARMLESS = {"pack_gqa": True, "sm_margin": 8, "attention_chunk": None, "num_splits": 2,
            "scheduler_metadata": torch.zeros(1, dtype=torch.int32)}  # fmt: skip


def taking(arguments: dict) -> list[tuple[str, str]]:
    return [
        (function, name)
        for function in CALLS
        for name in arguments
        if name in inspect.signature(getattr(fa3, function)).parameters
    ]


def test_refused():
    """What CONFIG lists."""
    (listed,) = importlib.import_module("flash_attn_config").CONFIG["refused"]
    with pytest.raises(NotImplementedError, match=r"^qv: got .* without page_table; .{30}"):
        fa3.flash_attn_varlen_func(*CALLS["flash_attn_varlen_func"], qv=DENSE[0][0])
    assert listed == "qv with cu_seqlens_k and without page_table"


@pytest.mark.parametrize(("function", "name"), taking(OF_CODES))
def test_refused_but_for_codes(function, name):
    tensor = "q" if name == "fp8_products" else name[0]
    said = f"^{name}: got .* with a {tensor} of torch.float32; it (scales|is for)"
    with pytest.raises(ValueError, match=said):
        getattr(fa3, function)(*CALLS[function], **{name: OF_CODES[name]})


def test_queries_in_16_bits_beside_codes():
    _, k, v = (x.to(torch.float8_e4m3fn) for x in DENSE)
    with pytest.raises(ValueError, match=r"codes are read from a KV cache"):
        fa3.flash_attn_func(DENSE[0], k, v)


@pytest.mark.parametrize(("function", "name"), taking(HARMLESS))
def test_harmless(function, name):
    def first(**options):
        result = getattr(fa3, function)(*CALLS[function], **options)
        return result[0] if isinstance(result, tuple) else result

    assert_bitwise("out", first(**{name: HARMLESS[name]}), first())


def test_two_names_of_one_argument():
    sink = torch.randn(2)
    once = fa3.flash_attn_func(*DENSE, s_aux=sink)
    assert_bitwise("out", fa3.flash_attn_func(*DENSE, s_aux=sink, learnable_sink=sink), once)
    with pytest.raises(ValueError, match="s_aux and sinks: got two tensors"):
        fa3.flash_attn_func(*DENSE, s_aux=sink, sinks=sink.clone())


@pytest.mark.parametrize("name", ["learnable_sink", "sinks"])
def test_names_of_the_sinks_of_a_backward(name):
    sink, dout = torch.randn(2), torch.randn_like(DENSE[0])
    out, lse = fa3.flash_attn_func(*DENSE, s_aux=sink, return_attn_probs=True)
    ours, expected = torch.zeros(2), torch.zeros(2)
    for ds_aux, given in ((ours, {name: sink}), (expected, {"s_aux": sink})):
        fa3._flash_attn_backward(dout, *DENSE, out, lse, ds_aux=ds_aux, **given)
    assert expected.all()
    assert_bitwise("ds_aux", ours, expected)


def test_metadata():
    lengths = torch.ones(2, dtype=torch.int32)
    found = fa3.get_scheduler_metadata(2, 1, 64, 4, 2, 64, lengths, page_size=16, causal=True)
    assert found.dtype == torch.int32
    assert found.tolist() == [0]
    assert fa3.get_scheduler_metadata(2, 1, 64, 4, 2, 64, lengths.to("meta")).is_meta


# --- The page -------------------------------------------------------------------------------------


def rows_of_the_page() -> dict[str, set[str]]:
    """Which arguments are honoured, harmless and refused."""
    text = (ROOT / "docs" / "fa3.md").read_text()
    table = text.split("<!-- the arguments -->")[1].split("<!-- end of the arguments -->")[0]
    found: dict[str, set[str]] = {"honoured": set(), "harmless": set(), "refused": set()}
    for names, kind in re.findall(r"^\| (`.*?) \| (\w+) \|", table, re.MULTILINE):
        found[kind] |= set(re.findall(r"`(\w+)`", names))
    return found


def test_the_page_has_every_argument():
    found = rows_of_the_page()
    assert not found["refused"]
    assert set(HARMLESS) - {"attention_chunk", "sm_margin"} <= found["harmless"]
    assert not found["refused"] & found["honoured"]
    named = set().union(*found.values())
    for function in [*SIGNATURES, *NAMES]:
        assert {p.name for p in positional(getattr(fa3, function))} <= named
    text = (ROOT / "docs" / "fa3.md").read_text()
    for function in [*SIGNATURES, *NAMES, *SCHEMAS]:
        assert f"`{function}`" in text
    parameters = inspect.signature(fa3.flash_attn_varlen_func).parameters.values()
    assert {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} <= set(
        re.findall(r"`(\w+)`", text)
    )
