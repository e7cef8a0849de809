#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "tesserae/comm/lane.h"
#include "tesserae/shard/flat.h"
#include "tesserae/shard/shard.h"
#include "tesserae/shard/sharding.h"

namespace tesserae::shard {

/// The gradient side of one flat buffer on this rank, from autograd's gradients to Shard::grad. The life of a gradient:
///
///  1. add(): each parameter's gradient goes into the whole buffer (reduce dtype): copied the first time, unless it was
///     written there (destination()), added after that.
///  2. complete() is true once every parameter has had one in this backward. A backward may complete a buffer several
///     times (a unit under reentrant checkpointing used twice) or never (a parameter without gradient).
///  3. reduce() sends the whole buffers of a unit on their way over the reduce lane; missing gradients count as zero.
///     First hop: sum over G, leaving this rank's gradient piece.
///  4. Not at a boundary: the piece is added to the kept piece (two_hop). At a boundary: the kept piece is added;
///     second hop: G to O; third hop: sum over replicas; the average (UnitContext::gradient_divisor) is added to
///     Shard::grad. Where the first hop is all there is, and nothing to be added to, it leaves the average in
///     Shard::grad itself.
///  5. finish() waits for that and gives the buffer back to the pool.
///
/// With accumulation `local`, nobody calls reduce() before the boundary, and step 1 accumulates: in the dtype that
/// computes where the reduce dtype is narrower, so that a sum is rounded once, when it is reduced.
class FlatGradient {
 public:
  FlatGradient(const UnitContext& context, const Flat& flat, Shard& shard);

  /// UnitContext::gradient_divisor has changed. Not while a reduction is in flight.
  void update_average_factor();

  void expect_all();  ///< every slot is missing again
  /// True if no buffer is held yet: add() is about to take one from the pool.
  bool needs_buffer() const { return buffer_ < 0; }
  /// The slot, for whoever computes its first gradient; undefined where it holds one already (of this backward, or of
  /// an earlier one of the accumulation) or was given away in this backward. See autograd::gradient_destination().
  at::Tensor destination(int slot);
  /// `waits`: no reduction follows this backward.
  void add(int slot, const at::Tensor& gradient, bool waits = false);
  bool complete() const { return missing_ == 0; }
  /// True if there is anything that a reduction at a boundary must still take along.
  bool pending() const { return buffer_ >= 0 || sum_.defined() || piece_pending_; }
  /// True if there is anything for a reduction of that kind.
  bool waits(bool boundary) const { return boundary ? pending() : buffer_ >= 0 || sum_.defined(); }

  /// Reduces what `all`, of one unit, hold, in one task. `always_whole`: zeros travel for what has none since a piece
  /// was kept, as other ranks may have some.
  static void reduce(const std::vector<FlatGradient*>& all, bool boundary, bool always_whole,
                     const UnitContext& context, const comm::Label& label);
  bool reducing() const { return in_flight_ >= 0; }
  bool reduced() const { return ticket_.ready(); }
  void finish();

  /// Forgets everything that has not been reduced yet, and the kept piece.
  void discard();
  /// discard(), and Shard::grad becomes undefined; its memory is kept for the next backward, or until give_back().
  void zero();
  void give_back();  ///< after zero(): drops the memory of Shard::grad, if the pool is elastic
  void part_with();  ///< after zero(): leaves the memory of Shard::grad to who else has it
  /// Whether anybody has the memory of Shard::grad besides Shard::grad itself and so many views of it.
  bool is_shared_beyond(size_t views) const;
  /// Makes `grad` ([chunk], master dtype) the memory of Shard::grad.
  void set_memory(at::Tensor grad) { grad_ = std::move(grad); }

  /// The memory of Shard::grad ([chunk], master dtype), made at its first use; undefined content.
  const at::Tensor& memory();
  bool has_memory() const { return grad_.defined(); }

  int64_t buffer_bytes() const { return flat_.total() * static_cast<int64_t>(c10::elementSize(flat_.dtypes().reduce)); }
  int64_t state_bytes() const;

 private:
  using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

  // Views of a buffer, made once per buffer since addresses are stable.
  struct Views {
    at::Tensor whole;
    at::Tensor piece;  // this rank's gradient piece
    at::Tensor chunk;  // this rank's chunk
    std::vector<at::Tensor> slots;
    std::vector<at::Tensor> gaps;
  };

  /// One reduction, for the lane.
  struct Job {
    FlatGradient* of;
    bool fresh;      ///< false: only the kept piece is left to bring to its owners
    bool add_piece;  ///< a kept piece is added to
    bool add_grad;   ///< Shard::grad is added to
    bool straight;   ///< the first hop leaves the average in Shard::grad
    std::shared_ptr<const Views> views;
  };
  Job begin_reduction(bool boundary, bool always_whole);
  static void carry(const std::vector<Job>& jobs, bool boundary, const Sharding& sharding, const comm::Label& label,
                    StepObserver* adjuster, UserCollective* scatterer);
  static bool run_users(UserCollective& scatterer, const std::vector<at::Tensor>& buffers, const comm::Group& group,
                        const std::vector<Job>& jobs);
  void carry_elsewhere(const Job& job, StepObserver& reducer);
  void deliver_adjusted(const at::Tensor& sum, bool add, StepObserver& adjuster);
  template <class Body>
  bool keep_failure(const Body& body);

  void take_buffer();
  void add_up(int slot, const at::Tensor& gradient);
  void round_sum();
  void fire(int slot);
  void evict(int slot);
  void zero_missing();
  bool first_hop_delivers() const;
  at::Tensor reduce_elsewhere(const Views& views, StepObserver& reducer);
  void deliver(const at::Tensor& chunk, bool add, bool divided);
  void deliver_to_host(const at::Tensor& chunk, bool add, bool divided);

  const UnitContext& context_;
  std::shared_ptr<const Sharding> sharding_;
  const Flat& flat_;
  Shard& shard_;
  double prescale_;            // applied to each gradient before summing (fp16 only), taken back in the average
  at::Tensor average_factor_;  // one over (divisor * prescale), a scalar on the host
  at::Tensor grad_;            // memory of Shard::grad
  at::Tensor piece_;           // kept gradient piece, two_hop only
  at::Tensor sum_;             // whole, of a local accumulation where reductions are of a narrower dtype
  bool piece_pending_ = false;

  Pool::Buffer buffer_ = -1;  // the whole buffer being filled
  Pool::Buffer viewed_ = -1;
  std::shared_ptr<const Views> views_;
  std::vector<bool> filled_;                      // by slot: the buffer holds a gradient
  std::vector<bool> fired_;                       // by slot: had one in this backward
  std::vector<std::optional<WeakTensor>> given_;  // by slot: what destination() returned in this backward
  int missing_ = 0;                               // slots that have not fired

  Pool::Buffer in_flight_ = -1;
  comm::Ticket ticket_;
  std::exception_ptr failure_;  // what a reducer threw on the lane, until finish()
};

}  // namespace tesserae::shard
