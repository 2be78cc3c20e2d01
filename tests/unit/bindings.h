// One function per topic adds its bindings to the module; they take and return plain numbers,
// tuples and lists, so that a test reads as arithmetic.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

namespace py = pybind11;

void bind_block_info(py::module_& m);
void bind_block_range(py::module_& m);
void bind_counter_arena(py::module_& m);
void bind_dropout(py::module_& m);
void bind_page_boxes(py::module_& m);
void bind_paging(py::module_& m);
void bind_philox(py::module_& m);
void bind_plan_decode(py::module_& m);
void bind_plan_backward(py::module_& m);
void bind_resident(py::module_& m);
void bind_plan_forward(py::module_& m);
void bind_rotary(py::module_& m);
void bind_tile_numbers(py::module_& m);
void bind_score_mod(py::module_& m);
void bind_piece_schedule(py::module_& m);
void bind_side_by_side(py::module_& m);
void bind_softmax(py::module_& m);
void bind_tile_grid(py::module_& m);
void bind_tile_queue(py::module_& m);
void bind_work_tile(py::module_& m);
