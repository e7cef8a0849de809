#include <exception>
#include <thread>

#include "tesserae/comm/fabric.h"
#include "tesserae/comm/group_table.h"
#include "tesserae/comm/transports/local_group.h"

namespace tesserae::comm {

namespace {

// What the ranks of one run_local share.
class LocalJob {
 public:
  explicit LocalJob(std::chrono::milliseconds deadline) : deadline(deadline) {}

  const std::chrono::milliseconds deadline;

  std::shared_ptr<LocalRoom> room(const std::string& name, const std::vector<int>& members) {
    std::lock_guard lock(mutex_);
    auto& room = rooms_[name];
    if (!room) {
      room = std::make_shared<LocalRoom>(members);
      for (const int rank : gone_) tell(*room, rank);
    }
    return room;
  }

  /// `threw`: its end is a loss.
  void leave(int rank, bool threw) {
    std::lock_guard lock(mutex_);
    gone_.push_back(rank);
    if (threw) lost_.push_back(rank);
    for (const auto& [name, room] : rooms_) tell(*room, rank);
  }

  std::vector<int> lost() const {
    std::lock_guard lock(mutex_);
    return lost_;
  }

 private:
  static void tell(LocalRoom& room, int rank) {
    std::lock_guard lock(room.mutex);
    for (const int member : room.members) {
      if (member == rank) room.gone.push_back(rank);
    }
    room.changed.notify_all();
  }

  mutable std::mutex mutex_;
  std::map<std::string, std::shared_ptr<LocalRoom>> rooms_;
  std::vector<int> gone_, lost_;
};

class LocalFabric final : public Fabric {
 public:
  LocalFabric(LocalJob& job, int rank, int size)
      : job_(job), world_(mesh::World::single_host(rank, size)), table_(rank, size, Lane::Kind::threaded, c10::kCPU) {}

  const mesh::World& world() const override { return world_; }
  c10::Device device() const override { return c10::kCPU; }
  Group& group(const std::vector<int>& members, Traffic traffic) override {
    return table_.group(members, traffic, [this](std::string name, const std::vector<int>& members, int rank) {
      auto room = job_.room(name, members);
      return std::make_unique<LocalGroup>(std::move(name), std::move(room), rank, job_.deadline);
    });
  }
  Lane& lane(Traffic traffic) override { return table_.lane(traffic); }
  Counters counters() const override { return table_.counters(); }
  void finish() { table_.clear(); }

 protected:
  GroupTable* table() const override { return &table_; }
  std::vector<int> lost() const override { return job_.lost(); }

 private:
  LocalJob& job_;
  mesh::World world_;
  mutable GroupTable table_;
};

// A rank that failed because another had failed tells nothing new.
bool is_consequence(const std::exception_ptr& failure) {
  try {
    std::rethrow_exception(failure);
  } catch (const PeerLost&) {
    return true;
  } catch (...) {
    return false;
  }
}

}  // namespace

void run_local(int ranks, const std::function<void(Fabric&)>& body, std::chrono::milliseconds deadline) {
  if (ranks < 1) throw InvalidArgument("run_local", cat("ranks = ", ranks, ", needs at least 1"));
  LocalJob job(deadline);
  std::vector<std::exception_ptr> failures(static_cast<size_t>(ranks));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      {
        LocalFabric fabric(job, rank, ranks);
        try {
          body(fabric);
        } catch (...) {
          failures[static_cast<size_t>(rank)] = std::current_exception();
          // Before the lanes finish: their tasks may wait for peers that wait for this rank.
          job.leave(rank, /*threw=*/true);
        }
        fabric.finish();
      }
      if (!failures[static_cast<size_t>(rank)]) job.leave(rank, /*threw=*/false);
    });
  }
  for (auto& thread : threads) thread.join();
  std::exception_ptr first;
  for (const auto& failure : failures) {
    if (failure && (!first || (is_consequence(first) && !is_consequence(failure)))) first = failure;
  }
  if (first) std::rethrow_exception(first);
}

}  // namespace tesserae::comm
