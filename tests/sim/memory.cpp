#include "tests/sim/memory.h"

#include <ATen/ops/from_blob.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <iterator>

#include "tests/sim/device.h"
#include "tests/sim/operation.h"

namespace tesserae::sim {
namespace {

constexpr size_t grain = 512;  // of addresses, as CUDA's
// A block serves a request if not more than half of it is wasted.
constexpr size_t waste = 2;

size_t rounded(size_t bytes) {
  return (bytes + grain - 1) / grain * grain;
}

char* map(int file, int protection) {
  void* const memory = mmap(nullptr, Memory::capacity, protection, MAP_SHARED | MAP_NORESERVE, file, 0);
  if (memory == MAP_FAILED) throw IoError("sim", cat("device memory cannot be mapped: ", std::strerror(errno)));
  return static_cast<char*>(memory);
}

}  // namespace

Memory::Memory(c10::DeviceIndex device) : device_(device) {
  const int file = memfd_create("sim", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, capacity) != 0) {
    throw IoError("sim", cat("there is no memory for device ", static_cast<int>(device), ": ", std::strerror(errno)));
  }
  tensors_ = map(file, PROT_NONE);
  tasks_ = map(file, PROT_READ | PROT_WRITE);
  close(file);
}

void* Memory::allocate(size_t bytes, c10::StreamId stream) {
  const size_t size = rounded(bytes);
  const std::lock_guard lock(mutex_);
  release_what_is_done();
  if (asked_ + size > limit_) {
    TORCH_CHECK_WITH(OutOfMemoryError, false, "[sim] device ", static_cast<int>(device_), " is limited to ", limit_,
                     " bytes, of which ", asked_, " are used: there are no ", size);
  }
  Block* block = take(size, stream);
  if (!block) block = &carve(size, stream);
  block->taken = true;
  block->asked = bytes;
  asked_ += size;
  block->made_by = Operation::current();
  used_ += block->size;
  peak_ = std::max(peak_, used_);
  auto& tally = Device::at(device_).tally();
  ++tally.allocations;
  tally.allocated_bytes += static_cast<int64_t>(bytes);
  return block->address;
}

Memory::Block* Memory::take(size_t size, c10::StreamId stream) {
  for (auto found = free_.lower_bound({stream, size}); found != free_.end(); ++found) {
    if (found->first.first != stream || found->first.second > size * waste) break;
    Block* const block = found->second.back();
    found->second.pop_back();
    if (found->second.empty()) free_.erase(found);
    return block;
  }
  return nullptr;
}

Memory::Block& Memory::carve(size_t size, c10::StreamId stream) {
  if (carved_ + size > capacity) {
    // torch's type, which is what CUDA's allocator throws.
    TORCH_CHECK_WITH(OutOfMemoryError, false, "[sim] device ", static_cast<int>(device_), " has ", capacity,
                     " bytes, of which ", used_, " are used and ", carved_ - used_,
                     " are in free blocks, and none of these fits ", size, "; ask for sizes that were given back");
  }
  char* const address = tensors_ + carved_;
  carved_ += size;
  Block& block = blocks_[address];
  block.address = address;
  block.size = size;
  block.stream = stream;
  fill_with_nan(block);
  return block;
}

void Memory::free(void* address) noexcept {
  const std::lock_guard lock(mutex_);
  Block& block = block_of(address);
  block.taken = false;
  block.freed_by = Operation::current();
  used_ -= block.size;
  asked_ -= rounded(block.asked);
  for (const c10::StreamId stream : block.also_on) {
    block.until.push_back(Device::at(device_).stream(stream).record());
  }
  block.also_on.clear();
  if (block.until.empty()) {
    release(block);
  } else {
    waiting_.push_back(&block);
  }
}

void Memory::release(Block& block) {
  fill_with_nan(block);
  free_[{block.stream, block.size}].push_back(&block);
}

void Memory::release_what_is_done() {
  std::erase_if(waiting_, [this](Block* block) {
    if (!std::ranges::all_of(block->until, [](const MomentPtr& moment) { return moment->reached(); })) return false;
    block->until.clear();
    release(*block);
    return true;
  });
}

void Memory::fill_with_nan(const Block& block) {
  Device::at(device_).stream(block.stream).enqueue("the allocator", [at = for_tasks(block.address), size = block.size] {
    std::memset(at, 0xff, size);
  });
}

void Memory::record_stream(const void* address, c10::StreamId stream) {
  const std::lock_guard lock(mutex_);
  Block& block = block_of(address);
  if (stream != block.stream) block.also_on.insert(stream);
}

void Memory::forget_streams() {
  const std::lock_guard lock(mutex_);
  release_what_is_done();
  std::map<std::pair<c10::StreamId, size_t>, std::vector<Block*>> all;
  for (auto& [key, blocks] : free_) {
    for (Block* const block : blocks) {
      block->stream = 0;
      all[{0, block->size}].push_back(block);
    }
  }
  free_ = std::move(all);
}

Memory::Block& Memory::block_of(const void* address) {
  const auto after = blocks_.upper_bound(static_cast<const char*>(address));
  TORCH_INTERNAL_ASSERT(after != blocks_.begin(), "an address that the allocator did not give");
  return std::prev(after)->second;
}

void Memory::set_limit(size_t bytes) {
  const std::lock_guard lock(mutex_);
  limit_ = bytes;
}

size_t Memory::asked_bytes() const {
  const std::lock_guard lock(mutex_);
  return asked_;
}

size_t Memory::used_bytes() const {
  const std::lock_guard lock(mutex_);
  return used_;
}

size_t Memory::peak_bytes() const {
  const std::lock_guard lock(mutex_);
  return peak_;
}

void Memory::reset_peak() {
  const std::lock_guard lock(mutex_);
  peak_ = used_;
}

void Memory::describe(const void* address, char* text, size_t size) const noexcept {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock) {
    std::snprintf(text, size, "in a block that nobody can name, for the allocator is at work");
    return;
  }
  const auto after = blocks_.upper_bound(static_cast<const char*>(address));
  const Block* const block = after == blocks_.begin() ? nullptr : &std::prev(after)->second;
  const auto offset = block ? static_cast<size_t>(static_cast<const char*>(address) - block->address) : 0;
  if (!block || offset >= block->size) {
    std::snprintf(text, size, "outside of all blocks");
    return;
  }
  const auto or_nobody = [](const char* name) { return *name ? name : "the program itself"; };
  std::snprintf(text, size, "byte %zu of a block of %zu bytes of stream %lld, made by %s%s%s", offset, block->asked,
                static_cast<long long>(block->stream), or_nobody(block->made_by), block->taken ? "" : ", freed by ",
                block->taken ? "" : or_nobody(block->freed_by));
}

at::Tensor for_tasks(const at::Tensor& tensor) {
  if (!tensor.defined()) return {};
  const auto options = at::TensorOptions().dtype(tensor.scalar_type());
  const void* const address = tensor.const_data_ptr();
  char* const memory = address ? Device::at(tensor.device().index()).memory().for_tasks(address) : nullptr;
  at::Tensor twin = at::from_blob(memory, tensor.sizes(), tensor.strides(), options);
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) twin.unsafeGetTensorImpl()->set_wrapped_number(true);
  if (tensor.is_conj()) twin.unsafeGetTensorImpl()->_set_conj(true);
  if (tensor.is_neg()) twin.unsafeGetTensorImpl()->_set_neg(true);
  return twin;
}

}  // namespace tesserae::sim
