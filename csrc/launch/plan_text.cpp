#include "launch/plan_text.h"

#include <array>
#include <span>

#include "launch/concat.h"

namespace flash {
namespace {

// text(choice), us(choice), is_chosen(choice)
template <class Choice, class Text, class Us, class IsChosen>
std::string json_of(std::span<Choice const> all, std::string const& plan, double plan_us, Text text,
                    Us us, IsChosen is_chosen) {
  std::string choices;
  int chosen = -1;
  for (int i = 0; i < static_cast<int>(all.size()); ++i) {
    choices +=
        concat(i > 0 ? ", " : "", "{\"text\": \"", text(all[i]), "\", \"us\": ", us(all[i]), "}");
    chosen = chosen < 0 && is_chosen(all[i]) ? i : chosen;
  }
  return concat("{\"choices\": [", choices, "], \"chosen\": ", chosen, ", \"text\": \"", plan,
                "\", \"us\": ", plan_us, "}");
}

}  // namespace

std::string describe(plan::BackwardChoice const& c, int group) {
  constexpr char const* schedules[] = {"tiles", "KV-persistent", "ordered dQ"};
  std::string text = schedules[static_cast<int>(c.schedule)];
  if (group > 1) {
    text += concat(", ", c.heads, " of ", group, " heads a tile");
  }
  if (c.row_splits > 1) {
    text += concat(", rows in ", c.row_splits, " parts");
  }
  return c.schedule == plan::Schedule::KvPersistent
             ? text
             : text + concat(", ", c.side_by_side, " side by side");
}

std::string describe(plan::ForwardChoice const& c, plan::ForwardKernel const& kernel) {
  std::string text = concat(kernel.block_m, " rows x ", plan::block_n_of(kernel, c.tile), " keys");
  if (c.tile == ForwardTile::PackGqa || c.tile == ForwardTile::Split) {
    text += ", pack-GQA";
  }
  if (c.splits > 1) {
    text += concat(", keys in ", c.splits, " splits");
  }
  return text + concat(", ", c.side_by_side, " heads side by side");
}

std::string describe(plan::KeySplit const& s) {
  return s.cluster_log2 > 0  ? concat("clusters of ", 1 << s.cluster_log2)
         : s.max_splits == 1 ? std::string("whole")
                             : concat(s.pieces, " pieces");
}

std::string to_json(plan::Problem const& problem, plan::Machine const& machine,
                    plan::BackwardKernel const& kernel) {
  using Choice = plan::BackwardChoice;
  std::array<Choice, plan::kMostChoices> all;
  int const count = plan::backward_choices(problem, kernel, all.data());
  plan::BackwardPlan const plan = plan::plan_backward(problem, machine, kernel);
  int const group = problem.group();
  return json_of(
      std::span<Choice const>(all.data(), count), describe(plan.choice, group), plan.us,
      [&](Choice const& c) { return describe(c, group); },
      [&](Choice const& c) { return plan::backward_us(problem, machine, kernel, c); },
      [&](Choice const& c) { return c == plan.choice; });
}

std::string to_json(plan::Problem const& problem, plan::Machine const& machine,
                    plan::ForwardKernel const& kernel) {
  using Choice = plan::ForwardChoice;
  std::array<Choice, plan::kMostChoices> all;
  int const count = plan::forward_choices(problem, machine, kernel, all.data());
  plan::ForwardPlan const plan = plan::plan_forward(problem, machine, kernel);
  return json_of(
      std::span<Choice const>(all.data(), count), describe(plan.choice, kernel), plan.us,
      [&](Choice const& c) { return describe(c, kernel); },
      [&](Choice const& c) { return plan::forward_us(problem, machine, kernel, c); },
      [&](Choice const& c) { return c == plan.choice; });
}

std::string to_json(std::span<plan::DecodeChoice const> all, plan::DecodePlan const& plan) {
  using Choice = plan::DecodeChoice;
  bool const decodes = plan.few_q > 0;
  return json_of(
      all, decodes ? describe(plan.split) : "forward kernel", plan.us,
      [](Choice const& c) { return describe(c.split); }, [](Choice const& c) { return c.us; },
      [&](Choice const& c) { return decodes && c.split == plan.split; });
}

}  // namespace flash
