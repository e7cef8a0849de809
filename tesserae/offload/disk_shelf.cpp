#include "tesserae/offload/disk_shelf.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "tesserae/base/error.h"
#include "tesserae/offload/paged_tensor.h"
#include "tesserae/os/memory.h"

namespace tesserae::offload {
namespace {

constexpr int64_t for_writes = int64_t{64} << 20;  // what may be on its way out at a time
constexpr int64_t loose = int64_t{128} << 20;      // of tensors that were freed

/// Paged tensors of bytes that wait for their next use. Owned by those in use, too.
class Slots : public std::enable_shared_from_this<Slots> {
 public:
  explicit Slots(std::shared_ptr<Disk> disk) : disk_(std::move(disk)) {}

  std::shared_ptr<at::Tensor> get(int64_t bytes) {
    at::Tensor slot;
    {
      const std::scoped_lock lock(mutex_);
      if (std::vector<Slot>& free = free_[bytes]; !free.empty()) {
        slot = std::move(free.back().tensor);
        free.pop_back();
      }
    }
    if (!slot.defined()) slot = paged_tensor(disk_, bytes, at::kByte);
    return {new at::Tensor(std::move(slot)), [slots = shared_from_this()](at::Tensor* tensor) {
              const std::scoped_lock lock(slots->mutex_);
              slots->free_[tensor->numel()].push_back({.tensor = std::move(*tensor), .idle = 0});
              delete tensor;
            }};
  }

  /// While a forward goes on memory is for what is on its way out, in a backward for what comes back.
  void expect(bool reads) {
    if (std::exchange(reads_, reads) != reads) disk_->set_memory(reads ? for_reads_ : for_writes);
  }

  /// `window`: bytes that come back together. Gives up what two passes had no use for: the first one holds more than
  /// the others.
  void end_pass(int64_t window) {
    for_reads_ = std::max(window, for_writes);
    const std::scoped_lock lock(mutex_);
    for (auto& [bytes, free] : free_) {
      std::erase_if(free, [](Slot& slot) { return ++slot.idle > 2; });
    }
  }

 private:
  struct Slot {
    at::Tensor tensor;
    int idle;
  };
  std::shared_ptr<Disk> disk_;
  bool reads_ = false;
  int64_t for_reads_ = 4 * for_writes;         // before it is known
  std::mutex mutex_;                           // a storage that was brought back ends on any thread
  std::map<int64_t, std::vector<Slot>> free_;  // by bytes
};

/// What a storage that was brought back is made of.
struct Loaded {
  std::shared_ptr<at::Tensor> slot;
  Use use;
};

class OnDisk final : public Shelved {
 public:
  OnDisk(std::shared_ptr<Slots> slots, std::shared_ptr<at::Tensor> slot)
      : slots_(std::move(slots)), slot_(std::move(slot)) {}

  void load() override {
    slots_->expect(/*reads=*/true);
    prefetch(*slot_);
  }

  c10::Storage take() override {
    if (!loaded_) {
      auto loaded = std::make_unique<Loaded>(Loaded{slot_, Use(*slot_, Access::read)});
      void* const data = slot_->mutable_data_ptr();
      c10::DataPtr memory(
          data, loaded.release(), [](void* context) { delete static_cast<Loaded*>(context); }, c10::kCPU);
      loaded_ = c10::Storage(c10::Storage::use_byte_size_t(), static_cast<size_t>(slot_->numel()), std::move(memory),
                             /*allocator=*/nullptr, /*resizable=*/false);
    }
    return loaded_;
  }

 private:
  std::shared_ptr<Slots> slots_;
  std::shared_ptr<at::Tensor> slot_;
  c10::Storage loaded_;
};

class DiskShelf final : public Shelf {
 public:
  explicit DiskShelf(const os::Path& folder)
      : disk_(std::make_shared<Disk>(DiskOptions{.folder = folder, .memory = for_writes, .keeps = false})),
        slots_(std::make_shared<Slots>(disk_)) {}

  void reserve(int64_t bytes) override { disk_->reserve(static_cast<uint64_t>(bytes)); }

  std::shared_ptr<Shelved> put(const c10::Storage& storage) override {
    const at::NoGradGuard no_grad;
    const auto bytes = static_cast<int64_t>(storage.nbytes());
    slots_->expect(/*reads=*/false);
    auto slot = slots_->get(bytes);
    copy(*slot, at::from_blob(const_cast<void*>(storage.data()), {bytes}, at::kByte));
    return std::make_shared<OnDisk>(slots_, std::move(slot));
  }

  void end_unit() override { tidy(); }
  void begin_backward() override { tidy(); }
  void end_pass(int64_t window) override { slots_->end_pass(window); }
  std::string describe() const override { return cat("disk (", disk_->describe(), ")"); }

 private:
  // glibc finds no use for most of what was freed, since blocks of tensors are aligned: it would stay resident beside
  // what comes and goes here. Giving it back costs a page fault for each page that is used again.
  void tidy() {
    const auto moved = static_cast<int64_t>(disk_->counters().read + disk_->counters().written);
    if (moved - tidied_ < loose) return;
    tidied_ = moved;
    os::give_back_freed_memory();
  }

  std::shared_ptr<Disk> disk_;
  std::shared_ptr<Slots> slots_;
  int64_t tidied_ = 0;  // bytes that had moved then
};

}  // namespace

std::shared_ptr<Shelf> make_disk_shelf(const os::Path& folder) {
  return std::make_shared<DiskShelf>(folder);
}

}  // namespace tesserae::offload
