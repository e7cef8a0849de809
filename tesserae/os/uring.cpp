#include "tesserae/os/uring.h"

#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <utility>

#include "tesserae/os/failure.h"

namespace tesserae::os {
namespace {

struct Mapping {
  void* memory = MAP_FAILED;
  size_t bytes = 0;

  Mapping() = default;
  Mapping(int descriptor, size_t size, off_t what)
      : memory(::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, descriptor, what)),
        bytes(size) {}
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping() {
    if (memory != MAP_FAILED) ::munmap(memory, bytes);
  }
  template <class T>
  T* at(uint32_t offset) const {
    return reinterpret_cast<T*>(static_cast<char*>(memory) + offset);
  }
};

uint32_t load(uint32_t* place) {
  return std::atomic_ref(*place).load(std::memory_order_acquire);
}

void store(uint32_t* place, uint32_t value) {
  std::atomic_ref(*place).store(value, std::memory_order_release);
}

}  // namespace

// The kernel reads submissions from one ring and writes completions to another; each has a head, which its reader
// moves, and a tail, which its writer does.
struct Uring::Rings {
  Rings(int descriptor, const io_uring_params& params)
      : submissions(descriptor, params.sq_off.array + params.sq_entries * sizeof(uint32_t), IORING_OFF_SQ_RING),
        completions(descriptor, params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe), IORING_OFF_CQ_RING),
        entries(descriptor, params.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES),
        offsets(params) {}

  bool mapped() const {
    return submissions.memory != MAP_FAILED && completions.memory != MAP_FAILED && entries.memory != MAP_FAILED;
  }

  Mapping submissions, completions, entries;
  io_uring_params offsets;
};

std::optional<Uring> Uring::make(unsigned entries) {
  io_uring_params params{};
  Descriptor descriptor(static_cast<int>(::syscall(__NR_io_uring_setup, entries, &params)));
  if (!descriptor) return std::nullopt;
  auto* const rings = new Rings(descriptor.get(), params);
  Uring made(std::move(descriptor), rings);
  if (!rings->mapped()) return std::nullopt;
  return made;
}

Uring::Uring(Uring&& other) noexcept
    : descriptor_(std::move(other.descriptor_)), rings_(std::exchange(other.rings_, nullptr)) {}

Uring::~Uring() {
  delete rings_;
}

void Uring::submit(Operation operation, int descriptor, uint64_t offset, void* memory, size_t bytes, uint64_t tag) {
  const auto& places = rings_->offsets.sq_off;
  uint32_t* const tail = rings_->submissions.at<uint32_t>(places.tail);
  const uint32_t next = *tail;  // nobody else moves it
  const uint32_t index = next & *rings_->submissions.at<uint32_t>(places.ring_mask);
  io_uring_sqe& entry = rings_->entries.at<io_uring_sqe>(0)[index];
  entry = {};
  entry.opcode = operation == Operation::read    ? IORING_OP_READ
                 : operation == Operation::write ? IORING_OP_WRITE
                                                 : IORING_OP_NOP;
  entry.fd = descriptor;
  entry.off = offset;
  entry.addr = reinterpret_cast<uint64_t>(memory);
  entry.len = static_cast<uint32_t>(bytes);
  entry.user_data = tag;
  rings_->submissions.at<uint32_t>(places.array)[index] = index;
  store(tail, next + 1);
  uint32_t* const head = rings_->submissions.at<uint32_t>(places.head);
  while (load(head) != next + 1) {  // the kernel has not taken it yet
    const long taken = ::syscall(__NR_io_uring_enter, descriptor_.get(), 1, 0, 0, nullptr, 0);
    if (taken < 0 && errno != EINTR && errno != EAGAIN && errno != EBUSY) {
      const int error = errno;
      store(tail, next);  // it was not taken, and must not be by the next call
      throw failure("Uring", "io_uring_enter", "submit", error);
    }
  }
}

Uring::Completion Uring::wait() {
  const auto& places = rings_->offsets.cq_off;
  uint32_t* const head = rings_->completions.at<uint32_t>(places.head);
  const uint32_t next = *head;  // nobody else moves it
  while (next == load(rings_->completions.at<uint32_t>(places.tail))) {
    if (::syscall(__NR_io_uring_enter, descriptor_.get(), 0, 1, IORING_ENTER_GETEVENTS, nullptr, 0) < 0 &&
        errno != EINTR) {
      throw failure("Uring", "io_uring_enter", "wait");
    }
  }
  const uint32_t index = next & *rings_->completions.at<uint32_t>(places.ring_mask);
  const io_uring_cqe& entry = rings_->completions.at<io_uring_cqe>(places.cqes)[index];
  const Completion completion{entry.user_data, entry.res};
  store(head, next + 1);
  return completion;
}

}  // namespace tesserae::os
