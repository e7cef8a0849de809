#include "tests/checkpoint/trained.h"

#include <nlohmann/json.hpp>

#include "tesserae/checkpoint/model_state.h"

namespace tesserae::testing {
namespace {

shard::Sharded shard_net(Net& net, comm::Fabric& fabric, shard::Options options) {
  shard::testing::fill_all(*net);
  return shard::shard_model(net, borrowed(fabric), std::move(options));
}

}  // namespace

std::shared_ptr<comm::Fabric> borrowed(comm::Fabric& fabric) {
  return {&fabric, [](comm::Fabric*) {}};
}

shard::Options with_degrees(mesh::Degrees degrees) {
  shard::Options options;
  options.strategy.degrees = degrees;
  return options;
}

Trained::Trained(comm::Fabric& fabric, const NetOptions& net, const shard::Options& options)
    : fabric_(fabric),
      options_(net),
      net_(net),
      sharded_(shard_net(net_, fabric, options)),
      optimizer_(sharded_, {.lr = 0.01, .weight_decay = 0.1}) {}

double Trained::step(const std::function<void()>& before_update) {
  const auto batch = shard::testing::batch_of(options_, step_++, fabric_.rank(), fabric_.size());
  at::Tensor loss = net_(batch.tokens, batch.targets);
  loss.backward();
  if (before_update) before_update();
  optimizer_.step({.clip_norm = 1.0});
  sharded_.zero_grad();
  return sharded_.sum_over_ranks(loss.item<double>()) / fabric_.size();
}

checkpoint::State Trained::state() {
  checkpoint::State state;
  state.step = step_;
  state.layout = mesh::Layout(fabric_.size(), sharded_.options().strategy.degrees);
  state.pieces = checkpoint::model_pieces(sharded_, &optimizer_);
  state.training = {{"step", step_}};
  return state;
}

void Trained::load(const checkpoint::Checkpoint& checkpoint) {
  checkpoint::load_model(checkpoint, sharded_, &optimizer_);
  step_ = checkpoint.manifest().training.at("step").get<int64_t>();
}

void Assembled::add(const std::vector<checkpoint::Piece>& pieces) {
  const std::scoped_lock lock(mutex_);
  for (const checkpoint::Piece& piece : pieces) {
    size_t elements = 1;
    for (const int64_t size : piece.shape) elements *= static_cast<size_t>(size);
    const at::Tensor data = piece.data.contiguous();
    std::string& value = values_[piece.name];
    if (value.empty()) value.assign(elements * data.element_size(), '\x7f');
    const auto* const bytes = static_cast<const char*>(data.const_data_ptr());
    const size_t width = data.element_size();
    mesh::for_each_run(piece.shape, piece.split, piece.elements, {},
                       [&](const mesh::Range& from, const mesh::Range& to) {
                         value.replace(static_cast<size_t>(to.begin) * width, static_cast<size_t>(to.size()) * width,
                                       bytes + static_cast<size_t>(from.begin - piece.elements.begin) * width,
                                       static_cast<size_t>(to.size()) * width);
                       });
  }
}

std::map<std::string, std::string> Assembled::bytes() const {
  const std::scoped_lock lock(mutex_);
  return values_;
}

std::string Assembled::difference(const Assembled& other) const {
  const auto mine = bytes(), theirs = other.bytes();
  for (const auto& [name, value] : mine) {
    const auto found = theirs.find(name);
    if (found == theirs.end()) return cat(name, " is missing");
    if (found->second != value) return cat(name, " has other bytes");
  }
  return mine.size() == theirs.size() ? "" : "there are more tensors";
}

}  // namespace tesserae::testing
