// TMA descriptors of tensors, and the coordinates of boxes in them.
#pragma once

#include <cuda.h>

#include "params/tensor_view.h"

namespace flash::sm90 {

// One TMA instruction fills a box: box_rows rows and box_columns columns of one head, or of `group`
// heads, head after head in each row. TMA writes zeros where a box covers what is not in the
// tensor.
enum class Boxes {
  EndWithTensor,
  // A box can end with any row, even with the last of a sequence that others follow; rows after it
  // are not even read. For this, rows are three dimensions: one of kClip rows, which a box overlaps
  // at its end; one of all rows, for where it begins; and one whose stride, times kClip, takes
  // kClip rows away again, modulo 2^64. (Moving the tensor's start address instead does not work:
  // TMA fails where there is no memory.) Batch entries have to be whole rows apart, and group is 1.
  EndWithRow,
  // A box is eights of rows with all columns, run after run of 64, so that a box of 128
  // columns takes one instruction instead of two, and lies in one piece (KeyTiles). All of a box's
  // rows exist, or none is wanted. Batch entries have to be a multiple of eight rows apart, and
  // group is 1.
  OfEights,
};

constexpr int kClip = 1 << 30;

// A tensor of 16-bit elements [batch, rows, heads, columns], unit stride in the last dimension. A
// box has as many columns as a row of its swizzle pattern: 64, 32 or 16.
struct TensorMapRequest {
  TensorView<const void> view;  // strides are multiples of 8
  int64_t columns;
  int64_t rows;
  int64_t heads;
  int64_t batch;
  int box_rows;
  int box_columns;
  Boxes boxes;
  int group;

  bool has_elements() const { return rows > 0 && heads > 0 && batch > 0; }
};

// Rows [row, row + rows) of a head, or of a group of heads, of one batch entry. rows: at most a
// box's; only EndWithRow and OfEights read it.
struct TileCoord {
  int row;
  int rows;
  int head;
  int batch;
};

// A descriptor as a kernel gets it, with what it takes to compute a box's coordinates.
struct TensorMap {
  CUtensorMap map;
  Boxes boxes;
  int head_step;  // 0 for a dimension without a stride of its own: expanded, or of size 1
  int batch_step;

  // A box's coordinates, but for its first column
  struct Coordinates {
    int c1, c2, c3, c4;
  };
  FLASH_HD Coordinates coordinates(TileCoord const& at) const {
    int const head = at.head * head_step, batch = at.batch * batch_step;
    bool const ends = boxes == Boxes::EndWithRow;
    return {ends ? kClip - at.rows : 0, head, ends ? batch + at.row + at.rows : at.row,
            ends ? kClip : batch};
  }

  // The same for OfEights, without asking: a kernel knows which of its maps are of this kind.
  FLASH_HD Coordinates eights(TileCoord const& at) const {
    int const row = at.batch * batch_step + at.row;
    return {0, 0, at.rows > 0 ? row / 8 : kClip, at.head * head_step};
  }
};

TensorMap make_tensor_map(TensorMapRequest const& request);

}  // namespace flash::sm90
