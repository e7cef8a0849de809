#include "tesserae/probe/probe.h"

#include <ATen/ops/randint.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <map>

#include "tesserae/base/error.h"
#include "tesserae/comm/agree.h"
#include "tesserae/cost/fabric_facts.h"
#include "tesserae/cost/place_memory.h"
#include "tesserae/model/gpt.h"
#include "tesserae/os/host.h"
#include "tesserae/os/memory.h"
#include "tesserae/os/process.h"
#include "tesserae/probe/measure.h"
#include "tesserae/tensor/product.h"

namespace tesserae::probe {
namespace {

/// Where one process started the ranks of this host, as `tesserae train --nproc` does, it takes memory as well.
uint64_t launcher_share(const comm::Fabric& fabric) {
  if (fabric.world().launch().launcher == "single") return 0;
  try {
    const auto ranks = fabric.world().host_ranks(fabric.rank()).size();
    return os::process_memory(os::parent_id()).proportional / ranks;
  } catch (const IoError&) {
    return 0;  // another user's
  }
}

/// What a rank takes beside its model: torch's libraries and what they made when they were first used, but for
/// workspaces. What ranks have in common counts once. On a device: what was taken before anything was allocated by us.
double process_bytes(const comm::Fabric& fabric) {
  if (!fabric.device().is_cpu()) {
    const cost::PlaceMemory place = cost::place_memory(fabric.device());
    return std::max(place.total - place.free - (place.used - place.transient), 0.0);
  }
  return static_cast<double>(os::process_memory().proportional + launcher_share(fabric));
}

/// The memory through which groups' bytes go is there from its first use on.
void use_rings(comm::Fabric& fabric) {
  constexpr int64_t larger_than_a_ring = int64_t{1} << 20;  // elements for each member
  for (const comm::Traffic traffic : {comm::Traffic::gather, comm::Traffic::reduce, comm::Traffic::control}) {
    comm::Group& group = fabric.group(fabric.world().host_ranks(fabric.rank()), traffic);
    const at::Tensor buffer = at::zeros({group.size() * larger_than_a_ring}, fabric.device());
    fabric.lane(traffic).submit([&] { group.reduce_scatter(buffer); }).wait();
  }
}

/// The smallest step of training: libraries make what they need when they are first used. What it frees stays where it
/// was, as between the steps of a job, and counts.
void use_libraries(const at::Device& device, const std::string& dtype) {
  os::give_back_freed_memory();
  model::GptImpl model(
      {.vocabulary = 512, .dimension = 64, .layers = 1, .heads = 1, .device = device, .dtype = scalar_type_of(dtype)});
  const at::Tensor tokens = at::randint(512, {2, 128}, at::TensorOptions(device).dtype(at::kLong));
  model.forward(tokens, tokens).backward();
}

/// By dtype. A job in one of them has not what others need besides.
std::map<std::string, double> measure_processes(comm::Fabric& fabric, const std::vector<std::string>& dtypes) {
  const auto after_use = [&](const std::string& dtype) {
    use_libraries(fabric.device(), dtype);
    fabric.everyone().barrier();  // all of them are there, and share what they share
    const double bytes = mean_over_ranks(fabric, process_bytes(fabric));
    fabric.everyone().barrier();
    return bytes;
  };
  const double common = after_use("fp32");
  std::map<std::string, double> process;
  double so_far = common;
  for (const std::string& dtype : dtypes) {
    const double now = dtype == "fp32" ? so_far : after_use(dtype);
    process[dtype] = common + std::max(0.0, now - so_far);
    so_far = now;
  }
  return process;
}

}  // namespace

cost::Machine probe(const std::shared_ptr<comm::Fabric>& fabric, const ProbeOptions& options) {
  for (const std::string& dtype : options.dtypes) {
    if (dtype == "fp32" || dtype == "bf16" || dtype == "fp16") continue;
    throw InvalidArgument("probe", cat("dtype \"", dtype, "\"; there are fp32, bf16, fp16"));
  }
  const Bench bench{*fabric, options.window, options.say};
  cost::Machine machine;
  machine.name = comm::text_of(*fabric, options.name.empty() ? os::host_name() : options.name, 0);
  machine.measured = true;
  machine.per_host = static_cast<int>(fabric->world().host_ranks(0).size());
  machine.shares_place = fabric->device().is_cpu();
  machine.shared_copy = cost::ranks_can_share(*fabric);
  machine.memory = cost::fullest_place(*fabric).total;
  bench.say("what a process takes");
  use_rings(*fabric);
  const std::map<std::string, double> process = measure_processes(*fabric, options.dtypes);
  std::map<std::string, cost::Machine::Workspaces> workspaces;
  for (const std::string& dtype : options.dtypes) workspaces[dtype] = measure_workspaces(bench, dtype);
  for (const std::string& dtype : options.dtypes) {
    machine.compute[dtype] = measure_compute(bench, dtype);
    machine.compute[dtype].process = process.at(dtype);
    machine.compute[dtype].workspaces = workspaces.at(dtype);
    machine.compute[dtype].widened = fabric->device().is_cpu() && tensor::widens_products(scalar_type_of(dtype));
  }
  measure_moving(bench, machine);
  for (const std::string& dtype : options.dtypes) measure_steps(bench, dtype, machine);
  return machine;
}

}  // namespace tesserae::probe
