"""A keyword that a function has not raises, and says which was meant; two names of the LSE."""

from __future__ import annotations

import inspect
import re

import pytest
import torch

import flash_attn
from build_tools import argument_table
from flash_attn import flash_attn_interface
from flash_attn.compat.other_arguments import ARGUMENTS

PUBLIC = flash_attn_interface.__all__


@pytest.mark.parametrize("name", PUBLIC)
@pytest.mark.parametrize(
    ("keyword", "says"),
    [
        ("is_causal", "did you mean 'causal'?"),
        ("scale", "did you mean 'softmax_scale'?"),
        ("sinks", "did you mean 's_aux'?"),
        ("attn_mask", "no mask tensor: causal and window_size"),
        ("softmax_scales", "did you mean 'softmax_scale'?"),
        ("something", "accepted are "),
    ],
)
def test_unknown_keyword(name, keyword, says):
    required = {"flash_attn_qkvpacked_func": 1, "flash_attn_kvpacked_func": 2}.get(name, 3)
    required += 4 * ("varlen" in name) - 4 * (name == "flash_attn_varlen_qkvpacked_func")
    required -= name == "flash_attn_varlen_kvpacked_func"
    with pytest.raises(TypeError) as raised:
        getattr(flash_attn, name)(*[None] * required, **{keyword: 1})
    message = str(raised.value)
    assert message.startswith(f"{name}() got an unexpected keyword argument {keyword!r}; ")
    assert says in message
    assert "unknown" not in message


@pytest.mark.parametrize(
    ("name", "keyword", "says"),
    [
        ("flash_attn_func", "page_table", "flash_attn_varlen_func takes 'block_table'"),
        ("flash_attn_func", "cu_seqlens", "flash_attn_varlen_func takes 'cu_seqlens_q'"),
        ("flash_attn_func", "cache_seqlens", "flash_attn_with_kvcache takes 'cache_seqlens'"),
        ("flash_attn_with_kvcache", "page_table", "did you mean 'block_table'?"),
        ("flash_attn_with_kvcache", "leftpad_k", "did you mean 'cache_leftpad'?"),
        ("flash_attn_func", "leftpad_k", "flash_attn_with_kvcache takes 'cache_leftpad'"),
        ("flash_attn_with_kvcache", "dropout_p", "flash_attn_func takes 'dropout_p'"),
        ("flash_attn_func", "max_seqlen_k", "flash_attn_varlen_func takes 'max_seqlen_k'"),
        ("flash_attn_kvpacked_func", "q_descale", "codes are taken by flash_attn_func and"),
        ("flash_attn_kvpacked_func", "v_descale", "codes are taken by flash_attn_func and"),
        ("flash_attn_with_kvcache", "q_descale", "codes are taken by flash_attn_func and"),
    ],
)
def test_keyword_of_another_function(name, keyword, says):
    with pytest.raises(TypeError, match="unexpected keyword") as raised:
        getattr(flash_attn, name)(None, None, None, **{keyword: 1})
    assert says in str(raised.value)


@pytest.mark.parametrize(
    ("keyword", "says"),
    [
        ("qv", "flash_attn_with_kvcache takes a latent cache"),
        ("rotary_seqlens", "positions are cache_seqlens and what follows"),
        ("return_softmax", "return_lse for the log-sum-exp"),
        ("seqused_k", "cache_seqlens of flash_attn_with_kvcache"),
        ("sink", "did you mean 's_aux'?"),
        ("alibi", "did you mean 'alibi_slopes'?"),
        ("p", "did you mean 'dropout_p'?"),
        ("enable_gqa", "leave it out: k and v may have fewer heads"),
        ("pack_gqa", "leave it out: it is chosen inside"),
        (
            "sm_margin",
            "leave it out: a call takes all SMs; the functions of flash-attn-3 honour it",
        ),
        ("attention_chunk", "flash_attn_varlen_func with each chunk"),
        ("scheduler_metadata", "leave it out: nothing is prepared"),
        ("bias", "there is no mask tensor"),
        ("key_padding_mask", "flash_attn.bert_padding.unpad_input takes a padding mask"),
        ("score_mod", "torch.nn.attention.flex_attention"),
        ("block_mask", "torch.nn.attention.flex_attention"),
        ("k_new", "flash_attn_with_kvcache takes new keys and values as k and v"),
        ("cache_position", "positions are cache_seqlens"),
        # alike, and not alike
        ("casual", "did you mean 'causal'?"),
        ("windowsize", "did you mean 'window_size'?"),
        ("dropout_prob", "did you mean 'dropout_p'?"),
        ("kv", "accepted are "),
        ("q_cache", "accepted are "),
        ("return_max", "accepted are "),
    ],
)
def test_keyword_of_another_library(keyword, says):
    with pytest.raises(TypeError) as raised:
        flash_attn.flash_attn_func(None, None, None, **{keyword: 1})
    assert str(raised.value).split("; ", 1)[1].startswith(says)


def test_every_argument_of_the_table_is_one_that_a_function_has():
    parameters = {
        name
        for function in PUBLIC
        for name in inspect.signature(getattr(flash_attn, function)).parameters
    }
    for name, meant in ARGUMENTS.items():
        assert bool(meant.name) or bool(meant.use)
        assert not meant.name or meant.name in parameters, name
        for argument in re.findall(r"`(\w+)`", meant.use):
            known = argument in parameters or hasattr(flash_attn, argument)
            assert known or argument in ("seqused_k",), argument


def test_the_table_of_the_page_is_up_to_date(monkeypatch):
    table = argument_table.TABLE
    assert table.main(["--check"]) == 0, "run python -m build_tools.argument_table --write"
    monkeypatch.setitem(ARGUMENTS, "qv", ARGUMENTS["qv"]._replace(use="something else"))
    assert table.main(["--check"]) == 1


ENDS = torch.tensor([0, 2, 6], dtype=torch.int32)
LENGTHS = (ENDS, ENDS, 4, 4)
CALLS = {
    "flash_attn_func": ((2, 6),) * 3,
    "flash_attn_kvpacked_func": ((2, 6), (2, 6, 2)),
    "flash_attn_qkvpacked_func": ((2, 6, 3),),
    "flash_attn_varlen_func": ((6,),) * 3,
    "flash_attn_varlen_kvpacked_func": ((6,), (6, 2)),
    "flash_attn_varlen_qkvpacked_func": ((6, 3),),
    "flash_attn_with_kvcache": ((2, 6),) * 3,
}


@pytest.mark.parametrize("name", PUBLIC)
@pytest.mark.parametrize("keyword", ["return_lse", "return_softmax_lse"])
def test_the_log_sum_exp_by_either_name(name, keyword):
    tensors = [torch.randn(*shape, 2, 8) for shape in CALLS[name]]
    lengths = () if "varlen" not in name else LENGTHS
    if name == "flash_attn_varlen_qkvpacked_func":
        lengths = (ENDS, 4)
    out, lse = getattr(flash_attn, name)(*tensors, *lengths, **{keyword: True})
    assert lse.shape == ((2, 6) if "varlen" in name else (2, 2, 6))
    assert torch.equal(getattr(flash_attn, name)(*tensors, *lengths), out)
