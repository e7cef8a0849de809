#include "tesserae/shard/memory.h"

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

#include <bit>

#include "tesserae/offload/paged_tensor.h"
#include "tesserae/os/pages.h"

namespace tesserae::shard {
namespace {

constexpr int64_t huge_from = int64_t{4} << 20;

struct Pages {
  void* memory;
  size_t bytes;
};

void give_back(void* context) {
  auto* const pages = static_cast<Pages*>(context);
  os::unmap_pages(pages->memory, pages->bytes);
  delete pages;
}

}  // namespace

c10::DataPtr allocate(int64_t bytes, c10::Device device) {
  if (!device.is_cpu() || bytes < huge_from) {
    const c10::DeviceGuard guard(device);
    return c10::GetAllocator(device.type())->allocate(static_cast<size_t>(bytes));
  }
  void* const memory = os::map_pages(static_cast<size_t>(bytes));
  return {memory, new Pages{memory, static_cast<size_t>(bytes)}, &give_back, device};
}

at::Tensor allocate(int64_t elements, c10::ScalarType dtype, c10::Device device) {
  const int64_t bytes = elements * static_cast<int64_t>(c10::elementSize(dtype));
  c10::Storage storage(c10::Storage::use_byte_size_t(), static_cast<size_t>(bytes), allocate(bytes, device),
                       /*allocator=*/nullptr, /*resizable=*/false);
  at::Tensor tensor = at::empty({0}, at::TensorOptions().dtype(dtype).device(device));
  tensor.set_(std::move(storage), 0, {elements}, {1});
  return tensor;
}

at::Tensor allocate_pinned(int64_t elements, c10::ScalarType dtype, c10::Device accelerator) {
  const c10::DeviceGuard guard(accelerator);
  return at::empty({elements}, at::TensorOptions().dtype(dtype).pinned_memory(true));
}

int64_t pinned_bytes(int64_t bytes) {
  return bytes <= 0 ? 0 : static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(bytes)));
}

void queue_copy(const at::Tensor& to, const at::Tensor& from) {
  if (to.device() == from.device() || offload::is_paged(to) || offload::is_paged(from)) {
    offload::copy(to, from);
  } else {
    to.copy_(from, /*non_blocking=*/true);  // of memory that is not pinned the host waits all the same
  }
}

}  // namespace tesserae::shard
