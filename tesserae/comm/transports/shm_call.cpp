#include "tesserae/comm/transports/shm_call.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "tesserae/comm/link_log.h"

namespace tesserae::comm {

void shm::LandingCopy::stream(std::byte* to, const std::byte* from, size_t bytes) {
#if defined(__x86_64__)
  constexpr size_t line = 64;
  const size_t head = std::min(bytes, (line - reinterpret_cast<uintptr_t>(to) % line) % line);
  copy_memory(to, from, head);
  size_t at = head;
  for (; at + line <= bytes; at += line) {
    const auto* const source = reinterpret_cast<const __m128i*>(from + at);
    auto* const target = reinterpret_cast<__m128i*>(to + at);
    const __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
    const __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
    _mm_stream_si128(target, a);
    _mm_stream_si128(target + 1, b);
    _mm_stream_si128(target + 2, c);
    _mm_stream_si128(target + 3, d);
  }
  copy_memory(to + at, from + at, bytes - at);
  _mm_sfence();  // such writes are not ordered by what comes after them
#else
  copy_memory(to, from, bytes);
#endif
}

std::string shm::text_of(const ShmLabel& label, const std::byte* data) {
  static constexpr const char* names[] = {"",          "all_gather", "reduce_scatter", "all_reduce",
                                          "broadcast", "barrier",    "exchange"};
  if (label.text_bytes > 0) return std::string(reinterpret_cast<const char*>(data), label.text_bytes);
  const char* name = label.verb < std::size(names) ? names[label.verb] : "an unknown verb";
  std::string text = verb_of(name, static_cast<Reduction>(label.reduction));
  if (label.dtype >= 0) text += cat(" of ", label.elements, " x ", static_cast<at::ScalarType>(label.dtype));
  if (label.root >= 0) text += cat(" from member ", label.root);
  return text + contents_text(label.contents);
}

ShmGroup::Call::Call(ShmGroup& group, shm::Verb verb, const at::Tensor& buffer, int root, Reduction how,
                     std::string_view what)
    : group_(group),
      room_(*group.room_),
      since_(std::chrono::steady_clock::now()),
      text_(what.substr(0, shm::longest_text)) {
  carried_by("shared memory");
  label_.verb = static_cast<uint32_t>(verb);
  label_.root = root;
  label_.contents = group.contents();
  label_.reduction = static_cast<uint16_t>(how);
  label_.text_bytes = static_cast<uint16_t>(text_.size());
  if (!text_.empty()) label_.elements = static_cast<int64_t>(std::hash<std::string_view>()(what));
  if (buffer.defined()) {
    label_.elements = buffer.numel();
    label_.dtype = static_cast<int32_t>(buffer.scalar_type());
  }
  if (verb != shm::Verb::exchange) label_.sequence = ++group.collectives_;
  std::lock_guard lock(group.mutex_);
  if (group.verdict_) throw shm::Aborted();
  group.pending_ = Pending{label_.sequence, text(), since_};
}

ShmGroup::Call::~Call() {
  std::lock_guard lock(group_.mutex_);
  group_.pending_.reset();
}

void ShmGroup::Call::waits_for(const std::vector<int>& peers) {
  std::lock_guard lock(group_.mutex_);
  if (group_.pending_) group_.pending_->peers = peers;
}

void ShmGroup::Call::check_agreement(const ShmRoom::Block& theirs, const ShmLabel& ours, int from) const {
  if (*theirs.label == ours) return;
  const std::string our_text = ours == label_ ? text() : shm::text_of(ours, nullptr);
  throw shm::Disagreement(cat("rank ", group_.members()[static_cast<size_t>(from)], " called ",
                              shm::text_of(*theirs.label, theirs.data), ", rank ",
                              group_.members()[static_cast<size_t>(group_.rank())], " called ", our_text));
}

void ShmGroup::Mail::move() {
  const at::Tensor& data = left_.front();
  const auto bytes = static_cast<int64_t>(data.nbytes());
  const int64_t length = std::min<int64_t>(static_cast<int64_t>(room_->shape().mail_bytes), bytes - moved_);
  ShmRoom::Count& count = sends_ ? room_->mail_written(self_, peer_) : room_->mail_read(peer_, self_);
  const uint64_t index = count.load(std::memory_order_relaxed);
  const ShmRoom::Block block = sends_ ? room_->mail_block(self_, peer_, index) : room_->mail_block(peer_, self_, index);
  std::byte* const place = shm::bytes_of(data) + moved_;
  if (sends_) {
    *block.label = label();
    copy_memory(block.data, place, static_cast<size_t>(length));
  } else {
    copy_memory(place, block.data, static_cast<size_t>(length));
  }
  count.store(index + 1, std::memory_order_release);
  room_->ring_bell(peer_);
  moved_ += length;
  if (moved_ == bytes) {
    left_.pop_front();
    moved_ = 0;
  }
}

}  // namespace tesserae::comm
