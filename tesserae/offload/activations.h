#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tesserae/offload/saved_version.h"
#include "tesserae/offload/shelf.h"

namespace tesserae::offload {

struct ActivationOptions {
  int horizon = 2;             ///< so many units ahead of a unit's backward its activations come back (>= 1)
  int64_t smallest = 1 << 20;  ///< bytes of a storage; smaller ones stay
  os::Path folder;             ///< of the scratch file, where units compute on the host
};

/// What left and came back so far, in bytes.
struct ActivationCounters {
  int64_t passes = 0;     ///< forwards whose backward has begun; several forwards before one backward are one pass
  int64_t out = 0;        ///< of storages that left
  int64_t in = 0;         ///< and that came back
  int64_t stayed = 0;     ///< that would have left, but are needed within the horizon of the end of the forward
  int64_t away = 0;       ///< now
  int64_t most_away = 0;  ///< at a time
  double waited = 0;      ///< seconds in which the thread that computes copied to the shelf, or waited for it
};

class Activations;

/// What stands for a tensor that autograd has saved. Giving it up gives up what it holds.
class Saved {
 public:
  ~Saved();
  Saved(const Saved&) = delete;
  Saved& operator=(const Saved&) = delete;
  /// The tensor, detached, with its sizes and strides; to be read only. May be called again. Throws what the shelf
  /// failed with, and InvalidArgument where the tensor was changed in place since it was put.
  at::Tensor take();

 private:
  friend class Activations;
  struct Unit;
  struct Item;
  Saved() = default;

  std::shared_ptr<Activations> store_;
  std::shared_ptr<Unit> unit_;
  std::shared_ptr<Item> item_;  // null: it stayed
  at::Tensor like_;             // it stayed: the tensor; else its sizes, strides and dtype, without memory
  SavedVersion version_;
  int64_t offset_ = 0;
};

/// Where activations are between forward and backward: put() after put() in units, in the order of the forward; take()
/// in that of the backward. A storage is one thing, however many tensors are views of it.
///
/// [Note: horizon] The first take() of a unit begins its backward, and brings back what the `horizon` units next in
/// order put. That order is the one of the last pass, if it had as many units; else the reverse of the forward. Those
/// that come first in it are needed within the horizon when the forward ends: what they put stays. Another order than
/// the last one's costs time or memory, never a number.
///
/// Thread-safe; one forward or backward at a time.
class Activations : public std::enable_shared_from_this<Activations> {
 public:
  /// `shelf`; null: make_shelf() for the device of the first activation. Throws InvalidArgument.
  static std::shared_ptr<Activations> make(ActivationOptions options, std::shared_ptr<Shelf> shelf = nullptr);
  Activations(const Activations&) = delete;
  Activations& operator=(const Activations&) = delete;

  /// Makes the shelf now, with room for `expected` bytes, so that one that cannot be had is found before training.
  /// Throws IoError.
  void open(c10::Device device, int64_t expected = 0);
  /// Views of its storage are no activations: parameters, buffers.
  void keep(const at::Tensor& tensor);

  // The forward of a unit. One within another ends what that one has put so far: it is a unit of its own. `leave`: what
  // it puts does; else all of that stays.
  void begin_unit(bool leave = true);
  void end_unit();
  void forget_units();  ///< of forwards that threw
  bool inside() const;  ///< a unit is in its forward

  /// Null: it is nothing that leaves (outside of units; kept; small; no plain strided tensor), and nothing was done.
  /// Throws IoError.
  std::shared_ptr<Saved> put(const at::Tensor& tensor);

  const ActivationOptions& options() const { return options_; }
  ActivationCounters counters() const;
  /// Bytes that leave in a pass like the newest whole one; 0 before that has begun its last backward.
  int64_t forecast() const;
  /// "disk (io_uring past the page cache in /scratch)"; empty before anything was put.
  std::string shelf() const;

 private:
  friend class Saved;
  struct Pass;
  /// What is on the shelf. The weak reference keeps the address from being given to another storage.
  struct Known {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    int64_t version;
    std::weak_ptr<Saved::Item> item;
  };

  Activations(ActivationOptions options, std::shared_ptr<Shelf> shelf)
      : options_(std::move(options)), shelf_(std::move(shelf)) {}
  bool leaves(const at::Tensor& tensor) const;
  void enter();
  void end_pass();
  void begin_backward(Saved::Unit& unit);
  std::shared_ptr<Saved::Item> shelve(const at::Tensor& tensor);

  const ActivationOptions options_;
  mutable std::mutex mutex_;
  std::shared_ptr<Shelf> shelf_;
  std::optional<c10::Device> device_;  // that of the first activation
  std::unordered_map<c10::StorageImpl*, c10::weak_intrusive_ptr<c10::StorageImpl>> kept_;
  std::unordered_map<c10::StorageImpl*, Known> known_;  // of this pass
  std::vector<bool> forwards_;                          // of units that are in one, the outermost first: what leaves
  std::shared_ptr<Pass> pass_;
  std::shared_ptr<Saved::Unit> unit_;  // null until it puts something
  std::vector<int> record_;            // the units of the last whole pass, in the order of their backwards
  int64_t forecast_ = 0;               // of that pass
  ActivationCounters counters_;
};

}  // namespace tesserae::offload
