// Thread blocks of different clusters, which may run at the same time.
#include "cases.h"

namespace selftest {

namespace {

struct Call {
  int& turn;  // blocks that are done, 0 at first
  int* out;   // [blocks], 0 at first
};

using Body = void (*)(Call const&);

void blocks_kernel(Body body, int* turn, int* out) { body({*turn, out}); }

bool first_thread() { return threadIdx.x == 0; }

void wait_for_turn(Call const& call, int number) {
  while (first_thread() && call.turn < number) {
    __nanosleep(0);
  }
  __syncthreads();
}

void pass_turn(Call const& call) {
  __syncthreads();
  if (first_thread()) ++call.turn;
}

// One more than the block before has.
void write(Call const& call) {
  int const before = blockIdx.x == 0 ? 0 : call.out[blockIdx.x - 1];
  __syncthreads();
  if (first_thread()) call.out[blockIdx.x] = before + 1;
}

std::map<std::string, Body> const kBodies = {
    {"in turns",
     [](Call const& call) {
       wait_for_turn(call, blockIdx.x);
       write(call);
       pass_turn(call);
     }},
    {"a turn passed too early",
     [](Call const& call) {
       wait_for_turn(call, blockIdx.x);
       pass_turn(call);
       for (int i = 0; i < 20; ++i) {
         __syncthreads();
       }
       write(call);
     }},
    {"which of them is done when",
     [](Call const& call) {
       pass_turn(call);
       if (first_thread()) call.out[blockIdx.x] = call.turn;
     }},
    {"waiting for the last block",
     [](Call const& call) {
       if (blockIdx.x == gridDim.x - 1) pass_turn(call);
       wait_for_turn(call, 1);
     }},
};

}  // namespace

void run_side_by_side(std::string const& what, int blocks, flash::SideBySide how, int* out) {
  int turn = 0;
  flash::RunSideBySide const so(how);
  launch<blocks_kernel>(blocks, 64, 0, kBodies.at(what), &turn, out);
}

}  // namespace selftest
