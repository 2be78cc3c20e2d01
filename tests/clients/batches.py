"""Answers of `transformers`' continuous batching, of which a GPU's first batch may read zeros."""

from __future__ import annotations

import torch


def generate_batch(model, prompts: list[list[int]], generation_config, **options) -> list:
    """What `model.generate_batch` returns, in the prompts' order.

    There is a request before, whose answer is of no interest: a manager that starts may clear the
    first batch's inputs when they are there (`ContinuousBatchingAsyncIOs.reset`; docs/porting.md).
    """
    with model.continuous_batching_context_manager(generation_config, **options) as manager:
        _finish(manager, [[3, 4, 5]])
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        return _finish(manager, prompts)


def _finish(manager, prompts: list[list[int]]) -> list:
    wanted = manager.add_requests(prompts)
    results = {}
    while len(results) < len(wanted):
        result = manager.get_result(timeout=1)
        if result is not None and result.is_finished():
            results[result.request_id] = result
        assert result is not None or manager.is_running(), "it ended before its requests"
    return [results[name] for name in wanted]
