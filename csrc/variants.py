"""The table of variants: every kernel that is compiled, one row each.

From these rows come the instantiations, the C++ registry, the matrix in docs/features.md and what
`flash_attn.explain` prints. A head dimension, a dtype or a tile is added by adding a row.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Variant:
    """One compiled kernel.

    direction: "fwd" or "bwd"; "paged", a forward over keys in pages; "decode", few query rows
        against a cache; "latent", the same with a latent cache; "append", which writes new keys to
        a cache.
    arch: family ("sm80", "sm90"). dtype: "bf16" or "fp16"; "e4m3", a forward of codes.
    head_dim, head_dim_v: the largest that it serves; smaller ones are zero-filled in shared memory.
    block_m, block_n: rows and keys of a tile. warps: 32 threads each.
    stages: buffers in shared memory for each tensor of the main loop: K and V, or in a backward Q
        and dO (with ordered dQ, d 128 has one less for dO, sm90/backward/config.h).
    scores: "plain" (a positive scale and mask limits only) or "full" (any scale, softcap, ALiBi,
        dropout as well; of decode, odd rows too).
    why: the reason for this tile, with the measured figure.
    allow_spills: bytes a thread may store to and load from local memory, summed over the code.
    tile_in_name: an earlier row serves the same calls, so the name needs the tile.
    key_warps: for a backward, warps along the keys; the others share their keys.
    cluster: CTAs that share a tile.
    second_block_n: for a forward, keys of a second tile, which has a kernel of its own and serves
        calls where it takes less time (plan/forward.cpp).
    cached_bits: of the keys and values that a decode row or Hopper's forward reads: 16, of its
        dtype, or 8, codes (e4m3) with descales.
    """

    direction: str
    arch: str
    dtype: str
    head_dim: int
    head_dim_v: int
    block_m: int
    block_n: int
    warps: int
    stages: int
    scores: str
    why: str
    allow_spills: int = 0
    tile_in_name: bool = False
    key_warps: int = 0
    cluster: int = 1
    second_block_n: int = 0
    cached_bits: int = 16

    @property
    def name(self) -> str:
        dims = f"d{self.head_dim}"
        if self.head_dim_v != self.head_dim:
            dims += f"x{self.head_dim_v}"
        tile = f"_{self.block_m}x{self.block_n}" if self.tile_in_name else ""
        codes = "_e4m3" if self.cached_bits == 8 else ""
        return f"{self.direction}_{self.arch}_{self.dtype}_{dims}_{self.scores}{tile}{codes}"

    @property
    def wide(self) -> bool:
        """Whether it is a decode row whose warps share keys, because one warp has no registers for
        all columns of O."""
        return self.direction == "decode" and self.head_dim_v > 256


def _rows(**columns) -> list[Variant]:
    """The same row for both dtypes. head_dim_v: head_dim, unless it is given."""
    columns = dict(head_dim_v=columns["head_dim"]) | columns
    return [Variant(dtype=dtype, **columns) for dtype in ("bf16", "fp16")]


def _both_levels(**columns) -> list[Variant]:
    """The same row without and with score mods."""
    return [row for scores in ("plain", "full") for row in _rows(scores=scores, **columns)]


# One warpgroup loads, each of the others has 64 rows. Where head dims differ, the row that wastes
# least comes first. These rows also serve pages of a multiple of 8 keys (sm90/forward/pages.h).
_SM90_FORWARD = dict(direction="fwd", arch="sm90", stages=2)
# At 512 and 1,024 keys, where another tile begins every few KV blocks, three stages are 1-4% faster
# than two. A fourth stage gains nothing, and a third gains nothing at d 128.
_SM90_SHORT_ROWS = _SM90_FORWARD | dict(stages=3)

_SM90_FORWARDS = [
    *_rows(**_SM90_SHORT_ROWS, scores="plain", head_dim=64, block_m=192, warps=16, block_n=128,
           why="three softmaxes hide behind the products; 160 registers, all in use"),
    *_rows(**_SM90_SHORT_ROWS, scores="plain", head_dim=96, block_m=192, warps=16, block_n=112,
           second_block_n=96,
           why="the longest of three warpgroups that does not spill: 128 keys do"),
    *_rows(**_SM90_FORWARD, scores="plain", head_dim=128, block_m=128, warps=12, block_n=128,
           second_block_n=176,
           why="512 keys on an H200: 489 TFLOP/s, 96 keys 427, 160 413; 176 where that costs less"),
    *_rows(**_SM90_FORWARD, scores="plain", head_dim=192, head_dim_v=128, block_m=128, warps=12,
           block_n=128, why="the longest that shared memory holds: 209 of 227 KiB"),
    *_rows(**_SM90_FORWARD, scores="plain", head_dim=192, block_m=128, warps=12, block_n=96,
           second_block_n=112,
           why="1k keys on an H200: 5% more than 112, the longest that fits, which 4k gain 2% by"),
    *_rows(**_SM90_FORWARD, scores="plain", head_dim=256, block_m=128, warps=12, block_n=80,
           second_block_n=64, why="the longest that shared memory holds: 225 of 227 KiB"),
    *_rows(**_SM90_SHORT_ROWS, scores="full", head_dim=64, block_m=192, warps=16, block_n=96,
           why="4k keys, ALiBi, H200: 343 TFLOP/s, 80 keys 338, 128x128 329"),
    *_rows(**_SM90_SHORT_ROWS, scores="full", head_dim=96, block_m=128, warps=12, block_n=128,
           why="4k keys, dropout, H200: 352 TFLOP/s, 192x80 321; ALiBi: both 432"),
    *_rows(**_SM90_FORWARD, scores="full", head_dim=128, block_m=128, warps=12, block_n=128,
           why="4k keys, ALiBi, H200: 508 TFLOP/s, 192x64 485; dropout: 365, 380"),
    *_rows(**_SM90_FORWARD, scores="full", head_dim=192, head_dim_v=128, block_m=128, warps=12,
           block_n=96, why="the longest that does not spill: 128 keys do"),
    *_rows(**_SM90_FORWARD, scores="full", head_dim=192, block_m=128, warps=12, block_n=96,
           allow_spills=120, why="112 keys spill more"),
    *_rows(**_SM90_FORWARD, scores="full", head_dim=256, block_m=128, warps=12, block_n=64,
           allow_spills=120, why="80 keys spill more"),
]  # fmt: skip

# A pair of CTAs has 64 rows each, and loads K and V for both; one warpgroup computes P, each of the
# others has half of O's columns.
_SM90_PAIRED_FORWARDS = _rows(
    direction="fwd", arch="sm90", cluster=2, scores="plain", head_dim=512, block_m=128, block_n=64,
    warps=12, stages=3, why="three tiles of K or V, two of P: 210 of 227 KiB",
)  # fmt: skip

# A fourth warpgroup converts codes of keys and values to 16 bits.
_SM90_CODES = dict(direction="fwd", arch="sm90", cached_bits=8, block_m=128, warps=16, stages=2)


def _sm90_forward_codes(scores: str) -> list[Variant]:
    """Keys and values are codes; they become numbers of the queries' dtype in shared memory."""
    rows = _SM90_CODES | dict(scores=scores)
    return [
        *_rows(**rows | dict(stages=3), head_dim=64, block_n=128,
               why="a fourth warpgroup of 64 rows would leave too few registers"),
        *_rows(**rows, head_dim=128, block_n=128, allow_spills=0 if scores == "plain" else 32,
               why="96 keys in three stages take a sixth more"),
        *_rows(**rows, head_dim=256, block_n=64 if scores == "plain" else 48,
               why="the longest that shared memory holds; with score mods 64 keys spill"),
    ]  # fmt: skip


# Q, K, V and P are codes in their products (sm90/forward/fp8_consumer.h). Two of the producer's
# warps transpose V.
_SM90_FP8 = [
    Variant(direction="fwd", arch="sm90", cached_bits=8, dtype="e4m3", scores=scores,
            head_dim=head_dim, head_dim_v=head_dim_v, block_m=rows, warps=4 + rows // 16,
            block_n=keys, second_block_n=second, stages=stages, allow_spills=32, why=why)
    for scores, head_dim, head_dim_v, rows, keys, second, stages, why in (
        ("plain", 64, 64, 192, 128, 192, 3, "8k keys, H200: 624 TFLOP/s, 192 keys 669; pages are "
         "loaded for tiles of up to 128 keys"),
        ("plain", 96, 96, 192, 128, 160, 3, "steps, H200: 814 TFLOP/s, of 160 keys 855; 192 spill"),
        ("plain", 128, 128, 192, 128, 0, 3, "8k keys, H200, full and causal: 919, 908 TFLOP/s; two "
         "warpgroups and 256 keys 952, 898"),
        ("plain", 192, 128, 192, 128, 0, 2, "as d 128"),
        ("plain", 192, 192, 128, 128, 160, 2, "steps, H200: 877 TFLOP/s, of 160 keys 943"),
        ("plain", 256, 256, 128, 128, 0, 2, "8k keys, H200: 1,110 TFLOP/s, 64 keys 859"),
        ("full", 64, 64, 192, 128, 0, 3, "192 keys spill a little"),
        ("full", 128, 128, 192, 128, 0, 3, "as plain"),
        ("full", 256, 256, 128, 128, 0, 2, "as plain"),
    )
]  # fmt: skip

# One warpgroup loads, each of the others has 64 keys. Figures: 8k keys, full, H200.
_SM90_BACKWARD = dict(direction="bwd", arch="sm90", stages=3, block_n=128, warps=12)

_SM90_BACKWARDS = [
    *_rows(**_SM90_BACKWARD, scores="plain", head_dim=64, block_m=128, allow_spills=212,
           why="all registers in use"),
    *_rows(**_SM90_BACKWARD, scores="plain", head_dim=96, block_m=64, allow_spills=144,
           why="128 rows do not fit the registers"),
    *_rows(**_SM90_BACKWARD, scores="plain", head_dim=128, block_m=64, allow_spills=224,
           why="128 rows do not fit the registers"),
    *_rows(**_SM90_BACKWARD, scores="full", head_dim=64, block_m=128, allow_spills=768,
           why="4k keys, softcap, H200: 0.78 of plain's rate, 64 rows 0.60"),
    *_rows(**_SM90_BACKWARD, scores="full", head_dim=96, block_m=64, allow_spills=144,
           why="as plain"),
    *_rows(**_SM90_BACKWARD, scores="full", head_dim=128, block_m=64, allow_spills=600,
           why="as plain; a softcap alone has a loop of its own"),
]  # fmt: skip

# Each CTA of the pair has 64 keys; one of its three warpgroups loads, and one has the scores.
_SM90_PAIRED = dict(
    direction="bwd", arch="sm90", cluster=2, stages=2, block_m=64, block_n=128, warps=12
)

_SM90_PAIRED_BACKWARDS = [
    *_rows(**_SM90_PAIRED | dict(stages=3), scores="plain", head_dim=192, head_dim_v=128,
           why="1k to 8k keys, H200: 3% more than with two buffers for Q and for dO"),
    *_rows(**_SM90_PAIRED, scores="plain", head_dim=192,
           why="8k keys, H200: 590 TFLOP/s; two stages for dS as well, and three for Q"),
    *_rows(**_SM90_PAIRED, scores="plain", head_dim=256, allow_spills=480,
           why="8k keys, H200: 600 TFLOP/s; all shared memory in use; the producer spills"),
    *_rows(**_SM90_PAIRED, scores="full", head_dim=192, head_dim_v=128, allow_spills=80,
           why="as plain"),
    *_rows(**_SM90_PAIRED, scores="full", head_dim=192, allow_spills=152,
           why="4k causal, H200: a softcap's loop has 0.92 of plain's rate, 0.74 in one for all"),
    *_rows(**_SM90_PAIRED, scores="full", head_dim=256, allow_spills=1368,
           why="as plain; the scores' warps spill, which have a loop for each score mod"),
    # Two pairs have half of the columns each, and add up their parts of the scores.
    *_rows(**_SM90_PAIRED | dict(cluster=4, stages=1), scores="plain", head_dim=512,
           allow_spills=420, why="8k keys, H200: 395 TFLOP/s; two buffers for Q: 224 KiB"),
]  # fmt: skip

# The first row that is large enough and fits the GPU's shared memory serves a call.
# docs/kernels/sm80_forward.md has the figures of the tiles that were not taken.
_SM80_FORWARD = dict(direction="fwd", arch="sm80", block_m=128, warps=4, stages=1)

_SM80_FORWARDS = [
    *_both_levels(**_SM80_FORWARD, head_dim=32, block_n=128,
                  why="a seventh fewer instructions a key than with 64 keys; not measured"),
    *_rows(**_SM80_FORWARD, scores="plain", head_dim=64, block_n=128,
           why="4k keys on an H200: 319 TFLOP/s, 128x64 keys 293, 8 warps 255"),
    *_rows(**_SM80_FORWARD, scores="full", head_dim=64, block_n=128, allow_spills=16,
           why="as plain"),
    *_rows(**_SM80_FORWARD, scores="plain", head_dim=96, block_n=96, allow_spills=16,
           why="4k keys on an H200: 349 TFLOP/s; 64 keys take 7% more instructions"),
    *_rows(**_SM80_FORWARD, scores="full", head_dim=96, block_n=96, allow_spills=16,
           why="as plain"),
    *_both_levels(**_SM80_FORWARD, head_dim=128, block_n=64,
                  why="4k keys on an H200: 372 TFLOP/s, 128x32 318, 8 warps 287, 64x64 301"),
    *_both_levels(**_SM80_FORWARD, head_dim=192, head_dim_v=128, block_n=48,
                  why="80 KiB: two CTAs on an A100 too, where 64 keys leave one; not measured"),
    *_both_levels(**_SM80_FORWARD | dict(block_m=64), head_dim=192, block_n=64,
                  why="2 CTAs an SM; 4k keys on an H200: 314 TFLOP/s, 128 rows by 8 warps 300"),
    *_both_levels(**_SM80_FORWARD | dict(block_m=64), head_dim=256, block_n=64,
                  why="2 CTAs an SM; causal, 1k keys: 262 TFLOP/s, 128 rows by 8 warps 223"),
    # Two warps share 16 rows, each with half of the columns. The last tile fits the 99 KiB of
    # consumer GPUs.
    *_both_levels(**_SM80_FORWARD | dict(block_m=64, warps=8), head_dim=512, block_n=32,
                  why="145 KiB, for an A100 too"),
    *_rows(**_SM80_FORWARD | dict(block_m=32), scores="full", tile_in_name=True, head_dim=512,
           block_n=16, why="68 KiB"),
]  # fmt: skip

# `why` of a backward row gives its tile's cost: bytes of shared memory per multiply-add (mma.sync
# keeps up with 0.1 on an H200) and resident CTAs of an SM. Where the plain row needs
# more shared memory than the GPU has, plain calls run a full row; the rows of _99_KIB fit consumer
# GPUs. Figures: docs/kernels/sm80_backward.md. Spills are mostly addresses that do not
# change.
_SM80_BACKWARD = dict(direction="bwd", arch="sm80")
_PLAIN = dict(**_SM80_BACKWARD, scores="plain")
_FULL = dict(**_SM80_BACKWARD, scores="full")
_99_KIB = dict(**_FULL, tile_in_name=True)

_SM80_BACKWARDS = [
    *_rows(**_PLAIN, head_dim=32, block_m=64, block_n=128, warps=4, key_warps=4, stages=2,
           why="as d 64"),
    *_rows(**_PLAIN, head_dim=64, block_m=64, block_n=128, warps=4, key_warps=4, stages=2,
           allow_spills=200, why="P and dS stay in registers; 0.10 bytes, 2 CTAs of 4 warps"),
    *_rows(**_PLAIN, head_dim=96, block_m=128, block_n=128, warps=8, key_warps=4, stages=1,
           why="0.11 bytes, 1 CTA of 8 warps; 64 rows, 2 stages: 0.125"),
    *_rows(**_PLAIN, head_dim=128, block_m=64, block_n=128, warps=8, key_warps=4, stages=2,
           allow_spills=120, why="0.1125 bytes, 1 CTA of 8 warps; 128 rows, 1 stage: 0.106"),
    *_rows(**_PLAIN, head_dim=192, head_dim_v=128, block_m=64, block_n=128, warps=8, key_warps=4,
           stages=2, allow_spills=436, why="0.106 bytes, 1 CTA of 8 warps"),
    *_rows(**_PLAIN, head_dim=192, block_m=128, block_n=64, warps=8, key_warps=2, stages=1,
           allow_spills=12, why="0.106 bytes, 1 CTA of 8 warps; 64 rows, 2 stages: 0.1375"),
    *_rows(**_PLAIN, head_dim=256, block_m=128, block_n=64, warps=8, key_warps=2, stages=1,
           allow_spills=36, why="0.10 bytes, 1 CTA of 8 warps; 64 rows, 2 stages: 0.13"),
    *_rows(**_PLAIN, head_dim=512, block_m=64, block_n=32, warps=8, key_warps=2, stages=1,
           why="201 KiB; 0.16 bytes, 1 CTA of 8 warps"),
    *_rows(**_FULL, head_dim=32, block_m=64, block_n=128, warps=8, key_warps=8, stages=2,
           why="with the plain tile's 4 warps, d 64's score mods spill 1344 bytes"),
    *_rows(**_FULL, head_dim=64, block_m=64, block_n=128, warps=8, key_warps=8, stages=2,
           why="with the plain tile's 4 warps, d 64's score mods spill 1344 bytes"),
    *_rows(**_FULL, head_dim=96, block_m=64, block_n=128, warps=8, key_warps=4, stages=2,
           why="0.125 bytes; fewer registers than the plain tile"),
    *_rows(**_99_KIB, head_dim=96, block_m=64, block_n=64, warps=4, key_warps=2, stages=2,
           allow_spills=12, why="88 KiB"),
    *_rows(**_FULL, head_dim=128, block_m=64, block_n=128, warps=8, key_warps=4, stages=2,
           allow_spills=108, why="as plain"),
    *_rows(**_99_KIB, head_dim=128, block_m=64, block_n=64, warps=8, key_warps=4, stages=1,
           why="80 KiB"),
    *_rows(**_FULL, head_dim=192, head_dim_v=128, block_m=64, block_n=64, warps=8, key_warps=2,
           stages=2, why="137 KiB, for an A100 too"),
    *_rows(**_99_KIB, head_dim=192, head_dim_v=128, block_m=32, block_n=64, warps=8, key_warps=4,
           stages=2, why="88 KiB"),
    *_rows(**_FULL, head_dim=192, block_m=64, block_n=64, warps=8, key_warps=2, stages=2,
           why="161 KiB, for an A100 too"),
    *_rows(**_99_KIB, head_dim=192, block_m=32, block_n=64, warps=8, key_warps=4, stages=1,
           why="80 KiB"),
    *_rows(**_FULL, head_dim=256, block_m=64, block_n=64, warps=8, key_warps=2, stages=1,
           allow_spills=36, why="145 KiB, for an A100 too"),
    *_rows(**_99_KIB, head_dim=256, block_m=32, block_n=32, warps=4, key_warps=2, stages=1,
           why="68 KiB"),
    # Warps share the squares of S and dP, in depth splits.
    *_rows(**_FULL, head_dim=512, block_m=32, block_n=32, warps=8, key_warps=2, stages=1,
           why="149 KiB, for an A100 too"),
    *_rows(**_99_KIB, head_dim=512, block_m=16, block_n=16, warps=4, key_warps=1, stages=1,
           why="75 KiB"),
]  # fmt: skip

# On Hopper these serve the remaining calls: pages of other sizes, and left padding. They are
# kernels of their own because a look-up in the plain kernels' loads, as a run-time flag, took their
# spills from 356 to 660 bytes (d 64) and from 244 to 300 (d 128).
_SM80_PAGED = [
    replace(
        row,
        direction="paged",
        allow_spills=16,
        why="as the forward's: " + row.why,
    )
    for row in _SM80_FORWARDS
    if row.head_dim == row.head_dim_v and row.head_dim in (64, 128, 256, 512)
]


def _sm80_decode(scores: str) -> list[Variant]:
    """block_n is one warp's keys of a step. All rows have 64 KiB of keys on their way."""
    rows = dict(direction="decode", arch="sm80", block_m=16, stages=2, scores=scores)
    return [
        *_rows(**rows, head_dim=64, block_n=32, warps=4,
               why="three CTAs an SM: 192 KiB on their way, where latency asks for 26"),
        *_rows(**rows, head_dim=128, block_n=16, warps=4,
               why="three CTAs an SM: 192 KiB on their way, where latency asks for 26"),
        # Q and O take 192 registers.
        *_rows(**rows, head_dim=256, block_n=16, warps=2,
               why="with 4 warps one CTA would fill an SM, and none of sm_86's"),
    ]  # fmt: skip


def _sm80_decode_codes(scores: str) -> list[Variant]:
    """As many bytes are on their way. Instructions take the time, and a step has some however few
    keys it has, so it has as many as registers allow."""
    rows = dict(direction="decode", arch="sm80", block_m=16, scores=scores, cached_bits=8)
    plain = dict(block_n=32, stages=2, allow_spills=48)
    full = dict(block_n=16, stages=4, allow_spills=104)
    return [
        *_rows(**rows, head_dim=64, block_n=32, warps=4, stages=4, why="as with 16 bits"),
        *_rows(**rows | (plain if scores == "plain" else full), head_dim=128, warps=4,
               why="plain: 443 instructions for 16 keys, with steps of 16 637"),
        *_rows(**rows, head_dim=256, block_n=16, warps=2, stages=4, allow_spills=108,
               why="32 keys spill more"),
    ]  # fmt: skip


# block_n is the keys of a CTA's step. The last tile fits the 99 KiB of consumer GPUs.
_WIDE_DECODE = dict(direction="decode", arch="sm80", head_dim=512, block_m=16, stages=2)

_SM80_WIDE_DECODE = [
    *_both_levels(**_WIDE_DECODE, block_n=32, warps=8,
                  why="128 KiB of keys: another stage would not fit an A100; not measured"),
    *_rows(**_WIDE_DECODE, scores="full", block_n=16, warps=4, tile_in_name=True,
           why="81 KiB; not measured"),
]  # fmt: skip

# Latent attention: head_dim is of the rotated part, and block_n the keys of a CTA's step. The last
# tile fits the 99 KiB of consumer GPUs.
_LATENT = dict(direction="latent", head_dim=64, head_dim_v=512)

_SM90_LATENT = _both_levels(
    **_LATENT, arch="sm90", block_m=64, block_n=64, warps=12, stages=3, allow_spills=64,
    why="three tiles of keys, and P in the place of a tile's rotated columns: 216 KiB",
)  # fmt: skip

_SM80_LATENT_STEP = dict(**_LATENT, arch="sm80", block_m=16, block_n=32, warps=8)

_SM80_LATENT = [
    *_both_levels(**_SM80_LATENT_STEP, stages=4,
                  why="108 KiB on their way, all that an A100 holds; H200: 64 x 4k keys 124 us"),
    *_both_levels(**_SM80_LATENT_STEP, stages=2, tile_in_name=True, why="91 KiB; not measured"),
]  # fmt: skip

# block_m is the rows of a CTA, one a warp, of any head dim up to 512.
_SM80_APPEND = _rows(
    direction="append", arch="sm80", head_dim=512, block_m=4, block_n=1, warps=4,
    stages=1, scores="plain", why="16 bytes a lane; a step of generation has few rows",
)  # fmt: skip

VARIANTS: list[Variant] = [
    *_SM90_FORWARDS,
    *_SM90_PAIRED_FORWARDS,
    *_sm90_forward_codes("plain"),
    *_sm90_forward_codes("full"),
    *_SM90_FP8,
    *_SM90_BACKWARDS,
    *_SM90_PAIRED_BACKWARDS,
    *_SM80_FORWARDS,
    *_SM80_BACKWARDS,
    *_SM80_PAGED,
    *_sm80_decode("plain"),
    *_sm80_decode("full"),
    *_sm80_decode_codes("plain"),
    *_sm80_decode_codes("full"),
    *_SM80_WIDE_DECODE,
    *_SM90_LATENT,
    *_SM80_LATENT,
    *_SM80_APPEND,
]

# Bytes a thread that the kernels of other files may spill. K 512, and of vectors K 256: a thread
# has 128 registers, and all states of a segment lie in them; factors of vectors have 80, for three
# CTAs an SM. Gradients of vectors, V 256: half of the registers are the state; it spills once a
# chunk, beside 2,000 instructions.
FILES_THAT_SPILL = {
    "walk_bf16": 240, "walk_fp16": 240, "step": 8,
    "vector_bf16": 80, "vector_fp16": 80, "vector_reverse_bf16": 100, "vector_reverse_fp16": 100,
    "vector_walks_bf16": 8, "vector_walks_fp16": 8,
    "vector_gradients_bf16": 480, "vector_gradients_fp16": 520,
}  # fmt: skip
