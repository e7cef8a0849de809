#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <memory>

namespace tesserae::tensor {
class Parallel;
}

namespace tesserae::context {
class Parallel;
}

namespace tesserae::model {

/// The shape of a decoder transformer. Zero means: the value in parentheses.
struct GptConfig {
  int64_t vocabulary = 257;
  int64_t dimension = 256;
  int64_t layers = 6;
  int64_t heads = 4;
  int64_t kv_heads = 0;         ///< heads of keys and values (heads)
  int64_t feed_forward = 0;     ///< width of the feed-forward layer (8/3 of dimension, rounded up to a multiple of 32)
  int64_t max_sequence = 1024;  ///< longest sequence that forward takes
  int64_t window = 0;           ///< > 0: a token attends to so many at most, itself among them
  /// >= 0: the token that ends a document; nobody attends across. (Documents are one sequence.)
  int64_t document_end = -1;
  double rope_base = 10000;
  double norm_epsilon = 1e-5;
  double dropout = 0;  ///< share of what the embedding and each residual branch give that is dropped in training
  bool tied = true;    ///< the output head uses the embedding's weights

  /// In the place of each block's feed-forward layer so many, each of its width, between which a router chooses for
  /// each token (experts/moe.h). (None: one layer for all.) The expert axis of `parallel`'s mesh shares them out.
  int64_t experts = 0;
  int64_t experts_per_token = 2;  ///< k
  int64_t shared_experts = 0;     ///< so many more, which every token goes through
  double balance_loss = 0.01;     ///< coefficients of the routers' losses: RoutingOptions has this and the next two
  double z_loss = 0.001;
  double bias_rate = 0;
  double capacity_factor = 0;  ///< > 0: choices beyond it are dropped; see experts::plan_dispatch

  uint64_t seed = 12345;           ///< of the initial parameters; see init.h
  c10::Device device = c10::kCPU;  ///< where parameters are made; kMeta: nowhere, the engine initialises them
  c10::ScalarType dtype = c10::kFloat;

  /// The tensor-parallel ranks that the model is split over; its degree divides heads, kv_heads and feed_forward. (One
  /// rank.) All of them build the model together.
  std::shared_ptr<const tensor::Parallel> parallel = nullptr;
  /// The context-parallel ranks that share out the positions of every sequence; with tensor-parallel ranks, each tensor
  /// index has its own. (One rank.) All of them pass the same tokens.
  std::shared_ptr<const context::Parallel> context = nullptr;
  bool sequence_parallel = false;  ///< between the split layers, each of those ranks has its piece of the sequence
};

/// The same with every zero replaced. Throws InvalidArgument, naming field and value, for a shape that cannot work.
GptConfig resolved(GptConfig config);

/// Numbers of parameters, without building the model. Each block and the head, if it is not tied, are units.
struct GptSizes {
  int64_t block = 0;    ///< of one block
  int64_t experts = 0;  ///< of these, in the block's experts, which are a unit inside it
  int64_t head = 0;     ///< 0: it is tied
  int64_t root = 0;     ///< outside of these: embedding and last norm
  int64_t total = 0;
};
GptSizes sizes(const GptConfig& config);

}  // namespace tesserae::model
