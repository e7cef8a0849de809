#include "tesserae/checkpoint/saver.h"

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>

#include "tesserae/base/log.h"
#include "tesserae/checkpoint/folder.h"
#include "tesserae/checkpoint/snapshot.h"
#include "tesserae/checkpoint/writer.h"
#include "tesserae/comm/agree.h"
#include "tesserae/os/clock.h"
#include "tesserae/os/fork.h"
#include "tesserae/os/random_name.h"

// How ranks agree on the outcome: each writes on a thread of its own, which talks to other ranks through the folder
// only. The training threads meet in finish(): they exchange "I failed" and "I am busy" every few milliseconds until
// nobody is busy or somebody failed. So a rank whose disk is gone, and which cannot even leave a mark there, ends the
// save on all ranks at once, and no thread but the training thread ever runs a collective.
namespace tesserae::checkpoint {
namespace {

constexpr std::chrono::milliseconds poll_interval(10);
constexpr std::chrono::seconds patience_with_the_stopped(2);
constexpr std::chrono::seconds patience_at_the_end(30);

/// Adds the time until its end to `sum`.
class Stopwatch {
 public:
  explicit Stopwatch(std::chrono::nanoseconds& sum) : sum_(sum) {}
  ~Stopwatch() { sum_ += os::now() - begin_; }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

 private:
  std::chrono::nanoseconds& sum_;
  os::TimePoint begin_ = os::now();
};

SaverOptions checked(SaverOptions options) {
  if (ManifestLimits::is_block(static_cast<uint64_t>(options.block_bytes))) return options;
  throw InvalidArgument("Saver", cat("block_bytes is ", options.block_bytes, "; it must be a power of two from ",
                                     ManifestLimits::smallest_block, " to ", ManifestLimits::largest_block));
}

std::string agree_on_job_name(comm::Fabric& fabric) {
  return comm::text_of(fabric, os::random_name(), 0);
}

}  // namespace

SaveFailed::SaveFailed(int64_t failed_step, const std::string& cause, bool is_taken)
    : IoError("Saver", cat("step ", failed_step, " was not saved, older checkpoints are untouched: ", cause)),
      step(failed_step),
      taken(is_taken) {}

/// What one save on this rank writes. The thread that writes has a share in it: a storage that hangs may keep it for
/// longer than the saver.
struct Saver::Task {
  explicit Task(SaveJob of) : job(std::move(of)) {}

  SaveJob job;
  State state;
  std::vector<Source> live;            // of the pieces, where they live
  std::shared_ptr<Snapshot> snapshot;  // if it is copied first
  std::stop_source waits;              // for other ranks' parts
  os::Deadline deadline{job.deadline};

  mutable std::mutex mutex;
  std::condition_variable changed;
  bool copied = false;
  bool committed = false;  // on rank 0; what is left is to remove older ones
  bool ended = false;
  bool taken = false;
  std::string error;  // empty: it went well, or it was told to stop

  void run(const std::stop_token& stop) {
    std::string failure;
    try {
      if (snapshot != nullptr) snapshot->copy();
      set(copied);
      const bool first = job.rank == 0;
      write_part(job, snapshot != nullptr ? snapshot->sources() : live, stop, first ? &state.training : nullptr);
      if (first) commit(job, state.training, waits.get_token());
    } catch (const Cancelled&) {
    } catch (const FolderTaken& caught) {
      set(taken);
      failure = caught.what();
    } catch (const std::exception& caught) {
      failure = caught.what();
    }
    end(failure);
  }

  void end(const std::string& failure) {
    {
      const std::scoped_lock lock(mutex);
      error = failure;
    }
    set(copied);
    set(ended);
  }

  void set(bool& flag) {
    {
      const std::scoped_lock lock(mutex);
      flag = true;
    }
    changed.notify_all();
  }

  bool is(const bool& flag) const {
    const std::scoped_lock lock(mutex);
    return flag;
  }

  void wait(const bool& flag) {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&flag] { return flag; });
  }

  bool wait_for(const bool& flag, std::chrono::nanoseconds duration) {
    std::unique_lock lock(mutex);
    return changed.wait_for(lock, duration, [&flag] { return flag; });
  }

  /// Empty: none so far.
  std::string failure() const {
    const std::scoped_lock lock(mutex);
    if (ended || committed || !deadline.passed()) return error;
    return cat("it has not been written within ", std::chrono::duration<double>(job.deadline).count(),
               " s; does the storage of ", job.folder.native(), " hang?");
  }
};

/// A task and the thread that runs it.
class Saver::Save {
 public:
  explicit Save(std::shared_ptr<Task> todo) : task(std::move(todo)) {}
  ~Save() {
    if (!thread_.joinable()) return;
    if (made_.in_child()) {  // there is no such thread here
      new std::jthread(std::move(thread_));
      return;
    }
    stop();
    if (wait_at_the_end()) return;
    log(LogLevel::error, cat("the save of step ", task->job.step, " is left behind: the storage of ",
                             task->job.folder.native(), " hangs"));
    thread_.detach();
  }

  void start() {
    thread_ = std::jthread([task = task](const std::stop_token& stop) { task->run(stop); });
  }
  void stop() {
    thread_.request_stop();
    task->waits.request_stop();
  }
  /// Writes this rank's part, and waits for no other.
  void leave() {
    task->waits.request_stop();
    wait_at_the_end();
  }

  const std::shared_ptr<Task> task;

 private:
  bool wait_at_the_end() {
    return task->wait_for(task->ended, std::min<std::chrono::nanoseconds>(patience_at_the_end, task->job.deadline));
  }

  os::ForkGuard made_;
  std::jthread thread_;
};

Saver::Saver(std::shared_ptr<comm::Fabric> fabric, SaverOptions options)
    : fabric_(std::move(fabric)), options_(checked(std::move(options))), job_(agree_on_job_name(*fabric_)) {}

Saver::~Saver() {
  if (!save_) return;
  if (busy()) {
    log(LogLevel::warning, cat("the save of step ", save_->task->job.step, " is given up: finish() was not called"));
  }
  if (const std::string cause = save_->task->failure(); !cause.empty()) {
    log(LogLevel::error, SaveFailed(save_->task->job.step, cause).what());
  }
}

void Saver::save(State state) {
  save(std::move(state), options_.asynchronous);
}

void Saver::save(State state, bool asynchronous) {
  finish();
  {
    const Stopwatch watch(waited_);
    begin(std::move(state), asynchronous);
  }
  if (!asynchronous) finish();
}

void Saver::begin(State state, bool asynchronous) {
  auto task = std::make_shared<Task>(SaveJob{.folder = options_.folder,
                                             .step = state.step,
                                             .attempt = cat(job_, "-", count_++),
                                             .layout = state.layout,
                                             .axes = state.axes,
                                             .rank = fabric_->rank(),
                                             .keep = options_.keep,
                                             .read_back = options_.read_back,
                                             .block_bytes = static_cast<uint64_t>(options_.block_bytes),
                                             .deadline = options_.deadline,
                                             .fence = fence_});
  task->job.committed = [of = task.get()] { of->set(of->committed); };  // which it outlives: it is called by its thread
  auto save = std::make_unique<Save>(task);
  try {
    // A save that was given up has ended before the next one begins: they share the memory of the copies.
    if (abandoned_) abandoned_->stop();
    if (abandoned_ && !abandoned_->task->wait_for(abandoned_->task->ended, patience_with_the_stopped)) {
      throw IoError("Saver", cat("the save of step ", abandoned_->task->job.step,
                                 ", which was given up, still hangs in ", abandoned_->task->job.folder.native()));
    }
    abandoned_.reset();
    if (asynchronous) {
      if (!snapshot_) snapshot_ = std::make_shared<Snapshot>();
      snapshot_->begin(std::exchange(state.pieces, {}));
      task->snapshot = snapshot_;
    } else {
      task->live = live_sources(state.pieces);
    }
    task->state = std::move(state);
    save->start();
  } catch (const std::exception& caught) {
    // Thrown here, it would leave the other ranks with a save that never ends: finish() throws it on all of them.
    task->end(caught.what());
  }
  save_ = std::move(save);
}

void Saver::set_target(os::Path folder, int keep, bool read_back) {
  options_.folder = std::move(folder);
  options_.keep = keep;
  options_.read_back = read_back;
}

void Saver::wait_copied() {
  const Stopwatch watch(waited_);
  if (save_) save_->task->wait(save_->task->copied);
}

bool Saver::failed() const {
  return save_ && !save_->task->failure().empty();
}

bool Saver::busy() const {
  return save_ && !save_->task->is(save_->task->ended);
}

void Saver::finish() {
  if (!save_) return;
  const Stopwatch watch(waited_);
  try {
    while (true) {
      save_->task->wait_for(save_->task->ended, poll_interval);
      // In this order: what is no longer busy has its failure, if it has one.
      const int64_t still_busy = busy() ? 1 : 0;
      const std::string failure = save_->task->failure();
      const auto sums = comm::counts_over_ranks(*fabric_, {still_busy, failure.empty() ? 0 : 1});
      if (sums[1] > 0) give_up(failure);
      if (sums[0] == 0) break;
    }
  } catch (const comm::CommError&) {
    if (save_) abandoned_ = std::move(save_);
    throw;
  }
  saved_step_ = save_->task->job.step;
  save_.reset();
}

void Saver::leave() {
  const std::unique_ptr<Save> save = save_ ? std::move(save_) : std::move(abandoned_);
  if (!save) return;
  save->leave();
  if (const std::string cause = save->task->failure(); !cause.empty()) {
    log(LogLevel::error, SaveFailed(save->task->job.step, cause).what());
  }
}

void Saver::give_up(const std::string& failure) {
  std::unique_ptr<Save> save = std::exchange(save_, nullptr);
  const Task& task = *save->task;
  const int rank = comm::lowest_rank_with(*fabric_, !failure.empty());
  const std::string cause = comm::text_of(*fabric_, cat("rank ", rank, ": ", failure), rank);
  save->stop();
  // A disk that hangs must not keep training from hearing of it: the thread may go on and is waited for later.
  const bool ended = save->task->wait_for(task.ended, patience_with_the_stopped);
  const auto sums = comm::counts_over_ranks(*fabric_, {ended ? 0 : 1, task.is(task.taken) ? 1 : 0});
  if (sums[0] == 0 && fabric_->rank() == 0) discard(task.job);
  const int64_t step = task.job.step;
  if (!ended) abandoned_ = std::move(save);
  throw SaveFailed(step, cause, sums[1] > 0);
}

}  // namespace tesserae::checkpoint
