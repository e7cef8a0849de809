#include "tesserae/comm/shm_group.h"

#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <deque>

#include "tesserae/base/log.h"
#include "tesserae/os/process.h"

namespace tesserae::comm {
namespace {

using Clock = std::chrono::steady_clock;

// As for Gloo: below this a message costs its latency, and all add all copies in the order of members.
constexpr int64_t kWholeReduceBytes = 64 * 1024;
// Two ranks' rings lie in the second-level cache.
constexpr size_t kBlockBytes = 256 * 1024;
// Of a message: where ranks outnumber cores each block costs a change of process, so large ones; less in large groups,
// which have a ring for each pair.
constexpr size_t kMailBytes = 512 * 1024, kLeastMailBytes = 64 * 1024, kMailOfAll = 64 * 1024 * 1024;
// So many blocks a writer is ahead of what it reads itself.
constexpr int64_t kLead = 2;
static_assert(kLead < static_cast<int64_t>(ShmRoom::ring_blocks), "a writer that is ahead must find a free block");
constexpr std::chrono::seconds kBackstop{15};
// What is said of a barrier in words fits in a block.
constexpr size_t kLongestText = 1024;

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

constexpr const char* kNames[] = {"", "all_gather", "reduce_scatter", "all_reduce", "broadcast", "barrier", "exchange"};

// `data`: of the block with that label.
std::string text_of(const ShmLabel& label, const std::byte* data) {
  if (label.text_bytes > 0) return std::string(reinterpret_cast<const char*>(data), label.text_bytes);
  const char* name = label.verb < std::size(kNames) ? kNames[label.verb] : "an unknown verb";
  std::string text = verb_of(name, static_cast<Reduction>(label.reduction));
  if (label.dtype >= 0) text += cat(" of ", label.elements, " x ", static_cast<at::ScalarType>(label.dtype));
  if (label.root >= 0) text += cat(" from member ", label.root);
  return text;
}

size_t mail_bytes(size_t members) {
  const size_t share = kMailOfAll / (members * members * ShmRoom::mail_blocks);
  return std::clamp(share / kLeastMailBytes * kLeastMailBytes, kLeastMailBytes, kMailBytes);
}

std::byte* bytes_of(const at::Tensor& tensor) {
  return static_cast<std::byte*>(tensor.mutable_data_ptr());
}

void reduce_bytes(const at::Tensor& like, Reduction how, std::byte* result, std::byte* left, std::byte* right,
                  int64_t bytes) {
  const int64_t elements = bytes / static_cast<int64_t>(like.element_size());
  if (elements == 0) return;
  const auto view = [&, options = at::TensorOptions().dtype(like.scalar_type())](std::byte* data) {
    return at::from_blob(data, {elements}, options);
  };
  const at::Tensor out = view(result);
  reduce_to(out, left == result ? out : view(left), view(right), how);
}

}  // namespace

// A verb: 1. what members must agree on becomes visible to the liveness channel, and goes with every block;
// 2. blocks are written and read; 3. nothing is left to do for others: what they have not read yet lies in the ring.
class ShmGroup::Call {
 public:
  Call(ShmGroup& group, Verb verb, const at::Tensor& buffer, int root = -1, Reduction how = Reduction::sum,
       std::string_view what = {})
      : group_(group), room_(*group.room_), since_(Clock::now()), text_(what.substr(0, kLongestText)) {
    label_.verb = static_cast<uint32_t>(verb);
    label_.root = root;
    label_.reduction = static_cast<uint16_t>(how);
    label_.text_bytes = static_cast<uint16_t>(text_.size());
    if (!text_.empty()) label_.elements = static_cast<int64_t>(std::hash<std::string_view>()(what));
    if (buffer.defined()) {
      label_.elements = buffer.numel();
      label_.dtype = static_cast<int32_t>(buffer.scalar_type());
    }
    if (verb != Verb::exchange) label_.sequence = ++group.collectives_;
    std::lock_guard lock(group.mutex_);
    if (group.verdict_) throw Aborted();
    group.pending_ = Pending{label_.sequence, text(), since_};
  }
  ~Call() {
    std::lock_guard lock(group_.mutex_);
    group_.pending_.reset();
  }

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
  void check_agreement(const ShmRoom::Block& theirs, const ShmLabel& ours, int from) const {
    if (*theirs.label == ours) return;
    const std::string our_text = ours == label_ ? text() : text_of(ours, nullptr);
    throw Disagreement(cat("rank ", group_.members()[static_cast<size_t>(from)], " called ",
                           text_of(*theirs.label, theirs.data), ", rank ",
                           group_.members()[static_cast<size_t>(group_.rank())], " called ", our_text));
  }
  Reduction reduction() const { return static_cast<Reduction>(label_.reduction); }
  std::string text() const { return text_of(label_, reinterpret_cast<const std::byte*>(text_.data())); }

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
  Clock::time_point since_;
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
  bool done() const { return left_.empty(); }
  bool ready(const Call& call) const { return !done() && (sends_ ? has_space() : has_block(call)); }

  /// Moves one block. ready() holds.
  void move() {
    const at::Tensor& data = left_.front();
    const auto bytes = static_cast<int64_t>(data.nbytes());
    const int64_t length = std::min<int64_t>(static_cast<int64_t>(room_->shape().mail_bytes), bytes - moved_);
    ShmRoom::Count& count = sends_ ? room_->mail_written(self_, peer_) : room_->mail_read(peer_, self_);
    const uint64_t index = count.load(std::memory_order_relaxed);
    const ShmRoom::Block block =
        sends_ ? room_->mail_block(self_, peer_, index) : room_->mail_block(peer_, self_, index);
    std::byte* const place = bytes_of(data) + moved_;
    if (sends_) {
      *block.label = label();
      std::memcpy(block.data, place, static_cast<size_t>(length));
    } else {
      std::memcpy(place, block.data, static_cast<size_t>(length));
    }
    count.store(index + 1, std::memory_order_release);
    room_->ring_bell(peer_);
    moved_ += length;
    if (moved_ == bytes) {
      left_.pop_front();
      moved_ = 0;
    }
  }

 private:
  ShmLabel label() const {
    const at::Tensor& data = left_.front();
    return {.sequence = static_cast<uint64_t>(moved_),
            .verb = static_cast<uint32_t>(Verb::exchange),
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

std::unique_ptr<ShmGroup> ShmGroup::connect(const std::string& name, const std::vector<int>& members, int rank,
                                            const c10::intrusive_ptr<c10d::Store>& store, const Options& options,
                                            std::string& reason) {
  const int size = static_cast<int>(members.size());
  const size_t block = options.block_bytes > 0 ? options.block_bytes : kBlockBytes;
  // A block of a reduction has a part for each other member, of whole cache lines.
  const ShmRoom::Shape shape{size, std::max(block, static_cast<size_t>(size) * 4096),
                             mail_bytes(static_cast<size_t>(size))};
  // 1. Member 0 makes the memory and tells where it is. 2. All map it and say whether they could. 3. Only if all could
  // is it used; nobody needs a name for it any more.
  std::optional<os::MemoryFile> memory;
  std::string failure;
  try {
    if (rank == 0) {
      memory.emplace(os::MemoryFile::create("tesserae-" + name, shape.total()));
      store->set("memory", cat(os::process_id(), " ", memory->descriptor()));
    } else {
      store->wait({"memory"}, options.connect_deadline);
      const std::string place = store->get_to_str("memory");
      const size_t space = place.find(' ');
      if (space == std::string::npos) throw IoError("ShmGroup", place);
      memory.emplace(os::MemoryFile::open(std::atoi(place.c_str()), std::atoi(place.c_str() + space), shape.total()));
    }
  } catch (const IoError& error) {
    failure = error.what();
    if (rank == 0) store->set("memory", "none");
  }
  store->set(cat("mapped/", rank), failure.empty() ? "yes" : failure);
  for (int member = 0; member < size; ++member) {
    const std::string key = cat("mapped/", member);
    store->wait({key}, options.connect_deadline);
    const std::string said = store->get_to_str(key);
    if (said == "yes" || !reason.empty()) continue;
    reason = cat("rank ", members[static_cast<size_t>(member)], ": ", said);
  }
  if (!reason.empty()) return nullptr;
  memory->close_descriptor();
  auto room = std::make_unique<ShmRoom>(std::move(*memory), shape, rank);
  return std::unique_ptr<ShmGroup>(new ShmGroup(name, members, rank, std::move(room), options));
}

ShmGroup::ShmGroup(std::string name, std::vector<int> members, int rank, std::unique_ptr<ShmRoom> room, Options options)
    : Group(std::move(name), std::move(members), rank), room_(std::move(room)), options_(options) {
  if (options_.liveness) options_.liveness->watch(this);
}

ShmGroup::~ShmGroup() {
  if (options_.liveness) options_.liveness->forget(this);
}

// In bytes; the same pieces as over Gloo.
ShmGroup::Starts ShmGroup::even_starts(const at::Tensor& buffer) const {
  const int64_t elements = buffer.numel();
  const int64_t piece = (elements + size() - 1) / size();
  const int64_t length = elements % size() == 0 ? piece : (piece + 63) / 64 * 64;
  Starts starts;
  for (int i = 0; i <= size(); ++i) {
    starts.push_back(std::min(elements, i * length) * static_cast<int64_t>(buffer.element_size()));
  }
  return starts;
}

void ShmGroup::gather_pieces(Call& call, const at::Tensor& buffer, const Starts& starts) {
  const auto block = static_cast<int64_t>(room_->shape().ring_bytes);
  const auto blocks_of = [&](int i) { return (starts[i + 1] - starts[i] + block - 1) / block; };
  const auto copy = [&](int i, int64_t index, std::byte* data, bool out) {
    const int64_t begin = starts[i] + index * block;
    const auto length = static_cast<size_t>(std::min(block, starts[i + 1] - begin));
    out ? std::memcpy(data, bytes_of(buffer) + begin, length) : std::memcpy(bytes_of(buffer) + begin, data, length);
  };
  int64_t posted = 0;
  for (int64_t index = 0; index < blocks_of(0); ++index) {  // no piece is longer than the first
    for (; posted < std::min(index + kLead, blocks_of(rank())); ++posted) {
      call.post([&](std::byte* data) { copy(rank(), posted, data, true); });
    }
    for (int k = 1; k < size(); ++k) {
      const int from = call.behind(k);
      if (index >= blocks_of(from)) continue;
      call.take(from, [&](std::byte* data) { copy(from, index, data, false); });
    }
  }
}

// A block holds a part of every other member's piece, in the order in which they follow this one. Each adds what it
// reads to its own piece, in the order rank, rank - 1, rank - 2, ... The sum of that is at `result`.
void ShmGroup::reduce_pieces(Call& call, const at::Tensor& buffer, const Starts& starts, std::byte* result) {
  const int64_t part = static_cast<int64_t>(room_->shape().ring_bytes) / (size() - 1) / 64 * 64;
  const int64_t blocks = (starts[1] - starts[0] + part - 1) / part;
  const auto range = [&](int i, int64_t index) {
    const int64_t begin = std::min(starts[i + 1], starts[i] + index * part);
    return std::pair(begin, std::min(part, starts[i + 1] - begin));
  };
  int64_t posted = 0;
  for (int64_t index = 0; index < blocks; ++index) {
    for (; posted < std::min(index + kLead, blocks); ++posted) {
      call.post([&](std::byte* data) {
        for (int k = 1; k < size(); ++k) {
          const auto [begin, length] = range(call.ahead(k), posted);
          std::memcpy(data + (k - 1) * part, bytes_of(buffer) + begin, static_cast<size_t>(length));
        }
      });
    }
    const auto [begin, length] = range(rank(), index);
    std::byte* const sum = result + (begin - starts[rank()]);
    for (int k = 1; k < size(); ++k) {
      std::byte* const left = k == 1 ? bytes_of(buffer) + begin : sum;
      call.take(call.behind(k), [&, length = length](std::byte* data) {
        reduce_bytes(buffer, call.reduction(), sum, left, data + (k - 1) * part, length);
      });
    }
  }
}

// All add all copies in the order of members; this member's own is read from the ring, too.
void ShmGroup::reduce_whole(Call& call, const at::Tensor& buffer) {
  const auto bytes = static_cast<int64_t>(buffer.nbytes());
  const auto length = static_cast<size_t>(bytes);
  std::byte* const sum = bytes_of(buffer);
  std::byte* const own = call.post([&](std::byte* data) { std::memcpy(data, sum, length); });
  for (int member = 0; member < size(); ++member) {
    const auto use = [&](std::byte* data) {
      member == 0 ? static_cast<void>(std::memcpy(sum, data, length))
                  : reduce_bytes(buffer, call.reduction(), sum, sum, data, bytes);
    };
    member == rank() ? use(own) : call.take(member, use);
  }
}

void ShmGroup::do_all_gather(const at::Tensor& buffer) {
  Call call(*this, Verb::all_gather, buffer);
  gather_pieces(call, buffer, even_starts(buffer));
}

void ShmGroup::do_reduce_scatter(const at::Tensor& buffer, Reduction how) {
  const Starts starts = even_starts(buffer);
  Call call(*this, Verb::reduce_scatter, buffer, -1, how);
  reduce_pieces(call, buffer, starts, bytes_of(buffer) + starts[rank()]);
}

void ShmGroup::do_reduce_scatter_to(const at::Tensor& output, const at::Tensor& input, Reduction how) {
  Call call(*this, Verb::reduce_scatter, input, -1, how);
  reduce_pieces(call, input, even_starts(input), bytes_of(output));
}

void ShmGroup::do_all_reduce(const at::Tensor& buffer, Reduction how) {
  Call call(*this, Verb::all_reduce, buffer, -1, how);
  const auto bytes = static_cast<int64_t>(buffer.nbytes());
  if (bytes * (size() - 1) <= kWholeReduceBytes) {
    reduce_whole(call, buffer);
  } else {
    const Starts starts = even_starts(buffer);
    reduce_pieces(call, buffer, starts, bytes_of(buffer) + starts[rank()]);
    gather_pieces(call, buffer, starts);
  }
}

void ShmGroup::do_broadcast(const at::Tensor& buffer, int root) {
  Call call(*this, Verb::broadcast, buffer, root);
  const auto block = static_cast<int64_t>(room_->shape().ring_bytes);
  const auto bytes = static_cast<int64_t>(buffer.nbytes());
  for (int64_t begin = 0; begin < bytes; begin += block) {
    const auto length = static_cast<size_t>(std::min(block, bytes - begin));
    if (rank() == root) {
      call.post([&](std::byte* data) { std::memcpy(data, bytes_of(buffer) + begin, length); });
    } else {
      call.take(root, [&](std::byte* data) { std::memcpy(bytes_of(buffer) + begin, data, length); });
    }
  }
}

void ShmGroup::do_barrier(std::string_view what) {
  Call call(*this, Verb::barrier, {}, -1, Reduction::sum, what);
  call.post([&](std::byte* data) { std::memcpy(data, what.data(), std::min(what.size(), kLongestText)); });
  for (int k = 1; k < size(); ++k) call.take(call.behind(k), [](std::byte*) {});
}

// Whatever can move moves: a member that waits for one peer still serves the others.
void ShmGroup::do_exchange(const std::vector<Message>& sends, const std::vector<Message>& receives) {
  Call call(*this, Verb::exchange, {});
  std::vector<Mail> mail;
  for (const bool out : {true, false}) {
    const size_t first = mail.size();
    for (int peer = 0; peer < size(); ++peer) mail.emplace_back(*room_, rank(), peer, out);
    for (const auto& message : out ? sends : receives)
      mail[first + static_cast<size_t>(message.peer)].add(message.data);
  }
  std::erase_if(mail, [](const Mail& one) { return one.done(); });
  while (!mail.empty()) {
    call.wait([&] { return std::ranges::any_of(mail, [&](const Mail& one) { return one.ready(call); }); });
    for (Mail& one : mail) {
      if (one.ready(call)) one.move();
    }
    std::erase_if(mail, [](const Mail& one) { return one.done(); });
  }
}

at::Tensor ShmGroup::share(int64_t bytes) {
  // As in connect(): member 0 makes it and tells where, the others map it, and all must have succeeded.
  at::Tensor place = at::zeros({2}, at::kLong), failures = at::zeros({1}, at::kLong);
  std::optional<os::MemoryFile> memory;
  const auto attempt = [&](const auto& make) {
    try {
      memory.emplace(make());
    } catch (const IoError& error) {
      failures.fill_(1);
      log(LogLevel::warning, cat("group ", name(), ": no shared memory: ", error.what()));
    }
  };
  if (rank() == 0) {
    attempt([&] { return os::MemoryFile::create("tesserae-" + name(), static_cast<size_t>(bytes)); });
    if (memory) {
      place[0] = static_cast<int64_t>(os::process_id());
      place[1] = memory->descriptor();
    }
  }
  broadcast(place, 0, {"shared memory"});
  const auto owner = place[0].item<int64_t>();
  const auto descriptor = place[1].item<int64_t>();
  if (rank() != 0 && owner == 0) failures.fill_(1);
  if (rank() != 0 && owner != 0) {
    attempt([&] {
      return os::MemoryFile::open(static_cast<pid_t>(owner), static_cast<int>(descriptor), static_cast<size_t>(bytes));
    });
  }
  all_reduce(failures, {"shared memory"});
  if (failures.item<int64_t>() > 0) return {};
  memory->close_descriptor();
  const auto kept = std::make_shared<os::MemoryFile>(std::move(*memory));
  return at::from_blob(
      kept->data(), {bytes}, [kept](void*) {}, at::TensorOptions().dtype(at::kByte));
}

void ShmGroup::check(Clock::time_point since) const {
  std::lock_guard lock(mutex_);
  if (verdict_) throw Aborted();
  const auto limit = options_.deadline + (options_.liveness ? kBackstop : std::chrono::seconds(0));
  if (Clock::now() - since > limit) throw Late(cat("the deadline of ", options_.deadline.count(), " ms passed"));
}

std::optional<Watched::Pending> ShmGroup::pending() const {
  std::lock_guard lock(mutex_);
  return pending_;
}

void ShmGroup::abort(const Verdict& verdict) {
  {
    std::lock_guard lock(mutex_);
    if (!verdict_) verdict_ = verdict;
  }
  room_->ring_bell(rank());
}

void ShmGroup::rethrow(const std::string& what, const std::exception& cause) {
  if (dynamic_cast<const Aborted*>(&cause)) {
    std::unique_lock lock(mutex_);
    const Verdict verdict = *verdict_;
    lock.unlock();
    verdict.raise(what);
  }
  if (dynamic_cast<const Late*>(&cause)) throw Timeout("Group", cat(what, ": ", cause.what()), {});
  if (dynamic_cast<const Disagreement*>(&cause)) {
    const Verdict verdict{Verdict::Kind::mismatch, {}, cause.what()};
    (options_.liveness ? options_.liveness->dispute(*this, verdict) : verdict).raise(what);
  }
  throw CommError("Group", cat(what, ": ", cause.what()));
}

}  // namespace tesserae::comm
