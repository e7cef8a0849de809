#include "tesserae/comm/torch_backend/process_group.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <mutex>
#include <set>

#include "tesserae/comm/give_up.h"
#include "tesserae/comm/meeting_store.h"
#include "tesserae/comm/transports/gloo_group.h"

namespace tesserae::comm {

namespace {

std::mutex living_mutex;
std::set<ProcessGroup*> living;

// "[function] message" without the function.
std::string message_of(const std::exception& error) {
  const std::string text = error.what();
  const size_t end = text.find("] ");
  return !text.empty() && text[0] == '[' && end != std::string::npos ? text.substr(end + 2) : text;
}

std::string join(const std::vector<int64_t>& ranks) {
  std::string text;
  for (const int64_t rank : ranks) text += cat(text.empty() ? "" : ", ", rank);
  return text;
}

}  // namespace

c10::intrusive_ptr<c10d::Backend> ProcessGroup::connect(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                                        int size, Setup setup) {
  return c10::make_intrusive<ProcessGroup>(store, rank, size, std::move(setup));
}

ProcessGroup::ProcessGroup(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, Setup setup)
    : Backend(rank, size), setup_(std::move(setup)) {
  FabricOptions options;
  options.backend = "shm";
  options.connect_deadline = options.deadline = setup_.timeout;
  options.names_process = setup_.global_ranks.empty();
  fabric_ = Fabric::join(store, rank, size, setup_.served, options);
  // The fabric orders ranks by host, torch does not.
  std::vector<int> members(static_cast<size_t>(size));
  for (int job_rank = 0; job_rank < size; ++job_rank) {
    const int ours = size == 1 ? 0 : fabric_->world().launcher_rank(job_rank);
    members[static_cast<size_t>(ours)] = job_rank;
    global_ranks_.push_back(setup_.global_ranks.empty() ? ours : setup_.global_ranks[static_cast<size_t>(ours)]);
  }
  group_ = &fabric_->group(members, Traffic::control);
  lane_ = &fabric_->lane(Traffic::control);
  if (size > 1) messages_ = make_gloo_messages(store, rank, size, fabric_->world().hosts() == 1, setup_.timeout);
  std::lock_guard lock(living_mutex);
  living.insert(this);
}

ProcessGroup::~ProcessGroup() {
  if (made_.in_child()) static_cast<void>(messages_.release());  // its threads cannot be joined
  std::lock_guard lock(living_mutex);
  living.erase(this);
}

void ProcessGroup::shutdown() {
  if (made_.in_child()) static_cast<void>(messages_.release());
  messages_.reset();
  fabric_.reset();
}

void ProcessGroup::shutdown_all() {
  std::lock_guard lock(living_mutex);
  for (ProcessGroup* group : living) group->shutdown();
}

std::vector<int> ProcessGroup::all_missing_ranks() {
  std::vector<int> all;
  std::lock_guard lock(living_mutex);
  for (const ProcessGroup* group : living) {
    if (group->fabric_ == nullptr) continue;
    const auto& global = group->setup_.global_ranks;
    for (const int rank : missing_ranks(*group->fabric_)) {
      all.push_back(global.empty() ? rank : static_cast<int>(global[static_cast<size_t>(rank)]));
    }
  }
  return all;
}

void ProcessGroup::abort() {
  if (made_.in_child() || !fabric_) return;
  if (messages_) close_gloo_connections(*messages_);
  give_up(*fabric_);
}

c10::intrusive_ptr<c10d::Backend::Options> ProcessGroup::getBackendOptions() {
  return c10::make_intrusive<Options>(getBackendName(), setup_.timeout);
}

void ProcessGroup::check_connected() const {
  if (made_.in_child()) throw ForkedChild("ProcessGroup");
  if (!fabric_) throw InvalidArgument("ProcessGroup", cat("group ", setup_.name, " was shut down"));
}

ProcessGroup::WorkPtr ProcessGroup::submit(Operation operation, std::function<void()> body) {
  check_connected();
  const auto work = c10::make_intrusive<LaneWork>(rank_, operation.type, operation.title, operation.inputs,
                                                  std::move(operation.outputs), sequence_++, operation.timeout);
  lane_->submit([this, work, body = std::move(body)] {
    work->run([&] {
      if (failure_) std::rethrow_exception(failure_);
      at::AutoDispatchBelowADInplaceOrView guard;
      try {
        body();
      } catch (...) {
        try {
          rethrow_with_global_ranks();
        } catch (...) {
          failure_ = std::current_exception();
          throw;
        }
      }
    });
  });
  return work;
}

void ProcessGroup::rethrow_with_global_ranks() const {
  bool same = true;
  for (size_t i = 0; i < global_ranks_.size(); ++i) same = same && global_ranks_[i] == static_cast<int64_t>(i);
  if (same) throw;
  const auto text = [this](const std::exception& error) {
    return cat(message_of(error), " (ranks 0 to ", size_ - 1, " in this text are the global ranks ",
               join(global_ranks_), ")");
  };
  const auto global = [this](const std::vector<int>& ranks) {
    std::vector<int> found;
    for (const int rank : ranks) found.push_back(static_cast<int>(global_ranks_[static_cast<size_t>(rank)]));
    return found;
  };
  try {
    throw;
  } catch (const PeerLost& error) {
    throw PeerLost("ProcessGroup", text(error), global(error.ranks));
  } catch (const Timeout& error) {
    throw Timeout("ProcessGroup", text(error), global(error.silent), global(error.absent));
  } catch (const Mismatch& error) {
    throw Mismatch("ProcessGroup", text(error));
  } catch (const CommError& error) {
    throw CommError("ProcessGroup", text(error));
  }
}

}  // namespace tesserae::comm
