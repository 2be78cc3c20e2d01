"""explain_call: appends, rotary, packed forms; backwards; and what is said to be slow."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys

import pytest
import torch
from test_explain import ROW, Library, fake, library, qkv  # noqa: F401 (a fixture)
from torch._subclasses import FakeTensorMode

import flash_attn
from flash_attn import backend, explain_call


def cache_call() -> tuple[list, dict]:
    q, new, *caches = fake("cpu", (2, 3, 4, 32), (2, 3, 2, 32), (2, 64, 2, 32), (2, 64, 2, 32))
    (cos,) = fake("cpu", (64, 16), dtype=torch.float32)
    options = {"k": new, "v": new, "rotary_cos": cos, "rotary_sin": cos, "cache_seqlens": 5}
    return [q, *caches], options


def test_append_and_rotary():
    tensors, options = cache_call()
    choice = explain_call(flash_attn.flash_attn_with_kvcache, *tensors, **options, causal=True)
    assert choice.operation == "_flash_attn_with_kvcache"
    for words in ("k (2, 64, 2, 32)", "causal", "append 3", "rotary"):
        assert words in choice.call
    del options["rotary_cos"], options["rotary_sin"]
    choice = explain_call(flash_attn.flash_attn_with_kvcache, *tensors, **options)
    assert "append 3" in choice.call
    assert "rotary" not in choice.call
    choice = explain_call(flash_attn.flash_attn_with_kvcache, *tensors)
    assert "append" not in choice.call


def test_append_is_checked_like_the_call():
    tensors, options = cache_call()
    del options["cache_seqlens"]
    with pytest.raises(ValueError, match="cache_seqlens: got None; with new keys"):
        explain_call(flash_attn.flash_attn_with_kvcache, *tensors, **options)


def test_packed_forms():
    (ends,) = fake("cpu", (3,), dtype=torch.int32)
    qkv_packed, q, kv = fake("cpu", (2, 5, 3, 4, 16), (2, 5, 4, 16), (2, 5, 2, 4, 16))
    dense = flash_attn.explain(q, q, q, causal=True)
    assert explain_call(flash_attn.flash_attn_func, q, q, q, causal=True) == dense
    bound = functools.partial(flash_attn.flash_attn_func, causal=True)
    assert explain_call(bound, q, q, q) == dense
    assert explain_call(flash_attn.flash_attn_qkvpacked_func, qkv_packed, causal=True) == dense
    assert explain_call(flash_attn.flash_attn_kvpacked_func, q, kv, causal=True) == dense
    flat = (qkv_packed[0], q[0], kv[0])
    lengths = (ends, ends, 4, 4)
    varlen = explain_call(flash_attn.flash_attn_varlen_func, q[0], q[0], q[0], *lengths)
    assert varlen.operation == "_flash_attn_varlen_forward"
    function = flash_attn.flash_attn_varlen_qkvpacked_func
    assert explain_call(function, flat[0], ends, 4) == varlen
    function = flash_attn.flash_attn_varlen_kvpacked_func
    assert explain_call(function, flat[1], flat[2], *lengths) == varlen
    with pytest.raises(ValueError, match="qkv: got shape"):
        explain_call(flash_attn.flash_attn_qkvpacked_func, kv)


def test_wrong_arguments():
    q = torch.zeros(1, 2, 2, 8)
    with pytest.raises(TypeError, match="did you mean 'causal'"):
        explain_call(flash_attn.flash_attn_func, q, q, q, is_causal=True)
    with pytest.raises(TypeError, match="missing a required argument: 'v'"):
        explain_call(flash_attn.flash_attn_func, q, q)


# --- Backward -------------------------------------------------------------------------------------


def test_backward_on_the_cpu():
    q = torch.zeros(1, 2, 2, 8)
    choice = explain_call(flash_attn.flash_attn_func, q, q, q, backward=True)
    assert (choice.operation, choice.backend) == ("_flash_attn_backward", "cpu")
    (ends,) = fake("cpu", (3,), dtype=torch.int32)
    choice = flash_attn.explain(q[0], q[0], q[0], cu_seqlens_q=ends, backward=True)
    assert choice.operation == "_flash_attn_varlen_backward"


def test_there_is_no_backward_of_a_cache():
    tensors, options = cache_call()
    choice = explain_call(flash_attn.flash_attn_with_kvcache, *tensors, **options, backward=True)
    assert choice.backend == "none"
    assert "no backward of a cache, pages or codes" in choice.why


def test_backward_on_a_gpu(library):  # noqa: F811
    assert flash_attn.explain(*qkv(), backward=True).kernel == "bwd_test"
    assert [asked[:5] for asked in library.asked] == [(90, "bf16", 64, 64, False)]
    fp16 = qkv(head_dim=96, dtype=torch.float16)
    choice = flash_attn.explain(*fp16, softcap=1.0, backward=True)
    assert library.asked[-1][:5] == (90, "fp16", 96, 96, True)
    assert (choice.backend, choice.kernel) == ("none", None)
    assert choice.rejected == (("bwd_test", "does not serve this"),)


# --- What is slow ---------------------------------------------------------------------------------


def test_slow_on_the_cpu():
    q = torch.zeros(1, 2, 2, 8)
    assert flash_attn.explain(q, q, q, causal=True).slow == ()
    (reason,) = flash_attn.explain(q, q, q, softcap=1.0, dropout_p=0.1).slow
    assert "no dropout and no softcap" in reason
    assert flash_attn.explain(q, q, q, return_attn_probs=True).slow[-1].endswith("whole matrix")
    assert f"slow       {reason}" in str(flash_attn.explain(q, q, q, softcap=1.0, dropout_p=0.1))


def test_slow_on_a_gpu(library, monkeypatch):  # noqa: F811
    assert flash_attn.explain(*qkv()).slow == ()
    (reason,) = flash_attn.explain(*qkv(head_dim=60)).slow
    assert "each call copies q, k and v" in reason
    monkeypatch.setattr(backend, "_missing", set())
    for columns, word in ((60, 8), (62, 4), (63, 2)):
        q, cache = fake("cuda", (2, 1, 4, columns), (2, 64, 4, columns))
        choice = flash_attn.explain(q, cache, cache, kvcache=True)
        assert f"read by {word} bytes at a time" in choice.slow[0]
        assert f"rows of the cache are read by {word} bytes" in choice.why
    q, cache = fake("cuda", (2, 1, 4, 60), (2, 64, 4, 60))
    with FakeTensorMode():
        apart = torch.empty_strided(cache.shape, (16128, 252, 63, 1), dtype=q.dtype, device="cuda")
    (reason,) = flash_attn.explain(q, apart, apart, kvcache=True).slow
    assert "read by 2 bytes" in reason
    (many,) = fake("cuda", (2, 100, 4, 60))
    (reason,) = flash_attn.explain(many, cache, cache, kvcache=True).slow
    assert "each call copies the whole cache" in reason
    newer = {**ROW, "name": "fwd_90", "arch": 90}
    monkeypatch.setattr(Library, "compiled_variants", lambda self: json.dumps([newer, ROW]))
    assert flash_attn.explain(*qkv()).slow == ("none of the 1 kernels for Hopper serves it",)


def test_the_trace_warns():
    program = (
        "import torch, flash_attn as f; q = torch.zeros(1, 4, 2, 8);"
        "f.flash_attn_func(q, q, q); f.flash_attn_func(q, q, q, softcap=1.0);"
        "f.flash_attn_with_kvcache(q, torch.zeros(1, 9, 2, 8), torch.zeros(1, 9, 2, 8), q, q,"
        " q[0, :, 0].new_ones(9, 4), q[0, :, 0].new_ones(9, 4), cache_seqlens=2)"
    )
    environment = {**os.environ, "FLASH_ATTN_LOG": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    plain, capped, cached = done.stderr.splitlines()
    assert "slow" not in plain
    assert "; slow: torch's kernel" in capped
    assert "append 4, rotary" in cached
