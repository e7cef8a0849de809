#include "tests/experts/net.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>

#include <algorithm>
#include <cmath>
#include <functional>

#include "tesserae/optim/adamw.h"
#include "tesserae/optim/sgd.h"
#include "tesserae/shard/engine.h"
#include "tesserae/tensor/split_parameters.h"
#include "tesserae/tensor/whole.h"

namespace tesserae::testing {
namespace {

constexpr int64_t net_rows = 8, net_time = 8;  // divided by every degree

void fill_net(const std::string& name, at::Tensor& parameter) {
  if (parameter.dim() == 1) {
    parameter.fill_(1.0);
    return;
  }
  const auto generator = at::detail::createCPUGenerator(std::hash<std::string>{}(name));
  parameter.copy_(at::randn(parameter.sizes(), generator, at::TensorOptions().dtype(at::kFloat)).mul_(0.3));
}

at::Tensor tokens_of_step(const MoeNetOptions& options, int step) {
  const auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(500 + step));
  return at::randint(options.vocabulary, {net_rows, net_time + 1}, generator, at::TensorOptions().dtype(at::kLong));
}

MoeNet made(const MoeJob& job, const tensor::ParallelPtr& parallel) {
  MoeNet net(job.net, parallel);
  tensor::fill_parameters(*net, [&](const std::string& name, at::Tensor& parameter) {
    fill_net(name, parameter);
    if (job.sync && parallel->mesh()->index(mesh::axes::expert_state) > 0) parameter.add_(1);
  });
  if (job.net.frozen_experts) {
    for (auto& item : net->named_parameters()) {
      if (item.key().starts_with("blocks.0.moe.experts.")) item.value().set_requires_grad(false);
    }
  }
  return net;
}

}  // namespace

MoeBlockImpl::MoeBlockImpl(const MoeNetOptions& net, const tensor::LayerOptions& layer) {
  norm = register_module("norm", tensor::RmsNorm(net.width, 1e-5, layer));
  dense = register_module("dense", tensor::Mlp(tensor::MlpOptions{.width = net.width, .hidden = 8}, layer));
  moe_norm = register_module("moe_norm", tensor::RmsNorm(net.width, 1e-5, layer));
  experts::MoeOptions options{.routing = net.routing,
                              .hidden = net.hidden,
                              .shared_hidden = net.shared_hidden,
                              .capacity_factor = net.capacity_factor};
  options.routing.width = net.width;
  options.routing.experts = net.experts;
  moe = register_module("moe", experts::Moe(options, layer));
}

std::tuple<at::Tensor, at::Tensor> MoeBlockImpl::forward(const at::Tensor& x) {
  const at::Tensor middle = x.add(dense(norm(x)));
  const auto [y, loss] = moe->forward(moe_norm(middle));
  return {middle.add(y), loss};
}

MoeNetImpl::MoeNetImpl(const MoeNetOptions& net, const tensor::ParallelPtr& parallel)
    : options(net), layer{parallel, net.sequence ? 1 : tensor::no_sequence, at::TensorOptions().dtype(net.dtype)} {
  embedding = register_module("embedding", tensor::VocabularyEmbedding(options.vocabulary, options.width, layer));
  const auto list = register_module("blocks", std::make_shared<torch::nn::Module>("Blocks"));
  for (int i = 0; i < options.blocks; ++i) {
    blocks.emplace_back(list->register_module(std::to_string(i), shard::Unit<MoeBlockImpl>(options, layer)));
    blocks.back()->checkpoint_activations(options.checkpoint);
  }
  norm = register_module("norm", tensor::RmsNorm(options.width, 1e-5, layer));
  head = register_module("head", tensor::ColumnLinear(options.width, options.vocabulary, layer));
}

at::Tensor MoeNetImpl::forward(const at::Tensor& tokens) {
  const int64_t time = tokens.size(1) - 1;
  at::Tensor x = embedding(tokens.narrow(1, 0, time)), total;
  for (auto& block : blocks) {
    const auto [y, loss] = block->forward(x);
    x = y;
    total = total.defined() ? total.add(loss) : loss;
  }
  const at::Tensor losses =
      tensor::vocabulary_cross_entropy(head(norm(x)), tokens.narrow(1, 1, time), options.vocabulary, layer.parallel);
  return losses.mean().add(total);
}

MoeRank::MoeRank(const std::shared_ptr<comm::Fabric>& job, const MoeJob& options)
    : job_(options),
      mesh_(std::make_shared<comm::MeshFabric>(job, mesh::Mesh(job->size(), job_.axes))),
      parallel_(std::make_shared<tensor::Parallel>(mesh_)),
      net_(made(job_, parallel_)),
      sharded_(shard::shard_model(net_, mesh_->over(mesh::axes::state), this->options())) {
  if (job_.adamw) {
    optimizer_ = std::make_unique<optim::AdamW>(sharded_, optim::AdamWOptions{.lr = 1e-3});
  } else {
    optimizer_ = std::make_unique<optim::Sgd>(sharded_, optim::SgdOptions{.lr = 0.1, .momentum = 0.9});
  }
}

shard::Options MoeRank::options() const {
  shard::Options options;
  options.strategy = job_.strategy;
  options.mesh = mesh_;
  options.sync_module_states = job_.sync;
  if (job_.rows) options.cut_by = shard::CutBy::rows;
  if (job_.bf16) options.precision = shard::Precision::bf16();
  if (job_.accumulation == 2) options.accumulation = shard::Accumulation::two_hop;
  return options;
}

MoeRank::Step MoeRank::step(int step, bool with_gradients) {
  const int micro = job_.accumulation == 0 ? 1 : 2;
  const int ranks = mesh_->degree(mesh::axes::state), index = mesh_->index(mesh::axes::state);
  const int64_t share = net_rows / micro / ranks;
  const at::Tensor tokens = tokens_of_step(job_.net, step);
  double total = 0;
  for (int part = 0; part < micro; ++part) {
    const auto backward = [&] {
      const at::Tensor loss = net_(tokens.narrow(0, (part * ranks + index) * share, share)) / micro;
      loss.backward();
      total += loss.item<double>();
    };
    if (part + 1 < micro) {
      const auto scope = sharded_.no_sync();
      backward();
    } else {
      backward();
    }
  }
  Step result;
  result.loss = sharded_.sum_over_ranks(total) / ranks;
  if (with_gradients) {
    for (shard::FlatBuffer* buffer : sharded_.engine().buffers()) {
      if (buffer->shard() == nullptr) continue;
      const at::Tensor flat = buffer->parameter().whole_values(buffer->shard()->grad);
      for (const auto& slot : buffer->flat().slots()) {
        result.gradients[slot.names.front()] = whole_of(slot, flat);
      }
    }
  }
  result.norm = optimizer_->step({.clip_norm = job_.clip ? 0.5 : 0}).norm;
  optimizer_->zero_grad();
  experts::update_biases(*net_);
  return result;
}

at::Tensor MoeRank::whole_of(const shard::Slot& slot, const at::Tensor& flat) {
  const at::Tensor part = slot.shaped(flat.narrow(0, slot.begin, slot.elements)).clone();
  return tensor::whole_of(part, slot.split, slot.whole, *mesh_);
}

std::map<std::string, at::Tensor> MoeRank::parameters() {
  std::map<std::string, at::Tensor> found;
  for (shard::FlatBuffer* buffer : sharded_.engine().buffers()) {
    const at::Tensor flat = buffer->parameter().whole_values(buffer->parameter().local());
    for (const auto& slot : buffer->flat().slots()) found[slot.names.front()] = whole_of(slot, flat);
  }
  return found;
}

double worst_of(const std::map<std::string, at::Tensor>& actual, const std::map<std::string, at::Tensor>& expected) {
  double worst = 0;
  for (const auto& [name, value] : expected) {
    const auto found = actual.find(name);
    if (found == actual.end() || found->second.sizes() != value.sizes()) return 1e9;
    const double most = value.abs().max().item<double>();
    const double difference = (found->second - value).abs().max().item<double>();
    if (!std::isfinite(difference)) return 1e9;
    worst = std::max(worst, most == 0 ? difference : difference / most);
  }
  return worst;
}

}  // namespace tesserae::testing
