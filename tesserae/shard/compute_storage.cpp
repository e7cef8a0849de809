#include "tesserae/shard/compute_storage.h"

#include <ATen/ops/empty.h>
#include <c10/core/StorageImpl.h>

#include <utility>

#include "tesserae/base/error.h"

namespace tesserae::shard {
namespace {

// Older versions of torch can set the message but not clear it again.
template <class Impl>
constexpr bool opens_again = requires(Impl& storage) {
  storage.clear_data_ptr_access_error_msg_();
};

void forbid_access(c10::StorageImpl& storage, const std::string& message) {
  storage.release_data_and_set_meta_custom_data_ptr_error_msg_(message);
}

template <class Impl>
void allow_access(Impl& storage) {
  if constexpr (opens_again<Impl>) storage.clear_data_ptr_access_error_msg_();
}

void view_storage(const std::vector<at::Tensor>& parameters, const c10::Storage& storage) {
  for (const at::Tensor& parameter : parameters) parameter.unsafeGetTensorImpl()->set_storage_keep_dtype(storage);
}

int64_t bytes_of(const Flat& flat) {
  return flat.total() * static_cast<int64_t>(c10::elementSize(flat.dtypes().compute));
}

std::string closed_message(const Flat& flat, const char* when) {
  return cat("[ComputeStorage] a parameter of unit \"", flat.unit(), "\" (", flat.slots().front().names.front(),
             ", ...) was read ", when,
             ". Look at whole parameters in Sharded::visit_parameters (Python: FSDP.summon_full_params)");
}

}  // namespace

void open_storage(c10::StorageImpl& storage, c10::DataPtr memory, size_t bytes) {
  allow_access(storage);
  storage.set_data_ptr_noswap(std::move(memory));
  storage.set_nbytes(bytes);
}

void close_storage(c10::StorageImpl& storage, const std::string& message) {
  storage.set_data_ptr_noswap(c10::DataPtr(nullptr, storage.device()));
  storage.set_nbytes(size_t{0});
  if constexpr (opens_again<c10::StorageImpl>) forbid_access(storage, message);
}

void accept_data_of(const at::Tensor& parameter, c10::Device device) {
  if (parameter.device().type() == device.type()) return;
  parameter.unsafeGetTensorImpl()->_change_backend_component_keys(device);
}

ComputeStorage::ComputeStorage(const Flat& flat, c10::Device device, const std::vector<at::Tensor>& parameters)
    : storage_(c10::Storage::use_byte_size_t(), 0, c10::DataPtr(nullptr, device), nullptr, false),
      device_(device),
      bytes_(bytes_of(flat)),
      sharded_message_(closed_message(flat,
                                      "while it is sharded: it holds memory only during the unit's forward and "
                                      "backward")),
      coming_message_(closed_message(flat,
                                     "after an update, while its new values come from the ranks that made them: "
                                     "they are there in the unit's next forward")) {
  storage_.unsafeGetStorageImpl()->set_nbytes(static_cast<size_t>(bytes_));
  const auto options = at::TensorOptions().dtype(flat.dtypes().compute).device(device);
  for (size_t i = 0; i < parameters.size(); ++i) {
    const Slot& slot = flat.slots()[i];
    at::Tensor view = at::empty({0}, options);
    // Of a tensor that has this storage for itself.
    const at::Tensor like = slot.shaped(at::empty({slot.elements}, options.device(c10::kMeta)));
    view.set_(storage_, slot.begin, like.sizes(), like.strides());
    accept_data_of(parameters[i], device);
    parameters[i].set_data(view);
  }
  if constexpr (!opens_again<c10::StorageImpl>) {
    parameters_ = parameters;
    closed_ = c10::Storage(c10::Storage::use_byte_size_t(), 0, c10::DataPtr(nullptr, device_), nullptr, false);
    forbid_access(*closed_.unsafeGetStorageImpl(), sharded_message_);
  }
  hide();
}

ComputeStorage::ComputeStorage(ComputeStorage&& other, const Flat& flat) : ComputeStorage(std::move(other)) {
  bytes_ = bytes_of(flat);
  hide();
}

void ComputeStorage::show(const at::Tensor& memory) {
  open_storage(*storage_.unsafeGetStorageImpl(), c10::DataPtr(memory.data_ptr(), device_), static_cast<size_t>(bytes_));
  view_storage(parameters_, storage_);
  shows_ = true;
}

bool ComputeStorage::has(const at::Tensor& parameter) const {
  const c10::StorageImpl* const of = parameter.storage().unsafeGetStorageImpl();
  return of == storage_.unsafeGetStorageImpl() || (closed_ && of == closed_.unsafeGetStorageImpl());
}

void ComputeStorage::hide(bool coming) {
  if (!storage_) return;  // moved from
  close_storage(*storage_.unsafeGetStorageImpl(), coming ? coming_message_ : sharded_message_);
  // A view of it may be made, as by Linear: without a size that would be an error which says nothing.
  if constexpr (opens_again<c10::StorageImpl>) storage_.unsafeGetStorageImpl()->set_nbytes(static_cast<size_t>(bytes_));
  if (closed_) view_storage(parameters_, closed_);
  shows_ = false;
}

}  // namespace tesserae::shard
