#include "tests/shard/net.h"

#include <ATen/ATen.h>

#include "tesserae/offload/paged_tensor.h"

namespace tesserae::shard::testing {
namespace {

at::Tensor make(const NetOptions& options, std::vector<int64_t> shape) {
  return at::empty(shape, at::TensorOptions().device(options.meta ? at::kMeta : at::kCPU));
}

uint64_t hash(const std::string& text) {
  uint64_t value = 1469598103934665603ULL;
  for (const char c : text) value = (value ^ static_cast<unsigned char>(c)) * 1099511628211ULL;
  return value;
}

at::Tensor random(uint64_t seed, at::IntArrayRef shape) {
  // A hand-made generator: at::Generator is fine too, but this one needs no state that threads could share.
  int64_t count = 1;
  for (const int64_t size : shape) count *= size;
  at::Tensor values = at::empty({count});
  auto* out = values.data_ptr<float>();
  for (int64_t i = 0; i < count; ++i) {
    seed = seed * 6364136223846793005ULL + 1442695040888963407ULL;
    out[i] = static_cast<float>(static_cast<double>(seed >> 33) / (1ULL << 31) * 2 - 1);
  }
  return values.view(shape);
}

}  // namespace

BlockImpl::BlockImpl(const NetOptions& options) : dropout(options.dropout) {
  first = register_parameter("first", make(options, {options.hidden, options.dimension}), !options.frozen_matrix);
  bias = register_parameter("bias", make(options, {options.hidden}));
  second = register_parameter("second", make(options, {options.dimension, options.hidden}));
  scale = register_parameter("scale", make(options, {options.dimension}));
  if (options.unused) unused = register_parameter("unused", make(options, {7}));
}

at::Tensor BlockImpl::forward(const at::Tensor& x) {
  at::Tensor hidden = at::gelu(at::linear(x * scale, first, bias));
  if (dropout > 0) hidden = at::dropout(hidden, dropout, is_training());
  return x + at::linear(hidden, second);
}

PairImpl::PairImpl(const NetOptions& options) : left(options), right(options) {
  register_module("left", left);
  register_module("right", right);
}

at::Tensor PairImpl::forward(const at::Tensor& x) {
  return right(left(x));
}

UnevenImpl::UnevenImpl(int64_t dimension, int64_t large, int small) {
  for (int i = 0; i <= small; ++i) {
    const NetOptions of_block{.dimension = dimension, .hidden = i == 0 ? large : 8};
    blocks.push_back(register_module("block" + std::to_string(i), Unit<BlockImpl>(of_block)));
  }
}

at::Tensor UnevenImpl::forward(const at::Tensor& x) {
  at::Tensor y = x;
  for (auto& block : blocks) y = block(y);
  return y;
}

NetImpl::NetImpl(const NetOptions& net) : options(net) {
  embedding = register_parameter("embedding", make(options, {options.vocabulary, options.dimension}));
  for (int i = 0; i < options.blocks; ++i) {
    Unit<BlockImpl> block(options);
    if (options.checkpoint) block->checkpoint_activations();
    if (i == options.frozen_block) {
      for (auto& parameter : block->parameters()) parameter.set_requires_grad(false);
    }
    blocks.push_back(register_module("block" + std::to_string(i), block));
  }
  if (options.nested) {
    pair = Unit<PairImpl>(options);
    register_module("pair", pair);
  }
  scale = register_parameter("scale", make(options, {options.dimension}));
  head = options.tied ? register_parameter("head", embedding)
                      : register_parameter("head", make(options, {options.vocabulary, options.dimension}));
}

at::Tensor NetImpl::forward(const at::Tensor& tokens, const at::Tensor& targets) {
  at::Tensor x = at::embedding(embedding, tokens);
  for (int i = 0; i < options.blocks; ++i) {
    if (i == options.skipped) continue;
    x = blocks[i](x);
    if (i == options.twice) x = blocks[i](x);
  }
  if (options.nested) x = pair(x);
  const at::Tensor outputs = at::linear(x * scale, head);
  return (outputs.to(at::kFloat) - targets).square().mean();
}

void fill(const std::string& name, at::Tensor& parameter) {
  const at::NoGradGuard no_grad;
  const std::string key = name == "head" ? "embedding" : name;
  parameter.copy_(random(hash(key), parameter.sizes()).mul_(parameter.dim() < 2 ? 1.0 : 0.3));
}

void fill_all(torch::nn::Module& module) {
  for (auto& item : module.named_parameters()) fill(item.key(), item.value());
}

Batch batch_of(const NetOptions& options, int64_t step, int rank, int ranks, int64_t rows) {
  const int64_t length = 5;
  const uint64_t seed = hash("batch" + std::to_string(step));
  const at::Tensor tokens = ((random(seed, {rows, length}) + 1) * 0.5 * static_cast<double>(options.vocabulary))
                                .to(at::kLong)
                                .clamp_max(options.vocabulary - 1);
  const at::Tensor targets = random(seed + 1, {rows, length, options.vocabulary});
  const int64_t share = rows / ranks;
  return {tokens.narrow(0, rank * share, share), targets.narrow(0, rank * share, share)};
}

std::shared_ptr<comm::Fabric> alone() {
  return comm::Fabric::null(mesh::World::single_host(0, 1));
}

Options fully_sharded(int ranks) {
  Options options;
  options.strategy = mesh::preset("FULL_SHARD", ranks);
  return options;
}

std::shared_ptr<comm::Fabric> share(comm::Fabric& fabric) {
  return {&fabric, [](comm::Fabric*) {}};
}

Reference train_reference(const NetOptions& net_options, int steps, double lr, int micro) {
  NetOptions options = net_options;
  options.meta = false;
  Net net(options);
  fill_all(*net);
  Reference result;
  for (int step = 0; step < steps; ++step) {
    double total = 0;
    for (int part = 0; part < micro; ++part) {
      const Batch batch = batch_of(options, step, part, micro);
      at::Tensor loss = net(batch.tokens, batch.targets) / micro;
      loss.backward();
      total += loss.item<double>();
    }
    result.losses.push_back(total);
    const at::NoGradGuard no_grad;
    for (auto& parameter : net->parameters()) {
      if (!parameter.grad().defined()) continue;
      parameter.sub_(parameter.grad(), lr);
      parameter.mutable_grad().reset();
    }
  }
  for (const auto& item : net->named_parameters()) result.parameters[item.key()] = item.value().detach().clone();
  return result;
}

void sgd(Sharded& sharded, double lr) {
  const at::NoGradGuard no_grad;
  for (auto& shard : sharded.shards()) {
    if (!shard.grad.defined()) continue;
    offload::Use use(shard.master, offload::Access::update);
    use.add(shard.grad, offload::Access::read);
    shard.master.sub_(shard.grad, lr);
    use.end();
    sharded.publish(shard.index);
  }
  sharded.zero_grad();
}

Reference train_sharded(comm::Fabric& fabric, const Training& run, Statistics* statistics) {
  Net net(run.net);
  Options options = run.options;
  if (run.net.meta) {
    options.initialize = fill;
  } else {
    fill_all(*net);
  }
  Sharded sharded = shard_model(net, std::shared_ptr<comm::Fabric>(&fabric, [](comm::Fabric*) {}), options);
  if (run.attach) run.attach(sharded);
  Reference result;
  const int ranks = fabric.size();
  for (int step = 0; step < run.steps; ++step) {
    double total = 0;
    for (int part = 0; part < run.micro; ++part) {
      // Part `part` of the global batch, then this rank's share of it: the same rows as in the reference.
      const Batch batch = batch_of(run.net, step, part * ranks + fabric.rank(), run.micro * ranks);
      const auto backward = [&] {
        const c10::Device device = fabric.device();
        at::Tensor loss = net(batch.tokens.to(device), batch.targets.to(device)) / run.micro;
        loss.backward();
        total += loss.item<double>();
      };
      if (part + 1 < run.micro) {
        const NoSync scope = sharded.no_sync();
        backward();
      } else {
        backward();
      }
    }
    result.losses.push_back(sharded.sum_over_ranks(total) / ranks);
    sgd(sharded, run.lr);
  }
  sharded.visit_parameters(
      [&](const std::string& name, const at::Tensor& value) { result.parameters[name] = value.clone().cpu(); });
  if (statistics != nullptr) *statistics = sharded.statistics();
  return result;
}

double worst_difference(const Values& actual, const Values& expected) {
  double worst = 0;
  for (const auto& [name, value] : expected) {
    const auto found = actual.find(name);
    if (found == actual.end()) return 1e9;
    const double difference = (found->second.to(at::kFloat) - value).abs().max().item<double>();
    worst = std::max(worst, difference / value.abs().max().item<double>());
  }
  return worst;
}

}  // namespace tesserae::shard::testing
