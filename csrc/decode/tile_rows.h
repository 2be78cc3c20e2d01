// The tile of a CTA, whose rows are queries with all heads of a KV head (core/work_tile.h), its
// keys, and its shared memory.
#pragma once

#include "core/mask.h"
#include "core/paging.h"
#include "core/piece_schedule.h"
#include "core/work_tile.h"
#include "decode/config.h"

namespace flash::decode {

// The rows and the mask of one tile of one sequence.
template <class Config>
struct DecodeTile {
  using Element = typename Config::Element;
  BlockInfo info;
  SequenceMask mask;
  int sequence;
  int head_kv;
  int first_row;  // of the sequence's rows by pack-GQA
  int rows;       // rows of the kBlockM that exist

  __device__ DecodeTile(DecodeParams const& params, int sequence_, int tile)
      : info(params.fwd.seqlens, sequence_),
        mask(params.fwd.mask, info.seqlen_q, info.seqlen_k),
        sequence(sequence_) {
    int const row_block = params.heads_kv.quotient(tile);
    head_kv = params.heads_kv.remainder(tile, row_block);  // neighbours read neighbouring memory
    first_row = row_block * Config::kBlockM;
    int64_t const below = int64_t(info.seqlen_q) * params.group.divisor - first_row;
    rows = static_cast<int>(below < Config::kBlockM ? below : Config::kBlockM);
  }

  // The rows that belong to no sequence (see VarlenRows) have neither slopes nor sinks.
  __device__ bool is_sequence(FwdParams const& p) const { return sequence < p.seqlens.batch; }

  // Row r's query, and its head, counted over all query heads
  __device__ QueryRow row(FastDiv const& group, int r) const {
    QueryRow const row = query_row(group, first_row + r);
    return {row.query, head_kv * static_cast<int>(group.divisor) + row.head};
  }
};

// The keys that any row of a sequence sees, from a multiple of kKeyAlignment on. These are cut into
// pieces.
template <class Config>
__device__ KeyLimits visible_keys(SequenceMask const& mask, int seqlen_q) {
  int const begin = mask.begin(0) & -Config::kKeyAlignment, end = mask.end(seqlen_q - 1);
  return {begin, end > begin ? end : begin};
}

// A CTA's steps over these keys.
template <class Config>
__device__ int num_units(KeyLimits keys) {
  static_assert(cutlass::is_pow2<Config::kUnit>::value, "a shift, as long as it is unsigned");
  return int(unsigned(keys.end - keys.begin + Config::kUnit - 1) / Config::kUnit);
}

// The CTAs that share a piece, those of a cluster or one alone, and this CTA's rank among them.
struct PieceShare {
  int log2;  // of their number

  __device__ int blocks() const { return 1 << log2; }
  __device__ int rank() const { return static_cast<int>(blockIdx.x) & (blocks() - 1); }
  __device__ int piece() const { return static_cast<int>(blockIdx.x) >> log2; }

  // The rows to merge go round-robin to the CTAs, and in a CTA to its threads, which have so many
  // rows at a time.
  __device__ int first_row(int number) const { return (number << log2) + rank(); }
  __device__ int row_step(int rows) const { return rows << log2; }
};

// The work of one CTA: keys [begin, end) of a tile.
template <class Config>
struct DecodeWork {
  Piece piece;
  DecodeTile<Config> tile;
  int begin;
  int end;
  bool has_first_keys;  // also if the tile has no keys
  KeyPages pages;
  typename Config::Cached const* k;  // of the tile's KV head
  typename Config::Cached const* v;
};

// What undoes the factors of Q's rows beside codes (decode/code_queries.h).
template <class Config, bool = Config::kCodes>
struct RowFactorStorage {
  float inverse_factors[Config::kBlockM];
};

template <class Config>
struct RowFactorStorage<Config, false> {};

template <class Config>
struct DecodeStorage : RowFactorStorage<Config> {
  union {  // merging begins when all keys have been read
    RingStorage<Config> ring[Config::kWarps];
    MergeStorage<Config> merge;
    PieceMergeStorage<Config> pieces;
  };
  // Q, until the warps have it in registers.
  alignas(16) array_aligned<typename Config::Element, Config::kBlockM * Config::kQueryStride> q;
  // DecodeWork is here and read again at each use: in registers it would make the kernel spill.
  alignas(16) char work[sizeof(DecodeWork<Config>)];
};

template <class Config>
constexpr int kSmemBytes = sizeof(DecodeStorage<Config>);

}  // namespace flash::decode
