#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "tesserae/comm/counters.h"
#include "tesserae/comm/error.h"
#include "tesserae/comm/reduction.h"
#include "tesserae/comm/wire.h"
#include "tesserae/os/fork.h"

namespace tesserae::comm {

/// One side of a point-to-point message: contiguous `data` to or from member `peer`.
struct Message {
  int peer = 0;
  at::Tensor data;
};

/// Some ranks of the job that run collectives together. Members are numbered by the piece that they own (the order of
/// `members`), not by their rank in the job.
///
/// Tensors are contiguous, of one device, and belong to the caller, who keeps them alive and untouched until the call
/// returns (or, where blocks_host() is false, until work queued later on the current stream). All members call the same
/// verbs in the same order with the same sizes. One thread at a time: groups are used from the lane that they were made
/// for (lane.h), which is also what makes a call asynchronous.
/// Each verb throws PeerLost, Timeout (after `deadline`) or Mismatch; see error.h.
class Group {
 public:
  virtual ~Group() = default;

  int rank() const { return rank_; }  ///< this member's index
  int size() const { return static_cast<int>(members_.size()); }
  const std::vector<int>& members() const { return members_; }  ///< job ranks by member index
  const std::string& name() const { return name_; }

  /// True if verbs return only when the data have arrived (CPU transports); false if they order the data on the current
  /// stream of the device (NCCL) or move nothing.
  virtual bool blocks_host() const = 0;

  /// In place: `buffer` is size() equal pieces; piece rank() is this member's contribution, the others are filled.
  ///
  /// `wire`: how floating point numbers may travel where the transport finds bytes dear: all pieces, this member's too,
  /// then have the values that were sent.
  void all_gather(const at::Tensor& buffer, Label label = {}, Wire wire = Wire::exact);

  /// The same from `input`, this member's piece, to `output`; `input` is no part of `output`, and only read. Members
  /// may call the one or the other.
  void all_gather_to(const at::Tensor& output, const at::Tensor& input, Label label = {});

  /// In place: `buffer` is size() equal pieces; afterwards piece rank() holds the sum over all members of their piece
  /// rank(), or what else `how` says. The other pieces are left undefined. The order of summation depends on nothing
  /// but size() and rank(). Throws InvalidArgument for a dtype that cannot be reduced so. `wire`: what others
  /// contribute was rounded once, before it was added.
  void reduce_scatter(const at::Tensor& buffer, Label label = {}, Reduction how = Reduction::sum,
                      Wire wire = Wire::exact);

  /// The same from `input` to `output`, which is as large as one piece and no part of `input`; `input` is only read.
  void reduce_scatter_to(const at::Tensor& output, const at::Tensor& input, Label label = {},
                         Reduction how = Reduction::sum);

  /// reduce_scatter of a sum, whose outcome times `scale` goes to `output`, which is as large as one piece and no part
  /// of `buffer`; all of `buffer` is left undefined. Where the transport can, a pass over memory less than one after
  /// the other, and for three members and more one rounding less of bf16 and fp16.
  void reduce_scatter_scaled(const at::Tensor& output, const at::Tensor& buffer, double scale, Label label = {},
                             Wire wire = Wire::exact);

  /// In place sum, or what else `how` says. All members end with the same bits. `wire`: of what is added; sums are not
  /// rounded.
  void all_reduce(const at::Tensor& buffer, Label label = {}, Reduction how = Reduction::sum, Wire wire = Wire::exact);

  void broadcast(const at::Tensor& buffer, int root, Label label = {});

  /// Member i gets `input_counts[i]` consecutive elements of `input`; `output` is filled in the order of members.
  void all_to_all(const at::Tensor& output, const at::Tensor& input, const std::vector<int64_t>& output_counts,
                  const std::vector<int64_t>& input_counts, Label label = {});

  /// Sends and receives all messages; messages between two members match in order. A member without messages need not
  /// call.
  void exchange(const std::vector<Message>& sends, const std::vector<Message>& receives, Label label = {});

  /// `what`: of what this is the beginning, in words; members that bring different words get Mismatch.
  void barrier(Label label = {}, std::string_view what = {});

  /// Memory that all members see: [bytes] uint8, zeroed, on the host; it lives until the last member lets go of it. Who
  /// may write when is for the callers to agree on, by barriers. Collective. Undefined, for all members, where the
  /// transport has no such memory, or there is none left.
  virtual at::Tensor share(int64_t bytes);
  /// Whether share() is of use: where it is true and the memory is there, it gives some.
  virtual bool can_share() const { return false; }

  /// `result`, what a verb has left, for the host to read: waits for it, then require_intact().
  at::Tensor to_host(const at::Tensor& result);
  /// Where blocks_host() is false, a verb that waits for a member which is lost just ends, on the device, and leaves
  /// what is no result: whoever let the host read one calls this before it acts on that. Throws PeerLost, Timeout or
  /// Mismatch if such a verb may have been among those before. Never waits.
  virtual void require_intact() {}

  /// The last call, of all members at the same place: nothing is in flight, and what connects them ends in good order.
  virtual void close() {}

  /// Calls and bytes that left this rank through this group.
  const Counters& counters() const { return *counters_; }
  /// The same for who may outlive the group.
  std::shared_ptr<const Counters> shared_counters() const { return counters_; }

 protected:
  Group(std::string name, std::vector<int> members, int rank);

  // The transports. Arguments are checked: contiguous, divisible, size() > 1.
  virtual void do_all_gather(const at::Tensor& buffer) = 0;
  virtual void do_reduce_scatter(const at::Tensor& buffer, Reduction how) = 0;
  // These copy where a transport has no better way.
  virtual void do_all_gather_to(const at::Tensor& output, const at::Tensor& input);
  virtual void do_reduce_scatter_to(const at::Tensor& output, const at::Tensor& input, Reduction how);
  virtual void do_reduce_scatter_scaled(const at::Tensor& output, const at::Tensor& buffer, double scale);
  virtual void do_all_reduce(const at::Tensor& buffer, Reduction how) = 0;
  virtual void do_broadcast(const at::Tensor& buffer, int root) = 0;
  virtual void do_exchange(const std::vector<Message>& sends, const std::vector<Message>& receives) = 0;
  virtual void do_barrier(std::string_view what) = 0;
  /// Where bytes cost next to nothing, exact.
  virtual Wire travels_as(Wire asked) const { return asked; }
  /// By messages, with memory of their own for what travels. `wire` is not exact.
  virtual void do_packed_all_gather(const at::Tensor& buffer, Wire wire);
  virtual void do_packed_reduce_scatter(const at::Tensor& buffer, Reduction how, Wire wire);
  /// The exchange of a collective that travels packed: unlike others it is one that all members take part in, and that
  /// they must agree on. `verb` says of what it is the exchange; `buffer` is what the caller brought.
  virtual void do_packed_exchange(const std::string& verb, const at::Tensor& buffer, const std::vector<Message>& sends,
                                  const std::vector<Message>& receives);
  /// Label::contents of the verb that runs: what members must agree on beside verb, size and dtype.
  uint32_t contents() const { return contents_; }
  /// Turns whatever the transport threw into PeerLost, Timeout or Mismatch. `what` describes the operation.
  [[noreturn]] virtual void rethrow(const std::string& what, const std::exception& cause) = 0;

 private:
  template <class Body>
  void run(std::string_view verb, Counters::Verb& counter, int64_t bytes, const Label& label, const Body& body);
  void check_buffer(std::string_view verb, const at::Tensor& buffer, int64_t pieces) const;
  void check_piece(std::string_view verb, const at::Tensor& piece, const at::Tensor& buffer) const;
  void check_reduction(std::string_view verb, const at::Tensor& buffer, Reduction how) const;
  void do_packed_all_reduce(const at::Tensor& buffer, Reduction how, Wire wire);
  Wire wire_for(Wire asked, const at::Tensor& buffer) const;
  int64_t piece_bytes(const at::Tensor& buffer, Wire wire) const;
  std::string describe(std::string_view verb, const Label& label) const;

  std::string name_;
  std::vector<int> members_;
  int rank_;
  std::shared_ptr<Counters> counters_ = std::make_shared<Counters>();
  uint64_t sequence_ = 0;
  uint32_t contents_ = 0;
  os::ForkGuard made_;
  std::exception_ptr failure_;  // what the first failing verb threw; every later verb throws it again
};

/// What texts say of them: " of contents #1f3a"; nothing for 0.
std::string contents_text(uint32_t contents);

}  // namespace tesserae::comm
