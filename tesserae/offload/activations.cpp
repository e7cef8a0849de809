#include "tesserae/offload/activations.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "tesserae/base/error.h"

namespace tesserae::offload {
namespace {

/// A view of less than that part of its storage says little about it: it may be a buffer of the user's.
constexpr int64_t smallest_part = 16;

/// Adds up the time of a scope.
class Stopwatch {
 public:
  explicit Stopwatch(double& seconds) : seconds_(seconds) {}
  ~Stopwatch() { seconds_ += std::chrono::duration<double>(Clock::now() - begin_).count(); }

 private:
  using Clock = std::chrono::steady_clock;
  double& seconds_;
  Clock::time_point begin_ = Clock::now();
};

}  // namespace

/// A storage on the shelf.
struct Saved::Item {
  Item(Activations& activations, std::shared_ptr<Shelved> on_shelf, int64_t size)
      : store(activations), shelved(std::move(on_shelf)), bytes(size) {
    ActivationCounters& counters = store.counters_;
    counters.out += bytes;
    counters.most_away = std::max(counters.most_away, counters.away += bytes);
  }
  ~Item() { come_back(); }

  // The first time that it is needed; else it has been given up without.
  void come_back() {
    if (std::exchange(away, false)) store.counters_.away -= bytes;
  }

  Activations& store;  // which those who own this keep
  std::shared_ptr<Shelved> shelved;
  int64_t bytes;
  bool away = true;
};

/// What was put between two boundaries of units.
struct Saved::Unit {
  std::shared_ptr<Activations::Pass> pass;
  int index;
  bool begun = false;
  int64_t bytes = 0;
  std::vector<std::weak_ptr<Item>> items;
};

struct Activations::Pass {
  bool whole() const { return begun.size() == units.size(); }
  /// Of what left, what the first `horizon` units put will stay the next time.
  int64_t forecast(int horizon) const {
    int64_t sum = 0;
    for (size_t i = static_cast<size_t>(horizon); i < begun.size(); ++i) sum += bytes[static_cast<size_t>(begun[i])];
    return sum;
  }

  std::vector<std::weak_ptr<Saved::Unit>> units;  // in the order of the forward
  std::vector<int64_t> bytes;                     // of each
  std::vector<int> begun;                         // in the order of the backward
  std::vector<int> expected;                      // the same, as it is expected to be; empty before the first
};

std::shared_ptr<Activations> Activations::make(ActivationOptions options, std::shared_ptr<Shelf> shelf) {
  if (options.horizon < 1 || options.smallest < 1) {
    throw InvalidArgument("Activations::make", cat("a horizon of ", options.horizon, " units and a smallest size of ",
                                                   options.smallest, " bytes: both must be at least 1"));
  }
  return std::shared_ptr<Activations>(new Activations(std::move(options), std::move(shelf)));
}

void Activations::open(c10::Device device, int64_t expected) {
  const std::scoped_lock lock(mutex_);
  if (!shelf_) shelf_ = make_shelf(device, options_.folder);
  device_ = device;
  shelf_->reserve(expected);
}

void Activations::keep(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) return;
  const std::scoped_lock lock(mutex_);
  const c10::Storage& storage = tensor.storage();
  kept_.try_emplace(storage.unsafeGetStorageImpl(), storage.getWeakStorageImpl());
}

// Units.

void Activations::begin_unit(bool leave) {
  const std::scoped_lock lock(mutex_);
  forwards_.push_back(leave);
  if (forwards_.size() == 1 && pass_ && !pass_->begun.empty()) end_pass();
  enter();
}

void Activations::end_unit() {
  const std::scoped_lock lock(mutex_);
  if (!forwards_.empty()) forwards_.pop_back();
  enter();
}

void Activations::forget_units() {
  const std::scoped_lock lock(mutex_);
  forwards_.clear();
  enter();
}

bool Activations::inside() const {
  const std::scoped_lock lock(mutex_);
  return !forwards_.empty();
}

// Another unit, or none.
void Activations::enter() {
  if (unit_ && shelf_) shelf_->end_unit();
  unit_ = nullptr;
}

void Activations::end_pass() {
  ++counters_.passes;
  if (pass_->whole()) {
    record_ = pass_->begun;
    forecast_ = pass_->forecast(options_.horizon);
  }
  int64_t window = 0;
  for (size_t i = 0; i < pass_->begun.size(); ++i) {
    int64_t bytes = 0;
    for (size_t j = i; j < pass_->begun.size() && j <= i + static_cast<size_t>(options_.horizon); ++j) {
      bytes += pass_->bytes[static_cast<size_t>(pass_->begun[j])];
    }
    window = std::max(window, bytes);
  }
  if (shelf_) shelf_->end_pass(window);
  known_.clear();
  pass_ = nullptr;
}

// The way out.

bool Activations::leaves(const at::Tensor& tensor) const {
  if (forwards_.empty() || !forwards_.back()) return false;
  if (!tensor.defined() || tensor.layout() != at::kStrided || !tensor.has_storage()) return false;
  if (tensor.unsafeGetTensorImpl()->is_python_dispatch() || tensor.is_conj() || tensor.is_neg()) return false;
  if (tensor.is_meta() || (device_ && *device_ != tensor.device())) return false;
  if (tensor.is_leaf() && tensor.requires_grad()) return false;
  const auto bytes = static_cast<int64_t>(tensor.storage().nbytes());
  if (bytes < options_.smallest || static_cast<int64_t>(tensor.nbytes()) < bytes / smallest_part) return false;
  return !kept_.contains(tensor.storage().unsafeGetStorageImpl());
}

std::shared_ptr<Saved> Activations::put(const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  std::shared_ptr<Saved> saved(new Saved);  // before the lock, which its end takes if this throws
  const std::scoped_lock lock(mutex_);
  if (!leaves(tensor)) return nullptr;
  if (!pass_) pass_ = std::make_shared<Pass>();
  if (!unit_) {
    unit_ = std::make_shared<Saved::Unit>(
        Saved::Unit{.pass = pass_, .index = static_cast<int>(pass_->units.size()), .items = {}});
    pass_->units.push_back(unit_);
    pass_->bytes.push_back(0);
  }
  saved->store_ = shared_from_this();
  saved->version_ = SavedVersion(tensor);
  saved->unit_ = unit_;
  const auto near = record_.begin() + std::min<int64_t>(options_.horizon, static_cast<int64_t>(record_.size()));
  if (std::find(record_.begin(), near, unit_->index) != near) {
    saved->like_ = tensor.detach();
    counters_.stayed += static_cast<int64_t>(tensor.nbytes());
    return saved;
  }
  saved->item_ = shelve(tensor);
  saved->like_ = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
  saved->offset_ = tensor.storage_offset();
  return saved;
}

// What is on the shelf already has come with another view, or from another unit: then both bring it back.
std::shared_ptr<Saved::Item> Activations::shelve(const at::Tensor& tensor) {
  const c10::Storage& storage = tensor.storage();
  std::shared_ptr<Saved::Item> item;
  if (const auto known = known_.find(storage.unsafeGetStorageImpl());
      known != known_.end() && known->second.version == tensor._version()) {
    item = known->second.item.lock();
  }
  if (!item) {
    const Stopwatch watch(counters_.waited);
    if (!shelf_) shelf_ = make_shelf(tensor.device(), options_.folder);
    device_ = tensor.device();
    const auto bytes = static_cast<int64_t>(storage.nbytes());
    item = std::make_shared<Saved::Item>(*this, shelf_->put(storage), bytes);
    known_.insert_or_assign(storage.unsafeGetStorageImpl(),
                            Known{storage.getWeakStorageImpl(), tensor._version(), item});
    pass_->bytes[static_cast<size_t>(unit_->index)] += bytes;
  }
  unit_->items.push_back(item);
  return item;
}

// The way back.

void Activations::begin_backward(Saved::Unit& unit) {
  if (std::exchange(unit.begun, true)) return;
  Pass& pass = *unit.pass;
  if (pass.expected.empty()) {
    pass.expected = record_;
    if (record_.size() != pass.units.size()) {
      pass.expected.clear();
      for (int i = static_cast<int>(pass.units.size()); i-- > 0;) pass.expected.push_back(i);
    }
  }
  pass.begun.push_back(unit.index);
  if (shelf_) shelf_->begin_backward();
  for (const auto& item : unit.items) {
    if (const auto there = item.lock()) there->shelved->load();
  }
  int ahead = 0;
  auto next = std::find(pass.expected.begin(), pass.expected.end(), unit.index);
  while (next != pass.expected.end() && ++next != pass.expected.end() && ahead < options_.horizon) {
    const auto soon = pass.units[static_cast<size_t>(*next)].lock();
    if (!soon || soon->begun) continue;
    ++ahead;
    for (const auto& item : soon->items) {
      if (const auto there = item.lock()) there->shelved->load();
    }
  }
}

at::Tensor Saved::take() {
  const at::NoGradGuard no_grad;
  const std::scoped_lock lock(store_->mutex_);
  store_->begin_backward(*unit_);
  version_.require_unchanged(like_);
  if (!item_) return like_;
  const Stopwatch watch(store_->counters_.waited);
  const c10::Storage storage = item_->shelved->take();
  if (item_->away) store_->counters_.in += item_->bytes;
  item_->come_back();
  at::Tensor tensor = at::empty({0}, like_.options().device(storage.device()));
  tensor.set_(storage, offset_, like_.sizes(), like_.strides());
  return tensor;
}

Saved::~Saved() {
  if (!store_) return;
  const std::scoped_lock lock(store_->mutex_);
  item_.reset();
  unit_.reset();
}

ActivationCounters Activations::counters() const {
  const std::scoped_lock lock(mutex_);
  return counters_;
}

int64_t Activations::forecast() const {
  const std::scoped_lock lock(mutex_);
  return pass_ && pass_->whole() ? pass_->forecast(options_.horizon) : forecast_;
}

std::string Activations::shelf() const {
  const std::scoped_lock lock(mutex_);
  return shelf_ ? shelf_->describe() : "";
}

}  // namespace tesserae::offload
