"""Attention backends for serving engines, made of this library's calls: vLLM and SGLang.

Nothing else in the package imports this one. The two functions here tell an engine where its
backend is; the engine imports ``flash_attn.engines.vllm`` or ``flash_attn.engines.sglang`` when it
makes one. Where this package is installed, both engines call them by themselves in each of their
processes, through the entry points in pyproject.toml. docs/engines.md says how to choose the
backends and what they refuse.
"""

from __future__ import annotations

from typing import Any

#: What vLLM calls a backend that is not its own.
VLLM_NAME = "CUSTOM"
#: What ``attention_backend`` of SGLang is called with.
SGLANG_NAME = "flash_attn"


def register_vllm() -> None:
    """Makes ``CUSTOM`` this library's backend in vLLM, in this process.

    Raises:
        ImportError: vLLM is missing, or has no such registry.
    """
    _vllm_registry().register_backend(
        _vllm_registry().AttentionBackendEnum[VLLM_NAME],
        "flash_attn.engines.vllm.FlashAttnBackend",
    )


def vllm_plugin() -> None:
    """``register_vllm`` unless another package has taken the name: vLLM calls it at its start."""
    if not _vllm_registry().AttentionBackendEnum[VLLM_NAME].is_overridden():
        register_vllm()


def register_sglang() -> None:
    """Adds ``flash_attn`` to SGLang's attention backends, in this process.

    Raises:
        ImportError: SGLang is missing, or has no such registry.
    """
    try:
        from sglang.srt.arg_groups import choices
        from sglang.srt.layers.attention.attention_registry import register_attention_backend
    except ImportError as error:
        raise missing("SGLang", error) from error

    @register_attention_backend(SGLANG_NAME)
    def make(model_runner: Any) -> Any:
        from flash_attn.engines.sglang import FlashAttnBackend

        return FlashAttnBackend(model_runner)

    for names in (
        choices.ATTENTION_BACKEND_CHOICES,
        choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES,
    ):
        if SGLANG_NAME not in names:
            names.append(SGLANG_NAME)


def _vllm_registry() -> Any:
    try:
        from vllm.v1.attention.backends import registry
    except ImportError as error:
        raise missing("vLLM", error) from error
    return registry


def missing(engine: str, error: ImportError) -> ImportError:
    """What to raise where an engine's interface cannot be imported."""
    written_for = {"vLLM": "0.33", "SGLang": "0.5.23"}[engine]
    return ImportError(
        f"{engine} is needed, {written_for} or a release with the same interface "
        f"(pip install {engine.lower()}): {error}"
    )
