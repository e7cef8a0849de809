#include "tesserae/comm/transports/c10d_group.h"

#include "tesserae/comm/equal_pieces.h"
#include "tesserae/comm/link_log.h"

namespace tesserae::comm {

namespace {

c10d::ReduceOp op_of(Reduction how) {
  using Op = c10d::ReduceOp;
  constexpr Op::RedOpType ops[] = {Op::SUM, Op::PRODUCT, Op::MIN, Op::MAX, Op::BAND, Op::BOR, Op::BXOR};
  return ops[static_cast<size_t>(how)];
}

}  // namespace

C10dGroup::C10dGroup(std::string name, std::vector<int> members, c10::intrusive_ptr<c10d::Backend> backend,
                     Options options)
    : Group(std::move(name), std::move(members), backend->getRank()),
      backend_(std::move(backend)),
      options_(options),
      tells_errors_(options.connects) {
  if (backend_->getSize() != size()) {
    throw InvalidArgument("C10dGroup", cat(size(), " members for a backend of ", backend_->getSize(), " ranks"));
  }
  if (options_.connects) backend_->eagerConnectSingleDevice(backend_->getBoundDeviceId().value());
  if (options_.liveness) options_.liveness->watch(this);
}

C10dGroup::~C10dGroup() {
  if (options_.liveness) options_.liveness->forget(this);
}

template <class Start>
void C10dGroup::run(const Start& start) {
  {
    std::lock_guard lock(mutex_);
    if (verdict_) throw std::runtime_error("aborted");
  }
  carried_by(options_.blocks_host ? "backend" : "device");
  const c10::intrusive_ptr<c10d::Work> work = start();
  // On the CPU this blocks. On a device it orders the current stream after messages; collectives run on that stream.
  if (work) work->wait();
}

void C10dGroup::do_all_gather(const at::Tensor& buffer) {
  auto flat = buffer.view(-1);
  auto piece = nth_piece(flat, rank(), size());
  c10d::AllgatherOptions how;
  how.asyncOp = has_own_streams();
  how.timeout = options_.deadline;
  run([&] { return backend_->_allgather_base(flat, piece, how); });
}

void C10dGroup::do_reduce_scatter(const at::Tensor& buffer, Reduction how_reduced) {
  auto flat = buffer.view(-1);
  auto piece = nth_piece(flat, rank(), size());
  c10d::ReduceScatterOptions how;
  how.asyncOp = has_own_streams();
  how.reduceOp = op_of(how_reduced);
  how.timeout = options_.deadline;
  run([&] { return backend_->_reduce_scatter_base(piece, flat, how); });
}

void C10dGroup::do_all_reduce(const at::Tensor& buffer, Reduction how_reduced) {
  std::vector<at::Tensor> one{buffer};
  c10d::AllreduceOptions how;
  how.asyncOp = has_own_streams();
  how.reduceOp = op_of(how_reduced);
  how.timeout = options_.deadline;
  run([&] { return backend_->allreduce(one, how); });
}

void C10dGroup::do_broadcast(const at::Tensor& buffer, int root) {
  std::vector<at::Tensor> one{buffer};
  c10d::BroadcastOptions how;
  how.asyncOp = has_own_streams();
  how.rootRank = root;
  how.timeout = options_.deadline;
  run([&] { return backend_->broadcast(one, how); });
}

void C10dGroup::do_exchange(const std::vector<Message>& sends, const std::vector<Message>& receives) {
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  run([&]() -> c10::intrusive_ptr<c10d::Work> {
    // Without coalescing, NCCL would run the messages one after the other, and two members that both send first would
    // wait for each other for ever.
    const bool together = backend_->supportsCoalescing();
    if (together) backend_->startCoalescing();
    for (const auto& message : receives) {
      std::vector<at::Tensor> one{message.data};
      works.push_back(backend_->recv(one, message.peer, 0));
    }
    for (const auto& message : sends) {
      std::vector<at::Tensor> one{message.data};
      works.push_back(backend_->send(one, message.peer, 0));
    }
    if (!together) return nullptr;
    works.clear();
    return backend_->endCoalescing();
  });
  for (const auto& work : works) work->wait();
}

void C10dGroup::do_barrier(std::string_view /*what*/) {
  c10d::BarrierOptions how;
  how.timeout = options_.deadline;
  run([&] { return backend_->barrier(how); });
  require_intact();  // the host has waited, for whatever ended it
}

// What an aborted verb leaves is read later than the verdict was set; and no group of the job is aborted before its
// channel knows who is lost.
void C10dGroup::require_intact() {
  if (size() == 1) return;
  const std::string what = cat("group ", name(), " on rank ", members()[static_cast<size_t>(rank())]);
  {
    std::lock_guard lock(mutex_);
    if (verdict_) verdict_->raise(what);
  }
  if (options_.liveness != nullptr) {
    if (const auto lost = options_.liveness->lost(); !lost.empty()) {
      Verdict{Verdict::Kind::lost, lost, "its process or its host is gone"}.raise(what);
    }
  }
  require_no_error(what);
}

void C10dGroup::require_no_error(const std::string& what) {
  if (!tells_errors_) return;
  c10d::ErrorType error = c10d::ErrorType::SUCCESS;
  try {
    error = backend_->getError();
  } catch (const c10::Error&) {  // it does not
    tells_errors_ = false;
  }
  if (error == c10d::ErrorType::SUCCESS) return;
  if (error == c10d::ErrorType::TIMEOUT) {
    Verdict{Verdict::Kind::timeout, {}, "an operation on the device took longer than the deadline"}.raise(what);
  }
  throw CommError("Group", cat(what, ": an operation on the device has failed; the backend's log says which"));
}

// Without it, NCCL's communicator would end with the last reference to the backend, and torch's registry has one of
// those that Python made.
void C10dGroup::close() {
  if (options_.connects) backend_->shutdown();
}

void C10dGroup::abort(const Verdict& verdict) {
  {
    std::lock_guard lock(mutex_);
    if (verdict_) return;
    verdict_ = verdict;  // before any verb ends for it: see require_intact()
  }
  backend_->abort();
}

void C10dGroup::rethrow(const std::string& what, const std::exception& cause) {
  {
    std::lock_guard lock(mutex_);
    if (verdict_) verdict_->raise(what);
  }
  const std::string text = reason_of(cause);
  if (options_.liveness) {
    const auto lost = options_.liveness->lost();
    if (!lost.empty()) Verdict{Verdict::Kind::lost, lost, text}.raise(what);
  }
  if (text.find("imed out") != std::string::npos || text.find("imeout") != std::string::npos) {
    Verdict{Verdict::Kind::timeout, {}, text}.raise(what);
  }
  throw CommError("Group", cat(what, ": ", text));
}

}  // namespace tesserae::comm
