#include "tesserae/comm/transports/staged_group.h"

#include <ATen/ops/empty.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <string>
#include <utility>

#include "tesserae/comm/call_log.h"
#include "tesserae/comm/equal_pieces.h"
#include "tesserae/comm/error.h"

namespace tesserae::comm {
namespace {

// A place in pinned memory begins where any dtype may.
constexpr int64_t kStagedAlignment = 64;

int64_t room_for(const at::Tensor& data) {
  return (static_cast<int64_t>(data.nbytes()) + kStagedAlignment - 1) / kStagedAlignment * kStagedAlignment;
}

}  // namespace

// A verb: places in pinned memory, copies to it, the host's wait for them, and copies back.
class StagedGroup::Call {
 public:
  /// `bytes`: of all places, by room_for().
  Call(StagedGroup& group, int64_t bytes) : group_(group) {
    group_.copied_.synchronize();  // on whichever stream the last verb was
    if (!group_.pinned_.defined() || group_.pinned_.numel() < bytes) {
      group_.pinned_.reset();
      group_.pinned_ = at::empty({bytes}, at::TensorOptions().dtype(at::kByte).pinned_memory(true));
    }
  }

  /// Memory of the host for what is like `data`, flat.
  at::Tensor place(const at::Tensor& data) {
    const at::Tensor bytes = group_.pinned_.narrow(0, used_, static_cast<int64_t>(data.nbytes()));
    used_ += room_for(data);
    return bytes.view(data.scalar_type());
  }

  static void copy(const at::Tensor& to, const at::Tensor& from) { to.copy_(from.view(-1), /*non_blocking=*/true); }

  at::Tensor placed_copy(const at::Tensor& data) {
    at::Tensor host = place(data);
    copy(host, data);
    return host;
  }

  /// `body` on the group behind, when all that was copied is there; the log has the verb once, from this group.
  template <class Body>
  void carry(const Body& body) {
    const c10::Stream stream = group_.current_stream();
    c10::impl::VirtualGuardImpl(stream.device_type()).synchronizeStream(stream);
    const CallLog::Scope silent(nullptr);
    body(*group_.host_);
  }

  void copy_back(const at::Tensor& to, const at::Tensor& from) {
    copy(to.view(-1), from);
    group_.copied_.record(group_.current_stream());
  }

 private:
  StagedGroup& group_;
  int64_t used_ = 0;
};

StagedGroup::StagedGroup(std::unique_ptr<Group> host, c10::Device device)
    : Group(host->name(), host->members(), host->rank()),
      host_(std::move(host)),
      device_(device),
      copied_(device.type()) {}

StagedGroup::~StagedGroup() {
  try {
    copied_.synchronize();
  } catch (...) {  // the device failed: whoever waits for it next is told
  }
}

c10::Stream StagedGroup::current_stream() const {
  return c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
}

void StagedGroup::do_all_gather(const at::Tensor& buffer) {
  Call call(*this, room_for(buffer));
  const at::Tensor host = call.place(buffer);
  Call::copy(nth_piece(host, rank(), size()), nth_piece(buffer, rank(), size()));
  call.carry([&](Group& group) { group.all_gather(host, label()); });
  call.copy_back(buffer, host);
}

void StagedGroup::do_all_gather_to(const at::Tensor& output, const at::Tensor& input) {
  Call call(*this, room_for(output));
  const at::Tensor host = call.place(output);
  Call::copy(nth_piece(host, rank(), size()), input);
  call.carry([&](Group& group) { group.all_gather(host, label()); });
  call.copy_back(output, host);
}

void StagedGroup::do_reduce_scatter(const at::Tensor& buffer, Reduction how) {
  do_reduce_scatter_to(nth_piece(buffer, rank(), size()), buffer, how);
}

void StagedGroup::do_reduce_scatter_to(const at::Tensor& output, const at::Tensor& input, Reduction how) {
  Call call(*this, room_for(input));
  const at::Tensor host = call.placed_copy(input);
  call.carry([&](Group& group) { group.reduce_scatter(host, label(), how); });
  call.copy_back(output, nth_piece(host, rank(), size()));
}

void StagedGroup::do_reduce_scatter_scaled(const at::Tensor& output, const at::Tensor& buffer, double scale) {
  Call call(*this, room_for(buffer) + room_for(output));
  const at::Tensor host = call.placed_copy(buffer), result = call.place(output);
  call.carry([&](Group& group) { group.reduce_scatter_scaled(result, host, scale, label()); });
  call.copy_back(output, result);
}

void StagedGroup::do_all_reduce(const at::Tensor& buffer, Reduction how) {
  Call call(*this, room_for(buffer));
  const at::Tensor host = call.placed_copy(buffer);
  call.carry([&](Group& group) { group.all_reduce(host, label(), how); });
  call.copy_back(buffer, host);
}

void StagedGroup::do_broadcast(const at::Tensor& buffer, int root) {
  Call call(*this, room_for(buffer));
  const at::Tensor host = rank() == root ? call.placed_copy(buffer) : call.place(buffer);
  call.carry([&](Group& group) { group.broadcast(host, root, label()); });
  if (rank() != root) call.copy_back(buffer, host);
}

void StagedGroup::do_exchange(const std::vector<Message>& sends, const std::vector<Message>& receives) {
  int64_t bytes = 0;
  for (const auto* side : {&sends, &receives}) {
    for (const Message& message : *side) bytes += room_for(message.data);
  }
  Call call(*this, bytes);
  std::vector<Message> from_host, to_host;
  for (const Message& message : sends) from_host.push_back({message.peer, call.placed_copy(message.data)});
  for (const Message& message : receives) to_host.push_back({message.peer, call.place(message.data)});
  call.carry([&](Group& group) { group.exchange(from_host, to_host); });
  for (size_t i = 0; i < receives.size(); ++i) call.copy_back(receives[i].data, to_host[i].data);
}

void StagedGroup::do_barrier(std::string_view what) {
  Call(*this, 0).carry([&](Group& group) { group.barrier({}, what); });
}

// The group behind says whose fault it is; this one, for which unit and step.
void StagedGroup::rethrow(const std::string& what, const std::exception& cause) {
  const std::string theirs = reason_of(cause), separator = ": ";
  const size_t end_of_verb = theirs.find(separator);
  const auto* error = dynamic_cast<const CommError*>(&cause);
  if (error == nullptr) throw CommError("Group", cat(what, separator, theirs));
  const std::string reason = end_of_verb == std::string::npos ? theirs : theirs.substr(end_of_verb + separator.size());
  const std::string text = cat(what, separator, reason);
  if (const auto* lost = dynamic_cast<const PeerLost*>(error)) throw PeerLost("Group", text, lost->ranks);
  if (const auto* late = dynamic_cast<const Timeout*>(error)) throw Timeout("Group", text, late->silent, late->absent);
  if (dynamic_cast<const Mismatch*>(error) != nullptr) throw Mismatch("Group", text);
  throw CommError("Group", text);
}

}  // namespace tesserae::comm
