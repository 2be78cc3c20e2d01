"""Where a sequence's rows and keys lie, for each way to give lengths."""

import itertools

from hypothesis import given
from hypothesis import strategies as st


@st.composite
def batches(draw):
    """Per sequence: query rows, key rows, keys in use, left padding (some of it past the use).

    Keys in use may be more than there are, or -1 for a sequence that pads a captured graph.
    """
    return [
        (
            draw(st.integers(0, 9)),
            allocated := draw(st.integers(0, 9)),
            draw(st.integers(-1, allocated + 3)),
            draw(st.integers(0, allocated)),
        )
        for _ in range(draw(st.integers(1, 6)))
    ]


def starts(lengths):
    return [0, *itertools.accumulate(lengths)]


def optional(values, given):
    return list(values) if given else None


def keys_of(info):
    assert info.seqlen_k >= 0  # padding past the keys in use leaves none
    return list(range(info.row_k, info.row_k + info.seqlen_k))


@given(batches(), st.booleans(), st.booleans())
def test_varlen(core, batch, has_used, has_leftpad):
    q, allocated, used, leftpad = zip(*batch)
    cu_q, cu_k = starts(q), starts(allocated)
    for sequence in range(len(batch)):
        info = core.block_info(
            sequence=sequence,
            batch=len(batch),
            seqlen_q=max(q),
            seqlen_k=max(allocated),
            total_q=cu_q[-1],
            cu_q=cu_q,
            cu_k=cu_k,
            total_k=cu_k[-1],
            used_k=optional(used, has_used),
            leftpad_k=optional(leftpad, has_leftpad),
        )
        keys = list(range(cu_k[sequence], cu_k[sequence + 1]))
        in_use = keys[: max(0, used[sequence])] if has_used else keys
        assert (info.row_q, info.seqlen_q) == (cu_q[sequence], q[sequence])
        assert info.slots_k == allocated[sequence]
        assert keys_of(info) == (in_use[leftpad[sequence] :] if has_leftpad else in_use)


@given(batches(), st.booleans(), st.booleans())
def test_cache(core, batch, has_used, has_leftpad):
    """[b, s, h, d] tensors: rows count from the start of the batch entry."""
    _, _, used, leftpad = zip(*batch)
    capacity = 9
    for sequence in range(len(batch)):
        info = core.block_info(
            sequence=sequence,
            batch=len(batch),
            seqlen_q=4,
            seqlen_k=capacity,
            used_k=optional(used, has_used),
            leftpad_k=optional(leftpad, has_leftpad),
        )
        in_use = list(range(min(used[sequence], capacity) if has_used else capacity))
        assert (info.row_q, info.seqlen_q) == (0, 4)
        assert keys_of(info) == (in_use[leftpad[sequence] :] if has_leftpad else in_use)


@given(st.integers(-1, 12), st.integers(0, 4), st.integers(0, 9), st.integers(-1, 4))
def test_appended_keys_and_entries_of_a_cache(core, used, new, leftpad, entry):
    capacity, entries = 9, 3
    info = core.block_info(
        sequence=1, batch=2, seqlen_q=4, seqlen_k=capacity, used_k=[5, used], new_k=new,
        leftpad_k=[0, leftpad], batch_k=[2, entry], batches_k=entries,
    )  # fmt: skip
    exists = 0 <= entry < entries and used >= 0
    in_use = list(range(min(used + new, capacity) if exists else 0))
    assert keys_of(info) == in_use[leftpad:]
    assert info.batch_k == (entry if 0 <= entry < entries else -1)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(0, 9))
def test_rows_behind_the_last_sequence(core, q, behind):
    """They are one more sequence, without keys; so are the keys behind the last one, unseen."""
    cu_q = starts(q)
    total = cu_q[-1] + behind
    info = core.block_info(
        sequence=len(q), batch=len(q), total_q=total, cu_q=cu_q, cu_k=cu_q, total_k=total + 3
    )
    assert (info.row_q, info.seqlen_q, info.seqlen_k) == (cu_q[-1], behind, 0)
    assert (info.row_k, info.slots_k) == (cu_q[-1], behind + 3)


@given(
    st.lists(st.integers(0, 40), max_size=6), st.integers(0, 40), st.integers(1, 17), st.booleans()
)
def test_row_blocks_have_room(core, q, behind, block_m, dense):
    """Every row block of every sequence has a number of its own."""
    if dense:
        q = [behind] * len(q)
        first, count = core.row_blocks(block_m=block_m, batch=len(q), seqlen_q=behind)
    else:
        cu_q, batch = starts(q), len(q)
        q = [*q, behind]  # the rows behind the last sequence
        first, count = core.row_blocks(block_m=block_m, batch=batch, total_q=sum(q), cu_q=cu_q)
    needed = [-(-rows // block_m) for rows in q]
    ends = [start + n for start, n in zip(first, needed, strict=True)]
    assert all(end <= start for end, start in zip(ends, [*first[1:], count], strict=False))


@given(st.lists(st.integers(0, 4), max_size=6), st.integers(0, 5))
def test_the_sequence_of_a_row(core, lengths, behind):
    cu = starts(lengths)
    total = cu[-1] + behind
    owners = [i for i, length in enumerate(lengths) for _ in range(length)]
    for row, owner in enumerate(owners + [len(lengths)] * behind):
        assert core.sequence_of(row=row, total=total, cu=cu) == owner


@given(st.lists(st.integers(-9, 30), min_size=1, max_size=6), st.integers(0, 9))
def test_the_sequence_of_a_row_is_one_of_the_batch(core, cu, row):
    assert 0 <= core.sequence_of(row=row, total=10, cu=cu) < len(cu)
