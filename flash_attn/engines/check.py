"""``python -m flash_attn.engines.check vllm|sglang``: whether an engine works with its backend.

It makes a small Llama with random weights and has the engine go on with the same prompts twice: by
this library's backend, and by the one that the engine chooses. It prints how far the two agree, and
exits 1 unless they do. It needs a GPU, the engine, and this package installed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

from flash_attn import backend, engines

NAMES = {"vllm": engines.VLLM_NAME, "sglang": engines.SGLANG_NAME}
TITLES = {"vllm": "vLLM", "sglang": "SGLang"}
PLUGINS = {"vllm": "vllm.general_plugins", "sglang": "sglang.srt.plugins"}

PROMPTS = (5, 40, 150, 300, 1, 17, 64, 90)  # tokens of each
CHUNK = 64  # tokens a step: prompts come in chunks, beside single tokens of others
NEW_TOKENS = 32
VOCABULARY = 1024
#: A difference of log-probabilities. Attention in half precision moves them by a tenth of it; a
#: wrong mask or a wrong page moves them by more than it.
TOLERANCE = 0.05


class Generated(NamedTuple):
    """What followed each prompt, greedily: (prompts, NEW_TOKENS) each."""

    tokens: list[list[int]]
    logprobs: list[list[float]]


def why_not(engine: str) -> str | None:
    """What is missing here for a check, in a sentence."""
    title = TITLES[engine]
    if version(engine) is None:
        return f"{title} is not installed here, so there is nothing to check: pip install {engine}"
    problem = backend.cuda_problem() or ("" if torch.cuda.is_available() else "no GPU was found")
    if problem:
        return f"{title} runs the backend on a GPU, which is not possible here: {problem}"
    loaded = importlib.metadata.entry_points(group=PLUGINS[engine])
    if "flash_attn" not in loaded.names:
        return (
            f"{title} finds the backend by the entry points of an installed flash_attn, and none "
            "is installed here: pip install ."
        )
    return None


def version(engine: str) -> str | None:
    try:
        return importlib.metadata.version(engine)
    except importlib.metadata.PackageNotFoundError:
        return None


def make_model(folder: Path) -> None:
    """A Llama of 4 layers with weights of ordinary size. (The engines' own dummy weights are so
    small that attention, right or wrong, would not show in a result.)"""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=512, intermediate_size=1024, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=1024,
        initializer_range=0.06, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.float16).save_pretrained(folder)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCABULARY, (n,), generator=generator).tolist() for n in PROMPTS]


def generate_vllm(model: str, name: str | None) -> Generated:
    # In this process, so that the line below can see which backend was taken.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    engine = LLM(
        model, skip_tokenizer_init=True, dtype="float16", max_model_len=512, max_num_seqs=16,
        max_num_batched_tokens=CHUNK, gpu_memory_utilization=0.3,
        attention_config={"backend": name} if name else None,
    )  # fmt: skip
    if name and "flash_attn.engines.vllm" not in sys.modules:
        raise RuntimeError(f"vLLM was asked for the backend {name} and took another")
    params = SamplingParams(
        temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=1, detokenize=False
    )
    given: Any = [{"prompt_token_ids": tokens} for tokens in prompts()]
    outputs = [x.outputs[0] for x in engine.generate(given, params)]
    tokens = [list(x.token_ids) for x in outputs]
    logprobs = [
        [step[token].logprob for step, token in zip(x.logprobs, x.token_ids)] for x in outputs
    ]
    return Generated(tokens, logprobs)


def generate_sglang(model: str, name: str | None) -> Generated:
    from sglang import Engine

    engine = Engine(
        model_path=model, skip_tokenizer_init=True, dtype="float16", context_length=512,
        chunked_prefill_size=CHUNK, mem_fraction_static=0.3, random_seed=0, log_level="warning",
        attention_backend=name,
    )  # fmt: skip
    params = {"temperature": 0.0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    outputs = engine.generate(input_ids=prompts(), sampling_params=params, return_logprob=True)
    chosen = [x["meta_info"]["output_token_logprobs"] for x in outputs]
    engine.shutdown()
    return Generated(
        [[token for _, token, *_ in x] for x in chosen],
        [[logprob for logprob, *_ in x] for x in chosen],
    )


def compare(ours: Generated, theirs: Generated) -> tuple[bool, list[str]]:
    """Whether they agree, and what there is to say.

    Tokens may part where two are about as likely: rounding decides. From there on texts differ.
    """
    same, most, notes = 0, 0.0, []
    for n, (a, la, b, lb) in enumerate(zip(*ours, *theirs)):
        agreed = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), len(a))
        same += agreed
        most = max([most, *(abs(x - y) for x, y in zip(la[: agreed + 1], lb[: agreed + 1]))])
        if agreed < len(a):
            notes.append(
                f"prompt {n} ({PROMPTS[n]} tokens): another token from number {agreed} on, of "
                f"log-probability {la[agreed]:.3f} beside {lb[agreed]:.3f}"
            )
    total = sum(map(len, ours.tokens))
    notes.insert(0, f"{same} of {total} tokens are the same before the first that differs")
    notes.append(f"log-probabilities there differ by at most {most:.4f}; {TOLERANCE} is allowed")
    return most <= TOLERANCE, notes


def _run(engine: str, name: str | None, model: Path) -> Generated:
    """In a process of its own, which leaves nothing on the GPU."""
    file = model / "generated.json"
    command = [sys.executable, "-m", "flash_attn.engines.check", engine, "--model", str(model)]
    if name:
        command += ["--backend", name]
    start = time.perf_counter()
    subprocess.run(command, check=True)
    print(f"with {name or 'what the engine chooses'}: {time.perf_counter() - start:.0f} s")
    return Generated(**json.loads(file.read_text()))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m flash_attn.engines.check", description=__doc__.partition(": ")[2]
    )
    parser.add_argument("engine", choices=list(NAMES))
    # The two are for processes that this one starts.
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--backend", help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if asked.model:
        generate = generate_vllm if asked.engine == "vllm" else generate_sglang
        generated = generate(asked.model, asked.backend)
        (Path(asked.model) / "generated.json").write_text(json.dumps(generated._asdict()))
        return 0
    if why := why_not(asked.engine):
        print(why, file=sys.stderr)
        return 1
    print(
        f"{TITLES[asked.engine]} {version(asked.engine)} on {torch.cuda.get_device_name()}: a "
        f"Llama of 4 layers with random weights, {len(PROMPTS)} prompts of 1 to {max(PROMPTS)} "
        f"tokens in chunks of {CHUNK}, {NEW_TOKENS} more tokens each"
    )
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        try:
            ours = _run(asked.engine, NAMES[asked.engine], Path(folder))
            theirs = _run(asked.engine, None, Path(folder))
        except subprocess.CalledProcessError as error:
            failed = NAMES[asked.engine] if "--backend" in error.cmd else "the engine's own backend"
            print(f"with {failed} the engine failed; its messages are above", file=sys.stderr)
            return 1
    agree, notes = compare(ours, theirs)
    print(*notes, "it works" if agree else "the results DIFFER", sep="\n")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
