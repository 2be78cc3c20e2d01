"""The public functions: exact attention over a sequence that several ranks share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from flash_attn.api import checks
from flash_attn.call import MaxLogits, Options, Window, pick
from flash_attn.cpu.common import max_of_heads
from flash_attn.dispatch import autograd, calls
from flash_attn.distributed import agree
from flash_attn.distributed.all_to_all import heads_for_rows, repeated_heads, rows_for_heads
from flash_attn.distributed.calls import Dropout, Scoring
from flash_attn.distributed.gather import Gather, GatherAttention
from flash_attn.distributed.layout import Layout
from flash_attn.distributed.ring import Ring, RingAttention
from flash_attn.distributed.tiles import Mask

_DROPOUT_BLOCK = 16  # rows and keys that kernels draw bits for together


class _Options(NamedTuple):
    """What a call says beside its tensors."""

    dropout_p: float
    softmax_scale: float | None
    causal: bool
    window_size: Window
    softcap: float
    alibi_slopes: Tensor | None
    deterministic: bool
    s_aux: Tensor | None
    return_max_logits: MaxLogits
    gradient_dtype: torch.dtype | None = None

    def of_a_call(self) -> Options:
        """As a call on one GPU has them."""
        return pick(Options, self._asdict())

    def mask(self) -> Mask:
        left, right = checks.window(self.window_size)
        alibi = self.alibi_slopes is not None
        block = _DROPOUT_BLOCK if self.dropout_p > 0 else 1
        right = 0 if self.causal else max(right, -1)
        return Mask(left=max(left, -1), right=right, alibi=alibi, block=block)


class _Ranks(NamedTuple):
    """Where this process is: in the ring, and among those that share a shard by heads."""

    ring: dist.ProcessGroup | None  # None: of one rank
    split: dist.ProcessGroup | None

    @property
    def shape(self) -> tuple[int, int]:
        return tuple(1 if g is None else dist.get_world_size(g) for g in (self.ring, self.split))

    @property
    def shard(self) -> int:
        return 0 if self.ring is None else dist.get_rank(self.ring)

    @property
    def part(self) -> int:
        return 0 if self.split is None else dist.get_rank(self.split)

    def rank(self, layout: Layout) -> int:
        return self.shard * layout.split + self.part


@torch.compiler.disable
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    group: dist.ProcessGroup | None = None,
    *,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    s_aux: Tensor | None = None,
    return_lse: bool = False,
    return_max_logits: MaxLogits = False,
    gradient_dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """Self-attention in which keys and values travel between ranks while kernels run.

    Every rank of the group calls it with its tokens, in the order of :func:`shard_sequence`, and
    gets the outputs of these: what one GPU would compute, up to rounding. For few long sequences;
    with a zigzag layout all ranks have the same work under a causal mask, and nothing masked is
    computed. Keys that no query of a rank sees do not travel to it.

    Arguments:
        q: (batch, tokens, heads, head_dim); for a packed layout (tokens, heads, head_dim).
            ``tokens`` is ``layout.tokens(rank)``, and may be 0.
        k, v: the same with heads_k, a divisor of heads; they travel with heads_k heads.
        layout: with ``split`` 1 and as many ranks as the group; the same on every rank.
        group: None is the default group.
        dropout_p: drops what one GPU would drop that draws what rank 0 draws, from the default
            generator of its device. It needs a layout with ``multiple=16``.
        alibi_slopes: (heads,) or, for each sequence, (batch, heads); float32. Distances are those
            of the whole sequence.
        s_aux: (heads,): sinks, counted once. Its gradient is this rank's tokens' share, as that of
            any weight is; sum it over ranks.
        softmax_scale, causal, window_size, softcap: as in ``flash_attn_func``.
        deterministic: the backward repeats bit for bit; sums over ranks always have one order.
        return_lse: also return the log-sum-exp, (batch, heads, tokens), packed (heads, tokens).
        return_max_logits: also return the largest logit of each head, (heads,), over all ranks;
            "row": of each row of this rank, like the log-sum-exp.
        gradient_dtype: in which gradients of keys and values travel; None is the inputs' dtype,
            which loses nothing where a step is one call of a kernel. They are summed in float32
            (two ranks: in the inputs' dtype).

    Returns:
        out, as q; with return_lse ``(out, lse)``, both differentiable. Largest logits come last.

    Raises:
        ValueError: an argument that is not as above or, when a kind of call is made for the first
            time, differs between ranks; on every rank.
        RuntimeError: of torch.distributed, when a rank died or did not come before the timeout.
    """
    return _whole_shards("ring", RingAttention, Ring, locals())


@torch.compiler.disable
def gather_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    group: dist.ProcessGroup | None = None,
    *,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    s_aux: Tensor | None = None,
    return_lse: bool = False,
    return_max_logits: MaxLogits = False,
    gradient_dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """Self-attention with all keys and values on every rank, each computing its own tokens.

    For many packed sequences: with a "balanced" or "contiguous" layout and a causal mask a rank's
    tokens are one call of a kernel. All keys of all sequences have to fit; the backward gathers
    them again instead of keeping them.

    Arguments, what is returned and what is raised are those of :func:`ring_attention`.
    """
    return _whole_shards("gather", GatherAttention, Gather, locals())


@torch.compiler.disable
def all_to_all_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    group: dist.ProcessGroup | None = None,
    *,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    s_aux: Tensor | None = None,
    return_lse: bool = False,
    return_max_logits: MaxLogits = False,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """Self-attention in which each rank has all tokens of some heads.

    Jacobs et al. 2023, "DeepSpeed Ulysses", arXiv:2309.14509. Balanced under any mask, with a
    kernel's call for the whole sequence; at most as many ranks as heads. Where there are fewer
    heads of keys than ranks, these travel to each rank that needs them.

    Arguments:
        q: as in :func:`ring_attention`; the group's ranks must divide heads.
        layout: with ``split`` as many as the group's ranks.
        s_aux: its gradient is that of this rank's heads; sum it over ranks.

    The others, what is returned and what is raised are those of :func:`ring_attention`.
    """
    return _by_heads("all-to-all", _Ranks(None, _ranks_of(group)), locals())


@torch.compiler.disable
def mesh_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    mesh: DeviceMesh,
    *,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    s_aux: Tensor | None = None,
    return_lse: bool = False,
    return_max_logits: MaxLogits = False,
    gradient_dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """A ring in the mesh's first dimension, all-to-all in its second: across hosts, and inside one.

    Arguments:
        layout: with ``split`` the size of the mesh's second dimension, and a ring of its first.
        mesh: of two dimensions. A submesh of a larger one will do: ``mesh["ring", "heads"]``.

    The others, what is returned and what is raised are those of :func:`ring_attention` and
    :func:`all_to_all_attention`.
    """
    if mesh.ndim != 2:
        raise ValueError(f"mesh: got {mesh.ndim} dimensions; (ring, all-to-all) is needed")
    return _by_heads("mesh", _Ranks(*mesh.get_all_groups()), locals())


def _ranks_of(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if group is None and not dist.is_initialized():
        raise RuntimeError("no process group: call torch.distributed.init_process_group first")
    return group or dist.group.WORLD


def _checked(
    method: str, ranks: _Ranks, arguments: dict[str, Any]
) -> tuple[tuple[Tensor, ...], Layout, _Options, bool]:
    """q, k and v, the layout, options with bools of Python's, and return_lse, of a function's
    arguments. All ranks of its groups look at everything that can be wrong, once for each kind."""
    tensors = tuple(arguments[name] for name in "qkv")
    layout, return_lse = arguments["layout"], arguments["return_lse"]
    options = pick(_Options, arguments)
    agree.check(
        [group for group in (ranks.split, ranks.ring) if group is not None],
        getattr(tensors[0], "device", torch.device("cpu")),
        lambda: (*_kind(method, tensors, layout, options), type(return_lse)),
        lambda: _description(method, ranks, tensors, layout, options, return_lse),
    )
    causal, deterministic = bool(options.causal), bool(options.deterministic)
    wanted = checks.max_logits(options.return_max_logits)
    options = options._replace(causal=causal, deterministic=deterministic, return_max_logits=wanted)
    return tensors, layout, options, return_lse


def _kind(method: str, tensors, layout: Layout, options: _Options) -> tuple:
    """Decides whether a call is one of those that were agreed on."""
    about = tuple(
        # True equals 1, and is another argument.
        (x.dtype, x.device.type, tuple(x.shape)) if isinstance(x, Tensor) else (type(x), x)
        for x in (*tensors, *options._replace(window_size=checks.window(options.window_size)))
    )
    slopes = options.alibi_slopes
    wants = slopes is not None and slopes.requires_grad  # which they may not
    # The strides of a rank without tokens say nothing, and may differ from call to call.
    whole_rows = tuple(x.is_contiguous() or x.stride(-1) == 1 for x in tensors)
    return method, layout.description, about, whole_rows, wants


def _description(
    method: str, ranks: _Ranks, tensors, layout: Layout, options: _Options, return_lse: bool
) -> str:
    """What must be the same on every rank; raises for what is wrong on this one."""
    if not isinstance(layout, Layout):
        raise TypeError(f"layout: got {type(layout).__name__}; a Layout is needed")
    if (layout.ring, layout.split) != ranks.shape:
        raise ValueError(
            f"layout: got {layout.ring} x {layout.split} ranks (ring x split); this call has "
            f"{ranks.shape[0]} x {ranks.shape[1]}"
        )
    form = "(tokens, heads, head_dim)" if layout.packed else "(batch, tokens, heads, head_dim)"
    rank = ranks.rank(layout)
    for name, x in zip("qkv", tensors, strict=True):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: got {type(x).__name__}; a torch.Tensor is needed")
        if x.dim() != form.count(",") + 1:
            raise ValueError(f"{name}: got shape {tuple(x.shape)}; {form} is needed")
        if x.shape[-3] != layout.tokens(rank):
            raise ValueError(
                f"{name}: got {x.shape[-3]} tokens (shape {tuple(x.shape)}); rank {rank} has "
                f"{layout.tokens(rank)} of a {layout.description}"
            )
    q, k, v = (x[None] if layout.packed else x for x in tensors)
    checks.dense(q, k, v)
    batch = len(layout.lengths) if layout.packed else q.shape[0]
    checks.flag(return_lse, "return_lse")
    checks.scoring(q, batch, checks.flags(options.of_a_call()))
    if not isinstance(options.gradient_dtype, (torch.dtype, type(None))):
        raise TypeError(f"gradient_dtype: got {options.gradient_dtype!r}; a torch.dtype is needed")
    if options.dropout_p > 0 and not layout.cut_at_multiples_of(_DROPOUT_BLOCK):
        raise ValueError(
            f"dropout_p: got {options.dropout_p}; a layout that cuts sequences at multiples of "
            f"{_DROPOUT_BLOCK} is needed: make it with multiple={_DROPOUT_BLOCK}"
        )
    if q.shape[2] % layout.split:
        raise ValueError(
            f"q: got {q.shape[2]} heads; a multiple of the {layout.split} ranks is needed"
        )
    shapes = [(x.shape[0], *x.shape[2:]) for x in (q, k, v)]
    plain = options._replace(window_size=checks.window(options.window_size))
    said = [(tuple(x.shape), x.dtype) if isinstance(x, Tensor) else x for x in plain]
    return f"{method}, {layout.description}, (batch, heads, head_dim) {shapes}, {q.dtype}, {said}"


class _Call(NamedTuple):
    """A call's tensors, all (b, s, h, d), and what is to be done with them."""

    tensors: Sequence[Tensor]  # q, k, v
    head_dim_v: int  # of the caller's v; the tensors' may be padded
    options: _Options  # with a scale
    dropout: Dropout | None

    @classmethod
    def of(cls, ranks: _Ranks, tensors, layout: Layout, options: _Options) -> _Call:
        q, k, v = (x[None] if layout.packed else x for x in tensors)
        if options.softmax_scale is None:
            options = options._replace(softmax_scale=q.shape[-1] ** -0.5)
        dropout = None
        if options.dropout_p > 0:
            state = _same_state(ranks, q.device)
            dropout = Dropout(options.dropout_p, state, heads=q.shape[2], first_head=0)
        padded = calls._padded(q, k, v) if calls._has_to_pad(q, v) else (q, k, v)
        return cls(padded, v.shape[-1], options, dropout)


def _same_state(ranks: _Ranks, device: torch.device) -> Tensor:
    """What the first rank of all draws; every rank draws, so that generators stay in step."""
    state = autograd.draw_rng_state(device)
    for group in (ranks.ring, ranks.split):
        if group is not None:
            dist.broadcast(state, dist.get_global_rank(group, 0), group=group)
    return state


def _attend(
    function, job, ranks: _Ranks, call: _Call, layout: Layout
) -> tuple[Tensor, Tensor, Tensor | None]:
    """q, k, v (b, s, h, d) of this shard -> out (b, s, h, dv), lse and, if wanted, largest logits,
    (b, h, s)."""
    options = call.options
    scoring = Scoring(
        softmax_scale=options.softmax_scale, softcap=options.softcap, packed=layout.packed,
        alibi_slopes=options.alibi_slopes, deterministic=options.deterministic,
        dropout=call.dropout, max_logits=options.return_max_logits is not False,
    )  # fmt: skip
    place = job(layout, ranks.ring, ranks.shard, options.mask(), scoring, options.gradient_dtype)
    out, lse, largest = function.apply(*call.tensors, options.s_aux, place)
    if call.head_dim_v != out.shape[-1]:  # whose backward is a copy
        out = out.narrow(-1, 0, call.head_dim_v)
    return out, lse, largest


def _whole_shards(method: str, function, job, arguments: dict[str, Any]):
    """Each rank has a shard."""
    ranks = _Ranks(_ranks_of(arguments["group"]), None)
    tensors, layout, options, return_lse = _checked(method, ranks, arguments)
    call = _Call.of(ranks, tensors, layout, options)
    out, lse, largest = _attend(function, job, ranks, call, layout)
    largest = _largest(largest, ranks, options)
    return _results(out, lse if return_lse else None, largest, layout.packed)


def _by_heads(method: str, ranks: _Ranks, arguments: dict[str, Any]):
    """Each rank has a part of a shard's rows, and gets all of its rows for a part of the heads."""
    tensors, layout, options, return_lse = _checked(method, ranks, arguments)
    call = _Call.of(ranks, tensors, layout, options)
    q, k, v = call.tensors
    counts = layout.part_tokens(ranks.shard)
    heads = q.shape[2] // layout.split
    mine = slice(ranks.part * heads, (ranks.part + 1) * heads)
    slopes, s_aux = (
        None if x is None else x[..., mine] for x in (options.alibi_slopes, options.s_aux)
    )
    whole = [
        rows_for_heads(x, counts, ranks.split)
        for x in (q, repeated_heads(k, layout.split), repeated_heads(v, layout.split))
    ]
    call = call._replace(
        tensors=whole,
        options=call.options._replace(alibi_slopes=slopes, s_aux=s_aux),
        dropout=call.dropout and replace(call.dropout, first_head=mine.start),
    )
    out, lse, largest = _attend(RingAttention, Ring, ranks, call, layout)
    out = heads_for_rows(out, counts, ranks.split)
    lse, largest = (
        None if x is None else _own_rows(x, counts, ranks)
        for x in (lse if return_lse else None, largest)
    )
    return _results(out, lse, _largest(largest, ranks, options), layout.packed)


def _own_rows(x: Tensor, counts: list[int], ranks: _Ranks) -> Tensor:
    """(b, h / ranks, sum(counts)) -> (b, h, s)"""
    rows = heads_for_rows(x.transpose(1, 2).unsqueeze(-1), counts, ranks.split)
    return rows.squeeze(-1).transpose(1, 2).contiguous()


def _largest(rows: Tensor | None, ranks: _Ranks, options: _Options) -> Tensor | None:
    """Rows' largest logits (b, h, s) as the call wants them: as they are, or (h,) of all ranks."""
    if rows is None or options.return_max_logits == "row":
        return rows
    heads = max_of_heads(rows)
    for group in (ranks.ring, ranks.split):
        if group is not None:
            dist.all_reduce(heads, op=dist.ReduceOp.MAX, group=group)
    return heads


def _results(out: Tensor, lse: Tensor | None, largest: Tensor | None, packed: bool):
    if packed:
        out, lse = out[0], None if lse is None else lse[0]
        largest = largest[0] if largest is not None and largest.dim() == 3 else largest
    results = [x for x in (out, lse, largest) if x is not None]
    return tuple(results) if len(results) > 1 else out
