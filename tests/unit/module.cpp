#include "bindings.h"

PYBIND11_MODULE(flash_core, m) {
  bind_block_info(m);
  bind_block_range(m);
  bind_counter_arena(m);
  bind_dropout(m);
  bind_page_boxes(m);
  bind_paging(m);
  bind_philox(m);
  bind_plan_decode(m);
  bind_plan_backward(m);
  bind_resident(m);
  bind_plan_forward(m);
  bind_rotary(m);
  bind_tile_numbers(m);
  bind_score_mod(m);
  bind_side_by_side(m);
  bind_piece_schedule(m);
  bind_softmax(m);
  bind_tile_grid(m);
  bind_tile_queue(m);
  bind_work_tile(m);
}
