// Boxes, runs of bytes, and stmatrix.
#include "cases.h"
#include "core/dynamic_smem.h"

namespace selftest {

namespace {

using Barrier = cutlass::arch::ClusterTransactionBarrier;

template <class Copy, class... Args>
void with_coordinates(Copy copy, std::vector<int> const& c, Args... args) {
  switch (c.size()) {
    case 2:
      return copy(args..., c[0], c[1]);
    case 3:
      return copy(args..., c[0], c[1], c[2]);
    case 4:
      return copy(args..., c[0], c[1], c[2], c[3]);
    default:
      return copy(args..., c.at(0), c.at(1), c.at(2), c.at(3), c.at(4));
  }
}

// One thread copies between shared memory, bit by bit as it is, and `dense`.
void box_kernel(CUtensorMap const map, std::string const what, std::vector<int> const begin,
                char* dense, int bytes) {
  char* const box = flash::dynamic_smem();
  auto* const full = reinterpret_cast<uint64_t*>(box + (bytes + 7) / 8 * 8);
  if (threadIdx.x > 0) {
    return;
  }
  if (what == "load") {
    Barrier::init(full, 1);
    Barrier::arrive_and_expect_tx(full, bytes);
    with_coordinates([](auto... all) { SM90_TMA_LOAD::copy(all...); }, begin, &map, full,
                     uint64_t{0}, box);
    Barrier::wait(full, 0);
    std::memcpy(dense, box, bytes);
    return;
  }
  std::memcpy(box, dense, bytes);
  cutlass::arch::fence_view_async_shared();
  if (what == "store") {
    with_coordinates([](auto... all) { SM90_TMA_STORE::copy(all...); }, begin, &map, box);
  } else {
    with_coordinates([](auto... all) { SM90_TMA_REDUCE_ADD::copy(all...); }, begin, &map, box);
  }
  tma_store_arrive();
  tma_store_wait<0>();
}

void bulk_kernel(char const* from, char* to, int bytes) {
  char* const run = flash::dynamic_smem();
  auto* const full = reinterpret_cast<uint64_t*>(run + (bytes + 7) / 8 * 8);
  if (threadIdx.x > 0) {
    return;
  }
  Barrier::init(full, 1);
  Barrier::expect_transaction(full, bytes);
  Barrier::arrive(full);
  SM90_BULK_COPY_G2S::copy(from, full, run, bytes);
  Barrier::wait(full, 0);
  SM90_BULK_COPY_S2G::copy(run, to, bytes);
  tma_store_arrive();
  tma_store_wait<0>();
}

// A warp's mma fragments of 16 x 16, through stmatrix to shared memory, and out as rows.
template <bool kTransposed>
void stmatrix_kernel(half_t const* input, half_t* output) {
  auto* const rows = reinterpret_cast<half_t*>(flash::dynamic_smem());  // [16][16]
  int const lane = threadIdx.x;
  uint32_t registers[4];  // matrix m: rows m % 2 * 8, columns m / 2 * 8
  for (int m = 0; m < 4; ++m) {
    int const row = m % 2 * 8 + lane / 4, column = m / 2 * 8 + lane % 4 * 2;
    std::memcpy(&registers[m], input + row * 16 + column, sizeof(uint32_t));
  }
  int const m = lane / 8, i = lane % 8;
  int const row = kTransposed ? m / 2 * 8 + i : m % 2 * 8 + i;
  int const column = kTransposed ? m % 2 * 8 : m / 2 * 8;
  using Store = std::conditional_t<kTransposed, SM90_U16x8_STSM_T, SM90_U32x4_STSM_N>;
  Store::copy(registers[0], registers[1], registers[2], registers[3],
              *reinterpret_cast<uint128_t*>(rows + row * 16 + column));
  __syncwarp();
  std::copy_n(rows + lane * 8, 8, output + lane * 8);
}

}  // namespace

void run_boxes(std::string const& what, std::vector<int64_t> const& tensor,
               std::vector<int> const& box, std::vector<int> const& begin, void* global,
               void* dense, int span_bytes) {
  CUtensorMap const map =
      make_map(global, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, tensor, box, span_bytes);
  int bytes = sizeof(float);
  for (int const size : box) {
    bytes *= size;
  }
  launch<box_kernel>(1, 32, bytes + 16, map, what, begin, static_cast<char*>(dense), bytes);
}

void run_bulk(void const* from, void* to, int bytes) {
  launch<bulk_kernel>(1, 32, bytes + 16, static_cast<char const*>(from), static_cast<char*>(to),
                      bytes);
}

void run_stmatrix(void const* input, void* output, bool transposed) {
  auto const* const from = static_cast<half_t const*>(input);
  auto* const to = static_cast<half_t*>(output);
  transposed ? launch<stmatrix_kernel<true>>(1, 32, 512, from, to)
             : launch<stmatrix_kernel<false>>(1, 32, 512, from, to);
}

}  // namespace selftest
