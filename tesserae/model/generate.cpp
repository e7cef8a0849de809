#include "tesserae/model/generate.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/sort.h>

#include <algorithm>
#include <random>

#include "tesserae/base/error.h"

namespace tesserae::model {

int64_t sample(const at::Tensor& logits, double temperature, int64_t top_k, double uniform) {
  // Stable: ranks and runs resolve equal logits alike.
  const auto sorted = at::sort(logits.to(at::kCPU, at::kDouble), /*stable=*/true, /*dim=*/0, /*descending=*/true);
  const auto& order = std::get<1>(sorted);
  if (temperature == 0) return order[0].item<int64_t>();

  const auto kept = top_k > 0 ? std::min(top_k, logits.size(0)) : logits.size(0);
  const auto cumulated = std::get<0>(sorted).slice(0, 0, kept).div(temperature).softmax(0).cumsum(0);
  const double* values = cumulated.const_data_ptr<double>();
  const auto drawn = std::upper_bound(values, values + kept, uniform) - values;
  return order[std::min<int64_t>(drawn, kept - 1)].item<int64_t>();
}

std::vector<int64_t> generate(const std::function<at::Tensor(const at::Tensor& tokens)>& logits,
                              std::vector<int64_t> prompt, const GenerateOptions& options) {
  if (prompt.empty()) throw InvalidArgument("generate", "the prompt is empty; give at least one token");
  if (options.window < 1) throw InvalidArgument("generate", cat("window is ", options.window, "; it must be >= 1"));
  if (!(options.temperature >= 0)) {
    throw InvalidArgument("generate", cat("temperature is ", options.temperature, "; it must be >= 0"));
  }
  const at::NoGradGuard no_grad;
  std::mt19937_64 random(options.seed);
  auto& text = prompt;
  const size_t given = text.size();
  for (int64_t i = 0; i < options.tokens; ++i) {
    const auto window = std::min(options.window, static_cast<int64_t>(text.size()));
    const auto tokens = at::from_blob(text.data() + text.size() - window, {1, window}, at::kLong).clone();
    const auto last = logits(tokens).select(1, -1).select(0, 0);
    // Not std::uniform_real_distribution: the standard does not fix its numbers.
    const double uniform = static_cast<double>(random() >> 11) * 0x1p-53;
    text.push_back(sample(last, options.temperature, options.top_k, uniform));
    if (text.back() == options.stop) break;
  }
  return {text.begin() + static_cast<std::ptrdiff_t>(given), text.end()};
}

}  // namespace tesserae::model
