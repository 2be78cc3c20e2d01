"""Every name of the 2.8 package is decided: it is here, or its import says what to use instead."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flash_attn
from build_tools import name_table
from flash_attn import bert_padding, flash_attn_interface
from flash_attn.compat.names import ABSENT, MODULES, NAMES
from flash_attn.layers import rotary
from flash_attn.ops.triton import cross_entropy, layer_norm

REFUSED = [(module, name) for module, names in NAMES.items() for name in names]


@pytest.mark.parametrize("module", name_table.NAMES)
def test_every_name_is_here_or_refused(module):
    here, refused = name_table.decided(module)
    assert {*name_table.NAMES[module].split()} <= {*here, *refused}
    assert not {*here} & {*refused}
    for name in here:
        assert getattr(importlib.import_module(module), name) is not None or name == "__version__"


def test_a_name_that_nobody_decided_is_noticed(monkeypatch):
    monkeypatch.setitem(name_table.NAMES, "flash_attn.utils.torch", "custom_fwd something_new")
    with pytest.raises(LookupError, match=r"flash_attn\.utils\.torch\.something_new"):
        name_table.decided("flash_attn.utils.torch")


@pytest.mark.parametrize(("module", "name"), REFUSED)
def test_a_refused_name_says_what_to_use(module, name):
    with pytest.raises(ImportError) as raised:
        exec(f"from {module} import {name}")
    assert f"{module}.{name} is not part" in str(raised.value)
    assert NAMES[module][name] in str(raised.value)
    found = importlib.import_module(module)
    assert not hasattr(found, "no_such_name")
    assert not hasattr(found, name)
    assert getattr(found, name, None) is None
    with pytest.raises(AttributeError, match="is not part of this package; use "):
        getattr(found, name)


@pytest.mark.parametrize("module", MODULES)
def test_a_refused_module_says_what_to_use(module):
    for _ in range(2):  # a failed import leaves nothing behind that the second one would find
        with pytest.raises(ModuleNotFoundError) as raised:
            importlib.import_module(module)
        assert raised.value.name == module
        assert MODULES[module] in str(raised.value)


def test_models_are_refused_whichever_is_asked_for():
    with pytest.raises(ImportError, match=r"flash_attn\.models is not part .* transformers"):
        importlib.import_module("flash_attn.models.gpt")


@pytest.mark.parametrize("module", ABSENT)
def test_clients_that_ask_do_not_find_what_is_absent(module):
    if "." in module:
        assert importlib.util.find_spec(module) is None
    else:  # of this distribution; the tests see flash-attn-3 beside it
        root = str(Path(flash_attn.__file__).parent.parent)
        assert importlib.machinery.PathFinder.find_spec(module, [root]) is None


def test_every_public_module_is_in_the_table():
    found = {
        module.name
        for module in pkgutil.walk_packages(flash_attn.__path__, "flash_attn.", lambda name: None)
        if not module.ispkg and not any(part.startswith("_") for part in module.name.split("."))
    }
    inner = {f"flash_attn.{name}" for name in ("backend", "call", "explain")}
    inner |= {"flash_attn.modules.inner_attention", "flash_attn.ops.rotary"}
    # Not of the 2.8 package:
    rooms = (
        "api",
        "compat",
        "cpu",
        "dispatch",
        "distributed",
        "engines",
        "fp8",
        "linear",
        "torch_attention",
        "utils.kv_quantization",
        "utils.transformers",
    )
    ours = tuple(f"flash_attn.{room}" for room in rooms)
    found = {name for name in found - inner if not name.startswith(ours)}
    assert found <= {*name_table.NAMES, *MODULES}


def test_the_table_of_the_page_is_up_to_date():
    assert name_table.TABLE.main(["--check"]) == 0, "run python -m build_tools.name_table --write"


def test_the_check_notices_a_change(monkeypatch):
    monkeypatch.setitem(NAMES["flash_attn.utils.testing"], "generate_qkv", "something else")
    assert name_table.TABLE.main(["--check"]) == 1


def test_the_modules_import_without_triton_and_einops():
    modules = [m for m in name_table.NAMES if m not in ("flash_attn.utils.library",)]
    program = (
        "import sys, torch, torch.utils.benchmark, importlib; before = set(sys.modules)\n"
        f"for m in {modules}: importlib.import_module(m)\n"
        "print({'einops', 'triton', 'transformers', 'torchvision'} & set(sys.modules) - before)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "set()"


# --- Classes with .apply --------------------------------------------------------------------------

TAIL = (0.0, 0.3, True, (-1, -1), 0.0, None, False)
ENDS = torch.tensor([0, 2, 6], dtype=torch.int32)
ATTENTION = {
    "FlashAttnFunc": (3, (2, 6), ()),
    "FlashAttnVarlenFunc": (3, (6,), (ENDS, ENDS, 4, 4)),
    "FlashAttnQKVPackedFunc": (1, (2, 6, 3), ()),
    "FlashAttnVarlenQKVPackedFunc": (1, (6, 3), (ENDS, 4)),
}


@pytest.mark.parametrize("name", ATTENTION)
def test_apply_is_the_function(name):
    count, shape, lengths = ATTENTION[name]
    inputs = [torch.randn(*shape, 2, 8, requires_grad=True) for _ in range(count)]
    words = {"FlashAttn": "flash_attn_", "Varlen": "varlen_", "QKVPacked": "qkvpacked_"}
    snake = name
    for word, part in [*words.items(), ("Func", "func")]:
        snake = snake.replace(word, part)
    apply, function = (getattr(flash_attn_interface, n) for n in (name, snake))
    apply = apply.apply
    expected = function(*inputs, *lengths, *TAIL, True)
    pages = (None,) if name == "FlashAttnVarlenFunc" else ()
    for out in (
        apply(*inputs, *lengths, *TAIL, True),
        apply(*inputs, *lengths, *TAIL, True, *pages, True),
    ):
        assert len(out) == 3
        for ours, theirs in zip(out, expected):
            torch.testing.assert_close(ours, theirs)
        assert out[0].requires_grad
    without = apply(*inputs, *lengths, *TAIL, False, *pages, False)
    assert not without.requires_grad
    torch.testing.assert_close(without, expected[0])


@pytest.mark.parametrize("varlen", [False, True])
def test_apply_of_packed_keys(varlen):
    kind = "Varlen" if varlen else ""
    apply = getattr(flash_attn_interface, f"FlashAttn{kind}KVPackedFunc").apply
    shape, lengths = ((6,), (ENDS, ENDS, 4, 4)) if varlen else ((2, 6), ())
    q, kv = torch.randn(*shape, 2, 8), torch.randn(*shape, 2, 2, 8)
    separate = getattr(flash_attn_interface, f"flash_attn_{kind.lower()}{'_' * varlen}func")
    expected = separate(q, *kv.unbind(-3), *lengths, *TAIL)
    torch.testing.assert_close(apply(q, kv, *lengths, *TAIL, False, True), expected)


def test_other_classes_with_apply():
    x, indices = torch.randn(5, 3, requires_grad=True), torch.tensor([3, 1])
    rows = bert_padding.IndexFirstAxis.apply(x, indices)
    torch.testing.assert_close(rows, x[indices])
    put = bert_padding.IndexPutFirstAxis.apply(rows, indices, 5)
    torch.testing.assert_close(put[indices], rows)
    taken, same = bert_padding.IndexFirstAxisResidual.apply(x, indices)
    assert torch.equal(taken, rows)
    assert torch.equal(same, x)
    taken.sum().backward()
    assert x.grad.sum() == 6
    angles = torch.randn(4, 2)
    q = torch.randn(1, 4, 2, 6)
    expected = rotary.apply_rotary_emb(q, angles.cos(), angles.sin(), True)
    ours = rotary.ApplyRotaryEmb.apply(q, angles.cos(), angles.sin(), True, False, 0, None, None)
    torch.testing.assert_close(ours, expected)
    logits, labels = torch.randn(3, 7), torch.tensor([0, 6, 2])
    ours = cross_entropy.CrossEntropyLoss.apply(logits, labels, None, 0.1)[0]
    expected = cross_entropy.cross_entropy_loss(logits, labels, label_smoothing=0.1)[0]
    torch.testing.assert_close(ours, expected)
    ours = layer_norm.LayerNormFn.apply(x, torch.ones(3), torch.zeros(3))
    torch.testing.assert_close(ours, torch.nn.functional.layer_norm(x, (3,), eps=1e-6))


def test_small_helpers():
    x = torch.randn(4, 6)
    assert flash_attn_interface.maybe_contiguous(None) is None
    assert flash_attn_interface.maybe_contiguous(x) is x
    assert flash_attn_interface.maybe_contiguous(x[:, 1:]).data_ptr() == x[:, 1:].data_ptr()
    assert flash_attn_interface.maybe_contiguous(x.t()).stride(-1) == 1
    assert [flash_attn_interface.round_multiple(n, 32) for n in (0, 1, 32, 33)] == [0, 32, 32, 64]
    assert flash_attn_interface.USE_TRITON_ROCM is False
