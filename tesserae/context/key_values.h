#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "tesserae/context/pieces.h"
#include "tesserae/context/sequence.h"

namespace tesserae::context {

/// The keys and values of one attention, as they come from the ranks that have them, and their gradients on the way
/// back. For one forward or one backward, on the thread that computes; all ranks of the sequence make one and go
/// through its blocks in the same order (collective). Tensors [batch, heads, time, width].
class KeyValues {
 public:
  struct Block {
    at::Tensor keys, values;
    std::vector<Placed> spans;  ///< which positions lie where along time
  };

  virtual ~KeyValues() = default;
  virtual int blocks() const = 0;
  /// The next block, which may be used until the next but one is asked for. Together they have every position that this
  /// rank's queries attend to.
  virtual Block next() = 0;
  /// Backward only, after each next(): the gradients of that block, of which `keys` and `values` are tensors of its
  /// own.
  virtual void add_gradients(const at::Tensor& keys, const at::Tensor& values) = 0;

  struct Gradients {
    at::Tensor keys, values;
  };
  /// Backward only, at the end: the sums over all ranks for this rank's positions.
  virtual Gradients gradients() = 0;
};

/// `keys`, `values`: of this rank's positions. `pattern`: who attends to whom.
std::unique_ptr<KeyValues> collect(Method method, const Sequence& sequence, const Pattern& pattern,
                                   const at::Tensor& keys, const at::Tensor& values);

// The methods.
std::unique_ptr<KeyValues> collect_at_once(bool shared, const Sequence& sequence, const at::Tensor& keys,
                                           const at::Tensor& values);
std::unique_ptr<KeyValues> collect_piece_by_piece(const Sequence& sequence, const Pattern& pattern,
                                                  const at::Tensor& keys, const at::Tensor& values);

}  // namespace tesserae::context
