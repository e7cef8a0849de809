#include "tesserae/experts/step_loads.h"

#include <ATen/ops/from_blob.h>

#include <algorithm>

namespace tesserae::experts {
namespace {

void append(std::vector<double>& row, const at::Tensor& counts) {
  const at::Tensor host = counts.to(at::kCPU, at::kDouble).contiguous();
  row.insert(row.end(), host.const_data_ptr<double>(), host.const_data_ptr<double>() + host.numel());
}

}  // namespace

StepLoads::StepLoads(torch::nn::Module& root) {
  for (const auto& item : root.named_modules("", /*include_self=*/false)) {
    if (auto* const layer = dynamic_cast<MoeImpl*>(item.value().get())) layers_.push_back(layer);
  }
}

void StepLoads::begin_step() {
  for (MoeImpl* layer : layers_) {
    if (layer->router().chosen_since.defined()) layer->router().chosen_since.zero_();
  }
}

std::vector<double> StepLoads::to_sum() const {
  std::vector<double> row;
  for (const MoeImpl* layer : layers_) {
    const Load& load = layer->load();
    std::vector<int64_t> tokens = load.tokens;
    tokens.resize(static_cast<size_t>(layer->router().options().experts), 0);  // before the first forward
    row.insert(row.end(), tokens.begin(), tokens.end());
    row.push_back(static_cast<double>(load.dropped));
    row.push_back(static_cast<double>(load.bytes));
    if (layer->router().bias.defined()) append(row, layer->router().chosen_since);
  }
  return row;
}

std::vector<Load> StepLoads::from_sums(std::span<const double> sums, bool updated) {
  std::vector<Load> loads;
  const auto take = [&sums](size_t count) {
    const std::span<const double> taken = sums.first(count);
    sums = sums.subspan(count);
    return taken;
  };
  for (MoeImpl* layer : layers_) {
    RouterImpl& router = layer->router();
    const auto experts = static_cast<size_t>(router.options().experts);
    const auto tensor_ranks = static_cast<double>(router.parallel()->size());
    Load load;
    for (const double tokens : take(experts)) load.tokens.push_back(static_cast<int64_t>(tokens / tensor_ranks));
    load.dropped = static_cast<int64_t>(take(1)[0] / tensor_ranks);
    load.bytes = static_cast<uint64_t>(take(1)[0]);
    loads.push_back(std::move(load));
    if (!router.bias.defined()) continue;
    std::vector<double> chosen(experts);
    std::ranges::copy(take(experts), chosen.begin());
    if (updated) router.update_bias(at::from_blob(chosen.data(), {router.options().experts}, at::kDouble));
  }
  return loads;
}

}  // namespace tesserae::experts
