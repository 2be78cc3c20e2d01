// CuTe's header, but for the function through which every wgmma goes: one here for all shapes.
#pragma once

#define mma_unpack mma_unpack_gpu
#include_next <cute/atom/mma_traits_sm90_gmma.hpp>
#undef mma_unpack

#include "hopper/wgmma.h"

namespace cute::SM90::GMMA {

template <class Element>
constexpr simt::Type kHostType = is_same_v<Element, half_t>         ? simt::Type::kHalf
                                 : is_same_v<Element, float_e4m3_t> ? simt::Type::kE4m3
                                                                    : simt::Type::kBfloat16;

// Where register i of a fragment is, from its first.
template <class Layout>
int const* host_offsets(Layout const& layout) {
  static auto const offsets = [&] {
    std::array<int, decltype(size(layout))::value> of{};
    for (int i = 0; i < size(layout); ++i) {
      of[i] = layout(i);
    }
    return of;
  }();
  return offsets.data();
}

template <Major kA, Major kB, int kSign, class Traits, class TD, class DLayout, class TA,
          class ALayout, class TB, class BLayout, class TC, class CLayout>
void issue_product(Traits const& traits, Tensor<TD, DLayout>& d, Tensor<TA, ALayout> const& a,
                   Tensor<TB, BLayout> const& b, Tensor<TC, CLayout> const& c) {
  using Instruction = typename MMA_Op<Traits>::type;
  using Element = typename Traits::ValTypeA;
  using RegisterA = typename remove_extent<typename Instruction::ARegisters>::type;
  constexpr bool kFromRegisters = is_same_v<RegisterA, uint32_t>;
  static_assert(is_same_v<Element, half_t> || is_same_v<Element, bfloat16_t> ||
                is_same_v<Element, float_e4m3_t>);
  static_assert(is_same_v<typename Traits::ValTypeD, float> && is_rmem<TD>::value);
  static_assert(size<2>(typename Traits::Shape_MNK{}) * sizeof_bits_v<Element> ==
                simt::kDepth * 16);
  simt::expect(static_cast<void const*>(&d(0)) == &c(0), "wgmma adds in place");

  Tensor registers_b = recast<uint64_t>(b);
  simt::Wgmma what{.n = size<1>(typename Traits::Shape_MNK{}),
                   .type = kHostType<Element>,
                   .a_in_registers = kFromRegisters,
                   .a_along_k = kA == Major::K,
                   .b_along_k = kB == Major::K,
                   .accumulate = traits.accumulate_ == ScaleOut::One,
                   .sign = kSign,
                   .a = 0,
                   .b = registers_b(0)};
  simt::Registers<float> const registers_d{&d(0), host_offsets(d.layout())};
  if constexpr (kFromRegisters) {
    Tensor registers_a = recast<uint32_t>(a);
    simt::warpgroup().issue(what, {&registers_a(0), host_offsets(registers_a.layout())},
                            registers_d);
  } else {
    Tensor registers_a = recast<uint64_t>(a);
    what.a = registers_a(0);
    simt::warpgroup().issue(what, {}, registers_d);
  }
}

template <template <Major, Major, ScaleIn, ScaleIn> class Op, Major kA, Major kB, ScaleIn kScaleA,
          ScaleIn kScaleB, class... Args, class TD, class DLayout, class TA, class ALayout,
          class TB, class BLayout, class TC, class CLayout>
void mma_unpack(MMA_Traits<Op<kA, kB, kScaleA, kScaleB>, Args...> const& traits,
                Tensor<TD, DLayout>& d, Tensor<TA, ALayout> const& a, Tensor<TB, BLayout> const& b,
                Tensor<TC, CLayout> const& c) {
  issue_product<kA, kB, int(kScaleA) * int(kScaleB)>(traits, d, a, b, c);
}

// Products of codes reduce along the columns of both operands.
template <template <ScaleIn, ScaleIn> class Op, ScaleIn kScaleA, ScaleIn kScaleB, class... Args,
          class TD, class DLayout, class TA, class ALayout, class TB, class BLayout, class TC,
          class CLayout>
void mma_unpack(MMA_Traits<Op<kScaleA, kScaleB>, Args...> const& traits, Tensor<TD, DLayout>& d,
                Tensor<TA, ALayout> const& a, Tensor<TB, BLayout> const& b,
                Tensor<TC, CLayout> const& c) {
  issue_product<Major::K, Major::K, int(kScaleA) * int(kScaleB)>(traits, d, a, b, c);
}

}  // namespace cute::SM90::GMMA
