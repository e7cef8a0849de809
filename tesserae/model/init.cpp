#include "tesserae/model/init.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <array>
#include <cmath>

namespace tesserae::model {
namespace {

// Those that write into the residual stream.
constexpr std::array residual_matrices{"attention.output.weight", "feed_forward.down.weight",
                                       "feed_forward.experts.down", "feed_forward.shared.down.weight"};

}  // namespace

uint64_t seed_of(uint64_t seed, const std::string& name) {
  uint64_t hash = 0xcbf29ce484222325u ^ seed;  // FNV-1a
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  // Finalizer of SplitMix64: FNV-1a alone leaves the high bits of similar names alike.
  hash = (hash ^ (hash >> 30)) * 0xbf58476d1ce4e5b9u;
  hash = (hash ^ (hash >> 27)) * 0x94d049bb133111ebu;
  return hash ^ (hash >> 31);
}

std::function<void(const std::string& name, at::Tensor& parameter)> initialize(const GptConfig& config) {
  const uint64_t seed = config.seed;
  const double residual_scale = 1.0 / std::sqrt(2.0 * static_cast<double>(config.layers));
  return [seed, residual_scale](const std::string& name, at::Tensor& parameter) {
    const at::NoGradGuard no_grad;
    if (parameter.dim() == 1) {
      parameter.fill_(1.0);
      return;
    }
    const bool residual = std::ranges::any_of(residual_matrices, [&](const char* end) { return name.ends_with(end); });
    const double deviation = residual ? 0.02 * residual_scale : 0.02;
    const auto generator = at::make_generator<at::CPUGeneratorImpl>(seed_of(seed, name));
    const bool in_place =
        parameter.device().is_cpu() && parameter.scalar_type() == at::kFloat && parameter.is_contiguous();
    if (in_place) {
      parameter.normal_(0.0, deviation, generator);
    } else {
      parameter.copy_(at::empty(parameter.sizes(), at::kFloat).normal_(0.0, deviation, generator));
    }
  };
}

}  // namespace tesserae::model
