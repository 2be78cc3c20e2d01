"""Padded batches to packed ones and back, with gradients."""

import pytest
import torch

from flash_attn.bert_padding import (
    index_first_axis,
    index_put_first_axis,
    pad_input,
    rearrange,
    unpad_input,
    unpad_input_for_concatenated_sequences,
)

LENGTHS = [3, 0, 5, 1]
SEQLEN = 5


def mask_of(lengths, seqlen=SEQLEN):
    return torch.arange(seqlen) < torch.tensor(lengths)[:, None]


@pytest.mark.parametrize("tail", [(), (4,), (2, 3)])
@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.int64, torch.float32])
def test_round_trip(tail, mask_dtype):
    x = torch.randn(4, SEQLEN, *tail)
    mask = mask_of(LENGTHS)
    packed, indices, cu_seqlens, max_seqlen, seqused = unpad_input(x, mask.to(mask_dtype))
    torch.testing.assert_close(packed, torch.cat([row[:n] for row, n in zip(x, LENGTHS)]))
    assert cu_seqlens.dtype == torch.int32
    assert cu_seqlens.tolist() == [0, 3, 3, 8, 9]
    assert isinstance(max_seqlen, int)
    assert max_seqlen == 5
    assert seqused.dtype == torch.int32
    assert seqused.tolist() == LENGTHS
    padded = pad_input(packed, indices, 4, SEQLEN)
    expected = torch.where(mask.view(4, SEQLEN, *[1] * len(tail)), x, 0)
    torch.testing.assert_close(padded, expected)


def test_unused_tokens_keep_their_place():
    x = torch.randn(2, 4, 3)
    used = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0]])
    unused = torch.tensor([[0, 0, 1, 0], [0, 0, 0, 0]])
    packed, indices, cu_seqlens, max_seqlen, seqused = unpad_input(x, used, unused)
    assert indices.tolist() == [0, 1, 2, 4]
    assert cu_seqlens.tolist() == [0, 3, 4]
    assert max_seqlen == 3
    assert seqused.tolist() == [2, 1]
    torch.testing.assert_close(packed, x.flatten(0, 1)[indices])


def test_indices_may_be_int32():
    # transformers decodes with cu_seqlens[:-1] as the indices of one token per row.
    x = torch.randn(3, 4)
    indices = torch.tensor([0, 1, 2], dtype=torch.int32)
    torch.testing.assert_close(pad_input(x, indices, 3, 1), x[:, None])
    torch.testing.assert_close(index_first_axis(x, indices), x)


def test_gradients_are_zero_at_padding_only():
    x = torch.randn(4, SEQLEN, 3, dtype=torch.float64, requires_grad=True)
    mask = mask_of(LENGTHS)

    def there_and_back(x):
        packed, indices, *_ = unpad_input(x, mask)
        return pad_input(packed.square(), indices, 4, SEQLEN)

    assert torch.autograd.gradcheck(there_and_back, x)
    there_and_back(x).sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.detach() * mask[..., None])


def test_repeated_indices_add_their_gradients():
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    indices = torch.tensor([0, 2, 2])
    assert torch.autograd.gradcheck(lambda x: index_first_axis(x, indices), x)


def test_index_put_gradient():
    values = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    indices = torch.tensor([3, 1])
    out = index_put_first_axis(values, indices, 5)
    assert out.shape == (5, 3)
    torch.testing.assert_close(out[3], values[0])
    assert torch.autograd.gradcheck(lambda v: index_put_first_axis(v, indices, 5), values)


def test_concatenated_sequences():
    x = torch.randn(2, 6, 2)
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [4, 0, 0, 0, 0, 0]])
    packed, indices, cu_seqlens, max_seqlen = unpad_input_for_concatenated_sequences(x, lengths)
    torch.testing.assert_close(packed, torch.cat((x[0, :5], x[1, :4])))
    assert cu_seqlens.tolist() == [0, 2, 5, 9]
    assert cu_seqlens.dtype == torch.int32
    assert isinstance(max_seqlen, int)
    assert max_seqlen == 4
    torch.testing.assert_close(pad_input(packed, indices, 2, 6)[:, :4], x[:, :4])


def test_empty_batch():
    packed, indices, cu_seqlens, max_seqlen, _ = unpad_input(torch.randn(0, 4, 2), torch.ones(0, 4))
    assert packed.shape == (0, 2)
    assert cu_seqlens.tolist() == [0]
    assert max_seqlen == 0
    assert pad_input(packed, indices, 0, 4).shape == (0, 4, 2)


def test_rearrange():
    x = torch.randn(2, 3, 4)
    torch.testing.assert_close(rearrange(x, "b s (h d) -> (b s) h d", h=2), x.reshape(6, 2, 2))


def test_bad_masks():
    with pytest.raises(ValueError, match="attention_mask: got shape"):
        unpad_input(torch.randn(2, 4, 3), torch.ones(2, 5))
    with pytest.raises(ValueError, match="unused_mask: got shape"):
        unpad_input(torch.randn(2, 4, 3), torch.ones(2, 4), torch.ones(4))
    with pytest.raises(ValueError, match="sums to 5"):
        unpad_input_for_concatenated_sequences(torch.randn(1, 4, 3), torch.tensor([[2, 3, 0, 0]]))


def test_pad_input_says_what_does_not_fit():
    x = torch.randn(3, 4)
    with pytest.raises(ValueError, match=r"indices: got shape \(2,\); one for each row .*, \(3,\)"):
        pad_input(x, torch.tensor([0, 1]), 2, 3)
    with pytest.raises(ValueError, match="indices: got 6; less than batch \\* seqlen = 6"):
        pad_input(x, torch.tensor([0, 1, 6]), 2, 3)
