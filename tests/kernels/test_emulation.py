"""The emulated Hopper instructions by themselves: small kernels that are right, and their faults.

The layouts and descriptors are CuTe's, the expected values torch's.
"""

from __future__ import annotations

import pytest
import torch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
GEN = torch.Generator().manual_seed(5)


def random(*shape: int, dtype=torch.float32) -> torch.Tensor:
    """Small integers, exact in every dtype and every sum."""
    return torch.randint(-4, 5, shape, generator=GEN).to(dtype)


def addresses(*tensors: torch.Tensor) -> list[int]:
    """Where the kernels find them."""
    return [x.data_ptr() for x in tensors]


def product(selftest, name: str, fault: str = "none") -> tuple[torch.Tensor, torch.Tensor]:
    """1 + a @ b of a kernel of products.cpp, and what it should be."""
    case = selftest.products()[name]
    a = random(64, case["k"], dtype=DTYPES[case["dtype"]])
    b = random(case["n"], case["k"], dtype=a.dtype)
    c = torch.full((64, case["n"]), float("nan"))
    stored_a = a if case["a_along_k"] else a.T.contiguous()
    stored_b = b if case["b_along_k"] else b.T.contiguous()
    selftest.product(name, addresses(stored_a, stored_b, c), fault)
    return c, 1 + a.float() @ b.float().T


def test_products(selftest):
    """Every swizzle, major and width, A from either memory."""
    names = list(selftest.products())
    assert len(names) == 30
    for name in names:
        c, expected = product(selftest, name)
        assert torch.equal(c, expected), name


ONE = "bf16_shared_kk_swizzle128_n64"
REGISTERS = "bf16_registers_kn_swizzle64_n192"


@pytest.mark.parametrize(
    ("name", "fault", "message"),
    [
        (ONE, "too many bytes", "deadlock:(.|\n)*mbarrier 0x.* parity 0 .* 16 bytes to come"),
        (ONE, "no wgmma fence", "with no wgmma.fence"),
        (ONE, "no async fence", "a bulk store .* no fence.proxy.async"),
        (ONE, "no store wait", "ends before its bulk stores have read"),
        (ONE, "early overwrite", "changed before a bulk store has read it"),
        (REGISTERS, "touched operand", "operand A of a wgmma has changed"),
    ],
)
def test_faults_are_found(selftest, name, fault, message):
    with pytest.raises(RuntimeError, match=message):
        product(selftest, name, fault)
    c, expected = product(selftest, name)  # nothing is left behind
    assert torch.equal(c, expected)


@pytest.mark.parametrize("fault", ["no load wait", "late wgmma wait"])
def test_what_has_yet_to_come_is_nan(selftest, fault):
    c, _ = product(selftest, ONE, fault)
    assert c.isnan().all()


def test_a_box_and_a_descriptor_have_to_agree_on_the_swizzle(selftest):
    c, expected = product(selftest, "bf16_shared_kk_swizzle32_n64", "wrong swizzle")
    assert not torch.equal(c, expected)


def test_boxes_narrower_than_their_swizzle(selftest):
    with pytest.raises(ValueError, match="narrower than its swizzle"):
        selftest.tensor_map(random(64, 64).data_ptr(), [64, 64], [32, 64], 128, [])


def pipeline(selftest, fault: str = "none") -> tuple[torch.Tensor, torch.Tensor]:
    """a @ b over 9 and a half steps of k, by a loading warp and a multiplying warpgroup."""
    k = 9 * 64 + 32
    a, b = random(64, k, dtype=torch.bfloat16), random(128, k, dtype=torch.bfloat16)
    c = torch.full((64, 128), float("nan"))
    selftest.pipeline(addresses(a, b, c), k, fault)
    return c, a.float() @ b.float().T


def test_pipeline(selftest):
    c, expected = pipeline(selftest)
    assert torch.equal(c, expected)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("early release", "operand [AB] of a wgmma has changed"),
        ("no empty wait", "operand [AB] of a wgmma has changed|too many"),
        ("no release", "deadlock:(.|\n)*mbarrier .*128 of 128 arrivals"),
    ],
)
def test_pipeline_faults_are_found(selftest, fault, message):
    with pytest.raises(RuntimeError, match=message):
        pipeline(selftest, fault)


# A tensor of fp32 with the innermost dimension first, a box of it, and where it begins.
BOXES = [
    ([16, 5], [8, 4], [4, 1]),
    ([16, 5], [8, 4], [12, 3]),  # over both ends
    ([16, 5], [8, 4], [-3, -2]),
    ([12, 5, 3], [4, 2, 2], [8, 4, 2]),
    ([8, 3, 2, 3], [8, 2, 1, 2], [0, 2, 1, -1]),
    ([8, 3, 2, 3, 2], [4, 3, 2, 1, 2], [2, 0, 0, 1, 0]),
    ([8, 3], [4, 3], [40, -70]),  # nothing of it
]


def box_of(x: torch.Tensor, box: list[int], begin: list[int]) -> torch.Tensor:
    """The box of `x`, dimensions outermost first here, zeros outside."""
    out = torch.zeros(box[::-1])
    for index in torch.cartesian_prod(*(torch.arange(n) for n in out.shape)).tolist():
        at = [i + o for i, o in zip(index, begin[::-1], strict=True)]
        if all(0 <= i < n for i, n in zip(at, x.shape, strict=True)):
            out[tuple(index)] = x[tuple(at)]
    return out


@pytest.mark.parametrize(("tensor", "box", "begin"), BOXES, ids=str)
def test_boxes(selftest, tensor, box, begin):
    x = random(*tensor[::-1])
    dense = torch.full(box[::-1], float("nan"))
    selftest.box("load", tensor, box, begin, x.data_ptr(), dense.data_ptr(), 0)
    assert torch.equal(dense, box_of(x, box, begin))

    # Back: where the tensor is, and nowhere else.
    inside = box_of(torch.ones_like(x), box, begin).bool()
    source = dense + 7
    for what in ("store", "add"):
        target = torch.zeros(tensor[::-1]) + 100
        selftest.box(what, tensor, box, begin, target.data_ptr(), source.data_ptr(), 0)
        written = box_of(target, box, begin)
        base = 100 if what == "add" else 0
        assert torch.equal(written[inside], (source + base)[inside])
        assert (target != 100).sum() <= inside.sum()
        assert (target - 100).abs().gt(0).sum() == written[inside].ne(100).sum()


@pytest.mark.parametrize("span", [32, 64, 128])
def test_swizzled_boxes(selftest, span):
    """16-byte chunk c of a row goes to c XOR bits of the row, as the CUDA manual draws it."""
    columns = span // 4
    x = random(16, columns)
    memory = torch.full((16, columns), float("nan"))
    selftest.box("load", [columns, 16], [columns, 16], [0, 0], *addresses(x, memory), span)
    flat = memory.view(-1, 4)  # chunks
    for row in range(16):
        for chunk in range(span // 16):
            line = (row * span + chunk * 16) // 128  # of 128 bytes
            at = row * span // 16 + (chunk ^ line % 8 % (span // 16))
            assert torch.equal(flat[at], x[row, chunk * 4 : chunk * 4 + 4])
    back = torch.zeros_like(x)
    selftest.box("store", [columns, 16], [columns, 16], [0, 0], *addresses(back, memory), span)
    assert torch.equal(back, x)


def test_what_the_driver_refuses(selftest):
    x = random(64, 64, dtype=torch.bfloat16)
    make = selftest.tensor_map
    make(x.data_ptr(), [64, 64], [64, 64], 128, [])
    for args in [
        (x.data_ptr() + 2, [64, 64], [64, 64], 128, []),
        (x.data_ptr(), [64, 64], [64, 257], 128, []),
        (x.data_ptr(), [60, 64], [64, 64], 128, []),  # rows of 120 bytes
        (x.data_ptr(), [64, 64], [4, 64], 0, []),  # 8 bytes
        (x.data_ptr(), [64, 64], [128, 8], 128, []),  # wider than the swizzle
        (x.data_ptr(), [64, 0], [64, 64], 128, []),
        (x.data_ptr(), [64, 64], [64, 64], 128, [1 << 40]),
        (x.data_ptr(), [64] * 6, [8] * 6, 0, []),
    ]:
        with pytest.raises(ValueError, match="no tensor map"):
            make(*args)


def test_bulk_copies(selftest):
    x, y = random(100), torch.zeros(100)
    selftest.bulk(*addresses(x, y), 96 * 4)
    assert torch.equal(y, torch.cat([x[:96], torch.zeros(4)]))
    with pytest.raises(RuntimeError, match="not 16-byte aligned"):
        selftest.bulk(*addresses(x, y), 100)


@pytest.mark.parametrize("transposed", [False, True])
def test_stmatrix(selftest, transposed):
    x = random(16, 16, dtype=torch.float16)
    y = torch.zeros_like(x)
    selftest.stmatrix(*addresses(x, y), transposed)
    assert torch.equal(y, x.T if transposed else x)


@pytest.mark.parametrize("what", ["collectives", "named barriers", "mbarrier phases", "registers"])
def test_threads(selftest, what):
    selftest.threads(what)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("half a warp at a barrier", "a part of a warp arrives"),
        (
            "one warp too few",
            r"deadlock:\n  block 0, threads 32 to 127 wait for named barrier 11 \(96 of 128",
        ),
        ("arriving twice", "arrives twice"),
        ("one arrival too many", "one arrival too many"),
        ("one arrival too few", r"mbarrier 0x400, parity 0 \(1 of 32 arrivals"),
        ("polling for ever", "deadlock:(.|\n)*what it polls"),
        ("an mbarrier overwritten", "overwritten"),
        ("no mbarrier", "not initialised"),
        ("a divergent vote", "deadlock:(.|\n)*the rest of its warp"),
        ("too many registers", "registers .setmaxnreg.inc."),
        ("a copy of words between words", "cp.async of 8 bytes is not aligned"),
        ("past shared memory", "writes past its shared memory"),
    ],
)
def test_threads_faults_are_found(selftest, what, message):
    with pytest.raises(RuntimeError, match=message):
        selftest.threads(what)


def clusters(selftest, what: str, blocks: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """x [16, 32], and what a kernel of clusters.cpp makes of it: out [blocks, 16, 32].

    Eight clusters of two blocks do the same, in all orders.
    """
    x = random(16, 32)
    out = torch.full((blocks, 16, 32), -1.0)
    selftest.clusters(what, blocks, *addresses(x, out))
    return x, out


@pytest.mark.parametrize(
    "what",
    ["ranks", "memories", "barrier", "barrier without some", "remote arrivals", "remote bytes"],
)
def test_clusters(selftest, what):
    clusters(selftest, what)


def test_either_block_of_a_cluster_may_be_the_first(selftest):
    _, out = clusters(selftest, "orders")
    assert set(out.flatten()[:8].tolist()) == {0, 1}


@pytest.mark.parametrize("what", ["multicast", "multicast, announced late"])
def test_multicast(selftest, what):
    """Each block loads half of x for both."""
    x, out = clusters(selftest, what)
    assert torch.equal(out, x.expand_as(out))


def test_multicast_to_the_other_block(selftest):
    x, out = clusters(selftest, "multicast to the other")
    halves, rank = out.view(8, 2, 2, 8, 32), torch.arange(2)
    assert torch.equal(halves[:, rank, 1 - rank], x.view(2, 8, 32)[1 - rank].expand(8, 2, 8, 32))
    assert halves[:, rank, rank].isnan().all()


def test_copies_to_the_other_block(selftest):
    _, out = clusters(selftest, "copies")
    halves, rank = out.view(8, 2, 2, 256), torch.arange(2)
    sent = torch.arange(16)[:, None] * 1000.0 + torch.arange(256)
    assert torch.equal(halves[:, rank, 1 - rank], sent.view(8, 2, 256)[:, 1 - rank])
    assert halves[:, rank, rank].isnan().all()


def test_what_has_yet_to_come_from_another_block_is_nan(selftest):
    _, out = clusters(selftest, "multicast, not waited for")
    assert out.isnan().all()
    _, out = clusters(selftest, "copies, not waited for")
    halves, rank = out.view(8, 2, 2, 256), torch.arange(2)
    assert halves[:, rank, 1 - rank].isnan().all()
    assert (halves[:, rank, rank] == 0).all()


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("an unfenced source", "thread 0: a copy to another block at .* no fence.proxy.async"),
        ("an unfenced target", "thread 0 in block [01]: a copy from another block at .* no fence"),
        ("a source changed", "changed before a copy to another block has read it"),
        ("a sender that ends", "block 0: the block ends before 1 of its copies to other blocks"),
        ("a receiver that ends", "block 0: block 1 of the cluster has ended"),
        ("a multicast to a block that ends", "block 1: the block ends before 1 of its bulk loads"),
        ("an arrival at a block that has ended", "block 0, thread .*: block 1 .* has ended"),
        ("an arrival at a block that has not begun", "thread .*: block [01] .* not have begun"),
        (
            "a deadlock of two blocks",
            r"deadlock:\n  block 0, threads 0 to 63 wait for mbarrier .*64 of 64 arrivals"
            r"(.|\n)*block 1, threads 0 to 63 wait for the cluster's barrier \(64 of 128",
        ),
        ("an mbarrier that is not there yet", "thread 0 in block [01]: mbarrier .*not initialised"),
        ("an mbarrier that others may not see yet", "another block, with no fence_barrier_init"),
        ("arriving twice", "has not waited since the last time"),
        ("waiting first", "waits at the cluster's barrier, and has not arrived"),
        ("no such block", "there is no block 2 in a cluster of 2"),
        ("no such block of a mask", "there is no block 2 in a cluster of 2"),
        ("no block of a mask", "a multicast load of no block"),
        ("past the second block's memory", "writes past its shared memory"),
    ],
)
def test_cluster_faults_are_found(selftest, what, message):
    with pytest.raises(RuntimeError, match=message):
        clusters(selftest, what)
    clusters(selftest, "multicast")  # nothing is left behind


def test_grids_are_whole_clusters(selftest):
    with pytest.raises(ValueError, match="does not take 3 blocks in clusters of 2"):
        clusters(selftest, "ranks", blocks=3)


ONE_AT_A_TIME = 1


@pytest.mark.parametrize("at_a_time", [ONE_AT_A_TIME, 3, 16])
def test_blocks_side_by_side(selftest, at_a_time):
    for seed in range(5):
        done = selftest.side_by_side("in turns", 20, at_a_time, seed)
        assert done == list(range(1, 21))


def test_chance_says_how_far_blocks_are(selftest):
    def order(at_a_time: int, seed: int) -> list[int]:
        return selftest.side_by_side("which of them is done when", 8, at_a_time, seed)

    assert order(ONE_AT_A_TIME, 1) == list(range(1, 9))
    assert order(8, 1) == order(8, 1)
    assert len({tuple(order(8, seed)) for seed in range(10)}) > 5


def test_blocks_that_do_not_run_at_the_same_time_do_not_wait_for_each_other(selftest):
    selftest.side_by_side("waiting for the last block", 16, 16, 0)
    with pytest.raises(RuntimeError, match=r"deadlock:\n  block \d, thread(.|\n)*what it polls"):
        selftest.side_by_side("waiting for the last block", 16, 15, 0)


def test_faults_that_one_block_at_a_time_does_not_show(selftest):
    def right(at_a_time: int, seed: int) -> bool:
        done = selftest.side_by_side("a turn passed too early", 16, at_a_time, seed)
        return done == list(range(1, 17))

    assert right(ONE_AT_A_TIME, 0)
    assert not all(right(16, seed) for seed in range(10))
