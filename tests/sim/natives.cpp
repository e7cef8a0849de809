#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/is_set_to_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "tests/sim/device.h"
#include "tests/sim/operation.h"
#include "tests/sim/operators.h"
#include "tests/sim/waits.h"

namespace tesserae::sim {
namespace {

constexpr c10::DispatchKeySet device_keys(c10::DispatchKey::PrivateUse1);

// An allocation is called after what it is for, where that is known.
const char* outermost(const char* name) {
  return *Operation::current() ? Operation::current() : name;
}

c10::Device asked_for(std::optional<c10::Device> wanted) {
  const c10::Device asked = wanted.value_or(device(current_device()));
  return asked.has_index() ? asked : device(current_device());
}

at::Tensor sim_empty(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout> /*layout*/,
                     std::optional<at::Device> wanted, std::optional<bool> /*pinned*/,
                     std::optional<at::MemoryFormat> format) {
  const Operation operation(outermost("aten::empty"));
  const c10::DeviceGuard guard(asked_for(wanted));
  return at::detail::empty_generic(sizes, c10::GetAllocator(c10::kPrivateUse1), device_keys,
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor sim_empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> dtype,
                             std::optional<at::Layout> /*layout*/, std::optional<at::Device> wanted,
                             std::optional<bool> /*pinned*/) {
  const Operation operation(outermost("aten::empty_strided"));
  const c10::DeviceGuard guard(asked_for(wanted));
  return at::detail::empty_strided_generic(sizes, strides, c10::GetAllocator(c10::kPrivateUse1), device_keys,
                                           c10::dtype_or_default(dtype));
}

const at::Tensor& sim_resize_(const at::Tensor& self, at::IntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  const Operation operation("aten::resize_");
  auto* const impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(sizes);
  if (format && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  const size_t bytes = at::detail::computeStorageNbytes(self.sizes(), self.strides(), self.dtype().itemsize(),
                                                        static_cast<size_t>(self.storage_offset()));
  if (bytes > self.storage().nbytes()) resize_storage(*self.storage().unsafeGetStorageImpl(), bytes);
  return self;
}

at::Scalar sim_local_scalar_dense(const at::Tensor& self) {
  const Operation operation("aten::_local_scalar_dense");
  auto& device = Device::at(self.device().index());
  ++device.tally().launches;
  device.tally().copied_bytes += static_cast<int64_t>(self.element_size());
  device.synchronize(device.current_stream());
  return at::native::_local_scalar_dense_cpu(for_tasks(self));
}

// Between devices: on the source's stream, after what the target's has now, before what comes to it later.
void copy_across(const at::Tensor& from, const at::Tensor& to) {
  auto& source = Device::at(from.device().index()).current_stream();
  auto& target = Device::at(to.device().index()).current_stream();
  source.wait_for(target.record());
  source.enqueue("a copy between devices", [from = for_tasks(from), to = for_tasks(to)] { to.copy_(from); });
  target.wait_for(source.record());
}

// CUDA's rules. Pinned memory is read and written when the copy runs, and stays alive till then; any other memory is
// read before the call returns, and written before it, too. Without non_blocking the host waits in any case.
at::Tensor sim_copy_from(const at::Tensor& self, const at::Tensor& dst, bool non_blocking) {
  const Operation operation("aten::_copy_from");
  const bool to_host = dst.is_cpu();
  const bool between = !to_host && !self.is_cpu() && self.device() != dst.device();
  auto& device = Device::at((self.is_cpu() ? dst : self).device().index());
  ++device.tally().launches;
  if (dst.numel() == 0) return dst;
  if (between) {
    copy_across(self, dst);
    return dst;
  }
  auto& stream = device.current_stream();
  if (!to_host && !self.is_cpu()) {
    stream.enqueue("aten::copy_", [from = for_tasks(self), to = for_tasks(dst)] { to.copy_(from); });
    return dst;
  }
  const at::Tensor& host = to_host ? dst : self;
  const bool pinned = is_pinned(host.const_data_ptr());
  device.tally().copied_bytes += static_cast<int64_t>(host.nbytes());
  if (to_host) {
    stream.enqueue("aten::copy_ to the host", [from = for_tasks(self), to = dst.detach()] { to.copy_(from); });
  } else {
    stream.enqueue("aten::copy_ from the host",
                   [from = pinned ? self.detach() : self.detach().clone(), to = for_tasks(dst)] { to.copy_(from); });
  }
  const bool waits = !non_blocking || (to_host && !pinned);
  if (waits && !(to_host && left_out(Wait::copy))) device.synchronize(stream);
  return dst;
}

at::Tensor sim_copy_from_and_resize(const at::Tensor& self, const at::Tensor& dst) {
  dst.resize_(self.sizes());
  return sim_copy_from(self, dst, /*non_blocking=*/false);
}

void sim_record_stream(at::Tensor& self, c10::Stream stream) {
  c10::getDeviceAllocator(c10::kPrivateUse1)->recordStream(self.storage().data_ptr(), stream);
}

at::Tensor& sim_set_storage(at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef sizes,
                            at::IntArrayRef strides) {
  return at::native::set_storage_cpu_(self, std::move(source), offset, sizes, strides);
}

at::Tensor& sim_set_whole_storage(at::Tensor& self, at::Storage source) {
  return at::native::set_(self, std::move(source));
}

at::Tensor& sim_set_tensor(at::Tensor& self, const at::Tensor& source) {
  return at::native::set_tensor_(self, source);
}

}  // namespace

void add_natives(torch::Library& aten) {
  aten.impl("empty.memory_format", TORCH_FN(sim_empty));
  aten.impl("empty_strided", TORCH_FN(sim_empty_strided));
  aten.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  aten.impl("view", TORCH_FN(at::native::view));
  aten.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  aten.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
  aten.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  aten.impl("unfold", TORCH_FN(at::native::unfold));
  aten.impl("is_set_to", TORCH_FN(at::native::is_set_to));
  aten.impl("resize_", TORCH_FN(sim_resize_));
  aten.impl("set_.source_Storage", TORCH_FN(sim_set_whole_storage));
  aten.impl("set_.source_Storage_storage_offset", TORCH_FN(sim_set_storage));
  aten.impl("set_.source_Tensor", TORCH_FN(sim_set_tensor));
  aten.impl("record_stream", TORCH_FN(sim_record_stream));
  aten.impl("_local_scalar_dense", TORCH_FN(sim_local_scalar_dense));
  aten.impl("_copy_from", TORCH_FN(sim_copy_from));
  aten.impl("_copy_from_and_resize", TORCH_FN(sim_copy_from_and_resize));
}

}  // namespace tesserae::sim
