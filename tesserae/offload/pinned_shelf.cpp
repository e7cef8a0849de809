#include "tesserae/offload/pinned_shelf.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "tesserae/base/error.h"

namespace tesserae::offload {
namespace {

/// A buffer of the host, and when the device has read it for the last time.
struct Buffer {
  at::Tensor host;
  std::optional<c10::Event> read;
  int idle = 0;
};

/// The streams, and the buffers that nobody uses. Owned by what was put, too.
struct Copies {
  explicit Copies(c10::Device device)
      : guard(device.type()),
        device(device),
        out(guard.getStreamFromGlobalPool(device, /*isHighPriority=*/false)),
        in(guard.getStreamFromGlobalPool(device, /*isHighPriority=*/false)) {}

  c10::Stream current() const { return guard.getStream(device); }
  /// `later` waits for what `earlier` has been given so far.
  void order(const c10::Stream& earlier, const c10::Stream& later) const {
    c10::Event event(device.type());
    event.record(earlier);
    event.block(later);
  }

  Buffer buffer(int64_t bytes) {
    std::vector<Buffer>& unused = free[bytes];
    if (unused.empty()) {
      return {.host = at::empty({bytes}, at::TensorOptions().dtype(at::kByte).pinned_memory(true)), .read = {}};
    }
    Buffer buffer = std::move(unused.back());
    unused.pop_back();
    if (buffer.read) buffer.read->block(out);
    return buffer;
  }

  c10::impl::VirtualGuardImpl guard;
  c10::Device device;
  c10::Stream out, in;
  std::map<int64_t, std::vector<Buffer>> free;  // by bytes
};

class Pinned final : public Shelved {
 public:
  Pinned(std::shared_ptr<Copies> copies, const c10::Storage& storage)
      : copies_(std::move(copies)),
        buffer_(copies_->buffer(static_cast<int64_t>(storage.nbytes()))),
        written_(copies_->device.type()) {
    const at::NoGradGuard no_grad;
    there_ = at::empty({0}, at::TensorOptions().dtype(at::kByte).device(copies_->device));
    there_.set_(storage, 0, {buffer_.host.numel()}, {1});
    copies_->order(copies_->current(), copies_->out);
    const c10::StreamGuard on_stream(copies_->out);
    buffer_.host.copy_(there_, /*non_blocking=*/true);
    written_.record(copies_->out);
  }

  ~Pinned() override {
    leave();
    if (arriving_) arriving_->block(copies_->current());  // before its memory is given to somebody else
    buffer_.read = std::move(arriving_);
    buffer_.idle = 0;
    copies_->free[buffer_.host.numel()].push_back(std::move(buffer_));
  }

  /// What was put is let go of.
  void leave() {
    if (left_) return;
    left_ = true;
    written_.block(copies_->current());
    there_.reset();
  }

  void load() override {
    if (!left_ || arriving_) return;  // it has not gone yet, or is on its way
    const at::NoGradGuard no_grad;
    there_ = at::empty({buffer_.host.numel()}, at::TensorOptions().dtype(at::kByte).device(copies_->device));
    copies_->order(copies_->current(), copies_->in);
    const c10::StreamGuard on_stream(copies_->in);
    written_.block(copies_->in);
    there_.copy_(buffer_.host, /*non_blocking=*/true);
    arriving_.emplace(copies_->device.type());
    arriving_->record(copies_->in);
  }

  c10::Storage take() override {
    load();
    if (arriving_) arriving_->block(copies_->current());
    return there_.storage();
  }

 private:
  std::shared_ptr<Copies> copies_;
  Buffer buffer_;
  at::Tensor there_;  // on the device: what was put, later what was brought back
  c10::Event written_;
  std::optional<c10::Event> arriving_;
  bool left_ = false;
};

class PinnedShelf final : public Shelf {
 public:
  explicit PinnedShelf(c10::Device device) : copies_(std::make_shared<Copies>(device)) {}

  void reserve(int64_t /*bytes*/) override {}  // pinned memory is taken as it is needed, and kept

  std::shared_ptr<Shelved> put(const c10::Storage& storage) override {
    auto pinned = std::make_shared<Pinned>(copies_, storage);
    of_this_unit_.push_back(pinned);
    return pinned;
  }

  void end_unit() override {
    if (of_this_unit_.empty()) return;
    for (const auto& pinned : std::exchange(of_last_unit_, std::exchange(of_this_unit_, {}))) {
      if (const auto still = pinned.lock()) still->leave();
    }
  }

  void begin_backward() override {}

  void end_pass(int64_t /*window*/) override {
    for (auto& [bytes, unused] : copies_->free) {
      std::erase_if(unused, [](Buffer& buffer) { return ++buffer.idle > 2; });
    }
  }

  std::string describe() const override { return "pinned memory of the host"; }

 private:
  std::shared_ptr<Copies> copies_;
  std::vector<std::weak_ptr<Pinned>> of_this_unit_, of_last_unit_;
};

}  // namespace

std::shared_ptr<Shelf> make_pinned_shelf(c10::Device device) {
  return std::make_shared<PinnedShelf>(device);
}

}  // namespace tesserae::offload
