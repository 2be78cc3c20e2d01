"""The presets: each yields rows as it measures them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from benchmarks import contenders, delta, fp8, linear, linear_step, mla, problems, rotary
from benchmarks.clock import Clock, graphed
from benchmarks.rows import Options, Row, rate
from examples.gpt.measure import peak_megabytes


def _dense(
    preset: str, what: str, points, options: Options, budget_ms: float = 60.0, attends=None
) -> Iterator[Row]:
    clock = Clock(options.device)
    attends = attends or contenders.dense(options.device, options.with_standard)
    on_gpu = options.device.type == "cuda"
    unit, scale = ("TFLOP/s", 1e12) if on_gpu else ("GFLOP/s", 1e9)
    for point in points:
        inputs = point.inputs(options.device, grad=what != "fwd")
        mask = (point.causal, point.window)
        steps = {name: _step(what, fn, inputs, *mask) for name, fn in attends.items()}
        times = clock.measure(steps, budget_ms)
        rates = rate(point.flops(what), scale, times)
        place = {"axis": "head_dim", "x": point.head_dim} if preset == "sweep" else {}
        yield Row(preset, f"{what} {point}", unit, times, rates, clock.missing, **place)


def _step(what: str, attend: Callable, inputs: tuple, *options) -> Callable:
    """The call that is timed, of ``attend(*inputs, *options)``, whose first inputs are q, k and v.
    For "bwd" its forward runs once, before."""
    if what == "fwd":
        return lambda: attend(*inputs, *options)
    leaves = inputs[:3]

    def gradients(out: torch.Tensor, **keep) -> tuple:
        return torch.autograd.grad(out, leaves, dout, **keep)

    dout = torch.randn_like(inputs[0][..., : inputs[2].shape[-1]])
    if what == "fwd+bwd":
        return lambda: gradients(attend(*inputs, *options))
    try:
        out = attend(*inputs, *options)
    except Exception as error:  # raised again in the warm-up, which reports it

        def missing(error=error):
            raise error

        return missing
    return lambda: gradients(out, retain_graph=True)


def forward(options: Options) -> Iterator[Row]:
    grid = problems.gpu_grid(options.dims, options.seqlens, gqa=True)
    return _dense("fwd", "fwd", grid, options)


def backward(options: Options) -> Iterator[Row]:
    grid = problems.gpu_grid(options.dims, options.seqlens, gqa=True)
    return _dense("bwd", "bwd", grid, options)


def sweep(options: Options) -> Iterator[Row]:
    """Every head dimension that fits the tiles' granularity, and the steps between tiles."""
    for what in ("fwd", "bwd"):
        yield from _dense("sweep", what, problems.head_dims(options.dims), options)


def memory(options: Options) -> Iterator[Row]:
    """What forward and backward hold at their peak on top of their inputs; times are of one run."""
    attends = contenders.dense(options.device, options.with_standard)
    for point in problems.lengths(options.device, options.seqlens):
        inputs = point.inputs(options.device, grad=True)
        times: dict[str, float | None] = {}
        held: dict[str, float | None] = {}
        missing: dict[str, str] = {}
        for name, fn in attends.items():
            step = _step("fwd+bwd", fn, inputs, point.causal)
            try:
                step()  # what a first call allocates for good is not this length's
                start = time.perf_counter()
                held[name] = peak_megabytes(step, options.device)
                times[name] = 1e3 * (time.perf_counter() - start)
            except Exception as error:
                held[name] = times[name] = None
                missing[name] = f"{type(error).__name__}: {str(error)[:200]}"
        place = {"axis": "seqlen", "x": point.seqlen}
        yield Row("memory", f"peak {point}", "MB", times, held, missing, **place)


def window(options: Options) -> Iterator[Row]:
    yield from _dense("window", "fwd", problems.windows(options.dims), options)
    yield from _dense("window", "bwd", problems.windows(options.dims), options)


def latent(options: Options) -> Iterator[Row]:
    for what in ("fwd", "bwd"):
        yield from _dense("latent", what, problems.latent_grid(options.dims), options)


def wide(options: Options) -> Iterator[Row]:
    attends = contenders.wide(options.device)
    for what in ("fwd", "bwd"):
        yield from _dense("wide", what, problems.wide_grid(options.dims), options, attends=attends)


def deterministic(options: Options) -> Iterator[Row]:
    """ "ours" and "fa3": gradients that are the same at every run."""
    points = problems.score_grid(options.dims, seqlen=8192)
    attends = contenders.repeatable(options.device)
    return _dense("deterministic", "bwd", points, options, attends=attends)


def varlen(options: Options) -> Iterator[Row]:
    """Rates are of the pairs that the mask lets through, so "ours" and "dense" compare."""
    clock = Clock(options.device)
    for what in ("fwd", "bwd"):
        for point in problems.varlen_grid(options.dims):
            packed = point.inputs(options.device, grad=what == "bwd")
            dense = point.dense.inputs(options.device, grad=what == "bwd")
            causal = point.dense.causal
            attends = contenders.packed(options.device)
            steps = {name: _step(what, fn, packed, causal) for name, fn in attends.items()}
            steps["dense"] = _step(what, contenders.ours, dense, causal)
            times = clock.measure(steps)
            rates = rate(point.flops(what), 1e12, times)
            rates |= rate(point.dense.flops(what), 1e12, {"dense": times["dense"]})
            yield Row("varlen", f"{what} {point}", "TFLOP/s", times, rates)


def scores(options: Options) -> Iterator[Row]:
    """What each score mod costs beside the plain call."""
    for what in ("fwd", "bwd"):
        for point in problems.score_grid(options.dims):
            mods = problems.score_mods(point, options.device)
            attends = {name: partial(contenders.ours, **mod) for name, mod in mods.items()}
            yield from _dense("scores", what, [point], options, attends=attends)


def cpu(options: Options) -> Iterator[Row]:
    options = replace(options, device=torch.device("cpu"))
    for what in ("fwd", "fwd+bwd"):
        grid = problems.cpu_grid(options.dims, options.seqlens)
        yield from _dense("cpu", what, grid, options, budget_ms=1000.0)


def decode(options: Options) -> Iterator[Row]:
    """Each point as a Python caller waits for it, and replayed from a CUDA graph, with an L2 cache
    that was flushed by writes and by reads. "read": torch's sum of as many bytes."""
    clocks = {
        "graph": Clock(options.device),
        "graph, clean L2": Clock(options.device, clean=True),
        "eager": Clock(options.device),
    }
    for point in problems.decode_grid():
        if options.seqlens and point.seqlen not in options.seqlens:
            continue
        inputs = point.inputs(options.device)
        calls = {
            name: (lambda fn=fn: fn(*inputs))  # noqa: B023  measured within this turn of the loop
            for name, fn in contenders.with_cache(options.device).items()
        }
        as_many = torch.zeros(point.cache_bytes // 4, device=options.device)
        calls["read"] = as_many.sum
        replays = {name: _maybe_graphed(fn) for name, fn in calls.items()}
        for mode, clock in clocks.items():
            steps = calls if mode == "eager" else replays
            times = clock.measure(steps, min_samples=20)
            rates = rate(point.cache_bytes, 1e9, times)
            yield Row("decode", f"{mode} {point}", "GB/s", times, rates)


def serve(options: Options) -> Iterator[Row]:
    """Steps of an engine, replayed from a CUDA graph; rates are of the keys and values, each once.
    "read": torch's sum of as many bytes."""
    clock = Clock(options.device)
    for point in problems.serve_grid():
        inputs = point.inputs(options.device)
        calls = {
            name: (lambda fn=fn: fn(*inputs))  # noqa: B023  measured within this turn of the loop
            for name, fn in contenders.serving(options.device, point.window).items()
        }
        if max(point.queries) >= 128:
            calls["packed keys"] = point.without_pages(inputs)
        as_many = torch.zeros(point.cache_bytes // 4, device=options.device)
        calls["read"] = as_many.sum
        replays = {name: _maybe_graphed(fn) for name, fn in calls.items()}
        times = clock.measure(replays, min_samples=20)
        yield Row("serve", f"graph {point}", "GB/s", times, rate(point.cache_bytes, 1e9, times))
    yield from _steps(clock, options)


def _steps(clock: Clock, options: Options) -> Iterator[Row]:
    """What it costs to append and turn: steps, and the same attention without."""
    for point in problems.step_grid():
        q, k, v, used, table = point.inputs(options.device)
        new_keys = point.new_keys(options.device)
        calls: dict[str, Callable] = {}
        for name, fn in contenders.with_cache(options.device).items():
            before = used - point.new
            calls[name] = lambda fn=fn, before=before: fn(q, k, v, before, table, **new_keys)  # noqa: B023
            calls[f"{name}, attention alone"] = lambda fn=fn: fn(q, k, v, used, table)  # noqa: B023
        times = clock.measure({n: _maybe_graphed(fn) for n, fn in calls.items()}, min_samples=20)
        yield Row("serve", f"graph {point}", "GB/s", times, rate(point.cache_bytes, 1e9, times))


def _maybe_graphed(fn: Callable) -> Callable:
    """The replay, or ``fn`` itself where capture fails, so that the warm-up shows the reason."""
    try:
        return graphed(fn)
    except Exception as error:

        def missing(error=error):
            raise error

        return missing


def host(options: Options) -> Iterator[Row]:
    """Host microseconds per call: a problem so small that nothing else takes time."""
    point = problems.Dense(1, 64, 2, 2, 64, True)
    inputs = point.inputs(options.device, grad=False)
    clock = Clock(options.device)
    times: dict[str, float | None] = {}
    for name, attend in contenders.dense(options.device).items():
        try:
            times[name] = _host_milliseconds(lambda attend=attend: attend(*inputs, True), clock)
        except Exception:
            times[name] = None
    calls = {name: 1e3 / t if t else None for name, t in times.items()}
    yield Row("host", f"host {point}", "calls/s", times, calls)


def _host_milliseconds(fn: Callable, clock: Clock, calls: int = 500) -> float:
    for _ in range(50):
        fn()
    clock.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        fn()
    elapsed = time.perf_counter() - start
    clock.synchronize()
    return 1e3 * elapsed / calls


def ceiling(options: Options) -> Iterator[Row]:
    """What this GPU gives to a large matrix product and to a copy: the scale for the rest."""
    a = torch.randn(8192, 8192, device=options.device, dtype=torch.bfloat16)
    x = torch.empty(2**30, dtype=torch.int32, device=options.device)
    y = torch.empty_like(x)
    clock = Clock(options.device)
    times = clock.measure({"torch": lambda: a @ a}, budget_ms=200)
    yield Row("ceiling", "8192^3 matmul bf16", "TFLOP/s", times, rate(2 * 8192**3, 1e12, times))
    times = clock.measure({"torch": lambda: y.copy_(x)}, budget_ms=200)
    yield Row("ceiling", "copy of 4 GiB", "GB/s", times, rate(2 * 4 * x.numel(), 1e9, times))


PRESETS: dict[str, Callable[[Options], Iterator[Row]]] = {
    "cpu": cpu,
    "fwd": forward,
    "bwd": backward,
    "window": window,
    "latent": latent,
    "wide": wide,
    "varlen": varlen,
    "scores": scores,
    "deterministic": deterministic,
    "decode": decode,
    "serve": serve,
    "fp8": fp8.fp8,
    "fp8_forward": fp8.fp8_forward,
    "mla": mla.mla,
    "sweep": sweep,
    "memory": memory,
    "linear": linear.linear,
    "linear_step": linear_step.linear_step,
    "delta": delta.delta,
    "delta_step": delta.delta_step,
    "rotary": rotary.rotary,
    "host": host,
    "ceiling": ceiling,
}
NEEDS_GPU = set(PRESETS) - {"cpu", "host", "sweep", "memory", "linear"}
