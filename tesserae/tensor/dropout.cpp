#include "tesserae/tensor/dropout.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/Generator.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/empty_like.h>

#include "tesserae/tensor/own_seed.h"

namespace tesserae::tensor {
namespace {

// A generator of the device of x that only this tensor-parallel rank has, drawn from the host's default generator.
at::Generator own_generator(const at::Tensor& x, const Parallel& parallel) {
  at::Generator shared = at::globalContext().defaultGenerator(at::kCPU);
  uint64_t drawn = 0;
  {
    const std::lock_guard lock(shared.mutex());
    drawn = shared.get<at::CPUGeneratorImpl>()->random64();
  }
  const uint64_t seed = own_seed(drawn, parallel);
  if (x.device().is_cpu()) return at::make_generator<at::CPUGeneratorImpl>(seed);
  at::Generator generator = at::globalContext().defaultGenerator(x.device()).clone();
  generator.set_current_seed(seed);
  return generator;
}

}  // namespace

at::Tensor dropout(const at::Tensor& x, double share, bool training, Placement placement, const ParallelPtr& parallel) {
  if (placement == Placement::repeated || !training || share == 0) return at::dropout(x, share, training);
  const at::Tensor mask = at::empty_like(x).bernoulli_(1 - share, own_generator(x, *parallel)).div_(1 - share);
  return x.mul(mask);
}

}  // namespace tesserae::tensor
