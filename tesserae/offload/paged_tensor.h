#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "tesserae/offload/paged_memory.h"

namespace tesserae::offload {

// Tensors on the host whose bytes are paged. They are ordinary tensors of one dimension, at addresses that stay; who
// reads or writes one, or a view of it, does so within a Use. All of this takes ordinary tensors, too, and does nothing
// for them: code that works on training state need not know where it lies.

/// [elements], zeros.
at::Tensor paged_tensor(const std::shared_ptr<Disk>& disk, int64_t elements, c10::ScalarType dtype);

/// The disk of a paged tensor, or of a view of one; null for others.
std::shared_ptr<Disk> disk_of(const at::Tensor& tensor);

/// Whether it, or what it is a view of, is paged.
bool is_paged(const at::Tensor& tensor);

/// While it lives, the tensors (of any kind; undefined ones are skipped) are in memory. Waits for that.
/// Throws what the disk failed with. Movable; made and dropped on any thread.
class Use {
 public:
  Use() = default;
  Use(const at::Tensor& tensor, Access access) { add(tensor, access); }
  Use(const std::vector<at::Tensor>& tensors, Access access);
  ~Use() { end(); }
  Use(Use&& other) noexcept : ranges_(std::exchange(other.ranges_, {})) {}
  Use& operator=(Use&& other) noexcept;

  void add(const at::Tensor& tensor, Access access);
  void end() noexcept;

 private:
  struct Range {
    PagedMemory* memory;
    size_t begin, end;
    Access access;
    at::Tensor keeps;
  };
  std::vector<Range> ranges_;
};

/// Starts to read what is on a disk, as far as there is room. Never waits.
void prefetch(const at::Tensor& tensor);

/// A tensor of one dimension and what is done with it.
struct Worked {
  at::Tensor tensor;
  Access access = Access::read;
};

/// For paged tensors of any size: `visit(i, j)` for run after run of elements that covers [0, elements), of about a
/// block each, within a use of that run of `tensors` (each of `elements`) and with the next one on its way. One run
/// where none of them is paged.
void in_runs(const std::vector<Worked>& tensors, int64_t elements,
             const std::function<void(int64_t begin, int64_t end)>& visit);

/// Elements [begin, end) of a tensor of one dimension: the tensor itself where that is all.
at::Tensor part(const at::Tensor& tensor, int64_t begin, int64_t end);

/// Sets all of it to zero.
void zero(const at::Tensor& tensor);

/// Copies, block by block where one of them is paged.
void copy(const at::Tensor& to, const at::Tensor& from);

}  // namespace tesserae::offload
