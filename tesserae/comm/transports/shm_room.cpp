#include "tesserae/comm/transports/shm_room.h"

#include "tesserae/os/futex.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tesserae::comm {
namespace {

// So long nobody notices that a verdict came or a deadline passed.
constexpr std::chrono::milliseconds nap{50};
constexpr size_t line = 64;
constexpr size_t page = 4096;

size_t round_to(size_t value, size_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// How the memory is divided. Counters: written [n], read [n][n], mail written [n][n], mail read [n][n].
struct Offsets {
  explicit Offsets(const ShmRoom::Shape& shape)
      : members(static_cast<size_t>(shape.members)),
        counters(members * line),
        ring_labels(counters + (members + 3 * members * members) * line),
        mail_labels(ring_labels + members * ShmRoom::ring_blocks * line),
        rings(round_to(mail_labels + members * members * ShmRoom::mail_blocks * line, page)),
        mail(rings + members * ShmRoom::ring_blocks * shape.ring_bytes),
        end(mail + members * members * ShmRoom::mail_blocks * shape.mail_bytes) {}

  size_t members, counters, ring_labels, mail_labels, rings, mail, end;
};

}  // namespace

static_assert(sizeof(ShmLabel) <= line, "labels have a cache line each");

size_t ShmRoom::Shape::total() const {
  return Offsets(*this).end;
}

ShmRoom::ShmRoom(os::MemoryFile memory, Shape shape, int member)
    : memory_(std::move(memory)), shape_(shape), member_(member) {}

ShmRoom::Block ShmRoom::ring_block(int writer, uint64_t index) const {
  const Offsets offsets(shape_);
  const size_t place = static_cast<size_t>(writer) * ring_blocks + index % ring_blocks;
  auto* const base = static_cast<std::byte*>(memory_.data());
  return {reinterpret_cast<ShmLabel*>(base + offsets.ring_labels + place * line),
          base + offsets.rings + place * shape_.ring_bytes};
}

ShmRoom::Block ShmRoom::mail_block(int from, int to, uint64_t index) const {
  const Offsets offsets(shape_);
  const size_t pair = static_cast<size_t>(from) * offsets.members + static_cast<size_t>(to);
  const size_t place = pair * mail_blocks + index % mail_blocks;
  auto* const base = static_cast<std::byte*>(memory_.data());
  return {reinterpret_cast<ShmLabel*>(base + offsets.mail_labels + place * line),
          base + offsets.mail + place * shape_.mail_bytes};
}

ShmRoom::Counter& ShmRoom::counter(size_t index) const {
  return *reinterpret_cast<Counter*>(static_cast<std::byte*>(memory_.data()) + Offsets(shape_).counters + index * line);
}

ShmRoom::Count& ShmRoom::written(int writer) const {
  return counter(static_cast<size_t>(writer)).value;
}

ShmRoom::Count& ShmRoom::read(int writer, int reader) const {
  const auto n = static_cast<size_t>(shape_.members);
  return counter(n + static_cast<size_t>(writer) * n + static_cast<size_t>(reader)).value;
}

ShmRoom::Count& ShmRoom::mail_written(int from, int to) const {
  const auto n = static_cast<size_t>(shape_.members);
  return counter(n + n * n + static_cast<size_t>(from) * n + static_cast<size_t>(to)).value;
}

ShmRoom::Count& ShmRoom::mail_read(int from, int to) const {
  const auto n = static_cast<size_t>(shape_.members);
  return counter(n + 2 * n * n + static_cast<size_t>(from) * n + static_cast<size_t>(to)).value;
}

ShmRoom::Bell& ShmRoom::bell(int member) const {
  return *reinterpret_cast<Bell*>(static_cast<std::byte*>(memory_.data()) + static_cast<size_t>(member) * line);
}

void ShmRoom::ring_bell(int member) const {
  Bell& theirs = bell(member);
  theirs.rings.fetch_add(1);
  if (theirs.sleepers.load() > 0) os::wake_all(theirs.rings);
}

void ShmRoom::ring_all() const {
  for (int member = 0; member < shape_.members; ++member) {
    if (member != member_) ring_bell(member);
  }
}

void ShmRoom::pause() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

void ShmRoom::sleep(uint32_t seen) const {
  os::wait_on(bell(member_).rings, seen, nap);
}

}  // namespace tesserae::comm
