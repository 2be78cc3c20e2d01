// What CuTe has to know of the wgmmas whose widths are not in its usual list: which thread has
// which number of 64 x kN. CuTe's own header of these takes the compiler 3 s in each of its passes,
// most of it for element types that no kernel here has.
#pragma once

#include <cutlass/numeric_types.h>
#include <cute/tensor.hpp>

namespace flash::sm90 {

template <class Element, int kN>
struct WgmmaTraits {
  using ValTypeA = Element;
  using ValTypeB = Element;
  using ValTypeC = float;
  using ValTypeD = float;
  static constexpr int kK = 32 / sizeof(Element);
  using Shape_MNK = cute::Shape<cute::_64, cute::Int<kN>, cute::Int<kK>>;
  using ThrID = cute::Layout<cute::_128>;
  using BLayout = cute::GMMA::ABLayout<kN, kK>;
  using CLayout = cute::GMMA::CLayout_64xN<kN>;

  cute::GMMA::ScaleOut accumulate_ = cute::GMMA::ScaleOut::One;
};

// Both operands in shared memory.
template <class Element, int kN, cute::GMMA::Major kMajorA, cute::GMMA::Major kMajorB>
struct SharedWgmmaTraits : WgmmaTraits<Element, kN> {
  using FrgTypeA = cute::GMMA::smem_desc<kMajorA>;
  using FrgTypeB = cute::GMMA::smem_desc<kMajorB>;
  using ALayout = cute::GMMA::ABLayout<64, SharedWgmmaTraits::kK>;
};

// A in registers.
template <class Element, int kN, cute::GMMA::Major kMajorB>
struct RegisterWgmmaTraits : WgmmaTraits<Element, kN> {
  using FrgTypeB = cute::GMMA::smem_desc<kMajorB>;
  using ALayout = std::conditional_t<sizeof(Element) == 1, cute::GMMA::ALayout_64x32,
                                     cute::GMMA::ALayout_64x16>;
};

}  // namespace flash::sm90

namespace cute {

#define FLASH_WGMMA_16_BITS(element, kN, name)                                             \
  template <GMMA::Major kA, GMMA::Major kB, GMMA::ScaleIn kScaleA, GMMA::ScaleIn kScaleB>  \
  struct MMA_Traits<SM90::GMMA::MMA_64x##kN##x16_F32##name##_SS<kA, kB, kScaleA, kScaleB>> \
      : flash::sm90::SharedWgmmaTraits<element, kN, kA, kB> {};                            \
  template <GMMA::Major kA, GMMA::Major kB, GMMA::ScaleIn kScaleA, GMMA::ScaleIn kScaleB>  \
  struct MMA_Traits<SM90::GMMA::MMA_64x##kN##x16_F32##name##_RS<kA, kB, kScaleA, kScaleB>> \
      : flash::sm90::RegisterWgmmaTraits<element, kN, kB> {};

#define FLASH_WGMMA(kN)                                                                      \
  FLASH_WGMMA_16_BITS(bfloat16_t, kN, BF16BF16)                                              \
  FLASH_WGMMA_16_BITS(half_t, kN, F16F16)                                                    \
  template <GMMA::ScaleIn kScaleA, GMMA::ScaleIn kScaleB>                                    \
  struct MMA_Traits<SM90::GMMA::MMA_64x##kN##x32_F32E4M3E4M3_SS_TN<kScaleA, kScaleB>>        \
      : flash::sm90::SharedWgmmaTraits<float_e4m3_t, kN, GMMA::Major::K, GMMA::Major::K> {}; \
  template <GMMA::ScaleIn kScaleA, GMMA::ScaleIn kScaleB>                                    \
  struct MMA_Traits<SM90::GMMA::MMA_64x##kN##x32_F32E4M3E4M3_RS_TN<kScaleA, kScaleB>>        \
      : flash::sm90::RegisterWgmmaTraits<float_e4m3_t, kN, GMMA::Major::K> {};

FLASH_WGMMA(24)
FLASH_WGMMA(40)
FLASH_WGMMA(48)
FLASH_WGMMA(56)
FLASH_WGMMA(72)
FLASH_WGMMA(80)
FLASH_WGMMA(88)
FLASH_WGMMA(104)
FLASH_WGMMA(112)
FLASH_WGMMA(120)
FLASH_WGMMA(136)
FLASH_WGMMA(144)
FLASH_WGMMA(152)
FLASH_WGMMA(160)
FLASH_WGMMA(168)
FLASH_WGMMA(176)
FLASH_WGMMA(184)
FLASH_WGMMA(200)
FLASH_WGMMA(208)
FLASH_WGMMA(216)
FLASH_WGMMA(224)
FLASH_WGMMA(232)
FLASH_WGMMA(240)
FLASH_WGMMA(248)

#undef FLASH_WGMMA
#undef FLASH_WGMMA_16_BITS

}  // namespace cute
