#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <string>
#include <vector>

#include "tesserae/shard/flat.h"

namespace tesserae::shard {

/// The storage that a flat buffer's compute parameters are views of. It owns no memory: it is pointed at a buffer while
/// the unit is gathered and holds nothing otherwise.
///
/// Autograd saves views of this storage in forward and reads them in backward, when it may be pointed at another buffer
/// with the same values: the storage object is what stays. Version counters do not move: they count operations on
/// tensors, and pointing a storage elsewhere is none.
class ComputeStorage {
 public:
  /// Makes each of `parameters` (one per slot, in any dtype, on `device` or the meta device) a view of this storage in
  /// the compute dtype; what they held before is dropped. They keep identity, requires_grad and hooks.
  ComputeStorage(const Flat& flat, c10::Device device, const std::vector<at::Tensor>& parameters);

  /// The same storage, and so the same parameters, for the same slots in a buffer of another size (a chunk's padding
  /// depends on the degrees). `other` is empty afterwards.
  ComputeStorage(ComputeStorage&& other, const Flat& flat);
  ComputeStorage(ComputeStorage&&) = default;

  /// Points at `memory` ([flat.total()], compute dtype, contiguous), which must stay until hide().
  void show(const at::Tensor& memory);
  /// Reading a parameter now throws an error that says that it is sharded; or, `coming`, that its new values are on
  /// their way.
  void hide(bool coming = false);
  bool shows() const { return shows_; }
  /// Whether `parameter` is still a view of it: nobody has given it other data (torch::load, set_data).
  bool has(const at::Tensor& parameter) const;

 private:
  c10::Storage storage_;
  c10::Device device_;
  int64_t bytes_;
  std::string sharded_message_, coming_message_;
  bool shows_ = false;
  // For a torch whose storages cannot be opened again (before 2.13): parameters are views of `closed_` while they are
  // sharded, so these are what is swapped.
  c10::Storage closed_;
  std::vector<at::Tensor> parameters_;
};

/// The storage holds `memory` of that size from now on.
void open_storage(c10::StorageImpl& storage, c10::DataPtr memory, size_t bytes);
/// It holds none: what reads it gets an error of that text, if this torch can open such a storage again (from 2.13 on).
void close_storage(c10::StorageImpl& storage, const std::string& message);

/// Lets a tensor that lies elsewhere, or nowhere (meta), take data on `device` by set_data: it then claims to live
/// there. torch lets tensors of the CPU take those of CUDA by itself, but of no other pair of backends.
void accept_data_of(const at::Tensor& parameter, c10::Device device);

}  // namespace tesserae::shard
