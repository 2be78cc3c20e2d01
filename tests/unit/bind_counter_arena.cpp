#include <memory>

#include "bindings.h"
#include "launch/counter_arena.h"

namespace {

// Memory that is never read: its counters are told by their numbers.
struct Arena {
  int64_t first;               // counters of the first slab
  std::vector<int64_t> slabs;  // and of each
  uint32_t* end = nullptr;
  flash::CounterArena arena{[this] { return make(first); },
                            [this](int64_t count) { return make(count); }};

  flash::CounterSlab make(int64_t count) {
    slabs.push_back(count);
    return {std::exchange(end, end + count), count};
  }
};

}  // namespace

void bind_counter_arena(py::module_& m) {
  using flash::Counting;
  py::enum_<Counting>(m, "Counting")
      .value("Tiles", Counting::Tiles)
      .value("Pieces", Counting::Pieces);
  py::class_<Arena>(m, "CounterArena")
      .def(py::init([](int64_t first) { return std::make_unique<Arena>(first); }), py::arg("first"))
      .def(
          "range",
          [](Arena& arena, int64_t count, int device, unsigned long long capture,
             unsigned long long stream, Counting what) {
            uint32_t const* const begin = arena.arena.range({device, capture, stream, what}, count);
            return reinterpret_cast<uintptr_t>(begin) / sizeof(uint32_t);
          },
          py::arg("count"), py::kw_only(), py::arg("device") = 0, py::arg("capture") = 0,
          py::arg("stream") = 0, py::arg("what") = Counting::Tiles,
          py::call_guard<py::gil_scoped_release>())
      .def_readonly("slabs", &Arena::slabs);
}
