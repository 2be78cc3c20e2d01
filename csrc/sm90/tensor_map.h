// Descriptors by which the TMA unit finds its way in a tensor.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "params/common.h"

namespace flash::sm90 {

// What one TMA instruction fills is a box: box_rows rows and box_columns columns of one head, or of
// `group` heads, head after head in each row. TMA writes zeros where a box covers what is not in
// the tensor.
enum class Boxes {
  EndWithTensor,
  // With any row, be it the last of a sequence with others behind it, which are not even read. For
  // this, rows are three dimensions: one of kClip rows, which a box overlaps at its end; one of
  // all rows, for where it begins; and one whose stride, times kClip, takes kClip rows away again,
  // modulo 2^64. (To move the address that the tensor begins at instead does not do: TMA fails
  // where there is no memory.) Batch entries have to be whole rows apart, and group is 1.
  EndWithRow,
  // Of eights of rows: all columns of them, run after run of 64, so that a box of 128 columns is
  // one instruction and not two, and lies in one piece (KeyTiles). All of a box's rows are there,
  // or none is wanted. Batch entries have to be whole eights apart, and group is 1.
  OfEights,
};

constexpr int kClip = 1 << 30;

// A tensor of 16-bit elements [batch, rows, heads, columns], unit stride in the last dimension. A
// box has as many columns as a row of its swizzle pattern: 64 or 32.
struct TensorMapRequest {
  void const* ptr;
  int64_t columns;
  int64_t rows;
  int64_t heads;
  int64_t batch;
  int64_t row_stride;  // of elements; a multiple of 8
  int64_t head_stride;
  int64_t batch_stride;
  int box_rows;
  int box_columns;
  Boxes boxes;
  int group;

  bool has_elements() const { return rows > 0 && heads > 0 && batch > 0; }
};

// Rows [row, row + rows) of a head, or of a group of heads, of one batch entry. rows: at most a
// box's, and looked at only where it ends with a row, or is of eights.
struct TileCoord {
  int row;
  int rows;
  int head;
  int batch;
};

// What a kernel is given.
struct TensorMap {
  CUtensorMap map;
  Boxes boxes;
  int head_step;  // 0 for a dimension without a stride of its own: expanded, or of size 1
  int batch_step;

  // Of a box, behind that of its first column
  struct Coordinates {
    int c1, c2, c3, c4;
  };
  FLASH_HD Coordinates coordinates(TileCoord const& at) const {
    int const head = at.head * head_step, batch = at.batch * batch_step;
    bool const ends = boxes == Boxes::EndWithRow;
    return {ends ? kClip - at.rows : 0, head, ends ? batch + at.row + at.rows : at.row,
            ends ? kClip : batch};
  }

  // The same of a box of eights, which one kernel has all of: it need not ask.
  FLASH_HD Coordinates eights(TileCoord const& at) const {
    int const row = at.batch * batch_step + at.row;
    return {0, 0, at.rows > 0 ? row / 8 : kClip, at.head * head_step};
  }
};

TensorMap make_tensor_map(TensorMapRequest const& request);

}  // namespace flash::sm90
