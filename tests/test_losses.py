"""Cross entropy against the plain float64 formula, and sharded over two processes against one."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F

from flash_attn.losses.cross_entropy import CrossEntropyLoss
from flash_attn.ops.triton import cross_entropy as cross_entropy_module
from flash_attn.ops.triton.cross_entropy import cross_entropy_loss

ROWS, VOCAB = 13, 22


def example(dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(ROWS, VOCAB, generator=generator, dtype=torch.float64) * 4
    labels = torch.randint(0, VOCAB, (ROWS,), generator=generator)
    labels[::4] = -100
    return logits.to(dtype).requires_grad_(), labels


def plain(logits, labels, smoothing=0.0, scale=1.0, lse_square_scale=0.0):
    """Per-row losses in float64."""
    z = logits.double() * scale
    losses = F.cross_entropy(z, labels, reduction="none", label_smoothing=smoothing)
    z_losses = lse_square_scale * torch.logsumexp(z, 1).square() * (labels != -100)
    return losses + z_losses, z_losses


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("scale", [1.0, 0.7])
@pytest.mark.parametrize("lse_square_scale", [0.0, 1e-2])
@pytest.mark.parametrize("inplace", [False, True])
def test_losses_and_gradient(smoothing, scale, lse_square_scale, inplace, monkeypatch):
    monkeypatch.setattr(cross_entropy_module, "_CHUNK_ELEMENTS", 4 * VOCAB)  # several chunks
    logits, labels = example()
    expected, expected_z = plain(logits, labels, smoothing, scale, lse_square_scale)
    dlosses = torch.randn_like(expected)
    (expected_grad,) = torch.autograd.grad(expected, logits, dlosses)
    losses, z_losses = cross_entropy_loss(
        logits,
        labels,
        label_smoothing=smoothing,
        logit_scale=scale,
        lse_square_scale=lse_square_scale,
        inplace_backward=inplace,
    )
    torch.testing.assert_close(losses, expected)
    torch.testing.assert_close(z_losses, expected_z)
    assert not z_losses.requires_grad
    (grad,) = torch.autograd.grad(losses, logits, dlosses)
    torch.testing.assert_close(grad, expected_grad)
    assert (grad.data_ptr() == logits.data_ptr()) == inplace


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_logits(dtype):
    logits, labels = example(dtype)
    losses, _ = cross_entropy_loss(logits, labels)
    assert losses.dtype == torch.float32
    expected, _ = plain(logits.detach(), labels)
    torch.testing.assert_close(losses.double(), expected, rtol=1e-5, atol=1e-5)
    (grad,) = torch.autograd.grad(losses.sum(), logits)
    exact = logits.detach().double().requires_grad_()
    (expected_grad,) = torch.autograd.grad(plain(exact, labels)[0].sum(), exact)
    torch.testing.assert_close(grad.double(), expected_grad, rtol=0, atol=4e-3)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_module_equals_torch(reduction, smoothing):
    logits, labels = example()
    ours = CrossEntropyLoss(reduction=reduction, label_smoothing=smoothing)(logits, labels)
    torchs = torch.nn.CrossEntropyLoss(reduction=reduction, label_smoothing=smoothing)(
        logits, labels
    )
    torch.testing.assert_close(ours, torchs)


@pytest.mark.parametrize("options", [{}, {"inplace_backward": True}, {"precomputed_lse": True}])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_hessian(smoothing, options, monkeypatch):
    monkeypatch.setattr(cross_entropy_module, "_CHUNK_ELEMENTS", 4 * VOCAB)
    logits, labels = example()
    with torch.no_grad():
        logits[0] = float("nan")  # ignored
    if "precomputed_lse" in options:
        options = {"precomputed_lse": torch.logsumexp(logits.detach() * 0.7, 1)}

    def hessian_product(losses):
        direction = torch.arange(logits.numel(), dtype=torch.float64).view_as(logits).sin()
        (gradient,) = torch.autograd.grad(losses.square().sum(), logits, create_graph=True)
        return torch.autograd.grad(gradient[1:], logits, direction[1:])[0]

    # First: the last use of the logits may overwrite them.
    expected = hessian_product(plain(logits[1:], labels[1:], smoothing, 0.7, 1e-2)[0])
    losses, _ = cross_entropy_loss(
        logits, labels, label_smoothing=smoothing, logit_scale=0.7, lse_square_scale=1e-2, **options
    )
    torch.testing.assert_close(hessian_product(losses), expected)


def test_second_derivatives_of_the_module():
    logits, labels = example()
    module = CrossEntropyLoss(label_smoothing=0.1, lse_square_scale=1e-2)
    assert torch.autograd.gradgradcheck(lambda x: module(x, labels), logits)


def test_module_returns_z_loss():
    logits, labels = example()
    loss, z_loss = CrossEntropyLoss(lse_square_scale=1e-3, return_z_loss=True)(logits, labels)
    losses, z_losses = plain(logits, labels, lse_square_scale=1e-3)
    used = (labels != -100).sum()
    torch.testing.assert_close(loss, losses.sum() / used)
    torch.testing.assert_close(z_loss, z_losses.sum() / used)


def test_precomputed_lse():
    logits, labels = example()
    lse = torch.logsumexp(logits.detach(), 1)
    torch.testing.assert_close(
        cross_entropy_loss(logits, labels, precomputed_lse=lse)[0], plain(logits, labels)[0]
    )


def test_ignored_rows_may_hold_nan():
    logits, labels = example()
    with torch.no_grad():
        logits[labels == -100] = float("nan")
    losses, _ = cross_entropy_loss(logits, labels, label_smoothing=0.1)
    assert (losses[labels == -100] == 0).all()
    assert losses.isfinite().all()
    (grad,) = torch.autograd.grad(losses.sum(), logits)
    assert (grad[labels == -100] == 0).all()
    assert grad.isfinite().all()


def test_bad_input():
    with pytest.raises(ValueError, match="\\(rows, vocab\\) is needed"):
        cross_entropy_loss(torch.randn(2, 3, 4), torch.zeros(2, 3, dtype=torch.long))
    with pytest.raises(ValueError, match="labels: got shape"):
        cross_entropy_loss(torch.randn(2, 4), torch.zeros(3, dtype=torch.long))
    logits, labels = example()
    for wrong in (VOCAB, -1):
        with pytest.raises(ValueError, match=f"labels: got {wrong}; accepted are 0 to 21, and"):
            cross_entropy_loss(logits, labels.index_fill(0, torch.tensor(3), wrong))
    with pytest.raises(ValueError, match="reduction: got 'average'"):
        CrossEntropyLoss(reduction="average")


def test_labels_are_classes():
    logits = torch.randn(3, VOCAB)
    loss = CrossEntropyLoss()
    said = r"labels: got dtype torch\.float32; classes of rows, int64 or int32, are needed"
    for floats in (torch.zeros(3), torch.full((3, VOCAB), 1 / VOCAB)):
        with pytest.raises(ValueError, match=f"{said}; probabilities of classes are not offered"):
            loss(logits, floats)
    with pytest.raises(ValueError, match=r"labels: got dtype torch\.bool.* are needed$"):
        loss(logits, torch.ones(3, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"logits: got dtype torch\.int64; a floating-point one"):
        loss(torch.zeros(3, VOCAB, dtype=torch.int64), torch.zeros(3, dtype=torch.int64))
    for name, call in {"labels": (logits, [1, 2, 3]), "logits": (logits.numpy(), 0)}.items():
        with pytest.raises(TypeError, match=rf"{name}: got \w+; a torch\.Tensor is needed"):
            loss(*call)


def test_labels_of_32_bits():
    logits, labels = example()
    for reduction in ("mean", "none"):
        loss = CrossEntropyLoss(reduction=reduction)
        ours, theirs = loss(logits, labels.int()), loss(logits, labels)
        assert torch.equal(ours, theirs)
        gradients = [torch.autograd.grad(x.sum(), logits)[0] for x in (ours, theirs)]
        assert torch.equal(*gradients)


def _shard_worker(rank, world, rendezvous):
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    try:
        for smoothing, lse_square_scale in ((0.0, 0.0), (0.1, 1e-2)):
            _check_shard(rank, world, smoothing, lse_square_scale)
    finally:
        dist.destroy_process_group()


def _check_shard(rank, world, smoothing, lse_square_scale):
    logits, labels = example()
    expected, _ = plain(logits, labels, smoothing, 0.7, lse_square_scale)
    dlosses = torch.linspace(-1, 1, ROWS, dtype=torch.float64)
    (expected_grad,) = torch.autograd.grad(expected, logits, dlosses)
    columns = slice(rank * VOCAB // world, (rank + 1) * VOCAB // world)
    shard = logits.detach()[:, columns].clone().requires_grad_()
    losses, _ = cross_entropy_loss(
        shard,
        labels,
        label_smoothing=smoothing,
        logit_scale=0.7,
        lse_square_scale=lse_square_scale,
        process_group=dist.group.WORLD,
    )
    torch.testing.assert_close(losses, expected)
    (grad,) = torch.autograd.grad(losses, shard, dlosses, retain_graph=True)
    torch.testing.assert_close(grad, expected_grad[:, columns])
    with pytest.raises(RuntimeError, match="no second derivative with process_group"):
        torch.autograd.grad(losses, shard, dlosses, create_graph=True)


@pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")
def test_vocabulary_sharded_over_two_processes(tmp_path):
    mp.spawn(_shard_worker, args=(2, tmp_path / "rendezvous"), nprocs=2)
