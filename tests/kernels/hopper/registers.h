// setmaxnreg: the warps of a block trade registers.
#pragma once

#include "../simt.h"

namespace simt {

// A block starts with what 64 K registers allow each of its threads, in steps of 8.
class RegisterFile : public Unit {
 public:
  RegisterFile()
      : per_thread_(block->threads.size(),
                    std::min(65536 / static_cast<int>(block->threads.size()) / 8 * 8, 255)) {}

  void give_back(int registers) {
    int& own = per_thread_[block->current];
    expect(registers <= own, "setmaxnreg.dec from ", own, " to ", registers);
    free_ += own - registers;
    own = registers;
  }

  void take(int registers) {
    struct Enough : Wait {
      int const more;
      Enough(int const& free, int more) : Wait(free), more(more) {}
      bool over() const override { return number >= more; }
      std::string what() const override { return "registers (setmaxnreg.inc)"; }
    } const enough{free_, registers - per_thread_[block->current]};
    expect(enough.more >= 0, "setmaxnreg.inc from ", registers - enough.more, " to ", registers);
    wait_for(enough);
    free_ -= enough.more;
    per_thread_[block->current] = registers;
  }

 private:
  std::vector<int> per_thread_;
  int free_ = 0;
};

inline RegisterFile& register_file() { return block->unit<RegisterFile>(); }

}  // namespace simt
