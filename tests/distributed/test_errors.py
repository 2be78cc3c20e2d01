"""What is wrong ends in an error that says so, on every rank, and soon."""

from __future__ import annotations

import datetime
import os
import re
import time

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from flash_attn.distributed import (
    agree,
    all_to_all_attention,
    dense_layout,
    mesh_attention,
    packed_layout,
    ring_attention,
    unshard_sequence,
)
from tests.distributed import work
from tests.distributed.cases import Case
from tests.distributed.processes import error_of, group

TIMEOUT = 5.0  # of the one group whose waits are to end


def tensors(tokens: int, heads: int = 4, dtype=torch.float32):
    return [torch.zeros(1, tokens, h, 8, dtype=dtype) for h in (heads, 2, 2)]


def differ(rank: int, what: str) -> str:
    """The error of a call to which rank 1 comes with something else."""
    layout, options, q = dense_layout(16, 2), {}, tensors(8)
    if rank == 1:
        match what:
            case "layout":
                layout = dense_layout(16, 2, "contiguous")
            case "heads":
                q = tensors(8, heads=2)
            case "dtype":
                q = tensors(8, dtype=torch.float64)
            case "causal":
                options = {"causal": False}
            case "tokens":
                q = tensors(7)
            case "rank of q":
                q[0] = q[0][0]
            case "sinks":
                options = {"s_aux": torch.zeros(4)}
            case "window":
                options = {"window_size": torch.tensor([3, 0])}
            case "slopes":
                options = {"alibi_slopes": torch.zeros(4, requires_grad=True)}
            case "no layout":
                layout = None
    if what == "window":
        options.setdefault("window_size", torch.tensor([16, 0]))
    options = {"causal": True} | options
    return error_of(Exception, ring_attention, *q, layout, group(2), **options)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (
            "layout",
            "ranks differ: .* (zigzag|contiguous) layout of one sequence, 16 tokens",
        ),
        ("heads", "ranks differ"),
        ("dtype", "ranks differ.*float64"),
        ("causal", "ranks differ"),
        ("tokens", "q: got 7 tokens"),
        ("rank of q", r"q: got shape \(8, 4, 8\)"),
        ("sinks", "ranks differ"),
        ("window", r"ranks differ.*\(3, 0\)"),
        ("slopes", "alibi_slopes"),
        ("no layout", "layout: got NoneType"),
    ],
)
def test_ranks_that_differ_all_say_so(processes, what, said):
    for error in processes.run(differ, what, ranks=2):  # which has a time limit
        assert re.search(said, error), error


def differ_in_a_mesh(rank: int) -> str:
    """Rank 3 is wrong; rank 0 shares no group with it."""
    case = Case("mesh", 4)
    q = tensors(4 if rank < 3 else 5)
    layout = dense_layout(16, 4, split=2)
    return error_of(ValueError, mesh_attention, *q, layout, work.place(case))


def test_word_of_an_error_gets_through_a_mesh(processes):
    assert all("got 5 tokens" in error for error in processes.run(differ_in_a_mesh))


def wrong_alike(rank: int, what: str) -> str:
    layout, options, q = dense_layout(16, 2), {}, tensors(8)
    match what:
        case "dropout":
            options = {"dropout_p": 0.1}
        case "layout of 4":
            layout = dense_layout(32, 4)
        case "split":
            layout = dense_layout(16, 2, split=2)
        case "packed":
            layout = packed_layout([0, 16], 2)
        case "not a tensor":
            q[1] = None
        case "scale":
            options = {"softmax_scale": float("nan")}
        case "deterministic":
            options = {"deterministic": "x"}
        case "gradient_dtype":
            options = {"gradient_dtype": "float32"}
    return error_of((TypeError, ValueError), ring_attention, *q, layout, group(2), **options)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("dropout", "dropout_p: got 0.1; a layout that cuts sequences at multiples of 16"),
        ("layout of 4", "layout: got 4 x 1 ranks"),
        ("split", "layout: got 1 x 2 ranks"),
        ("packed", "q: got shape (1, 8, 4, 8); (tokens, heads, head_dim) is needed"),
        ("not a tensor", "k: got NoneType"),
        ("scale", "softmax_scale: got nan; a finite number"),
        ("deterministic", "deterministic: got 'x'; True or False"),
        ("gradient_dtype", "gradient_dtype: got 'float32'; a torch.dtype"),
    ],
)
def test_bad_arguments_are_named(processes, what, said):
    assert all(said in error for error in processes.run(wrong_alike, what, ranks=2))


def wrong_in_type_alone(rank: int, wrong: dict) -> str:
    """After the right call, which the ranks agreed on and to which the wrong one is equal."""
    layout, right = dense_layout(16, 2), {"causal": True, "return_lse": True, "softcap": 1.0}
    ring_attention(*tensors(8), layout, group(2), **right)
    return error_of(TypeError, ring_attention, *tensors(8), layout, group(2), **right | wrong)


@pytest.mark.parametrize(("name", "value"), [("causal", 1), ("softcap", True), ("return_lse", 1)])
def test_a_flag_is_a_bool_and_a_bool_no_number(processes, name, value):
    errors = processes.run(wrong_in_type_alone, {name: value}, ranks=2)
    assert all(f"{name}: got {value}; " in error for error in errors)


def heads_and_ranks(rank: int) -> str:
    layout = dense_layout(32, 4, split=4)
    return error_of(ValueError, all_to_all_attention, *tensors(8, heads=6), layout)


def test_heads_that_ranks_do_not_divide(processes):
    assert all("got 6 heads" in error for error in processes.run(heads_and_ranks))


def exchanges(rank: int) -> int:
    """How many descriptions two equal calls and a third one of another shape send."""
    sent = []
    gather = dist.all_gather_object

    def counted(*args, **kwargs):
        sent.append(1)
        return gather(*args, **kwargs)

    agree.dist.all_gather_object = counted
    try:
        for tokens in (88, 88, 92):
            ring_attention(*tensors(tokens // 2), dense_layout(tokens, 2), group(2))
    finally:
        agree.dist.all_gather_object = gather
    return len(sent)


def test_a_shape_is_checked_once(processes):
    assert processes.run(exchanges, ranks=2) == [2, 2]


def kinds_of_a_mesh(rank: int) -> list[bool]:
    """Which of some calls over a mesh's groups exchange descriptions, where ranks 0 and 1 made one
    among themselves before, and no more than two kinds are remembered."""
    split, ring = work.place(Case("mesh", 4)).get_all_groups()[::-1]
    exchanged, remembered = [], agree._REMEMBERED

    def nobody_differs(group, mine) -> str:
        exchanged[-1] = True
        return ""

    def call(groups, kind) -> None:
        exchanged.append(False)
        agree.check(groups, torch.device("cpu"), lambda: ("of a test", kind), lambda: kind)

    different, agree._different, agree._REMEMBERED = agree._different, nobody_differs, 2
    try:
        if rank < 2:
            call([split], "of two ranks")
        exchanged.clear()
        for kind in ("first", "second", "first", "third", "second", "third"):
            call([split, ring], kind)
    finally:
        agree._different, agree._REMEMBERED = different, remembered
    return exchanged


def test_all_ranks_of_a_mesh_forget_at_once(processes):
    """Else one of them would wait for a word of the others, which remember."""
    wanted = [True, True, False, True, True, False]
    assert processes.run(kinds_of_a_mesh) == [wanted] * 4


def describes_nothing_wrong(rank: int) -> str:
    """On rank 1 the call cannot be told from others; its description alone would pass."""
    kind = [] if rank == 1 else ()
    args = [group(2)], torch.device("cpu"), lambda: kind, lambda: "the same"
    return error_of((TypeError, ValueError), agree.check, *args)


def test_what_cannot_be_compared_is_an_error_everywhere(processes):
    assert all("unhashable" in e for e in processes.run(describes_nothing_wrong, ranks=2))


def strides_of_nothing(rank: int) -> int:
    """How many descriptions are sent by a second call, in which rank 1 has other empty tensors."""
    layout, sent = dense_layout(1, 2, "contiguous"), []
    tokens = layout.tokens(rank)
    ring_attention(*tensors(tokens), layout, group(2))
    gather = dist.all_gather_object
    agree.dist.all_gather_object = lambda *args, **kwargs: sent.append(1) or gather(*args, **kwargs)
    try:
        q, k, v = tensors(tokens)
        if tokens == 0:
            q = torch.zeros(()).expand_as(q)
        ring_attention(q, k, v, layout, group(2))
    finally:
        agree.dist.all_gather_object = gather
    return len(sent)


def test_strides_of_a_rank_without_tokens_are_no_other_kind(processes):
    assert processes.run(strides_of_nothing, ranks=2) == [0, 0]


def unshard_wrong(rank: int) -> str:
    args = torch.zeros(1, 7, 2), dense_layout(16, 2), group(2)
    return error_of(ValueError, unshard_sequence, *args)


def test_unshard_names_the_rank(processes):
    for rank, error in enumerate(processes.run(unshard_wrong, ranks=2)):
        assert f"rank {rank} of the layout has 8" in error


def comes_late(rank: int) -> tuple[str, float]:
    """The error of rank 0, to which rank 1 sends nothing."""
    soon = datetime.timedelta(seconds=TIMEOUT)
    both = dist.new_group([0, 1], timeout=soon)
    return second_call(rank, both, how="late") if rank < 2 else ("", 0.0)


def second_call(rank: int, both: dist.ProcessGroup, how: str) -> tuple[str, float]:
    q, layout = tensors(8), dense_layout(16, 2)
    ring_attention(*q, layout, both)
    start = time.monotonic()
    if rank == 1:
        if how == "dead":
            os._exit(0)
        return "", 0.0
    try:
        ring_attention(*q, layout, both)
    except RuntimeError as error:
        return str(error), time.monotonic() - start
    return "nothing raised", 0.0


def test_a_rank_that_does_not_come_ends_in_an_error(processes):
    said, seconds = processes.run(comes_late)[0]
    assert "imed out" in said
    assert seconds < 2 * TIMEOUT


def _lives(rank: int, store: str, result) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2,
        timeout=datetime.timedelta(seconds=60),
    )  # fmt: skip
    result.put(second_call(rank, dist.group.WORLD, how="dead"))


def test_a_rank_that_dies_ends_in_an_error(tmp_path):
    context = mp.get_context("forkserver")
    result = context.SimpleQueue()
    args = (str(tmp_path / "store"), result)
    running = [context.Process(target=_lives, args=(r, *args), daemon=True) for r in range(2)]
    for process in running:
        process.start()
    try:
        running[0].join(60)
        assert not running[0].is_alive(), "hangs"
        said, seconds = result.get()
        assert said != "nothing raised"
        assert seconds < 30  # the connection ends with the process, whatever the timeout
    finally:
        for process in running:
            process.kill()
