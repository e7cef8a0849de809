#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tesserae/base/error.h"

namespace tesserae::sim {

/// The members of a group called different collectives, or the same with other sizes. NCCL would hang, or mix them up.
class OrderMismatch : public Error {
 public:
  using Error::Error;
};

/// A communicator is made when it is first used, and not all of its members came to that.
class NotEntered : public Error {
 public:
  using Error::Error;
};

/// A collective ran on the device and its peers never did. NCCL's watchdog would end the process.
class CollectiveTimeout : public Error {
 public:
  using Error::Error;
};

/// This member aborted the group.
class Aborted : public Error {
 public:
  using Error::Error;
};

/// What all members of a communicator share: the order of its collectives, and the place where their tasks meet.
/// Members are numbered from 0. Any thread.
class Communicator {
 public:
  Communicator(std::string name, int size);
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;
  virtual ~Communicator() = default;

  /// Blocks the host until all members are here, as the making of an NCCL communicator does. Throws NotEntered naming
  /// who is missing after `deadline`; Aborted.
  virtual void enter(int member, std::chrono::milliseconds deadline);

  /// On the host, in the order of the program: the number of the member's next collective. `what` says all that must be
  /// the same. Throws OrderMismatch, as every later call of any member does; Aborted.
  virtual uint64_t announce(int member, const std::string& what);

  /// What a member brings to a collective: tensors for tasks.
  struct Offer {
    std::vector<at::Tensor> inputs;
    std::vector<at::Tensor> outputs;
  };
  using Offers = std::vector<Offer>;

  /// On the member's stream. The last one to come runs `move` for all. Throws CollectiveTimeout, OrderMismatch,
  /// Aborted.
  virtual void meet(uint64_t number, int member, Offer offer, const std::function<void(Offers&)>& move,
                    std::chrono::milliseconds deadline);

  /// One side of a message.
  struct Message {
    int peer = 0;
    at::Tensor data;
  };
  /// On the member's stream: all of these messages together. Those between two members match in their order. Throws as
  /// meet() does, OrderMismatch for a message of another size or dtype.
  virtual void exchange(int member, const std::vector<Message>& sends, const std::vector<Message>& receives,
                        std::chrono::milliseconds deadline);

  /// Ends what this member waits for, and refuses what it does later. The others wait for their own end.
  virtual void abort(int member);

  /// Throws what this member must know: OrderMismatch, Aborted.
  virtual void check(int member);

  const std::string& name() const { return name_; }
  int size() const { return size_; }

 private:
  struct Meeting {
    std::string what;
    int described_by = -1;
    Offers offers;
    std::vector<bool> present;
    int arrived = 0;
    int left = 0;
    bool done = false;
    std::exception_ptr failure;  // of who moved the data
  };
  struct Parcel {
    at::Tensor data;
    bool taken = false;
  };
  using Lock = std::unique_lock<std::mutex>;
  void check_locked(int member) const;
  // Until `ready`. Says no when the deadline passes.
  bool wait(Lock& lock, int member, std::chrono::steady_clock::time_point until, const std::function<bool()>& ready);
  void receive(Lock& lock, int member, const Message& message, std::chrono::steady_clock::time_point until);
  std::string missing(const std::vector<bool>& present) const;

  const std::string name_;
  const int size_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<bool> entered_;
  std::vector<bool> aborted_;
  std::vector<uint64_t> next_;
  std::map<uint64_t, Meeting> meetings_;
  std::map<std::pair<int, int>, std::deque<std::shared_ptr<Parcel>>> mail_;  // by sender and receiver
  std::string disagreement_;
};

/// Where the ranks of a group find its communicators: one object for all of them.
class Room {
 public:
  /// `members`: of the communicator, by their numbers in the group.
  using Make = std::function<std::shared_ptr<Communicator>(std::string name, const std::vector<int>& members)>;

  /// `make`: for members that are processes (processes.h). Without it they are threads of this one.
  Room(std::string name, int size, Make make = {}) : name_(std::move(name)), size_(size), make_(std::move(make)) {}
  /// That of all members, or of two of them.
  std::shared_ptr<Communicator> all();
  std::shared_ptr<Communicator> pair(int low, int high);

  const std::string& name() const { return name_; }
  int size() const { return size_; }

 private:
  std::shared_ptr<Communicator> find(const std::string& suffix, const std::vector<int>& members);

  const std::string name_;
  const int size_;
  const Make make_;
  std::mutex mutex_;
  std::map<std::string, std::shared_ptr<Communicator>> communicators_;
};

}  // namespace tesserae::sim
