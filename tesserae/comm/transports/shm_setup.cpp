// How a group over shared memory begins and ends.

#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>

#include <atomic>
#include <cstdlib>

#include "tesserae/base/log.h"
#include "tesserae/comm/transports/shm_call.h"
#include "tesserae/os/process.h"

namespace tesserae::comm {
namespace {

using Clock = std::chrono::steady_clock;

// Two ranks' rings lie in the second-level cache.
constexpr size_t kBlockBytes = 256 * 1024;
// Of a message: where ranks outnumber cores each block costs a change of process, so large ones; less in large groups,
// which have a ring for each pair.
constexpr size_t kMailBytes = 512 * 1024, kLeastMailBytes = 64 * 1024, kMailOfAll = 64 * 1024 * 1024;
constexpr std::chrono::seconds kShmBackstop{15};

size_t mail_bytes(size_t members) {
  const size_t share = kMailOfAll / (members * members * ShmRoom::mail_blocks);
  return std::clamp(share / kLeastMailBytes * kLeastMailBytes, kLeastMailBytes, kMailBytes);
}

std::string label_of(const std::string& group) {
  return "tesserae-" + group;
}

}  // namespace

std::unique_ptr<ShmGroup> ShmGroup::connect(const std::string& name, const std::vector<int>& members, int rank,
                                            const c10::intrusive_ptr<c10d::Store>& store, const Options& options,
                                            std::string& reason) {
  const int size = static_cast<int>(members.size());
  const size_t block = options.block_bytes > 0 ? options.block_bytes : kBlockBytes;
  // A block of a reduction has a part for each other member, of whole cache lines.
  const ShmRoom::Shape shape{size, std::max(block, static_cast<size_t>(size) * 4096),
                             mail_bytes(static_cast<size_t>(size))};
  // 1. Member 0 makes the memory and tells where it is. 2. All map it and say whether they could. 3. Only if all could
  // is it used; nobody needs a name for it any more.
  std::optional<os::MemoryFile> memory;
  std::string failure;
  try {
    if (!options.willing) throw IoError("ShmGroup", "it could not share memory before");
    if (rank == 0) {
      memory.emplace(os::MemoryFile::create(label_of(name), shape.total()));
      store->set("memory", cat(os::process_id(), " ", memory->descriptor()));
    } else {
      const std::string place = store->get_to_str("memory");
      const size_t space = place.find(' ');
      if (space == std::string::npos) throw IoError("ShmGroup", place);
      memory.emplace(os::MemoryFile::open(std::atoi(place.c_str()), std::atoi(place.c_str() + space), label_of(name),
                                          shape.total()));
    }
  } catch (const IoError& error) {
    failure = error.what();
    if (rank == 0) store->set("memory", "none");
  }
  store->set(cat("mapped/", rank), failure.empty() ? "yes" : failure);
  for (int member = 0; member < size; ++member) {
    const std::string key = cat("mapped/", member);
    const std::string said = store->get_to_str(key);
    if (said == "yes" || !reason.empty()) continue;
    reason = cat("rank ", members[static_cast<size_t>(member)], ": ", said);
  }
  if (!reason.empty()) return nullptr;
  memory->close_descriptor();
  auto room = std::make_unique<ShmRoom>(std::move(*memory), shape, rank);
  return std::unique_ptr<ShmGroup>(new ShmGroup(name, members, rank, std::move(room), options));
}

ShmGroup::ShmGroup(std::string name, std::vector<int> members, int rank, std::unique_ptr<ShmRoom> room, Options options)
    : Group(std::move(name), std::move(members), rank), room_(std::move(room)), options_(options) {
  if (options_.liveness) options_.liveness->watch(this);
}

ShmGroup::~ShmGroup() {
  if (options_.liveness) options_.liveness->forget(this);
}

at::Tensor ShmGroup::share(int64_t bytes) {
  if (bytes == 0) return {};  // of parameters without elements
  // As in connect(): member 0 makes it and tells where, the others map it, and all must have succeeded.
  at::Tensor place = at::zeros({2}, at::kLong), failures = at::zeros({1}, at::kLong);
  std::optional<os::MemoryFile> memory;
  const auto attempt = [&](const auto& make) {
    try {
      memory.emplace(make());
    } catch (const IoError& error) {
      failures.fill_(1);
      static std::atomic_flag said;  // one for all that a model asks for
      if (!said.test_and_set()) log(LogLevel::warning, cat("group ", name(), ": no shared memory: ", error.what()));
    }
  };
  if (rank() == 0) {
    attempt([&] { return os::MemoryFile::create(label_of(name()), static_cast<size_t>(bytes)); });
    if (memory) {
      place[0] = static_cast<int64_t>(os::process_id());
      place[1] = memory->descriptor();
    }
  }
  broadcast(place, 0, {"shared memory"});
  const auto owner = place[0].item<int64_t>();
  const auto descriptor = place[1].item<int64_t>();
  if (rank() != 0 && owner == 0) failures.fill_(1);
  if (rank() != 0 && owner != 0) {
    attempt([&] {
      return os::MemoryFile::open(static_cast<pid_t>(owner), static_cast<int>(descriptor), label_of(name()),
                                  static_cast<size_t>(bytes));
    });
  }
  all_reduce(failures, {"shared memory"});
  if (failures.item<int64_t>() > 0) return {};
  memory->close_descriptor();
  const auto kept = std::make_shared<os::MemoryFile>(std::move(*memory));
  return at::from_blob(
      kept->data(), {bytes}, [kept](void*) {}, at::TensorOptions().dtype(at::kByte));
}

void ShmGroup::check(Clock::time_point since) const {
  std::lock_guard lock(mutex_);
  if (verdict_) throw shm::Aborted();
  const auto limit = options_.deadline + (options_.liveness ? kShmBackstop : std::chrono::seconds(0));
  if (Clock::now() - since > limit) throw shm::Late(cat("the deadline of ", options_.deadline.count(), " ms passed"));
}

std::optional<Watched::Pending> ShmGroup::pending() const {
  std::lock_guard lock(mutex_);
  return pending_;
}

void ShmGroup::abort(const Verdict& verdict) {
  {
    std::lock_guard lock(mutex_);
    if (!verdict_) verdict_ = verdict;
  }
  room_->ring_bell(rank());
}

void ShmGroup::rethrow(const std::string& what, const std::exception& cause) {
  if (dynamic_cast<const shm::Aborted*>(&cause)) {
    std::unique_lock lock(mutex_);
    const Verdict verdict = *verdict_;
    lock.unlock();
    verdict.raise(what);
  }
  if (dynamic_cast<const shm::Late*>(&cause)) throw Timeout("Group", cat(what, ": ", cause.what()), {});
  if (dynamic_cast<const shm::Disagreement*>(&cause)) {
    const Verdict verdict{Verdict::Kind::mismatch, {}, cause.what()};
    (options_.liveness ? options_.liveness->dispute(*this, verdict) : verdict).raise(what);
  }
  throw CommError("Group", cat(what, ": ", cause.what()));
}

}  // namespace tesserae::comm
