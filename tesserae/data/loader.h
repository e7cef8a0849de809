#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>

#include "tesserae/data/sampler.h"
#include "tesserae/data/token_stream.h"

namespace tesserae::data {

struct Batch {
  at::Tensor tokens;   ///< int64 [batch, sequence], on the CPU
  at::Tensor targets;  ///< the same, one token later
};

struct LoaderOptions {
  int64_t sequence_length = 256;
  int64_t batch_per_rank = 8;
  int64_t accumulate = 1;  ///< micro-batches of a step
  int rank = 0;
  int ranks = 1;
  uint64_t seed = 0;
  double validation_fraction = 0.05;  ///< the last part of the stream, never trained on
};

/// Cuts a stream into samples of sequence_length tokens (and the one that follows) and deals them to ranks. The samples
/// of a step depend on the global batch only, not on how it is divided into ranks and micro-batches: micro-batch m of a
/// step takes the next ranks * batch_per_rank samples, of which each rank takes a run of batch_per_rank. Used from one
/// thread.
class Loader {
 public:
  /// Throws InvalidArgument if the stream is too short for one sample to train on (and one to validate with).
  Loader(std::shared_ptr<TokenStream> stream, const LoaderOptions& options);

  int64_t training_samples() const { return training_.samples(); }
  int64_t validation_samples() const { return validation_samples_; }
  int64_t global_batch() const;  ///< samples of a step: batch_per_rank * accumulate * ranks

  /// Where the step that follows so many steps from `start` begins.
  Position after(int64_t steps, const Position& start = {}) const;

  /// This rank's part of micro-batch `micro` of the step that begins at `step`.
  Batch training_batch(const Position& step, int64_t micro = 0);

  /// This rank's part of validation batch `index`: spread over the validation part, the same at every call. Begins anew
  /// when there are fewer samples. Needs validation_samples() > 0.
  Batch validation_batch(int64_t index);

 private:
  Batch read(const std::function<int64_t(int64_t i)>& sample_of);

  std::shared_ptr<TokenStream> stream_;
  LoaderOptions options_;
  int64_t validation_samples_;
  Sampler training_;
};

}  // namespace tesserae::data
