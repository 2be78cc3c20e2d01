#include "host/plan_text.h"

#include <array>

#include "host/error.h"

namespace flash {

std::string describe(plan::BackwardChoice const& c, int group) {
  constexpr char const* schedules[] = {"tiles", "KV-persistent", "ordered dQ"};
  std::string text = schedules[static_cast<int>(c.schedule)];
  if (group > 1) {
    text += concat(", ", c.heads, " of ", group, " heads a tile");
  }
  if (c.row_parts > 1) {
    text += concat(", rows in ", c.row_parts, " parts");
  }
  return c.schedule == plan::Schedule::KvPersistent
             ? text
             : text + concat(", ", c.together, " side by side");
}

std::string to_json(plan::Problem const& problem, plan::Machine const& machine,
                    plan::BackwardKernel const& kernel) {
  std::array<plan::BackwardChoice, plan::kMostBackwardChoices> all;
  int const count = plan::backward_choices(problem, kernel, all.data());
  plan::BackwardPlan const plan = plan::plan_backward(problem, machine, kernel);
  std::string choices;
  int chosen = -1;
  for (int i = 0; i < count; ++i) {
    choices += concat(i > 0 ? ", " : "", "{\"text\": \"", describe(all[i], problem.group()),
                      "\", \"us\": ", plan::backward_us(problem, machine, kernel, all[i]), "}");
    chosen = all[i] == plan.choice ? i : chosen;
  }
  return concat("{\"choices\": [", choices, "], \"chosen\": ", chosen, ", \"text\": \"",
                describe(plan.choice, problem.group()), "\", \"us\": ", plan.us, "}");
}

}  // namespace flash
