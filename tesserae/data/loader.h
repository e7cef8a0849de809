#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "tesserae/data/mixture.h"
#include "tesserae/data/sampler.h"
#include "tesserae/data/token_stream.h"

namespace tesserae::data {

struct Batch {
  at::Tensor tokens;   ///< int64 [batch, sequence], on the CPU
  at::Tensor targets;  ///< the same, one token later
};

/// A stream of a mixture, and how much of the mixture it is, beside the others.
struct Source {
  std::shared_ptr<TokenStream> stream;
  double weight = 1;
};

struct LoaderOptions {
  int64_t sequence_length = 256;
  int64_t batch_per_rank = 8;
  int64_t accumulate = 1;  ///< micro-batches of a step
  int rank = 0;
  int ranks = 1;
  uint64_t seed = 0;
  double validation_fraction = 0.05;  ///< the last part of each stream, never trained on
};

/// Cuts streams into samples of sequence_length tokens (and the one that follows), mixes them (mixture.h) and deals
/// them to ranks. The samples of a step depend on the global batch only, not on how it is divided into ranks and
/// micro-batches: micro-batch m of a step takes the next ranks * batch_per_rank samples, of which each rank takes a run
/// of batch_per_rank. Used from one thread.
class Loader {
 public:
  /// Throws InvalidArgument if a stream is too short for one sample to train on (and one to validate with), for streams
  /// of different vocabularies, and for weights that cannot be.
  Loader(std::vector<Source> sources, const LoaderOptions& options);
  Loader(std::shared_ptr<TokenStream> stream, const LoaderOptions& options)
      : Loader(std::vector<Source>{{std::move(stream)}}, options) {}

  const std::vector<Source>& sources() const { return sources_; }
  const LoaderOptions& options() const { return options_; }
  /// Of each stream (TokenStream::fingerprint), as text.
  std::vector<std::string> fingerprints() const;
  int64_t training_samples() const { return training_.samples(); }  ///< of all streams
  int64_t validation_samples() const { return validation_ ? validation_->samples() : 0; }
  int64_t global_batch() const;  ///< samples of a step: batch_per_rank * accumulate * ranks

  /// So many samples after the beginning.
  Position position(int64_t samples) const { return training_.advance({}, samples); }
  /// Where the step that follows so many steps from `start` begins.
  Position after(int64_t steps, const Position& start = {}) const;

  /// This rank's part of micro-batch `micro` of the step that begins at `step`.
  Batch training_batch(const Position& step, int64_t micro = 0);

  /// This rank's part of validation batch `index`: spread over the validation part, the same at every call. Begins anew
  /// when there are fewer samples. Throws InvalidArgument where nothing is held out.
  Batch validation_batch(int64_t index);

 private:
  int64_t first_held_out(size_t source) const;
  Batch read(const std::function<Mixture::Sample(int64_t i)>& sample_of);

  std::vector<Source> sources_;
  LoaderOptions options_;
  std::vector<int64_t> held_out_;  // of each source, its last samples
  Mixture training_;
  std::optional<Mixture> validation_;
};

}  // namespace tesserae::data
