// Two engines with the same contract. Both compute checksums on their own threads, never on the caller's.

#include "tesserae/os/disk_queue.h"

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tesserae/base/checksum.h"
#include "tesserae/base/log.h"
#include "tesserae/os/failure.h"
#include "tesserae/os/uring.h"

namespace tesserae::os {
namespace {

using Direction = BlockRequest::Direction;

uint64_t checksum_of(const BlockRequest& request) {
  return checksum({request.memory, request.bytes});
}

void before(const BlockRequest& request) {
  if (request.direction == Direction::write && request.checksum != nullptr) *request.checksum = checksum_of(request);
}

void after(const BlockRequest& request, const ScratchFile& file) {
  if (request.direction == Direction::write || request.checksum == nullptr) return;
  if (checksum_of(request) == *request.checksum) return;
  throw DamagedBlock("DiskQueue", cat("scratch file in ", file.folder().native(), ": the ", request.bytes, " bytes at ",
                                      request.offset,
                                      " are not those that were written there. What they "
                                      "held is lost: check the disk and go on from the last checkpoint"));
}

/// What waits to be begun.
class Waiting {
 public:
  void push(BlockRequest request) {
    {
      const std::scoped_lock lock(mutex_);
      requests_.push_back(std::move(request));
    }
    changed_.notify_one();
  }
  /// False: it was closed and nothing waits.
  bool pop(BlockRequest& request) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return closed_ || !requests_.empty(); });
    if (requests_.empty()) return false;
    request = std::move(requests_.front());
    requests_.pop_front();
    return true;
  }
  void close() {
    {
      const std::scoped_lock lock(mutex_);
      closed_ = true;
    }
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<BlockRequest> requests_;
  bool closed_ = false;
};

class ThreadsQueue final : public DiskQueue {
 public:
  explicit ThreadsQueue(const ScratchFile& file) : file_(file) {
    for (int i = 0; i < 4; ++i) threads_.emplace_back([this] { work(); });
  }
  ~ThreadsQueue() override { waiting_.close(); }

  void submit(BlockRequest request) override { waiting_.push(std::move(request)); }
  std::string engine() const override { return "threads"; }

 private:
  void work() {
    BlockRequest request;
    while (waiting_.pop(request)) {
      std::exception_ptr failure;
      try {
        before(request);
        if (request.direction == Direction::write) {
          file_.write(request.offset, request.memory, request.bytes);
        } else {
          file_.read(request.offset, request.memory, request.bytes);
        }
        after(request, file_);
      } catch (...) {
        failure = std::current_exception();
      }
      request.done(failure);
    }
  }

  const ScratchFile& file_;
  Waiting waiting_;
  std::vector<std::jthread> threads_;
};

/// One thread begins what waits, another meets what has ended.
class UringQueue final : public DiskQueue {
 public:
  static constexpr unsigned depth = 32;

  UringQueue(const ScratchFile& file, Uring uring) : file_(file), uring_(std::move(uring)) {
    begins_ = std::jthread([this] { begin_all(); });
    ends_ = std::jthread([this] { end_all(); });
  }
  ~UringQueue() override {
    waiting_.close();
    begins_.join();
    ends_.join();
  }

  void submit(BlockRequest request) override { waiting_.push(std::move(request)); }
  std::string engine() const override { return "io_uring"; }

 private:
  struct UnderWay {
    BlockRequest request;
    size_t moved = 0;
  };

  void begin_all() {
    BlockRequest request;
    while (waiting_.pop(request)) {
      before(request);
      std::unique_lock lock(mutex_);
      room_.wait(lock, [this] { return under_way_.size() < depth; });
      const uint64_t tag = ++last_tag_;
      try {
        go_on(tag, under_way_[tag] = {std::move(request), 0});
      } catch (...) {
        request = std::move(under_way_.extract(tag).mapped().request);
        lock.unlock();
        request.done(std::current_exception());
      }
    }
    std::unique_lock lock(mutex_);
    room_.wait(lock, [this] { return under_way_.empty(); });
    uring_.submit(Uring::Operation::nothing, -1, 0, nullptr, 0, 0);
  }

  // With the mutex held: one thread submits at a time.
  void go_on(uint64_t tag, const UnderWay& what) {
    const BlockRequest& request = what.request;
    uring_.submit(request.direction == Direction::write ? Uring::Operation::write : Uring::Operation::read,
                  file_.descriptor(), request.offset + what.moved, request.memory + what.moved,
                  request.bytes - what.moved, tag);
  }

  void end_all() {
    while (true) {
      const Uring::Completion completion = uring_.wait();
      if (completion.tag == 0) return;
      BlockRequest request;
      {
        const std::scoped_lock lock(mutex_);
        UnderWay& what = under_way_.at(completion.tag);
        const bool again = completion.result == -EINTR || completion.result == -EAGAIN;
        if (completion.result > 0) what.moved += static_cast<size_t>(completion.result);
        if (again || (completion.result > 0 && what.moved < what.request.bytes)) {
          go_on(completion.tag, what);
          continue;
        }
        request = std::move(what.request);
      }
      request.done(outcome(request, completion.result));
      {
        const std::scoped_lock lock(mutex_);
        under_way_.erase(completion.tag);
      }
      room_.notify_one();
    }
  }

  std::exception_ptr outcome(const BlockRequest& request, int result) const {
    try {
      if (result <= 0) {
        throw failure("DiskQueue", cat("scratch file in ", file_.folder().native()),
                      request.direction == Direction::write ? "write" : "read", result < 0 ? -result : EIO);
      }
      after(request, file_);
      return {};
    } catch (...) {
      return std::current_exception();
    }
  }

  const ScratchFile& file_;
  Uring uring_;
  Waiting waiting_;
  std::mutex mutex_;
  std::condition_variable room_;
  std::unordered_map<uint64_t, UnderWay> under_way_;
  uint64_t last_tag_ = 0;
  std::jthread begins_, ends_;
};

}  // namespace

std::unique_ptr<DiskQueue> DiskQueue::make(const ScratchFile& file, Engine engine) {
  if (engine == Engine::best) {
    if (auto uring = Uring::make(UringQueue::depth * 2)) return std::make_unique<UringQueue>(file, std::move(*uring));
    static std::once_flag said;
    std::call_once(said, [] { log(LogLevel::info, "io_uring is forbidden here: threads read and write the disk"); });
  }
  return std::make_unique<ThreadsQueue>(file);
}

}  // namespace tesserae::os
