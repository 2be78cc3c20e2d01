// Operands of wgmma in shared memory: descriptors of a tile's steps, as CuTe's partition_fragment_A
// and _B make them. Those divide layouts, which was 40% of what the front end spent on templates
// (docs/lab/sm90_operands.md); here the layout is asked for a few offsets.
#pragma once

#include "sm90/tensor_core.h"

namespace flash::sm90 {

// Offsets in a layout (width, depth), or (width, depth, tiles), in units of 16 bytes. The depth is
// what products reduce over; the width, rows of A or columns of the product.
template <class Element, class Layout>
struct OperandOffsets {
  static constexpr int kWidth = size<0>(Layout{}), kDepth = size<1>(Layout{});
  static constexpr int kOfStep = 32 / sizeof(Element);  // the depth of one wgmma
  static constexpr int kSteps = kDepth / kOfStep;

  static constexpr int at(int i, int depth, int tile = 0) {
    if constexpr (rank_v<Layout> == 2) {
      return static_cast<int>(Layout{}(i, depth) * sizeof(Element) / 16);
    } else {
      return static_cast<int>(Layout{}(i, depth, tile) * sizeof(Element) / 16);
    }
  }
  static constexpr int at_step(int step) { return at(0, step * kOfStep); }

  // Steps whose operands are equally far apart. The next ones are in another run of columns.
  static constexpr int steps_of_run() {
    int steps = 1;
    while (steps < kSteps && at_step(steps) == steps * at_step(1)) {
      ++steps;
    }
    return steps;
  }
  static constexpr int kRun = steps_of_run(), kRuns = kSteps / kRun;
  static constexpr int kStepOffset = kSteps > 1 ? at_step(kRun > 1) : 0;
  static constexpr int kRunOffset = kRuns > 1 ? at_step(kRuns > 1 ? kRun : 0) : 0;

  static constexpr bool has_equal_runs() {
    for (int step = 0; step < kSteps; ++step) {
      if (at_step(step) != step / kRun * kRunOffset + step % kRun * kStepOffset) {
        return false;
      }
    }
    return kSteps == kRun * kRuns && kDepth == kSteps * kOfStep;
  }

  // Whether so many parts of the width are equally far apart.
  static constexpr bool are_equal(int part, int count) {
    for (int i = 0; i < count; ++i) {
      if (at(i * part, 0) != i * at(count > 1 ? part : 0, 0)) {
        return false;
      }
    }
    return true;
  }
};

// The descriptor of an operand's first step, kWidth wide.
template <GMMA::Major kMajor, int kWidth, class Engine, class Layout>
__device__ __forceinline__ GmmaDescriptor first_descriptor(Tensor<Engine, Layout> const& tensor) {
  using At = OperandOffsets<typename Engine::value_type, Layout>;
  using Swizzle = get_swizzle_t<Engine>;
  constexpr int kSwizzle = Swizzle::num_bits;  // of 32, 64 or 128 bytes
  static_assert(kSwizzle >= 1 && kSwizzle <= 3 && Swizzle::num_base == 4 && Swizzle::num_shft == 3);
  constexpr GMMA::LayoutType kTypes[] = {GMMA::LayoutType::B32, GMMA::LayoutType::B64,
                                         GMMA::LayoutType::B128};
  constexpr int kEight = 8, kPattern = (16 << kSwizzle) / sizeof(typename Engine::value_type);
  GmmaDescriptor descriptor;
  descriptor.bitfield.layout_type_ = static_cast<uint8_t>(kTypes[kSwizzle - 1]);
  uint32_t const address = cast_smem_ptr_to_uint(raw_pointer_cast(tensor.data()));
  descriptor.bitfield.start_address_ = static_cast<uint16_t>(address >> 4);
  descriptor.bitfield.base_offset_ = 0;
  if constexpr (kMajor == GMMA::Major::MN) {
    // Several patterns side by side, or a part of one.
    constexpr int kNext = kWidth > kPattern ? At::at(kPattern, 0) : 0;
    static_assert(kNext == 0 ||
                  (kWidth % kPattern == 0 && At::are_equal(kPattern, kWidth / kPattern)));
    static_assert(At::kWidth == kWidth || kWidth % kPattern == 0);
    descriptor.bitfield.stride_byte_offset_ = At::at(0, kEight);
    descriptor.bitfield.leading_byte_offset_ = kNext;
  } else {
    static_assert(kWidth % kEight == 0 && At::are_equal(kEight, kWidth / kEight));
    descriptor.bitfield.stride_byte_offset_ = kWidth > kEight ? At::at(kEight, 0) : 0;
    descriptor.bitfield.leading_byte_offset_ = 1;
  }
  return descriptor;
}

// (1, kWidths, steps), or (1, kWidths, steps, tiles)
template <GMMA::Major kMajor, int kWidth, class Engine, class Layout>
__device__ __forceinline__ auto operand(Tensor<Engine, Layout> const& tensor) {
  using At = OperandOffsets<typename Engine::value_type, Layout>;
  static_assert(At::has_equal_runs() && At::kWidth % kWidth == 0);
  constexpr int kWidths = At::kWidth / kWidth, kNext = kWidths > 1 ? At::at(kWidth, 0) : 0;
  static_assert(At::are_equal(kWidth, kWidths));
  using Steps = Shape<Int<At::kRun>, Int<At::kRuns>>;
  using Apart = Stride<Int<At::kStepOffset>, Int<At::kRunOffset>>;
  GMMA::DescriptorIterator const first{first_descriptor<kMajor, kWidth>(tensor)};
  if constexpr (rank_v<Layout> == 2) {
    return make_tensor(
        first, make_layout(Shape<_1, Int<kWidths>, Steps>{}, Stride<_0, Int<kNext>, Apart>{}));
  } else {
    constexpr int kTiles = size<2>(Layout{}), kTile = kTiles > 1 ? At::at(0, 0, kTiles > 1) : 0;
    return make_tensor(first, make_layout(Shape<_1, Int<kWidths>, Steps, Int<kTiles>>{},
                                          Stride<_0, Int<kNext>, Apart, Int<kTile>>{}));
  }
}

template <class Fragment>
struct MajorOf;
template <GMMA::Major kMajor>
struct MajorOf<GMMA::smem_desc<kMajor>> {
  static constexpr GMMA::Major value = kMajor;
};

// A of a product: rows and depth.
template <class Mma, class Tensor>
__device__ __forceinline__ auto operand_a(Tensor const& tensor) {
  return operand<MajorOf<typename Mma::FrgTypeA>::value, kWarpgroupRows>(tensor);
}

// B: columns of the product and depth.
template <class Mma, class Tensor>
__device__ __forceinline__ auto operand_b(Tensor const& tensor) {
  constexpr int kColumns = size<1>(typename Mma::AtomShape_MNK{});
  return operand<MajorOf<typename Mma::FrgTypeB>::value, kColumns>(tensor);
}

}  // namespace flash::sm90
