#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tesserae/comm/fabric.h"
#include "tesserae/shard/sharded.h"
#include "tesserae/shard/unit.h"

namespace tesserae::shard::testing {

/// A small network with what the engine must cope with; sizes are odd on purpose.
struct NetOptions {
  int64_t dimension = 13;
  int64_t hidden = 29;
  int64_t vocabulary = 31;
  int blocks = 3;
  bool tied = false;           ///< embedding and head are one parameter
  bool nested = false;         ///< blocks 1 and 2 lie inside a unit of their own
  int frozen_block = -1;       ///< this block's parameters need no gradient
  bool frozen_matrix = false;  ///< in every block the first matrix is frozen, the rest trains
  bool unused = false;         ///< every block has a parameter that never gets a gradient
  int twice = -1;              ///< this block is called twice
  int skipped = -1;            ///< this block is not called at all
  bool checkpoint = false;     ///< blocks recompute their activations
  double dropout = 0;
  bool meta = false;  ///< parameters are on the meta device until sharded
};

class BlockImpl : public torch::nn::Module {
 public:
  explicit BlockImpl(const NetOptions& options);
  at::Tensor forward(const at::Tensor& x);

  at::Tensor first, bias, second, scale, unused;
  double dropout;
};

class PairImpl : public torch::nn::Module {
 public:
  explicit PairImpl(const NetOptions& options);
  at::Tensor forward(const at::Tensor& x);
  Unit<BlockImpl> left, right;
};

class NetImpl : public torch::nn::Module {
 public:
  explicit NetImpl(const NetOptions& options);
  /// tokens [batch, length] int64 -> mean squared distance of the outputs to `targets` [batch, length, vocabulary].
  at::Tensor forward(const at::Tensor& tokens, const at::Tensor& targets);

  NetOptions options;
  at::Tensor embedding, head, scale;
  std::vector<Unit<BlockImpl>> blocks;
  Unit<PairImpl> pair{nullptr};
};
using Net = Unit<NetImpl>;

/// A large block and small ones after it: buffers that all units share have the size of the large one.
class UnevenImpl : public torch::nn::Module {
 public:
  explicit UnevenImpl(int64_t dimension = 64, int64_t large = 1024, int small = 4);
  at::Tensor forward(const at::Tensor& x);
  std::vector<Unit<BlockImpl>> blocks;
};
using Uneven = Unit<UnevenImpl>;

/// Fills a parameter from its name alone.
void fill(const std::string& name, at::Tensor& parameter);
/// fill() for all parameters that are in memory.
void fill_all(torch::nn::Module& module);

struct Batch {
  at::Tensor tokens, targets;
};
/// The rows of rank `rank` of `ranks` in the global batch of a step; rank 0 of 1 gets all of it.
Batch batch_of(const NetOptions& options, int64_t step, int rank, int ranks, int64_t rows = 8);

using Values = std::map<std::string, at::Tensor>;

/// For what keeps its fabric: without owning it, as the test does.
std::shared_ptr<comm::Fabric> share(comm::Fabric& fabric);

/// A job of one rank.
std::shared_ptr<comm::Fabric> alone();
Options fully_sharded(int ranks);

/// What a call's exception of that kind says.
template <class Kind = std::exception, class Call>
std::string error_of(const Call& call) {
  try {
    call();
  } catch (const Kind& error) {
    return error.what();
  }
  return "no error";
}

/// `steps` of plain SGD (no momentum) in one process without an engine; `micro` backwards a step over equal parts of
/// the batch.
struct Reference {
  std::vector<double> losses;
  Values parameters;
};
Reference train_reference(const NetOptions& options, int steps, double lr, int micro = 1);

/// The same on an engine. Losses are means over ranks.
struct Training {
  NetOptions net;
  Options options;
  int steps = 4;
  double lr = 0.5;
  int micro = 1;
  std::function<void(Sharded&)> attach = {};  ///< before the first step
};
Reference train_sharded(comm::Fabric& fabric, const Training& run, Statistics* statistics = nullptr);

/// One SGD step on the shards.
void sgd(Sharded& sharded, double lr);
/// max |a - b| / max |b| over all parameters of `expected`, the worst of them; 1e9 if one is missing.
double worst_difference(const Values& actual, const Values& expected);

}  // namespace tesserae::shard::testing
