#include "tesserae/tensor/split_random.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>

#include <mutex>

namespace tesserae::tensor {
namespace {

// SplitMix64's finalizer: neighbouring seeds give unrelated generators.
uint64_t mixed(uint64_t seed) {
  seed = (seed ^ (seed >> 30)) * 0xbf58476d1ce4e5b9u;
  seed = (seed ^ (seed >> 27)) * 0x94d049bb133111ebu;
  return seed ^ (seed >> 31);
}

}  // namespace

SplitRandom::SplitRandom(const Parallel& parallel, uint64_t seed, at::Device device)
    : seed_(mixed(seed + 0x9e3779b97f4a7c15u * static_cast<uint64_t>(parallel.index() + 1))), device_(device) {}

void SplitRandom::begin() {
  if (inside()) return;
  std::vector<at::Generator> generators{at::globalContext().defaultGenerator(at::kCPU)};
  if (!device_.is_cpu()) generators.push_back(at::globalContext().defaultGenerator(device_));
  uint64_t drawn = 0;
  {
    const std::lock_guard lock(generators[0].mutex());
    drawn = generators[0].get<at::CPUGeneratorImpl>()->random64();
  }
  for (auto& generator : generators) {
    const std::lock_guard lock(generator.mutex());
    saved_.push_back({generator, generator.get_state()});
    generator.set_current_seed(mixed(seed_ ^ drawn));
  }
}

void SplitRandom::end() {
  for (auto& saved : saved_) {
    const std::lock_guard lock(saved.generator.mutex());
    saved.generator.set_state(saved.state);
  }
  saved_.clear();
}

}  // namespace tesserae::tensor
