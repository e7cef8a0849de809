#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "tesserae/comm/group.h"

namespace tesserae::comm {

/// What the members of one local group share: the meeting place of a collective, and a mailbox per pair of members.
struct LocalRoom {
  /// What a member brings to a collective; the last to come checks that all agree and moves the data for all.
  struct Offer {
    std::string verb;
    int root = 0;
    at::Tensor buffer;
    bool present = false;
    uint32_t contents = 0;
  };
  /// A message that waits for its receiver. It belongs to the sender, who waits until it is taken.
  struct Parcel {
    at::Tensor data;
    bool taken = false;
    std::string refusal;  ///< why the receiver did not take it
  };

  LocalRoom(std::vector<int> job_ranks) : members(job_ranks), offers(job_ranks.size()) {}

  const std::vector<int> members;
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<Offer> offers;
  size_t arrived = 0;
  uint64_t round = 0;
  std::string disagreement;  ///< of the members; such a room is never used again
  bool late = false;         ///< a member met its deadline: the others need not wait for theirs
  std::map<std::pair<int, int>, std::deque<Parcel*>> mail;
  std::vector<int> gone;  ///< job ranks whose body ended, in that order
};

/// A group whose members are threads of one process. Sums run in the order of members, so they are the same for all.
class LocalGroup final : public Group {
 public:
  LocalGroup(std::string name, std::shared_ptr<LocalRoom> room, int rank, std::chrono::milliseconds deadline);

  bool blocks_host() const override { return true; }

 protected:
  void do_all_gather(const at::Tensor& buffer) override;
  void do_reduce_scatter(const at::Tensor& buffer, Reduction how) override;
  void do_all_reduce(const at::Tensor& buffer, Reduction how) override;
  void do_broadcast(const at::Tensor& buffer, int root) override;
  void do_exchange(const std::vector<Message>& sends, const std::vector<Message>& receives) override;
  void do_barrier(std::string_view what) override;
  void do_packed_exchange(const std::string& verb, const at::Tensor& buffer, const std::vector<Message>& sends,
                          const std::vector<Message>& receives) override;
  [[noreturn]] void rethrow(const std::string& what, const std::exception& cause) override;

 private:
  template <class Move>
  void meet(LocalRoom::Offer offer, const Move& move);
  template <class Condition, class Missing>
  void wait(std::unique_lock<std::mutex>& lock, const Condition& condition, const Missing& missing);

  std::shared_ptr<LocalRoom> room_;
  std::chrono::milliseconds deadline_;
};

}  // namespace tesserae::comm
