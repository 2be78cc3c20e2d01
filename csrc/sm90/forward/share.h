// The share of the GPU that a launch takes beside one of the decode kernel (core/side_by_side.h).
#pragma once

#include "core/block_info.h"
#include "core/mask.h"
#include "core/side_by_side.h"
#include "core/warp_lanes.h"
#include "sm90/forward/args.h"

namespace flash::sm90::forward {

// Work of this lane's sequences; the lanes of one warp have all sequences between them.
template <class Config>
__device__ MixedWork mixed_work(ForwardArgs const& args) {
  FwdParams const& p = args.params;
  int const block_rows = Config::kConsumers * args.rows.template queries_of<Config>();
  int const heads = Config::kPackGqa ? p.heads_kv : p.heads_q;
  MixedWork work;
  for (int b = WarpLanes{}.index(); b < p.seqlens.batch; b += WarpLanes::kCount) {
    BlockInfo const info(p.seqlens, b);
    SequenceMask const mask(p.mask, info.seqlen_q, info.seqlen_k);
    // Few queries count all keys that they see, many queries those that the middle one sees.
    bool const few = info.seqlen_q <= p.seqlens.few_q;
    int const last = few ? info.seqlen_q - 1 : info.seqlen_q / 2;
    float const keys = float(max(mask.end(last) - mask.begin(few ? 0 : last), 0));
    if (few) {
      work.decode_keys += info.seqlen_q > 0 ? keys * float(p.heads_kv) : 0.f;
    } else {
      float const tiles = float(num_m_blocks(info.seqlen_q, block_rows) * heads);
      work.tiles += tiles;
      work.tile_keys += tiles * keys;
    }
  }
  return work;
}

// How many CTAs share the tiles: those of the lowest numbers. One warp calls it before tiles are
// looked for.
template <class Config>
__device__ int sharing_blocks(ForwardArgs const& args) {
  int const all = static_cast<int>(gridDim.x);
  if (args.params.seqlens.few_q == 0) {
    return all;
  }
  MixedWork work = mixed_work<Config>(args);
#pragma unroll
  for (int distance = WarpLanes::kCount / 2; distance > 0; distance /= 2) {
    work.tiles += __shfl_xor_sync(WarpLanes::kAll, work.tiles, distance);
    work.tile_keys += __shfl_xor_sync(WarpLanes::kAll, work.tile_keys, distance);
    work.decode_keys += __shfl_xor_sync(WarpLanes::kAll, work.decode_keys, distance);
  }
  return forward_blocks(work, Config::kBlockM, all);
}

}  // namespace flash::sm90::forward
