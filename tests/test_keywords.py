"""A keyword that a function has not raises, and says which was meant; two names of the LSE."""

from __future__ import annotations

import pytest
import torch

import flash_attn
from flash_attn import flash_attn_interface

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
    ],
)
def test_keyword_of_another_function(name, keyword, says):
    with pytest.raises(TypeError, match="unexpected keyword") as raised:
        getattr(flash_attn, name)(None, None, None, **{keyword: 1})
    assert says in str(raised.value)


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
