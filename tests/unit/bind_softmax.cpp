#include "bindings.h"
#include "core/softmax.h"

namespace {

constexpr int rows = 2;
constexpr int cols = 4;
using Scores = std::array<std::array<float, cols>, rows>;
using Softmax = flash::OnlineSoftmax<rows>;

}  // namespace

// The rows of one thread, with all columns in it, so that no reduction over threads takes place.
void bind_softmax(py::module_& m) {
  py::class_<Softmax>(m, "OnlineSoftmax")
      .def(py::init<float>(), py::arg("scale_log2"))
      .def(
          "step",  // scores (2, 4) -> unnormalised probabilities (2, 4), rescale factors (2)
          [](Softmax& softmax, Scores scores) {
            float rescale[rows];
            auto const at = [&](int r, int c) -> float& { return scores[r][c]; };
            softmax.step<cols>(at, rescale, flash::NoReduce{});
            return std::make_tuple(scores, std::array<float, rows>{rescale[0], rescale[1]});
          },
          py::arg("scores"))
      .def(
          "step_with_offsets",  // the same of scores that lack `offsets` (2), asking first
          [](Softmax& softmax, Scores scores, std::array<float, rows> lacking) {
            float rescale[rows] = {1.f, 1.f};
            auto const at = [&](int r, int c) -> float& { return scores[r][c]; };
            flash::RowOffsets<rows> const offsets{{lacking[0], lacking[1]}};
            if (softmax.may_move<cols>(at, offsets)) {
              softmax.raise<cols>(at, rescale, flash::NoReduce{}, offsets);
              softmax.rescale(rescale);
            }
            softmax.exponentials<cols>(at, offsets);
            return std::make_tuple(scores, std::array<float, rows>{rescale[0], rescale[1]});
          },
          py::arg("scores"), py::arg("offsets"))
      .def(
          "may_move",
          [](Softmax const& softmax, Scores scores) {
            return softmax.may_move<cols>([&](int r, int c) { return scores[r][c]; });
          },
          py::arg("scores"))
      .def(
          "finish",  // (out_scale, lse)
          [](Softmax& softmax, int row, float sink) {
            auto const closed = softmax.finish(row, sink, flash::NoReduce{});
            return std::make_tuple(closed.out_scale, closed.lse);
          },
          py::arg("row"), py::arg("sink"));
}
