#include "tesserae/offload/paged_tensor.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/StorageImpl.h>

#include <algorithm>
#include <utility>

namespace tesserae::offload {
namespace {

void drop_memory(void* memory) {
  delete static_cast<PagedMemory*>(memory);
}

PagedMemory* memory_of(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage() || !tensor.device().is_cpu()) return nullptr;
  const c10::DataPtr& data = tensor.storage().data_ptr();
  return data.get_deleter() == &drop_memory ? static_cast<PagedMemory*>(data.get_context()) : nullptr;
}

std::pair<size_t, size_t> bytes_of(const at::Tensor& tensor) {
  const size_t begin = static_cast<size_t>(tensor.storage_offset()) * tensor.element_size();
  return {begin, begin + at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.element_size())};
}

}  // namespace

at::Tensor paged_tensor(const std::shared_ptr<Disk>& disk, int64_t elements, c10::ScalarType dtype) {
  const size_t bytes = static_cast<size_t>(elements) * c10::elementSize(dtype);
  auto memory = std::make_unique<PagedMemory>(disk, bytes);
  char* const data = memory->data();
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes,
                       c10::DataPtr(data, memory.release(), &drop_memory, c10::kCPU), /*allocator=*/nullptr,
                       /*resizable=*/false);
  at::Tensor tensor = at::empty({0}, at::TensorOptions().dtype(dtype));
  tensor.set_(std::move(storage), 0, {elements}, {1});
  return tensor;
}

std::shared_ptr<Disk> disk_of(const at::Tensor& tensor) {
  const PagedMemory* const memory = memory_of(tensor);
  return memory != nullptr ? memory->disk() : nullptr;
}

bool is_paged(const at::Tensor& tensor) {
  return memory_of(tensor) != nullptr;
}

Use::Use(const std::vector<at::Tensor>& tensors, Access access) {
  try {
    for (const at::Tensor& tensor : tensors) prefetch(tensor);
    for (const at::Tensor& tensor : tensors) add(tensor, access);
  } catch (...) {
    end();
    throw;
  }
}

Use& Use::operator=(Use&& other) noexcept {
  end();
  ranges_ = std::exchange(other.ranges_, {});
  return *this;
}

void Use::add(const at::Tensor& tensor, Access access) {
  PagedMemory* const memory = memory_of(tensor);
  if (memory == nullptr) return;
  const auto [begin, end] = bytes_of(tensor);
  memory->acquire(begin, end, access);
  ranges_.push_back({memory, begin, end, access, tensor});
}

void Use::end() noexcept {
  for (const Range& range : ranges_) range.memory->release(range.begin, range.end, range.access);
  ranges_.clear();
}

void prefetch(const at::Tensor& tensor) {
  PagedMemory* const memory = memory_of(tensor);
  if (memory == nullptr) return;
  const auto [begin, end] = bytes_of(tensor);
  memory->prefetch(begin, end);
}

void in_runs(const std::vector<Worked>& tensors, int64_t elements,
             const std::function<void(int64_t begin, int64_t end)>& visit) {
  if (std::ranges::none_of(tensors, [](const Worked& worked) { return is_paged(worked.tensor); })) {
    if (elements > 0) visit(0, elements);
    return;
  }
  int64_t length = elements;
  for (const Worked& worked : tensors) {
    if (!is_paged(worked.tensor)) continue;
    length = std::min(length, static_cast<int64_t>(PagedMemory::block / worked.tensor.element_size()));
  }
  Use use;
  for (int64_t begin = 0; begin < elements; begin += length) {
    const int64_t end = std::min(begin + length, elements), next = std::min(end + length, elements);
    Use run;
    for (const Worked& worked : tensors) run.add(worked.tensor.slice(0, begin, end), worked.access);
    use = std::move(run);  // ends the run before, with which this one may have blocks in common
    for (const Worked& worked : tensors) {
      if (worked.access != Access::fill) prefetch(worked.tensor.slice(0, end, next));
    }
    visit(begin, end);
  }
}

at::Tensor part(const at::Tensor& tensor, int64_t begin, int64_t end) {
  return begin == 0 && end == tensor.numel() ? tensor : tensor.slice(0, begin, end);
}

void zero(const at::Tensor& tensor) {
  in_runs({{tensor, Access::fill}}, tensor.numel(),
          [&](int64_t begin, int64_t end) { part(tensor, begin, end).zero_(); });
}

// A step makes one or two copies for each unit: where nothing is paged they cost the host nothing but torch's call.
void copy(const at::Tensor& to, const at::Tensor& from) {
  if (!is_paged(to) && !is_paged(from)) {
    to.copy_(from);
    return;
  }
  in_runs({{from, Access::read}, {to, Access::fill}}, from.numel(),
          [&](int64_t begin, int64_t end) { part(to, begin, end).copy_(part(from, begin, end)); });
}

}  // namespace tesserae::offload
