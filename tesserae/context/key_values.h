#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "tesserae/context/pieces.h"
#include "tesserae/context/sequence.h"

namespace tesserae::context {

/// Keys and values, or their gradients: [batch, heads, time, width] each.
struct Pair {
  at::Tensor keys, values;
};

/// The keys and values of one attention, as they come from the ranks that have them, and their gradients on the way
/// back. For one forward or one backward, on the thread that computes; all ranks of the sequence make one and go
/// through its blocks in the same order (collective).
class KeyValues {
 public:
  struct Block : Pair {         ///< undefined: this rank's queries attend to nothing of it
    std::vector<Placed> spans;  ///< which positions lie where along time
  };

  virtual ~KeyValues() = default;
  virtual int blocks() const = 0;
  /// The next block, which may be used until the next but one is asked for. Together they have every position that this
  /// rank's queries attend to.
  virtual Block next() = 0;
  /// Backward only, after each next(): the gradients of that block's keys and values, [2, batch, heads, time, width]
  /// with its spans end to end, which is kept; undefined where the block was.
  virtual void add_gradients(const at::Tensor& both) = 0;
  /// Backward only, at the end: the sums over all ranks for this rank's positions.
  virtual Pair gradients() = 0;
};

/// `own`: of this rank's positions, as all that is returned. `pattern`: who attends to whom.
std::unique_ptr<KeyValues> collect_for_forward(Method method, const Sequence& sequence, const Pattern& pattern,
                                               const Pair& own);
std::unique_ptr<KeyValues> collect_for_backward(Method method, const Sequence& sequence, const Pattern& pattern,
                                                const Pair& own);

// What these are made of.

/// Every position, in its place, in memory that the ranks share.
Pair in_shared_memory(const Sequence& sequence, const Pair& own);
/// One block with every position; `whole`: they are there already, else they are gathered.
std::unique_ptr<KeyValues> collect_at_once(const Sequence& sequence, const Pair& own, const Pair& whole = {});
/// A block of each rank; `whole`: its keys and values are read there, and only gradients travel.
std::unique_ptr<KeyValues> collect_piece_by_piece(const Sequence& sequence, const Pattern& pattern, const Pair& own,
                                                  const Pair& whole = {});

}  // namespace tesserae::context
