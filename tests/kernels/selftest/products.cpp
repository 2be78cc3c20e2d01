// TMA loads both operands, wgmma multiplies them, TMA stores the product. Descriptors come from
// CuTe's layouts, as in csrc/sm90.
#include "cases.h"
#include "core/dynamic_smem.h"

namespace selftest {

namespace {

using GMMA::Major;

template <class Element, Major kMajor, int kSpan>
using Atom = std::conditional_t<
    kSpan == 128, GMMA::Layout_SW128_Atom<Element, kMajor>,
    std::conditional_t<kSpan == 64, GMMA::Layout_SW64_Atom<Element, kMajor>,
                       std::conditional_t<kSpan == 32, GMMA::Layout_SW32_Atom<Element, kMajor>,
                                          GMMA::Layout_INTER_Atom<Element, kMajor>>>>;

// (kRows, kK) in shared memory: runs as wide as the swizzle along the contiguous dimension, one
// after the other, which is what boxes of that width leave behind.
template <class Element, Major kMajor, int kSpan, int kRows, int kK>
using Tile =
    decltype(tile_to_shape(Atom<Element, kMajor, kSpan>{}, Shape<Int<kRows>, Int<kK>>{},
                           std::conditional_t<kMajor == Major::K, Step<_1, _2>, Step<_2, _1>>{}));

template <class Element_, int kN_, Major kMajorA_, Major kMajorB_, int kSpan_, bool kRegisters_>
struct Config {
  using Element = Element_;
  static constexpr int kN = kN_, kK = 64, kSpan = kSpan_;
  static constexpr int kRun = (kSpan ? kSpan : 16) / 2;  // elements
  static constexpr Major kMajorA = kMajorA_, kMajorB = kMajorB_;
  static constexpr bool kRegisters = kRegisters_;
  using TileA = Tile<Element, kMajorA, kSpan, 64, kK>;
  using TileB = Tile<Element, kMajorB, kSpan, kN, kK>;
  using Sizes = Shape<_64, Int<kN>, Int<kK>>;
  using Mma = std::conditional_t<
      kRegisters,
      decltype(make_tiled_mma(
          GMMA::rs_op_selector<Element, Element, float, Sizes, Major::K, kMajorB>())),
      decltype(make_tiled_mma(
          GMMA::ss_op_selector<Element, Element, float, Sizes, kMajorA, kMajorB>()))>;
};

template <class Config>
struct Storage {
  using Element = typename Config::Element;
  alignas(1024) Element a[64 * Config::kK];
  alignas(1024) Element b[Config::kN * Config::kK];
  alignas(1024) float c[64 * Config::kN];
  alignas(8) uint64_t full;
};

template <class Config, Major kMajor, int kRows>
void load_tile(CUtensorMap const& map, typename Config::Element* smem, uint64_t* full) {
  constexpr int kWide = kMajor == Major::K ? Config::kK : kRows;
  constexpr int kLong = kMajor == Major::K ? kRows : Config::kK;
  for (int run = 0; run < kWide; run += Config::kRun) {
    SM90_TMA_LOAD_2D::copy(&map, full, 0, smem + run * kLong, run, 0);
  }
}

struct Maps {
  CUtensorMap a, b, c;
};

template <class Config>
void product_kernel(Maps const maps, Fault fault) {
  using Barrier = cutlass::arch::ClusterTransactionBarrier;
  auto& smem = *reinterpret_cast<Storage<Config>*>(flash::dynamic_smem());
  bool const first = threadIdx.x == 0;
  if (first) {
    Barrier::init(&smem.full, 1);
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();
  if (first) {
    uint32_t const more = fault == Fault::kTooManyBytes ? 16 : 0;
    Barrier::arrive_and_expect_tx(&smem.full, sizeof(smem.a) + sizeof(smem.b) + more);
    load_tile<Config, Config::kMajorA, 64>(maps.a, smem.a, &smem.full);
    load_tile<Config, Config::kMajorB, Config::kN>(maps.b, smem.b, &smem.full);
  }
  if (fault != Fault::kNoLoadWait) {
    Barrier::wait(&smem.full, 0);
  }

  typename Config::Mma mma;
  auto slice = mma.get_slice(threadIdx.x);
  Tensor a = make_tensor(make_smem_ptr(smem.a), typename Config::TileA{});
  Tensor b = make_tensor(make_smem_ptr(smem.b), typename Config::TileB{});
  Tensor c = partition_fragment_C(mma, Shape<_64, Int<Config::kN>>{});
  Tensor operand_b = slice.partition_fragment_B(b);
  Tensor operand_a = slice.partition_fragment_A(a);
  if constexpr (Config::kRegisters) {
    copy(slice.partition_A(a), operand_a);
  }
  fill(c, 1.f);
  if (fault != Fault::kNoWgmmaFence) {
    warpgroup_arrive();
  }
  for (int k = 0; k < size<2>(operand_a); ++k) {
    cute::gemm(mma, operand_a(_, _, k), operand_b(_, _, k), c);
  }
  warpgroup_commit_batch();
  if constexpr (Config::kRegisters) {
    if (fault == Fault::kTouchOperand) {
      operand_a(threadIdx.x % size(operand_a)) = typename Config::Element(0.f);
    }
  }
  if (fault != Fault::kLateWgmmaWait) {
    warpgroup_wait<0>();
  }

  Tensor out = make_tensor(make_smem_ptr(smem.c), Shape<_64, Int<Config::kN>>{},
                           Stride<Int<Config::kN>, _1>{});
  copy(c, slice.partition_C(out));
  if (fault != Fault::kNoAsyncFence) {
    tma_store_fence();
  }
  warpgroup_wait<0>();
  cutlass::arch::NamedBarrier::sync(128, 0);
  if (first) {
    SM90_TMA_STORE_2D::copy(&maps.c, smem.c, 0, 0);
    tma_store_arrive();
    if (fault == Fault::kEarlyOverwrite) {
      smem.c[5] = 17.f;
    }
    if (fault != Fault::kNoStoreWait) {
      tma_store_wait<0>();
    }
  }
}

template <class Config>
void run(Matrices const& m, Fault fault) {
  constexpr int kN = Config::kN, kK = Config::kK;
  auto const map = [&](void const* global, Major major, int rows, int span) {
    std::vector<int64_t> const sizes =
        major == Major::K ? std::vector<int64_t>{kK, rows} : std::vector<int64_t>{rows, kK};
    return make_map(global, CU_TENSOR_MAP_DATA_TYPE_UINT16, sizes,
                    {Config::kRun, static_cast<int>(sizes[1])}, span);
  };
  int const span_b = fault == Fault::kWrongSwizzle ? 0 : Config::kSpan;
  Maps const maps{map(m.a, Config::kMajorA, 64, Config::kSpan),
                  map(m.b, Config::kMajorB, kN, span_b),
                  make_map(m.c, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, {kN, 64}, {kN, 64}, 0)};
  launch<product_kernel<Config>>(1, 128, sizeof(Storage<Config>), maps, fault);
}

template <class Config>
void add(std::map<std::string, ProductCase>& cases) {
  bool const a_along_k = Config::kMajorA == Major::K, b_along_k = Config::kMajorB == Major::K;
  std::string const dtype = is_same_v<typename Config::Element, half_t> ? "fp16" : "bf16";
  std::string const name = dtype + (Config::kRegisters ? "_registers_" : "_shared_") +
                           (a_along_k ? "k" : "m") + (b_along_k ? "k" : "n") + "_swizzle" +
                           std::to_string(Config::kSpan) + "_n" + std::to_string(Config::kN);
  cases[name] = {Config::kN, Config::kK, Config::kSpan, Config::kRegisters,
                 a_along_k,  b_along_k,  dtype,         run<Config>};
}

template <int kSpan>
void add_span(std::map<std::string, ProductCase>& cases) {
  add<Config<bfloat16_t, 64, Major::K, Major::K, kSpan, false>>(cases);
  add<Config<bfloat16_t, 64, Major::K, Major::MN, kSpan, false>>(cases);
  add<Config<bfloat16_t, 128, Major::MN, Major::K, kSpan, false>>(cases);
  add<Config<half_t, 128, Major::MN, Major::MN, kSpan, false>>(cases);
  add<Config<bfloat16_t, 192, Major::K, Major::K, kSpan, true>>(cases);
  add<Config<bfloat16_t, 192, Major::K, Major::MN, kSpan, true>>(cases);
}

}  // namespace

std::map<std::string, ProductCase> const& product_cases() {
  static auto const all = [] {
    std::map<std::string, ProductCase> cases;
    add_span<0>(cases);
    add_span<32>(cases);
    add_span<64>(cases);
    add_span<128>(cases);
    add<Config<bfloat16_t, 8, Major::K, Major::K, 128, false>>(cases);
    add<Config<half_t, 24, Major::K, Major::K, 128, true>>(cases);
    add<Config<half_t, 96, Major::K, Major::MN, 64, true>>(cases);
    add<Config<bfloat16_t, 112, Major::K, Major::K, 64, false>>(cases);
    add<Config<bfloat16_t, 176, Major::K, Major::K, 128, false>>(cases);
    add<Config<half_t, 256, Major::K, Major::MN, 128, true>>(cases);
    return cases;
  }();
  return all;
}

}  // namespace selftest
