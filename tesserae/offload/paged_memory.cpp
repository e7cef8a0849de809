#include "tesserae/offload/paged_memory.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "tesserae/os/reserved_pages.h"

namespace tesserae::offload {
namespace {

using Clock = std::chrono::steady_clock;

}  // namespace

size_t PagedMemory::on_disk(size_t bytes) {
  constexpr size_t to = os::ScratchFile::alignment;
  return std::max<size_t>((bytes + to - 1) / to * to, to);
}

PagedMemory::PagedMemory(std::shared_ptr<Disk> disk, size_t bytes)
    : disk_(std::move(disk)),
      bytes_(bytes),
      mapped_(on_disk(bytes)),
      data_(static_cast<char*>(os::reserve_pages(mapped_))),
      blocks_((mapped_ + block - 1) / block) {
  try {
    const std::scoped_lock lock(disk_->mutex_);
    offset_ = disk_->take(mapped_);
  } catch (...) {
    os::unreserve_pages(data_, mapped_);
    throw;
  }
}

PagedMemory::~PagedMemory() {
  {
    std::unique_lock lock(disk_->mutex_);
    disk_->changed_.wait(lock, [this] { return travelling_ == 0; });
    for (size_t i = 0; i < blocks_.size(); ++i) {
      if (blocks_[i].where == Where::memory) disk_->count_resident(-static_cast<int64_t>(size_of(i)));
      if (blocks_[i].stays) disk_->staying_ -= static_cast<int64_t>(size_of(i));
    }
    disk_->give_back(offset_, mapped_);
  }
  disk_->changed_.notify_all();
  os::unreserve_pages(data_, mapped_);
}

size_t PagedMemory::size_of(size_t index) const {
  return std::min(block, mapped_ - index * block);
}

void PagedMemory::acquire(size_t begin, size_t end, Access access) {
  if (begin >= end) return;
  if (access != Access::fill) prefetch(begin, end);  // whole blocks are overwritten without being read
  std::unique_lock lock(disk_->mutex_);
  const size_t first = begin / block, last = (end - 1) / block;
  for (size_t i = first; i <= last; ++i) {
    const bool whole = begin <= i * block && std::min(i * block + block, bytes_) <= end;
    try {
      begin_use(lock, i, access == Access::fill && whole);
      if (access != Access::read) {
        // The block is this call's already, so nobody gives its memory back meanwhile.
        disk_->changed_.wait(lock, [&] { return blocks_[i].where != Where::writing; });
      }
    } catch (...) {
      while (i-- > first) end_use(i);
      throw;
    }
  }
}

// `whole`: all of the block will be overwritten. With the mutex held.
void PagedMemory::begin_use(std::unique_lock<std::mutex>& lock, size_t index, bool whole) {
  Block& it = blocks_[index];
  const auto size = static_cast<int64_t>(size_of(index));
  const auto begin = Clock::now();
  bool waited = false;
  const auto wait = [&](const auto& condition) {
    waited = waited || !condition();
    disk_->changed_.wait(lock, condition);
  };
  const auto failed = [&] { return disk_->failure_ != nullptr; };
  const auto away = [&] { return it.where == Where::nowhere || it.where == Where::disk; };
  const auto there = [&] { return it.where == Where::memory || it.where == Where::writing; };
  // Again if, between its arrival and this thread's turn, another one has used it and let it go.
  while (!failed() && !there()) {
    // What others write will give its memory back; if nobody writes, there is no use in waiting.
    wait([&] { return failed() || !away() || disk_->has_room(size) || disk_->writing_ == 0; });
    if (!failed() && away()) {
      if (it.where == Where::nowhere || whole) {
        admit(index);
        it.where = Where::memory;
      } else {
        begin_read(index);
      }
    }
    wait([&] { return failed() || there() || away(); });
  }
  if (waited) disk_->waited_ += std::chrono::duration<double>(Clock::now() - begin).count();
  if (disk_->failure_ != nullptr) std::rethrow_exception(disk_->failure_);
  ++it.uses;
}

void PagedMemory::release(size_t begin, size_t end, Access access) noexcept {
  if (begin >= end) return;
  const std::scoped_lock lock(disk_->mutex_);
  for (size_t i = begin / block; i <= (end - 1) / block; ++i) {
    const bool changed = access == Access::update || access == Access::fill;
    blocks_[i].changed = blocks_[i].changed || changed;
    end_use(i);
  }
}

void PagedMemory::end_use(size_t index) {
  if (--blocks_[index].uses == 0) settle(index);
}

void PagedMemory::prefetch(size_t begin, size_t end) {
  if (begin >= end) return;
  const std::scoped_lock lock(disk_->mutex_);
  for (size_t i = begin / block; i <= (end - 1) / block; ++i) {
    if (blocks_[i].where != Where::disk) continue;
    if (!disk_->has_room(static_cast<int64_t>(size_of(i))) || disk_->failure_ != nullptr) return;
    begin_read(i);
  }
}

// The rest with the mutex held.

void PagedMemory::admit(size_t index) {
  os::open_pages(data_ + index * block, size_of(index));
  disk_->count_resident(static_cast<int64_t>(size_of(index)));
}

void PagedMemory::begin_read(size_t index) {
  admit(index);
  Block& it = blocks_[index];
  it.where = Where::reading;
  ++travelling_;
  disk_->read_ += size_of(index);
  disk_->queue_->submit({.direction = os::BlockRequest::Direction::read,
                         .offset = offset_ + index * block,
                         .memory = data_ + index * block,
                         .bytes = size_of(index),
                         .checksum = &it.checksum,
                         .done = [this, index](const std::exception_ptr& failure) { end_transfer(index, failure); }});
}

void PagedMemory::begin_write(size_t index) {
  Block& it = blocks_[index];
  it.where = Where::writing;
  it.changed = false;
  ++travelling_;
  ++disk_->writing_;
  disk_->written_ += size_of(index);
  disk_->queue_->submit({.direction = os::BlockRequest::Direction::write,
                         .offset = offset_ + index * block,
                         .memory = data_ + index * block,
                         .bytes = size_of(index),
                         .checksum = &it.checksum,
                         .done = [this, index](const std::exception_ptr& failure) { end_transfer(index, failure); }});
}

void PagedMemory::end_transfer(size_t index, const std::exception_ptr& failure) {
  Disk& disk = *disk_;
  {
    const std::scoped_lock lock(disk.mutex_);
    Block& it = blocks_[index];
    if (failure != nullptr && disk.failure_ == nullptr) disk.failure_ = failure;
    if (it.where == Where::writing) {
      --disk.writing_;
      it.stored = true;
    }
    const bool wrote = it.where == Where::writing;
    it.where = Where::memory;
    // What was read ahead stays until it is used.
    if (wrote && it.uses == 0) settle(index);
    --travelling_;
    disk.changed_.notify_all();  // with the mutex held: the memory, and with it the disk, may go right after
  }
}

// Nobody uses the block: it stays, or leaves.
void PagedMemory::settle(size_t index) {
  Block& it = blocks_[index];
  if (it.where != Where::memory || disk_->failure_ != nullptr) return;
  choose_whether_it_stays(index);
  if (it.stays) return;
  if (it.changed) {
    begin_write(index);
  } else {
    drop(index);
  }
}

// A choice holds until the memory changes, whatever else is in memory at the moment: it must be the same blocks that
// stay, step after step.
void PagedMemory::choose_whether_it_stays(size_t index) {
  Block& it = blocks_[index];
  const auto size = static_cast<int64_t>(size_of(index));
  const int64_t others = disk_->staying_ - (it.stays ? size : 0);
  const bool stays = disk_->keeps_ && others + size <= disk_->memory_ - disk_->window();
  disk_->staying_ = others + (stays ? size : 0);
  it.stays = stays;
}

void PagedMemory::drop(size_t index) {
  Block& it = blocks_[index];
  os::close_pages(data_ + index * block, size_of(index));
  it.where = it.stored ? Where::disk : Where::nowhere;
  disk_->count_resident(-static_cast<int64_t>(size_of(index)));
  disk_->changed_.notify_all();
}

}  // namespace tesserae::offload
