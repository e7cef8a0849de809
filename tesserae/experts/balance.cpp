#include "tesserae/experts/balance.h"

#include <ATen/ops/cat.h>

#include <algorithm>
#include <numeric>

#include "tesserae/comm/agree.h"
#include "tesserae/experts/routing.h"

namespace tesserae::experts {

double Load::imbalance() const {
  const auto sum = static_cast<double>(std::accumulate(tokens.begin(), tokens.end(), int64_t{0}));
  if (sum == 0) return 0;
  return static_cast<double>(std::ranges::max(tokens)) * static_cast<double>(tokens.size()) / sum;
}

Load over_ranks(const Load& load, comm::MeshFabric& mesh) {
  std::vector<int64_t> counts = load.tokens;
  counts.push_back(load.dropped);
  counts.push_back(static_cast<int64_t>(load.bytes));
  counts = comm::counts_over_ranks(*mesh.over(mesh::axes::loss), counts, {"load of experts"});
  const auto bytes = static_cast<uint64_t>(counts.back());
  counts.pop_back();
  const int64_t dropped = counts.back();
  counts.pop_back();
  return {std::move(counts), dropped, bytes};
}

void update_biases(torch::nn::Module& root) {
  std::vector<RouterImpl*> routers;
  for (const auto& item : root.named_modules("", /*include_self=*/false)) {
    auto* const router = dynamic_cast<RouterImpl*>(item.value().get());
    if (router != nullptr && router->bias.defined()) routers.push_back(router);
  }
  if (routers.empty()) return;
  std::vector<at::Tensor> counts;
  for (const RouterImpl* router : routers) counts.push_back(router->chosen_since);
  const at::Tensor all = at::cat(counts);
  comm::MeshFabric& mesh = *routers.front()->parallel()->mesh();
  mesh.group(mesh::axes::loss, comm::Traffic::control).all_reduce(all, {"load of experts"});
  int64_t begin = 0;
  for (RouterImpl* router : routers) {
    const int64_t experts = router->options().experts;
    router->update_bias(all.narrow(0, begin, experts));
    begin += experts;
  }
}

}  // namespace tesserae::experts
