"""A client as it is: models of `transformers` with attention by this package and written out."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from packaging.version import Version
from torch import Tensor

import flash_attn
from flash_attn.utils.transformers import allow_cpu
from tests.clients.batches import generate_batch
from tests.clients.models import ENCODERS, FAMILIES, LENGTHS, SIZES, VOCABULARY, Family, batch
from tests.clients.no_worse import assert_no_worse, step

transformers = pytest.importorskip("transformers")

import transformers.modeling_flash_attention_utils as client  # noqa: E402

allow_cpu()
OURS = "flash_attention_2"
GENERATING = ("llama", "gemma2", "gemma3", "gemma4", "falcon", "deepseek_v3")


pytestmark = pytest.mark.usefixtures("one_thread")


@functools.cache
def weights(family: Family) -> dict[str, Tensor]:
    return family.build("eager", torch.bfloat16, "cpu").state_dict()


def three(family: Family, device: str) -> list[torch.nn.Module]:
    """[float32 and bfloat16 written out, bfloat16 by this package], of the same weights."""
    kinds = (("eager", torch.float32), ("eager", torch.bfloat16), (OURS, torch.bfloat16))
    models = [family.build(*kind, device, weights(family)) for kind in kinds]
    client.lazy_import_flash_attention(OURS)  # as a model that lists it does when it is made
    assert client._flash_fn is flash_attn.flash_attn_func, "the client took something else"
    return models


# --- Training -----------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", [*FAMILIES, "modernbert"])
def test_training_with_padding(name, side, device):
    """Through unpad_input, flash_attn_varlen_func and pad_input."""
    x = batch(device, side)
    used = x["attention_mask"].bool()
    models = three((FAMILIES | ENCODERS)[name], device)
    assert_no_worse(*[step(model, model(**x).logits, used) for model in models])


@pytest.mark.parametrize("name", [n for n, family in FAMILIES.items() if family.packs])
def test_training_on_packed_sequences(name, device):
    """Sequences in one row, told apart by their positions alone; written out, each by itself."""
    x = batch(device)
    parts = [row[:n] for row, n in zip(x["input_ids"], LENGTHS, strict=True)]
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None].to(device)
    *written_out, ours = three(FAMILIES[name], device)
    results = [
        step(model, torch.cat([model(input_ids=part[None]).logits[0] for part in parts]))
        for model in written_out
    ]
    packed = ours(input_ids=torch.cat(parts)[None], position_ids=positions).logits[0]
    assert_no_worse(*results, step(ours, packed))


def test_training_of_whisper(device):
    """The decoder attends to the encoder: other lengths of q and k, and no mask."""
    ids = batch(device)["input_ids"][:2]
    features = torch.randn(2, 8, 48, generator=torch.Generator().manual_seed(4)).to(device)
    results = []
    for model in three(ENCODERS["whisper"], device):
        out = model(input_features=features.to(model.dtype), decoder_input_ids=ids)
        results.append(step(model, out.logits))
    assert_no_worse(*results)


def test_training_of_qwen2_5_vl_vision(device):
    """Patches of two images in windows and in full, by cu_seqlens."""
    sizes = torch.tensor([[1, 16, 8], [1, 8, 8]], device=device)
    patches = torch.randn(192, 12, generator=torch.Generator().manual_seed(4)).to(device)
    results = []
    for model in three(ENCODERS["qwen2_5_vl"], device):
        out = model(patches.to(model.dtype), grid_thw=sizes)
        results.append(step(model, getattr(out, "pooler_output", out)))
    assert_no_worse(*results)


# --- Generation ---------------------------------------------------------------------------------

GREEDY = dict(do_sample=False, output_logits=True, return_dict_in_generate=True, max_new_tokens=5)
# To compile the second layer takes as long as the first.
SHALLOW = Family(lambda: transformers.LlamaConfig(**SIZES | {"num_hidden_layers": 1}))


def pair(family: Family, device: str, implementation: str = OURS) -> list[torch.nn.Module]:
    """[written out, by this package]; float32 on the CPU, where the tokens have to be the same."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    kinds = ("eager", implementation)
    return [family.build(kind, dtype, device, weights(family)) for kind in kinds]


def assert_same_text(ours, expected, device: str) -> None:
    """Of half precision the logits of the first token: greedy tokens may differ after a tie."""
    exact = device == "cpu"  # as in pair(); the logits are float32 either way
    if exact:
        assert torch.equal(ours.sequences, expected.sequences)
    close = functools.partial(torch.testing.assert_close, rtol=0)
    scale = expected.logits[0].abs().max().item()
    close(ours.logits[0], expected.logits[0], atol=(1e-4 if exact else 5e-2) * scale)


@pytest.mark.parametrize("name", GENERATING)
def test_generation(name, device):
    """After prompts padded on the left, with the cache that grows."""
    x = batch(device, "left")
    expected, ours = (model.generate(**x, **GREEDY) for model in pair(FAMILIES[name], device))
    assert_same_text(ours, expected, device)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_generation_compiled_with_a_static_cache(device):
    from transformers import CompileConfig

    x = batch(device)
    x = {key: value[:1] for key, value in x.items()}
    written_out, model = pair(SHALLOW, device)
    compilation = CompileConfig(fullgraph=False, backend="aot_eager", mode=None)
    compilation._compile_all_devices = True  # else a GPU alone
    torch._dynamo.reset()
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    options = GREEDY | {"max_new_tokens": 3}
    ours = model.generate(**x, **options, cache_implementation="static", compile_config=compilation)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > graphs
    assert_same_text(ours, written_out.generate(**x, **options), device)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_continuous_batching(device):
    """Requests of different lengths in one paged cache."""
    if device == "cpu" and Version(transformers.__version__) < Version("5.23"):
        pytest.importorskip("psutil")  # else it takes the machine to have no memory
    names = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS.valid_keys()
    paged = f"paged|{OURS}" if f"paged|{OURS}" in names else OURS
    written_out, model = pair(FAMILIES["llama"], device, paged)
    x = batch(device)
    prompts = [row[:n].tolist() for row, n in zip(x["input_ids"], LENGTHS, strict=True)]
    answers = generate_batch(
        model,
        prompts,
        transformers.GenerationConfig(
            max_new_tokens=5, do_sample=False, eos_token_id=VOCABULARY + 1, pad_token_id=0
        ),
        continuous_batching_config=transformers.ContinuousBatchingConfig(
            num_blocks=32, max_batch_tokens=64
        ),
    )
    assert len(answers) == len(prompts)
    for prompt, answer in itertools.zip_longest(prompts, answers):
        assert answer.error is None
        assert len(answer.generated_tokens) == 5
        expected = written_out.generate(torch.tensor([prompt], device=device), **GREEDY)
        if device == "cpu":
            assert answer.generated_tokens == expected.sequences[0, len(prompt) :].tolist()
        else:  # a tie, and what follows it, may fall otherwise in half precision
            assert answer.generated_tokens[0] in expected.logits[0].topk(2).indices


# --- What the client asks of the package ----------------------------------------------------------


def test_allow_cpu_says_so_where_the_client_asks_otherwise(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(client, "FLASH_ATTENTION_COMPATIBILITY_MATRIX", {})
    with pytest.raises(ImportError, match=r"transformers \d.* asks for a GPU in a way"):
        allow_cpu()


def test_allow_cpu_changes_nothing_beside_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(client, "FLASH_ATTENTION_COMPATIBILITY_MATRIX", {})
    allow_cpu()
