#pragma once

// Private to ShmGroup: one verb from beginning to end, and the messages of an exchange, which share its blocks. Not a
// contract for others, so it is longer than one.

#include <algorithm>
#include <deque>
#include <functional>
#include <stdexcept>
#include <string>
#include <string_view>

#include "tesserae/base/copy.h"
#include "tesserae/comm/transports/shm_group.h"

namespace tesserae::comm {

namespace shm {

struct Aborted : std::runtime_error {
  Aborted() : std::runtime_error("aborted") {}
};
struct Late : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct Disagreement : std::runtime_error {
  using std::runtime_error::runtime_error;
};

enum class Verb : uint32_t { all_gather = 1, reduce_scatter, all_reduce, broadcast, barrier, exchange };

// What is said of a barrier in words fits in a block.
inline constexpr size_t longest_text = 1024;

/// What a label says, in words; `data`: of the block with that label.
std::string text_of(const ShmLabel& label, const std::byte* data);

inline std::byte* bytes_of(const at::Tensor& tensor) {
  return static_cast<std::byte*>(tensor.mutable_data_ptr());
}

/// Copies what came to where it stays. If all members together get more than caches hold, past them: a line of the
/// target is then not fetched before it is written over, and the rings stay in the cache.
class LandingCopy {
 public:
  explicit LandingCopy(int64_t bytes_of_all) : past_caches_(bytes_of_all > cache_bytes) {}
  void operator()(std::byte* to, const std::byte* from, size_t bytes) const {
    past_caches_ ? stream(to, from, bytes) : copy_memory(to, from, bytes);
  }

 private:
  static constexpr int64_t cache_bytes = int64_t{32} << 20;
  static void stream(std::byte* to, const std::byte* from, size_t bytes);
  bool past_caches_;
};

}  // namespace shm

// A verb: 1. what members must agree on becomes visible to the liveness channel, and goes with every block;
// 2. blocks are written and read; 3. nothing is left to do for others: what they have not read yet lies in the ring.
class ShmGroup::Call {
 public:
  Call(ShmGroup& group, shm::Verb verb, const at::Tensor& buffer, int root = -1, Reduction how = Reduction::sum,
       std::string_view what = {});
  ~Call();

  /// Writes the next block of this member's ring; returns where, for who wants to read it again.
  template <class Fill>
  std::byte* post(const Fill& fill) {
    const int self = group_.rank();
    const uint64_t index = room_.written(self).load(std::memory_order_relaxed);
    wait([&] {
      for (int reader = 0; reader < group_.size(); ++reader) {
        if (reader == self) continue;
        if (index - room_.read(self, reader).load(std::memory_order_acquire) >= ShmRoom::ring_blocks) return false;
      }
      return true;
    });
    const ShmRoom::Block block = room_.ring_block(self, index);
    *block.label = label_;
    fill(block.data);
    room_.written(self).store(index + 1, std::memory_order_release);
    room_.ring_all();
    return block.data;
  }

  /// Lets `use` read the next block of another member.
  template <class Use>
  void take(int from, const Use& use) {
    ShmRoom::Count& count = room_.read(from, group_.rank());
    const uint64_t index = count.load(std::memory_order_relaxed);
    const ShmRoom::Block block = room_.ring_block(from, index);
    wait([&] {
      if (room_.written(from).load(std::memory_order_acquire) <= index) return false;
      check_agreement(block, label_, from);
      return true;
    });
    use(block.data);
    count.store(index + 1, std::memory_order_release);
    room_.ring_bell(from);
  }

  /// Throws Disagreement if the block is not of this operation.
  void check_agreement(const ShmRoom::Block& theirs, const ShmLabel& ours, int from) const;
  Reduction reduction() const { return static_cast<Reduction>(label_.reduction); }
  std::string text() const { return shm::text_of(label_, reinterpret_cast<const std::byte*>(text_.data())); }

  /// Of an exchange: the job ranks on which its end depends still.
  void waits_for(const std::vector<int>& peers);

  template <class Ready>
  void wait(const Ready& ready) const {
    room_.wait(ready, [this] { group_.check(since_); });
  }

  int behind(int distance) const { return (group_.rank() - distance + group_.size()) % group_.size(); }
  int ahead(int distance) const { return (group_.rank() + distance) % group_.size(); }
  ShmRoom& room() const { return room_; }

 private:
  ShmGroup& group_;
  ShmRoom& room_;
  std::chrono::steady_clock::time_point since_;
  std::string text_;
  ShmLabel label_;
};

// The messages between this member and another, in one direction, block by block.
class ShmGroup::Mail {
 public:
  Mail(ShmRoom& room, int self, int peer, bool sends) : room_(&room), self_(self), peer_(peer), sends_(sends) {}

  void add(const at::Tensor& data) {
    if (data.numel() > 0) left_.push_back(data);
  }
  int peer() const { return peer_; }
  bool done() const { return left_.empty(); }
  bool ready(const Call& call) const { return !done() && (sends_ ? has_space() : has_block(call)); }

  /// Moves one block. ready() holds.
  void move();

 private:
  ShmLabel label() const {
    const at::Tensor& data = left_.front();
    return {.sequence = static_cast<uint64_t>(moved_),
            .verb = static_cast<uint32_t>(shm::Verb::exchange),
            .elements = data.numel(),
            .dtype = static_cast<int32_t>(data.scalar_type())};
  }
  bool has_space() const {
    return room_->mail_written(self_, peer_).load(std::memory_order_relaxed) -
               room_->mail_read(self_, peer_).load(std::memory_order_acquire) <
           ShmRoom::mail_blocks;
  }
  bool has_block(const Call& call) const {
    const uint64_t index = room_->mail_read(peer_, self_).load(std::memory_order_relaxed);
    return room_->mail_written(peer_, self_).load(std::memory_order_acquire) > index &&
           agrees(call, room_->mail_block(peer_, self_, index));
  }

  bool agrees(const Call& call, const ShmRoom::Block& block) const {
    call.check_agreement(block, label(), peer_);
    return true;
  }

  ShmRoom* room_;
  int self_, peer_;
  bool sends_;
  std::deque<at::Tensor> left_;
  int64_t moved_ = 0;  // bytes of the first one
};

}  // namespace tesserae::comm
