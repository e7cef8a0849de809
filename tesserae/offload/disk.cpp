#include "tesserae/offload/disk.h"

#include <algorithm>
#include <iterator>

#include "tesserae/base/error.h"
#include "tesserae/offload/paged_memory.h"

namespace tesserae::offload {

Disk::Disk(const DiskOptions& options)
    : file_(options.folder),
      keeps_(options.keeps),
      memory_(options.memory),
      queue_(os::DiskQueue::make(file_, options.engine)) {}

// For what is being used, read ahead or on its way out.
int64_t Disk::window() const {
  constexpr int64_t most = int64_t{96} << 20;
  return std::min(memory_ / 2, most);
}

void Disk::set_memory(int64_t bytes) {
  {
    const std::scoped_lock lock(mutex_);
    memory_ = bytes;
  }
  changed_.notify_all();
}

int64_t Disk::memory() const {
  const std::scoped_lock lock(mutex_);
  return memory_;
}

void Disk::reserve(uint64_t bytes) {
  if (bytes == 0) return;
  const std::scoped_lock lock(mutex_);
  const uint64_t room = PagedMemory::on_disk(bytes);
  const auto is_enough = [room](const auto& hole) { return hole.second >= room; };
  if (std::ranges::none_of(free_, is_enough)) give_back(file_.reserve(room), room);
}

DiskCounters Disk::counters() const {
  const std::scoped_lock lock(mutex_);
  return {.read = read_,
          .written = written_,
          .waited = waited_,
          .size = static_cast<int64_t>(file_.size()),
          .writing = writing_,
          .resident = resident_,
          .most_resident = most_resident_};
}

std::exception_ptr Disk::failure() const {
  const std::scoped_lock lock(mutex_);
  return failure_;
}

std::string Disk::describe() const {
  return cat(queue_->engine(), file_.direct() ? " past the page cache in " : " through the page cache in ",
             file_.folder().native());
}

void Disk::count_resident(int64_t change) {
  resident_ += change;
  most_resident_ = std::max(most_resident_, resident_);
}

// With the mutex held. The first hole that is large enough, else more of the disk.
uint64_t Disk::take(uint64_t bytes) {
  for (auto hole = free_.begin(); hole != free_.end(); ++hole) {
    if (hole->second < bytes) continue;
    const uint64_t offset = hole->first, rest = hole->second - bytes;
    free_.erase(hole);
    if (rest > 0) free_[offset + bytes] = rest;
    return offset;
  }
  return file_.reserve(bytes);
}

// With the mutex held. Neighbouring holes become one.
void Disk::give_back(uint64_t offset, uint64_t bytes) {
  auto hole = free_.emplace(offset, bytes).first;
  if (const auto next = std::next(hole); next != free_.end() && hole->first + hole->second == next->first) {
    hole->second += next->second;
    free_.erase(next);
  }
  if (hole == free_.begin()) return;
  if (const auto last = std::prev(hole); last->first + last->second == hole->first) {
    last->second += hole->second;
    free_.erase(hole);
  }
}

}  // namespace tesserae::offload
