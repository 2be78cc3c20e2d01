// wgmma: the four warps of a warpgroup issue matrix products that run beside them.
//
// As harsh as the PTX manual allows. Accumulators hold NaN from the issue until their thread has
// waited; products run when a thread waits for them, and find out whether their operands are still
// what they were. Registers are the C++ objects that the kernel passes: they have to stay where
// they are.
#pragma once

#include <bit>
#include <deque>

#include "matrix.h"

namespace simt {

constexpr int kWarpgroup = 128;
constexpr int kWgmmaRows = 64;

// What is the same for all threads of the warpgroup.
struct Wgmma {
  int n;
  Type type;
  bool a_in_registers;
  bool a_along_k, b_along_k;
  bool accumulate;  // else D is overwritten
  float sign;       // of the product
  uint64_t a, b;    // descriptors
  bool operator==(Wgmma const&) const = default;
};

// A thread's registers: element i is at base[offset[i]].
template <class Register>
struct Registers {
  Register* base;
  int const* offset;
  Register& operator[](int i) const { return base[offset[i]]; }
};

class Warpgroup {
 public:
  // wgmma.fence
  void fence() { mine().fenced = true; }

  void issue(Wgmma const& what, Registers<uint32_t const> a, Registers<float> d) {
    OfThread& me = mine();
    Product& product = product_at(me.issued, what);
    expect(product.what == what, "the threads of a warpgroup issue different wgmmas");
    bool const in_flight = find(d.base) != nullptr;
    expect(me.fenced || (in_flight && !what.a_in_registers),
           "wgmma on registers that may have been used since the last wait, with no wgmma.fence");
    Accumulators& acc = in_flight ? *find(d.base) : take(product, d, what.n);
    expect(!product.acc || product.acc == &acc, "threads of a warpgroup mix up accumulators");
    product.acc = &acc;
    expect(acc.n == what.n, "accumulators in flight are used as another shape");
    acc.last[rank()] = me.issued++;
    if (what.a_in_registers) {
      read_fragment(rank(), a, product.a);
      product.a_registers[rank()] = a;
    }
  }

  void commit() {
    OfThread& me = mine();
    me.groups.push_back(me.issued);
  }

  // All but the thread's last `pending` groups are done.
  void wait(size_t pending) {
    OfThread& me = mine();
    if (me.groups.size() <= pending) {
      return;
    }
    int const until = me.groups[me.groups.size() - 1 - pending];
    me.groups.erase(me.groups.begin(), me.groups.end() - pending);
    struct Done : Wait {
      Warpgroup const& group;
      int const until;
      Done(Warpgroup const& g, int until) : Wait(g.done_), group(g), until(until) {}
      bool over() const override { return group.done_ >= until; }
      std::string what() const override { return "wgmmas that others have to issue, too"; }
    } const done{*this, until};
    wanted_ = std::max(wanted_, until);
    wait_for(done);
    give_back(until);
    me.fenced = false;
  }

  // Runs the next product if a thread waits for it and all threads have issued it.
  bool advance() {
    if (done_ >= wanted_ || !issued_by_all(done_ + 1)) {
      return false;
    }
    run(products_.front());
    products_.pop_front();
    ++done_;
    return true;
  }

  bool idle(int rank) const {
    return std::none_of(in_flight_.begin(), in_flight_.end(),
                        [=](auto const& acc) { return acc->d[rank].base != nullptr; });
  }

 private:
  struct OfThread {
    int issued = 0;           // wgmmas
    std::vector<int> groups;  // the wgmmas up to the end of each that is not waited for
    bool fenced = false;
  };

  // [64][n] and the registers it came from, from the first issue until all threads have it back.
  struct Accumulators {
    int n;
    std::vector<float> values;
    Registers<float> d[kWarpgroup] = {};
    int last[kWarpgroup] = {};
    int users = 0;
  };

  struct Product {
    Wgmma what;
    Accumulators* acc = nullptr;
    std::vector<uint16_t> a = {}, b = {};  // as they were at the issue, [kDepth][rows]
    std::vector<Registers<uint32_t const>> a_registers = {};
  };

  // A signalling NaN: arithmetic on it makes another number, and is noticed.
  static constexpr uint32_t kInFlight = 0x7fa0dead;

  static int rank() { return block->current % kWarpgroup; }
  OfThread& mine() { return of_[rank()]; }

  // Where accumulator register i lies (PTX manual, "Register Fragments for
  // wgmma.mma_async.m64nNk16"); an operand's register pair the same, with k for the column.
  static int row(int rank, int i) { return rank / 32 * 16 + rank % 32 / 4 + i / 2 % 2 * 8; }
  static int column(int rank, int i) { return i / 4 * 8 + rank % 4 * 2 + i % 2; }

  Product& product_at(int index, Wgmma const& what) {
    if (index == done_ + static_cast<int>(products_.size())) {
      Product& product = products_.emplace_back(Product{what});
      product.b = read_matrix(what.b, what.b_along_k, what.n);
      if (what.a_in_registers) {
        product.a.resize(kDepth * kWgmmaRows);
        product.a_registers.resize(kWarpgroup);
      } else {
        product.a = read_matrix(what.a, what.a_along_k, kWgmmaRows);
      }
    }
    return products_[index - done_];
  }

  Accumulators* find(float const* base) const {
    for (auto const& acc : in_flight_) {
      if (acc->d[rank()].base == base) {
        return acc.get();
      }
    }
    return nullptr;
  }

  // The thread's registers join those in flight, with the others' of this product.
  Accumulators& take(Product& product, Registers<float> d, int n) {
    if (!product.acc) {
      in_flight_.push_back(
          std::make_unique<Accumulators>(Accumulators{n, std::vector<float>(kWgmmaRows * n)}));
      product.acc = in_flight_.back().get();
    }
    Accumulators& acc = *product.acc;
    expect(acc.d[rank()].base == nullptr, "threads of a warpgroup mix up accumulators");
    acc.d[rank()] = d;
    ++acc.users;
    for (int i = 0; i < n / 2; ++i) {
      acc.values[row(rank(), i) * n + column(rank(), i)] = d[i];
      std::memcpy(&d[i], &kInFlight, sizeof(kInFlight));
    }
    return acc;
  }

  // A thread's share of A, 4 registers, into [kDepth][64].
  static void read_fragment(int rank, Registers<uint32_t const> a, std::vector<uint16_t>& into) {
    for (int i = 0; i < 8; ++i) {
      into[column(rank, i) * kWgmmaRows + row(rank, i)] =
          static_cast<uint16_t>(a[i / 2] >> (i % 2 * 16));
    }
  }

  bool issued_by_all(int until) const {
    return std::all_of(of_.begin(), of_.end(),
                       [=](OfThread const& t) { return t.issued >= until; });
  }

  static void run(Product const& product) {
    Wgmma const& what = product.what;
    std::vector<uint16_t> a(product.a.size());
    if (what.a_in_registers) {
      for (int rank = 0; rank < kWarpgroup; ++rank) {
        read_fragment(rank, product.a_registers[rank], a);
      }
    } else {
      a = read_matrix(what.a, what.a_along_k, kWgmmaRows);
    }
    expect(a == product.a, "operand A of a wgmma has changed while it is in flight");
    expect(read_matrix(what.b, what.b_along_k, what.n) == product.b,
           "operand B of a wgmma has changed while it is in flight");
    std::vector<float>& c = product.acc->values;
    if (!what.accumulate) {
      std::fill(c.begin(), c.end(), 0.f);
    }
    for (bool const odd : {false, true}) {
      if (odd && what.type != Type::kE4m3) {
        break;
      }
      std::vector<float> left = to_float(a, what.type, odd);
      for (float& x : left) {
        x *= what.sign;
      }
      multiply_add(c.data(), left.data(), to_float(product.b, what.type, odd).data(), what.n);
    }
  }

  // The thread gets the accumulators of all products before `until`.
  void give_back(int until) {
    for (size_t k = 0; k < in_flight_.size();) {
      Accumulators& acc = *in_flight_[k];
      Registers<float>& d = acc.d[rank()];
      if (d.base && acc.last[rank()] < until) {
        for (int i = 0; i < acc.n / 2; ++i) {
          expect(std::bit_cast<uint32_t>(d[i]) == kInFlight,
                 "accumulators of a wgmma have been touched while it is in flight");
          d[i] = acc.values[row(rank(), i) * acc.n + column(rank(), i)];
        }
        d.base = nullptr;
        --acc.users;
      }
      if (acc.users == 0) {
        in_flight_.erase(in_flight_.begin() + k);
      } else {
        ++k;
      }
    }
  }

  std::vector<OfThread> of_ = std::vector<OfThread>(kWarpgroup);
  std::deque<Product> products_;  // issued and not done; the oldest is number done_
  int done_ = 0;
  int wanted_ = 0;  // threads wait for the products before this number
  std::vector<std::unique_ptr<Accumulators>> in_flight_;
};

class Warpgroups : public Unit {
 public:
  Warpgroup& mine() {
    size_t const index = block->current / kWarpgroup;
    expect((index + 1) * kWarpgroup <= block->threads.size(), "wgmma takes four warps");
    return groups_[index];
  }

  bool advance() override {
    auto const run = [](Warpgroup& group) { return group.advance(); };
    return block->order.last_first ? std::any_of(groups_.rbegin(), groups_.rend(), run)
                                   : std::any_of(groups_.begin(), groups_.end(), run);
  }

  void thread_ends(int thread) override {
    size_t const index = thread / kWarpgroup;
    expect(index >= groups_.size() || groups_[index].idle(thread % kWarpgroup),
           "it ends before its wgmmas do");
  }

 private:
  std::vector<Warpgroup> groups_ = std::vector<Warpgroup>(block->threads.size() / kWarpgroup);
};

inline Warpgroup& warpgroup() { return block->unit<Warpgroups>().mine(); }

}  // namespace simt
