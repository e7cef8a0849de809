#include "tesserae/tensor/split_random.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>

#include <mutex>

#include "tesserae/tensor/own_seed.h"

namespace tesserae::tensor {

SplitRandom::SplitRandom(const Parallel& parallel, uint64_t seed, at::Device device)
    : seed_(own_seed(seed, parallel)), device_(device) {}

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
