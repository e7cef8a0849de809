#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

namespace tesserae::model {

/// How tokens are drawn, and how many.
struct GenerateOptions {
  int64_t tokens = 200;      ///< how many to generate
  double temperature = 0.8;  ///< 0: always the likeliest token
  int64_t top_k = 0;         ///< > 0: only the so many likeliest tokens are drawn from
  int64_t window = 1024;     ///< at most so many of the last tokens are given to the model (its max_sequence)
  uint64_t seed = 0;         ///< of the draws: the same on all ranks
  int64_t stop = -1;         ///< >= 0: generation ends after this token
};

/// Continues `prompt` (not empty) and returns the new tokens. `logits` maps tokens [1, time] to [1, time, vocabulary];
/// it is called without gradients. With a sharded model every rank calls this together with the same arguments: ranks
/// draw the same tokens, as they compute the same logits. With `stop` they must also round alike (equal hardware).
std::vector<int64_t> generate(const std::function<at::Tensor(const at::Tensor& tokens)>& logits,
                              std::vector<int64_t> prompt, const GenerateOptions& options = {});

/// Draws from logits [vocabulary]: the first token whose cumulated probability exceeds `uniform`, a number in [0, 1).
int64_t sample(const at::Tensor& logits, double temperature, int64_t top_k, double uniform);

}  // namespace tesserae::model
