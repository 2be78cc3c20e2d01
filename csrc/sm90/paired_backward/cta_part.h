// Which part of its cluster's work a CTA has: half of the tile's keys and, where the cluster has
// two pairs, half of the columns.
#pragma once

#include <cstdint>

namespace flash::sm90::backward {

template <class Config>
struct CtaPart {
  uint32_t rank;  // in the cluster; the CTAs of a pair follow each other

  // Which half of the tile's keys it has: 0 or 1.
  __device__ uint32_t key_half() const {
    return Config::kSplitsColumns ? rank % Config::kPair : rank;
  }
  __device__ int first_key() const { return static_cast<int>(key_half()) * Config::kKeys; }

  __device__ int first_column() const { return column_half() * Config::kColumns; }  // of Q and K
  __device__ int first_column_v() const {
    return column_half() * Config::kColumnsV;
  }  // of V and dO

  // The CTA with the other keys and the same columns, the first of the two, and the CTA with the
  // other columns and the same keys.
  __device__ uint32_t other_keys() const { return rank ^ 1; }
  __device__ uint32_t pair_begin() const { return rank - key_half(); }
  __device__ uint32_t other_columns() const { return rank ^ Config::kPair; }

 private:
  __device__ int column_half() const {
    return Config::kSplitsColumns ? static_cast<int>(rank) / Config::kPair : 0;
  }
};

}  // namespace flash::sm90::backward
