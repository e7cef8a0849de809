#include "tests/sim/process_group.h"

#include <algorithm>
#include <utility>

#include "tests/sim/waits.h"

namespace tesserae::sim {
namespace {

using Tensors = std::vector<at::Tensor>;

// What a work keeps alive until somebody waits for it.
struct Kept {
  std::mutex mutex;
  Tensors tensors;
  void drop() {
    Tensors dropped;
    const std::lock_guard lock(mutex);
    dropped.swap(tensors);
  }
};

}  // namespace

struct ProcessGroup::Channel {
  std::shared_ptr<Communicator> communicator;
  int member;
  Stream& stream;
  bool entered = false;
};

class ProcessGroup::Work final : public c10d::Work {
 public:
  Work(int rank, c10d::OpType type, c10::DeviceIndex device, std::shared_ptr<Communicator> communicator, int member,
       MomentPtr end, std::shared_ptr<Kept> kept, bool blocks_host)
      : c10d::Work(rank, type),
        device_(device),
        communicator_(std::move(communicator)),
        member_(member),
        end_(std::move(end)),
        kept_(std::move(kept)),
        blocks_host_(blocks_host) {}

  bool isCompleted() override { return end_->reached(); }
  bool isSuccess() const override { return end_->reached(); }
  void synchronize() override { wait(kNoTimeout); }
  bool wait(std::chrono::milliseconds /*timeout*/) override {
    communicator_->check(member_);
    auto& device = Device::at(device_);
    if (!left_out(Wait::work)) device.current_stream().wait_for(end_);
    kept_->drop();
    if (blocks_host_) device.synchronize(*end_);
    return true;
  }

 private:
  const c10::DeviceIndex device_;
  const std::shared_ptr<Communicator> communicator_;
  const int member_;
  const MomentPtr end_;
  const std::shared_ptr<Kept> kept_;
  const bool blocks_host_;
};

ProcessGroup::ProcessGroup(std::shared_ptr<Room> room, int rank, c10::DeviceIndex device, Options options)
    : Backend(rank, room->size()), room_(std::move(room)), device_(device), options_(options) {}

ProcessGroup::ProcessGroup(std::shared_ptr<Room> room, int rank, c10::DeviceIndex device)
    : ProcessGroup(std::move(room), rank, device, Options()) {}

ProcessGroup::~ProcessGroup() = default;

ProcessGroup::Channel& ProcessGroup::all() {
  return enter(room_->all(), getRank());
}

ProcessGroup::Channel& ProcessGroup::pair(int peer) {
  const int low = std::min(peer, getRank()), high = std::max(peer, getRank());
  return enter(room_->pair(low, high), getRank() == low ? 0 : 1);
}

ProcessGroup::Channel& ProcessGroup::enter(std::shared_ptr<Communicator> communicator, int member) {
  Channel* channel = nullptr;
  {
    const std::lock_guard lock(mutex_);
    auto& slot = channels_[communicator->name()];
    if (!slot) {
      auto& device = Device::at(device_);
      Stream& stream = device.stream(device.next_stream(/*high_priority=*/true));
      slot.reset(new Channel{std::move(communicator), member, stream});
    }
    channel = slot.get();
  }
  if (!channel->entered) channel->communicator->enter(member, options_.deadline);
  channel->entered = true;
  return *channel;
}

void ProcessGroup::eagerConnectSingleDevice(at::Device /*device*/) {
  all();
}

void ProcessGroup::abort() {
  const std::lock_guard lock(mutex_);
  for (const auto& [name, channel] : channels_) channel->communicator->abort(channel->member);
}

void ProcessGroup::shutdown() {
  abort();
  const std::lock_guard lock(mutex_);
  channels_.clear();
  room_.reset();  // those between processes end here, with their threads
}

void ProcessGroup::check_device(const Tensors& tensors) const {
  for (const at::Tensor& tensor : tensors) {
    TORCH_CHECK(tensor.device() == device(device_), "[sim] a group of ", device(device_), " is given a tensor on ",
                tensor.device());
    TORCH_CHECK(tensor.is_contiguous(), "[sim] collectives take contiguous tensors");
  }
}

ProcessGroup::WorkPtr ProcessGroup::enqueue(Channel& channel, c10d::OpType type, const char* name, Tensors tensors,
                                            std::function<void()> task, Place place, bool blocks_host) {
  auto& device = Device::at(device_);
  ++device.tally().launches;
  ++device.tally().collectives;
  auto kept = std::make_shared<Kept>();
  auto run = [task = std::move(task), kept] {
    try {
      task();
    } catch (const Aborted&) {  // the kernel ends, the device is well: Work::wait() tells
    }
  };
  if (place == Place::current_stream) {  // which orders the use of the tensors' memory, too: nothing keeps it
    device.current_stream().enqueue(name, std::move(run));
    return nullptr;
  }
  kept->tensors = std::move(tensors);
  channel.stream.wait_for(device.current_stream().record());
  channel.stream.enqueue(name, std::move(run));
  return c10::make_intrusive<Work>(getRank(), type, device_, channel.communicator, channel.member,
                                   channel.stream.record(), std::move(kept), blocks_host);
}

ProcessGroup::WorkPtr ProcessGroup::collective(c10d::OpType type, const char* name, const std::string& what,
                                               Tensors inputs, Tensors outputs, std::chrono::milliseconds timeout,
                                               bool async, Move move, bool blocks_host) {
  check_device(inputs);
  check_device(outputs);
  Channel& channel = all();
  const uint64_t number = channel.communicator->announce(channel.member, cat(name, what));
  Communicator::Offer offer;
  std::ranges::transform(inputs, std::back_inserter(offer.inputs), for_tasks);
  std::ranges::transform(outputs, std::back_inserter(offer.outputs), for_tasks);
  const auto deadline = timeout == c10d::kUnsetTimeout ? options_.deadline : timeout;
  auto task = [communicator = channel.communicator, member = channel.member, number, offer = std::move(offer),
               move = std::move(move), deadline] { communicator->meet(number, member, offer, move, deadline); };
  Tensors tensors = std::move(inputs);
  tensors.insert(tensors.end(), outputs.begin(), outputs.end());
  return enqueue(channel, type, name, std::move(tensors), std::move(task),
                 async ? Place::own_stream : Place::current_stream, blocks_host);
}

ProcessGroup::WorkPtr ProcessGroup::messages(Channel& channel, int member, std::vector<Communicator::Message> sends,
                                             std::vector<Communicator::Message> receives) {
  channel.communicator->check(member);
  Tensors tensors;
  for (auto* const side : {&sends, &receives}) {
    for (auto& message : *side) {
      tensors.push_back(message.data);
      message.data = for_tasks(message.data);
    }
  }
  check_device(tensors);
  return enqueue(
      channel, c10d::OpType::COALESCED, "messages", std::move(tensors),
      [communicator = channel.communicator, member, sends = std::move(sends), receives = std::move(receives),
       deadline = options_.deadline] { communicator->exchange(member, sends, receives, deadline); },
      Place::own_stream, /*blocks_host=*/false);
}

ProcessGroup::WorkPtr ProcessGroup::message(bool sends, Tensors& tensors, int peer) {
  const at::Tensor& data = only_one(sends ? "send" : "recv", tensors);
  if (coalescing_) {
    (sends ? sends_ : receives_).push_back({peer, data});
    return nullptr;
  }
  Channel& channel = pair(peer);
  const std::vector<Communicator::Message> one{{1 - channel.member, data}};
  return sends ? messages(channel, channel.member, one, {}) : messages(channel, channel.member, {}, one);
}

ProcessGroup::WorkPtr ProcessGroup::send(Tensors& tensors, int to, int /*tag*/) {
  return message(/*sends=*/true, tensors, to);
}

ProcessGroup::WorkPtr ProcessGroup::recv(Tensors& tensors, int from, int /*tag*/) {
  return message(/*sends=*/false, tensors, from);
}

void ProcessGroup::startCoalescing() {
  coalescing_ = true;
}

ProcessGroup::WorkPtr ProcessGroup::endCoalescing() {
  coalescing_ = false;
  Channel& channel = all();
  return messages(channel, channel.member, std::exchange(sends_, {}), std::exchange(receives_, {}));
}

}  // namespace tesserae::sim
