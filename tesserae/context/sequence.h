#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "tesserae/context/cut.h"
#include "tesserae/context/parallel.h"

namespace tesserae::context {

/// A sequence that is cut over the ranks of a Parallel, as one of them sees it: what a model's forward hands to its
/// layers. Immutable. Functions marked *collective* are called by all ranks in the same order, and so are their
/// backwards; they have first derivatives only.
class Sequence {
 public:
  Sequence(ParallelPtr parallel, const Pattern& pattern);

  const Parallel& parallel() const { return *parallel_; }
  const Cut& cut() const { return cut_; }
  const std::vector<Span>& spans() const { return cut_.spans(parallel_->index()); }
  int64_t tokens() const { return cut_.tokens(parallel_->index()); }  ///< of this rank

  /// This rank's positions [tokens], int64, ascending.
  at::Tensor positions(c10::Device device) const { return positions_.to(device); }

  /// Of x, which has every position along `dim`: this rank's. Throws InvalidArgument for another length.
  at::Tensor own(const at::Tensor& x, int64_t dim) const;

  /// The reverse: every position of what the ranks have. What is computed from it all ranks compute alike; of its
  /// gradient a rank gets its positions' part times C, since gradients are averaged over the ranks. Collective.
  at::Tensor whole(const at::Tensor& x, int64_t dim) const;

  /// The sum of `sum` (a scalar) over the ranks, divided by `count`: the mean loss of all tokens, the same on all
  /// ranks, if each brings the sum of its tokens' losses. Its gradient is C / count on each rank, since gradients are
  /// averaged over the ranks. Collective.
  at::Tensor mean(const at::Tensor& sum, const at::Tensor& count) const;

 private:
  ParallelPtr parallel_;
  Cut cut_;
  at::Tensor positions_;  // on the device of the job: layers ask for them anew
};
using SequencePtr = std::shared_ptr<const Sequence>;

}  // namespace tesserae::context
