#include "launch/plan_text.h"

#include "launch/concat.h"

namespace flash {
namespace {

// text(choice). planned: null if none of them is.
template <class Choice, class Text>
std::string json_of(std::vector<plan::Predicted<Choice>> const& all, Choice const* planned,
                    std::string const& plan, double plan_us, Text text) {
  std::string choices;
  int chosen = -1;
  for (int i = 0; i < static_cast<int>(all.size()); ++i) {
    auto const& [choice, us] = all[i];
    choices += concat(i > 0 ? ", " : "", "{\"text\": \"", text(choice), "\", \"us\": ", us, "}");
    chosen = chosen < 0 && planned && choice == *planned ? i : chosen;
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
    text += concat(", rows in ", c.row_splits, " splits");
  }
  return c.schedule == plan::Schedule::KvPersistent
             ? text
             : text + concat(", ", c.side_by_side, " side by side");
}

std::string describe(plan::ForwardChoice const& c, plan::Kernel const& kernel) {
  std::string text = concat(kernel.block_m, " rows x ", kernel.block_n_of(c.tile), " keys");
  if (c.tile == ForwardTile::PackGqa || c.tile == ForwardTile::Split) {
    text += ", pack-GQA";
  }
  if (c.splits > 1) {
    text += concat(", keys in ", c.splits, " splits");
  }
  return text + concat(", ", c.side_by_side, " heads side by side");
}

std::string describe(plan::PieceCut const& s) {
  return s.cluster_log2 > 0             ? concat("clusters of ", 1 << s.cluster_log2)
         : s.max_pieces == 1            ? std::string("whole")
         : s.slices == plan::kAnySlices ? concat("up to ", s.max_pieces, " pieces a tile")
                                        : concat(s.slices, " pieces");
}

std::string backward_json(plan::Problem const& problem, plan::Machine const& machine,
                          plan::Kernel const& kernel) {
  plan::BackwardPlan const plan = plan::plan_backward(problem, machine, kernel);
  auto const text = [&](plan::BackwardChoice const& c) { return describe(c, problem.group()); };
  return json_of(plan::backward_choices(problem, machine, kernel), &plan.choice, text(plan.choice),
                 plan.us, text);
}

std::string forward_json(plan::Problem const& problem, plan::Machine const& machine,
                         plan::Kernel const& kernel) {
  plan::ForwardPlan const plan = plan::plan_forward(problem, machine, kernel);
  auto const text = [&](plan::ForwardChoice const& c) { return describe(c, kernel); };
  return json_of(plan::forward_choices(problem, machine, kernel), &plan.choice, text(plan.choice),
                 plan.us, text);
}

std::string decode_json(std::vector<plan::DecodeChoice> const& all, plan::DecodePlan const& plan) {
  bool const decodes = plan.few_q > 0;
  return json_of(all, decodes ? &plan.cut : nullptr,
                 decodes ? describe(plan.cut) : "forward kernel", plan.us,
                 [](plan::PieceCut const& cut) { return describe(cut); });
}

}  // namespace flash
