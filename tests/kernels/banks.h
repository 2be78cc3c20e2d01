// What the 32 banks of shared memory make of the kernels' 16-byte accesses: eight lanes are served
// at once if no bank is asked for two different words.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace simt {

struct BankCounts {
  int64_t passes = 0;     // of eight lanes each
  int64_t conflicts = 0;  // passes more than without conflicts
};

// Counts of each kind of instruction since they were last read.
inline std::map<std::string, BankCounts> bank_counts;

// Eight lanes' addresses, 16-byte aligned.
inline void count_pass(char const* kind, uintptr_t const* address) {
  BankCounts& counts = bank_counts[kind];
  ++counts.passes;
  int rows[8] = {};  // of each four banks
  int most = 1;
  for (int i = 0; i < 8; ++i) {
    bool seen = false;
    for (int j = 0; j < i; ++j) {
      seen |= address[j] == address[i];
    }
    int& own = rows[address[i] / 16 % 8];
    own += !seen;
    most = own > most ? own : most;
  }
  counts.conflicts += most - 1;
}

// Accesses that lanes make one by one: the n-th of every lane of a warp belong together.
inline void count_lanes(char const* kind, std::vector<uintptr_t> const* const (&lanes)[32]) {
  for (size_t n = 0; n < lanes[0]->size(); ++n) {
    uintptr_t address[32];
    for (int lane = 0; lane < 32; ++lane) {
      if (n >= lanes[lane]->size()) {
        return;  // the lanes went different ways: what belongs together is not known
      }
      address[lane] = (*lanes[lane])[n];
    }
    for (int first = 0; first < 32; first += 8) {
      count_pass(kind, address + first);
    }
  }
}

}  // namespace simt
