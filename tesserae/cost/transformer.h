#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "tesserae/model/config.h"

namespace tesserae::cost {

/// How a model is run, as far as its size and traffic depend on it. Bytes are those of one element.
struct Execution {
  int64_t sequence = 4096;        ///< tokens of a sequence
  int64_t micro_batch = 1;        ///< sequences that a rank computes at once
  int tensor = 1;                 ///< tensor-parallel degree T
  int context = 1;                ///< context-parallel degree C: a rank has 1/C of the tokens of each sequence
  int expert = 1;                 ///< expert-parallel degree E: a rank has 1/E of the experts
  int compute_bytes = 2;          ///< of a parameter and of an activation
  bool recompute = false;         ///< blocks keep their input only and run forward again in backward
  bool sequence_parallel = true;  ///< between the split layers activations are split by tokens
  bool composed_norms = false;    ///< torch has no kernel for the norm, as on the CPU: each keeps a tensor more
  bool widened = false;           ///< products are of fp32 copies, block by block (tensor::widens_products)
  /// Gradients of weights are computed beside the place where they are reduced, as in another dtype than that they must
  /// be, and all but the first of micro-batches that add up whole.
  bool gradients_apart = false;

  double tokens() const {  ///< of a rank
    return static_cast<double>(sequence) * static_cast<double>(micro_batch) / context;
  }
};

/// Elements of the parameters that one tensor-parallel rank has. Matrices are split, norms are not; the vocabulary is
/// padded to a multiple of T.
struct PartSizes {
  int64_t block = 0;    ///< without its experts
  int64_t experts = 0;  ///< of a block: a unit inside it
  int64_t head = 0;     ///< 0: it is tied
  int64_t root = 0;
  int64_t total = 0;  ///< with experts
};

/// Throws InvalidArgument where T does not divide the heads, the heads of keys and values and the width of the
/// feed-forward layer, or E the experts, naming what would do.
PartSizes part_sizes(const model::GptConfig& model, int tensor, int expert = 1);

/// Bytes of activations of one rank at the fullest moment of a step, by what they are for. Experts get equally many
/// tokens, here and below.
struct Activations {
  double blocks = 0;    ///< kept from forward to backward; with `recompute` the inputs, and one block being run again;
                        ///< gradients in a block, those of weights that are computed apart, and fp32 copies of
                        ///< products, where that is more than the head needs before
  double head = 0;      ///< last norm, logits, and the loss with its gradient
  double exchange = 0;  ///< of context ranks: keys and values on their way, of one layer
  double total() const { return blocks + head + exchange; }
};
Activations activations_of(const model::GptConfig& model, const Execution& run);

/// Bytes that a logit takes at the fullest moment, in the loss's backward: itself and its gradient.
double logit_bytes(double compute_bytes);

/// Bytes that all blocks would keep from forward to backward, if none were recomputed; no gradients among them.
double kept_by_blocks(const model::GptConfig& model, const Execution& run);

/// Which activations leave between forward and backward (offload::Activations).
struct Leaving {
  int horizon = 2;            ///< units; 0: also of a first forward, whose order nobody knows
  double smallest = 1 << 20;  ///< bytes of a tensor
  std::function<bool(const std::string& unit)> of = {};  ///< by name; unset: of all units
};
/// Bytes that leave in a forward and its backward, once the order of units is known. Dense models.
double leaving_bytes(const model::GptConfig& model, const Execution& run, const Leaving& leaving);

/// Operations (additions and multiplications) of one token, forward and backward, over all ranks.
double operations_of_token(const model::GptConfig& model, const Execution& run);

/// What a rank sends to the others of its group along an axis in one forward and backward of a micro-batch.
struct AxisTraffic {
  double bytes = 0;
  double calls = 0;
};
AxisTraffic tensor_traffic_of(const model::GptConfig& model, const Execution& run);
/// Of the method that context::Parallel chooses where ranks share no memory.
AxisTraffic context_traffic_of(const model::GptConfig& model, const Execution& run);
/// Of tokens that go to experts of other ranks, and what they make of them.
AxisTraffic expert_traffic_of(const model::GptConfig& model, const Execution& run);

}  // namespace tesserae::cost
