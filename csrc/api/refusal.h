// A call that cannot be served: what is wrong with which argument. flash_attn/api/refusals.py words
// it.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <string>

#include "launch/error.h"

namespace flash::api {

// An operand whose text is a tensor's dtype; that of a tensor itself is its shape.
struct DtypeOf {
  torch::stable::Tensor const& t;
};

inline std::string operand_text(DtypeOf const& x) {
  return torch::headeronly::toString(x.t.scalar_type());
}
inline std::string operand_text(torch::stable::Tensor const& t) {
  std::string text;
  for (int64_t i = 0; i < t.dim(); ++i) {
    text += concat(i > 0 ? ", " : "", t.size(i));
  }
  return concat("(", text, ")");
}
template <class T>
T const& operand_text(T const& x) {
  return x;
}

// Throws unless `served`. code: a row of the table there, whose text takes the operands. They
// become text where the call is refused alone: each call comes through dozens of these.
template <class... Operands>
void require(bool served, char const* argument, char const* code, Operands const&... operands) {
  if (!served) {
    check(false, "refused: ", argument, "|", code, concat("|", operand_text(operands))...);
  }
}

}  // namespace flash::api
