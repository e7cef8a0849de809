// A collective among processes, on each member's stream:
//
//  1. All tell all what they call, and how many elements their tensors have. Who hears of another call than his own, or
//     of other sizes than fit, fails with OrderMismatch, as all others do.
//  2. All send all what they bring.
//  3. Each member does for itself what one member does for all where they are threads: with copies of what the others
//     brought, and scratch memory for what they get. So numbers are the same, wherever the members are.

#include "tests/sim/processes.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "tests/sim/device.h"

namespace tesserae::sim {
namespace {

using Clock = std::chrono::steady_clock;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// What has come by the deadline is taken, however late this member asks for it.
constexpr std::chrono::milliseconds least_wait{50};
constexpr size_t text_bytes = 160;
constexpr size_t most_tensors = device_count;

struct Sizes {
  uint64_t count = 0;
  int64_t elements[most_tensors] = {};

  int64_t total() const { return std::accumulate(std::begin(elements), std::end(elements), int64_t{0}); }
};

// What members tell each other first.
struct Header {
  uint64_t number = 0;
  char what[text_bytes] = {};
  Sizes inputs;
  Sizes outputs;
};

at::Tensor bytes_of(Header& header) {
  at::Tensor bytes = at::empty({static_cast<int64_t>(sizeof(Header))}, at::kByte);
  std::memcpy(bytes.mutable_data_ptr(), &header, sizeof(Header));
  return bytes;
}

Header header_of(const at::Tensor& bytes) {
  Header header;
  std::memcpy(&header, bytes.const_data_ptr(), sizeof(Header));
  return header;
}

class ProcessCommunicator final : public Communicator {
 public:
  ProcessCommunicator(std::string name, int size, int member, c10::intrusive_ptr<c10d::Store> store)
      : Communicator(std::move(name), size), member_(member), store_(std::move(store)) {}

  void enter(int /*member*/, std::chrono::milliseconds deadline) override {
    auto options = c10d::ProcessGroupGloo::Options::create(deadline);
    options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1"));
    options->threads = 1;
    try {
      gloo_ = c10::make_intrusive<c10d::ProcessGroupGloo>(c10::make_intrusive<c10d::PrefixStore>(name(), store_),
                                                          member_, size(), std::move(options));
    } catch (const std::exception& failure) {
      throw NotEntered(
          "sim", cat("communicator ", name(), " of ", size(), " members is not made after ", deadline.count(),
                     " ms: not all members used it; all members must use a group ",
                     "once, in the same order of groups, before some of them can use it alone (", failure.what(), ")"));
    }
  }

  uint64_t announce(int member, const std::string& what) override {
    check(member);
    const std::lock_guard lock(mutex_);
    announced_[next_] = what;
    return next_++;
  }

  void meet(uint64_t number, int member, Offer offer, const std::function<void(Offers&)>& move,
            std::chrono::milliseconds deadline) override {
    check(member);
    const std::string what = take(number);
    const auto until = Clock::now() + deadline;
    Header own;
    own.number = number;
    std::strncpy(own.what, what.c_str(), text_bytes - 1);
    own.inputs = sizes_of(offer.inputs);
    own.outputs = sizes_of(offer.outputs);
    const auto headers = tell_all(what, bytes_of(own), std::vector(peers(), int64_t{sizeof(Header)}), until);
    std::vector<Header> all;
    for (const at::Tensor& bytes : headers) all.push_back(header_of(bytes));
    for (size_t peer = 0; peer < all.size(); ++peer) {
      if (all[peer].number == number && std::strcmp(all[peer].what, own.what) == 0) continue;
      disagree(cat("collective ", number, " of group ", name(), " is ", own.what, " for member ", member_, " and ",
                   all[peer].what, " (collective ", all[peer].number, ") for member ", peer,
                   "; all members call the same collectives in one order"));
    }
    Offers offers = brought(what, offer, all, until);
    move(offers);
  }

  void exchange(int member, const std::vector<Message>& sends, const std::vector<Message>& receives,
                std::chrono::milliseconds deadline) override {
    check(member);
    const auto until = Clock::now() + deadline;
    std::vector<WorkPtr> works;
    std::vector<at::Tensor> sizes, data;
    for (const Message& message : sends) {
      sizes.push_back(size_of(message.data));
      works.push_back(send(sizes.back(), message.peer));
      works.push_back(send(message.data.contiguous(), message.peer));
    }
    for (const Message& message : receives) {
      const at::Tensor size = at::zeros({2}, at::kLong);
      wait("a message", receive(size, message.peer), until);
      if (!size.equal(size_of(message.data))) {
        disagree(cat("member ", message.peer, " of group ", name(), " sends ", size.data_ptr<int64_t>()[0],
                     " elements of ", static_cast<at::ScalarType>(size.data_ptr<int64_t>()[1]), ", and member ",
                     member_, " receives ", message.data.numel(), " of ", message.data.scalar_type(),
                     "; both sides must agree"));
      }
      const at::Tensor whole = at::empty({message.data.numel()}, message.data.options());
      wait("a message", receive(whole, message.peer), until);
      message.data.copy_(whole.view(message.data.sizes()));
    }
    for (const WorkPtr& work : works) wait("a message", work, until);
  }

  void abort(int /*member*/) override {
    const std::lock_guard lock(mutex_);
    is_aborted_ = true;
    for (const WorkPtr& work : running_) work->abort();
  }

  void check(int /*member*/) override {
    const std::lock_guard lock(mutex_);
    check_locked();
  }

 private:
  size_t peers() const { return static_cast<size_t>(size()); }

  void check_locked() const {
    if (!disagreement_.empty()) throw OrderMismatch("sim", disagreement_);
    if (is_aborted_) throw Aborted("sim", cat("member ", member_, " aborted group ", name(), "; make another one"));
  }

  [[noreturn]] void disagree(std::string text) {
    const std::lock_guard lock(mutex_);
    disagreement_ = std::move(text);
    throw OrderMismatch("sim", disagreement_);
  }

  std::string take(uint64_t number) {
    const std::lock_guard lock(mutex_);
    const auto found = announced_.find(number);
    std::string what = std::move(found->second);
    announced_.erase(found);
    return what;
  }

  static at::Tensor size_of(const at::Tensor& data) {
    at::Tensor size = at::empty({2}, at::kLong);
    size.data_ptr<int64_t>()[0] = data.numel();
    size.data_ptr<int64_t>()[1] = static_cast<int64_t>(data.scalar_type());
    return size;
  }

  static Sizes sizes_of(const std::vector<at::Tensor>& tensors) {
    TORCH_CHECK(tensors.size() <= most_tensors, "[sim] a collective of ", tensors.size(), " tensors, at most ",
                most_tensors);
    Sizes sizes;
    for (const at::Tensor& tensor : tensors) sizes.elements[sizes.count++] = tensor.numel();
    return sizes;
  }

  // What each member has, by member: that of this one is `own`, the others' have as many elements as `elements` says.
  std::vector<at::Tensor> tell_all(const std::string& what, const at::Tensor& own, const std::vector<int64_t>& elements,
                                   Clock::time_point until) {
    std::vector<at::Tensor> all(peers());
    std::vector<WorkPtr> works;
    for (int peer = 0; peer < size(); ++peer) {
      auto& theirs = all[static_cast<size_t>(peer)];
      theirs = peer == member_ ? own : at::empty({elements[static_cast<size_t>(peer)]}, own.options());
      if (peer != member_ && own.numel() > 0) works.push_back(send(own, peer));
      if (peer != member_ && theirs.numel() > 0) works.push_back(receive(theirs, peer));
    }
    for (const WorkPtr& work : works) wait(what, work, until);
    return all;
  }

  Offers brought(const std::string& what, const Offer& own, const std::vector<Header>& headers,
                 Clock::time_point until) {
    Offers offers(peers());
    const auto& some = own.inputs.empty() ? own.outputs : own.inputs;
    if (some.empty()) return offers;
    const auto like = some.front().options();
    std::vector<at::Tensor> flat{at::empty({0}, like)};
    for (const at::Tensor& input : own.inputs) flat.push_back(input.reshape(-1));
    std::vector<int64_t> totals;
    for (const Header& header : headers) totals.push_back(header.inputs.total());
    const auto all = tell_all(what, at::cat(flat), totals, until);
    // Of the shape that this member's own has, where that fits: a member that another one sends to has its shapes.
    const auto shaped = [](at::Tensor elements, const std::vector<at::Tensor>& own, size_t i) {
      const bool fits = i < own.size() && own[i].numel() == elements.numel();
      return fits ? elements.view(own[i].sizes()) : elements;
    };
    for (size_t peer = 0; peer < peers(); ++peer) {
      if (static_cast<int>(peer) == member_) {
        offers[peer] = own;
        continue;
      }
      int64_t begin = 0;
      for (size_t i = 0; i < headers[peer].inputs.count; ++i) {
        const int64_t elements = headers[peer].inputs.elements[i];
        offers[peer].inputs.push_back(shaped(all[peer].narrow(0, begin, elements), own.inputs, i));
        begin += elements;
      }
      for (size_t i = 0; i < headers[peer].outputs.count; ++i) {
        offers[peer].outputs.push_back(shaped(at::empty({headers[peer].outputs.elements[i]}, like), own.outputs, i));
      }
    }
    return offers;
  }

  WorkPtr send(const at::Tensor& data, int peer) {
    std::vector<at::Tensor> one{data};
    return gloo_->send(one, peer, 0);
  }
  WorkPtr receive(const at::Tensor& data, int peer) {
    std::vector<at::Tensor> one{data};
    return gloo_->recv(one, peer, 0);
  }

  void wait(const std::string& what, const WorkPtr& work, Clock::time_point until) {
    {
      const std::lock_guard lock(mutex_);
      check_locked();
      running_.push_back(work);
    }
    std::string reason = "the deadline passed";
    bool done = false;
    try {
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(until - Clock::now());
      done = work->wait(std::max(left, least_wait));
    } catch (const std::exception& failure) {
      reason = failure.what();
    }
    const std::lock_guard lock(mutex_);
    std::erase(running_, work);
    check_locked();
    if (!done) {
      throw CollectiveTimeout("sim", cat(what, " of group ", name(), " timed out on member ", member_,
                                         ": a peer did not run it, or has ended (", reason, ")"));
    }
  }

  const int member_;
  const c10::intrusive_ptr<c10d::Store> store_;
  c10::intrusive_ptr<c10d::ProcessGroupGloo> gloo_;
  std::mutex mutex_;
  uint64_t next_ = 0;
  std::map<uint64_t, std::string> announced_;
  std::vector<WorkPtr> running_;
  std::string disagreement_;
  bool is_aborted_ = false;
};

}  // namespace

std::shared_ptr<Room> room_of_processes(c10::intrusive_ptr<c10d::Store> store, std::string name, int rank, int size) {
  return std::make_shared<Room>(
      std::move(name), size, [store = std::move(store), rank](std::string made, const std::vector<int>& members) {
        const auto self = std::ranges::find(members, rank);
        return std::make_shared<ProcessCommunicator>(std::move(made), static_cast<int>(members.size()),
                                                     static_cast<int>(self - members.begin()), store);
      });
}

}  // namespace tesserae::sim
