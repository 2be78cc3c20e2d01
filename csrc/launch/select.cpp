#include "launch/select.h"

#include <array>
#include <cstdlib>

#include "core/score_mod.h"
#include "launch/error.h"

namespace flash {
namespace {

// FLASH_ATTN_ARCH=80 forces a family, to compare kernels on one GPU; 0 means unset. The variable is
// read once, because every call needs it.
int forced_arch() {
  static int const arch = [] {
    char const* const text = std::getenv("FLASH_ATTN_ARCH");
    return text ? std::atoi(text) : 0;
  }();
  return arch;
}

// Whether the variant cannot serve the request. `say` takes the parts of the reason, which only
// `explain` joins to a text: this runs in every call.
template <class Say>
bool rejects(Variant const& v, Request const& r, Say say) {
  auto const because = [&](auto const&... parts) {
    say(parts...);
    return true;
  };
  bool const reads_pages_too =
      r.direction == Direction::Paged && v.direction == Direction::Fwd && v.arch == 90;
  if (v.direction != r.direction && !reads_pages_too) {
    return because("is ", to_string(v.direction));
  }
  bool const loads_boxes = v.direction == Direction::Latent && v.arch == 90;
  if ((reads_pages_too || loads_boxes) && r.pages != PageLayout::Boxes) {
    return because("serves keys whose rows can be numbered, and pages of a multiple of ",
                   kLeastBoxRows, " rows, without left padding");
  }
  if (reads_pages_too && v.dtype == std::string_view("e4m3") && v.block_n > kMostPagedKeys) {
    return because("has tiles of ", v.block_n, " keys, in pages ", kMostPagedKeys);
  }
  if (int const arch = forced_arch(); arch && arch != v.arch) {
    return because("is sm", v.arch, ", FLASH_ATTN_ARCH asks for ", arch);
  }
  if (v.arch > r.sm) {
    return because("needs sm_", v.arch, ", the GPU is sm_", r.sm);
  }
  if (v.arch == 90 && r.sm / 10 != 9) {
    return because("runs on Hopper only");
  }
  if (v.smem_bytes > r.smem_per_block) {
    return because("needs ", v.smem_bytes, " bytes of shared memory, the GPU has ",
                   r.smem_per_block);
  }
  if (v.dtype != r.dtype) {
    return because("is ", v.dtype);
  }
  if (r.head_dim > v.head_dim || r.head_dim_v > v.head_dim_v) {
    return because("serves head dims up to ", v.head_dim, "/", v.head_dim_v);
  }
  if (r.cached_bits != v.cached_bits) {
    return because("reads keys of ", v.cached_bits, " bits");
  }
  if (r.full_scores && v.is_plain()) {
    return because("is plain: no softcap, ALiBi, dropout, scale <= 0 or odd rows");
  }
  if (r.max_logits && (v.arch != 90 || v.cluster > 1) && v.is_plain()) {
    return because("keeps no largest logits");
  }
  // A tanh that is exact for all softcaps would spill 200 bytes more of these kernels' registers.
  if (r.softcap > kUsualSoftcap && v.direction == Direction::Bwd && v.arch == 90) {
    return because("serves softcaps up to ", kUsualSoftcap);
  }
  return false;
}

Variant const* first_that_serves(Request const& request) {
  for (Variant const& variant : variants()) {
    if (!rejects(variant, request, [](auto const&...) {})) {
      return &variant;
    }
  }
  return nullptr;
}

std::string describe(Request const& r) {
  return concat(to_string(r.direction), " ", r.dtype, " head_dim ", r.head_dim,
                r.head_dim_v == r.head_dim ? std::string() : concat("/", r.head_dim_v),
                r.full_scores ? " with softcap, ALiBi, dropout, a scale <= 0 or odd rows" : "",
                r.max_logits ? " with largest logits" : "",
                r.cached_bits == 8 ? " with a cache of codes" : "", " on sm_", r.sm);
}

}  // namespace

bool allows_family(int arch) { return forced_arch() == 0 || forced_arch() == arch; }

PageLayout page_layout(int64_t page_size) {
  return page_size % kLeastBoxRows == 0 ? PageLayout::Boxes : PageLayout::Any;
}

PageLayout page_layout(FwdParams const& p) {
  Pages const& pages = p.pages;
  // Left padding is not a whole number of boxes, and a box can end at any row only where the rows
  // of all pages can be numbered.
  auto const boxes = [&](TensorView<const void> const& x) {
    return x.numbers_rows(pages.count, pages.page_size.divisor);
  };
  return !p.seqlens.leftpad_k && boxes(p.k) && boxes(p.v) ? page_layout(pages.page_size.divisor)
                                                          : PageLayout::Any;
}

PageLayout key_layout(FwdParams const& p) {
  return p.pages.table          ? page_layout(p)
         : has_numbered_keys(p) ? PageLayout::Boxes
                                : PageLayout::Any;
}

bool has_numbered_keys(FwdParams const& p) {
  Seqlens const& s = p.seqlens;
  auto const numbered = [&](TensorView<const void> const& x) {
    return x.numbers_rows(s.batch_k ? s.batches_k : s.batch, s.seqlen_k);
  };
  return p.pages.table || !s.used_k || s.cu_k || (numbered(p.k) && numbered(p.v));
}

Selection explain(Request const& request) {
  Selection selection{nullptr, {}};
  for (Variant const& variant : variants()) {
    std::string why;
    bool const rejected =
        rejects(variant, request, [&](auto const&... parts) { why = concat(parts...); });
    if (!rejected && !selection.variant) {
      selection.variant = &variant;
    } else {
      if (!rejected) {
        why = concat("comes after ", selection.variant->name);
      }
      selection.rejected.push_back({&variant, std::move(why)});
    }
  }
  return selection;
}

Variant const* find(Request const& request) {
  // The thread's last answers: a call asks up to six times, and calls repeat.
  struct Answer {
    Request request{};
    Variant const* variant = nullptr;
  };
  thread_local std::array<Answer, 16> answers;
  unsigned const dims = unsigned(request.head_dim) / 8 + unsigned(request.dtype.size());
  Answer& answer = answers[(dims + 5 * unsigned(request.direction)) % answers.size()];
  if (!answer.variant || answer.request != request) {
    answer = {request, first_that_serves(request)};
  }
  return answer.variant;
}

Variant const& select(Request request) {
  if (Variant const* const variant = find(request)) {
    return *variant;
  }
  std::string compiled;
  for (Variant const& variant : variants()) {
    compiled += concat(" ", variant.name);
  }
  throw std::runtime_error(
      concat(kNotImplemented, "no kernel for ", describe(request), "; compiled:", compiled));
}

}  // namespace flash
