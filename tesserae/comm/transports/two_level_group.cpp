#include "tesserae/comm/transports/two_level_group.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <map>
#include <utility>

#include "tesserae/base/copy.h"
#include "tesserae/comm/call_log.h"
#include "tesserae/comm/equal_pieces.h"
#include "tesserae/comm/transports/packed_messages.h"

namespace tesserae::comm {
namespace {

// Below this a message costs its latency, not its bytes (as for Gloo).
constexpr size_t kFlatReduceBytes = 64 * 1024;

// What members tell each other of a collective fits in here.
constexpr int64_t kTextBytes = 192;

struct TwoLevelDisagreement : std::runtime_error {
  using std::runtime_error::runtime_error;
};

at::Tensor written(const std::string& text) {
  const at::Tensor bytes = at::zeros({kTextBytes}, at::kByte);
  copy_memory(bytes.mutable_data_ptr(), text.data(), std::min(text.size(), static_cast<size_t>(kTextBytes - 1)));
  return bytes;
}

std::string read(const at::Tensor& bytes) {
  return static_cast<const char*>(bytes.const_data_ptr());
}

}  // namespace

MembersByHost members_by_host(const std::vector<int>& host_of) {
  std::map<int, std::vector<int>> by_host;
  for (size_t member = 0; member < host_of.size(); ++member)
    by_host[host_of[member]].push_back(static_cast<int>(member));
  MembersByHost hosts;
  for (auto& [host, members] : by_host) hosts.push_back(std::move(members));
  return hosts;
}

bool has_two_levels(const MembersByHost& hosts) {
  const auto even = [&](const auto& host) { return host.size() == hosts.front().size(); };
  return hosts.size() > 1 && hosts.front().size() > 1 && std::ranges::all_of(hosts, even);
}

bool alternate(const MembersByHost& hosts) {
  for (size_t host = 0; host < hosts.size(); ++host) {
    for (size_t i = 0; i < hosts[host].size(); ++i) {
      if (hosts[host][i] != static_cast<int>(i * hosts.size() + host)) return false;
    }
  }
  return true;
}

class TwoLevelGroup::Call {
 public:
  Call(TwoLevelGroup& group, const std::string& text, bool collective = true) : group_(group) {
    const uint64_t sequence = collective ? ++group.collectives_ : 0;
    {
      std::lock_guard lock(group.mutex_);
      group.pending_ = Pending{sequence, text, std::chrono::steady_clock::now()};
    }
    if (collective) group.agree(text);
  }
  Call(TwoLevelGroup& group, const char* verb, const at::Tensor& buffer)
      : Call(group, cat(verb, " of ", buffer.numel(), " x ", buffer.scalar_type(), contents_text(group.contents()))) {}
  ~Call() {
    std::lock_guard lock(group_.mutex_);
    group_.pending_.reset();
  }

 private:
  TwoLevelGroup& group_;
  const CallLog::Scope silent_{nullptr};  // a lane's log has the verb once, from this group
};

TwoLevelGroup::TwoLevelGroup(std::string name, std::unique_ptr<GlooGroup> flat, std::unique_ptr<ShmGroup> near,
                             MembersByHost hosts, std::chrono::milliseconds deadline, Liveness& liveness)
    : Group(std::move(name), flat->members(), flat->rank()),
      flat_(std::move(flat)),
      near_(std::move(near)),
      hosts_(std::move(hosts)),
      alternate_(alternate(hosts_)),
      deadline_(deadline),
      liveness_(liveness) {
  while (counterpart(host_) != rank()) ++host_;
  liveness_.watch(this);
}

TwoLevelGroup::~TwoLevelGroup() {
  liveness_.forget(this);
}

// 0.
void TwoLevelGroup::agree(const std::string& text) {
  const auto compare = [&](const at::Tensor& theirs, int member) {
    const std::string other = read(theirs);
    if (other == read(written(text))) return;
    throw TwoLevelDisagreement(cat("rank ", members()[static_cast<size_t>(member)], " called ", other, ", rank ",
                                   members()[static_cast<size_t>(rank())], " called ", text));
  };
  const at::Tensor near = at::empty({near_->size(), kTextBytes}, at::kByte);
  near[near_->rank()].copy_(written(text));
  near_->all_gather(near);
  for (int i = 0; i < near_->size(); ++i) compare(near[i], hosts_[static_cast<size_t>(host_)][static_cast<size_t>(i)]);
  const at::Tensor own = near[near_->rank()], far = at::empty({hosts(), kTextBytes}, at::kByte);
  std::vector<Message> sends, receives;
  for (int k = 1; k < hosts(); ++k) {
    sends.push_back({counterpart((host_ + k) % hosts()), own});
    const int from = (host_ + hosts() - k) % hosts();
    receives.push_back({counterpart(from), far[from]});
  }
  flat_->exchange(sends, receives);
  for (const Message& message : receives) compare(message.data, message.peer);
}

at::Tensor TwoLevelGroup::pieces_of(int host, const at::Tensor& flat, bool& copied) const {
  const auto& members = hosts_[static_cast<size_t>(host)];
  const auto count = static_cast<int>(members.size());
  copied = members.back() - members.front() != count - 1;  // they are in ascending order
  if (!copied) return flat.narrow(0, members.front() * (flat.numel() / size()), flat.numel() / size() * count);
  std::vector<at::Tensor> pieces;
  for (const int member : members) pieces.push_back(nth_piece(flat, member, size()));
  return at::cat(pieces);
}

at::Tensor TwoLevelGroup::reduced_inside(int host, const at::Tensor& flat, Reduction how) {
  bool copied = false;
  const at::Tensor pieces = pieces_of(host, flat, copied);
  near_->reduce_scatter(pieces, {}, how);
  return nth_piece(pieces, near_->rank(), near_->size());
}

void TwoLevelGroup::gather(const at::Tensor& flat, Wire wire) {
  // 1.
  const at::Tensor own = nth_piece(flat, rank(), size()), packed = pack(own, wire);
  PackedMessages messages(wire);
  for (int k = 1; k < hosts(); ++k) {
    messages.send_packed(counterpart((host_ + k) % hosts()), packed);
    const int from = counterpart((host_ + hosts() - k) % hosts());
    messages.receive(from, nth_piece(flat, from, size()));
  }
  messages.run([this](const auto& sends, const auto& receives) { flat_->exchange(sends, receives); });
  unpack(packed, wire, own);
  // 2.
  if (alternate_) return near_->all_gather(flat);
  for (int host = 0; host < hosts(); ++host) {
    bool copied = false;
    const at::Tensor pieces = pieces_of(host, flat, copied);
    near_->all_gather(pieces);
    for (int i = 0; copied && i < near_->size(); ++i) {
      const int member = hosts_[static_cast<size_t>(host)][static_cast<size_t>(i)];
      nth_piece(flat, member, size()).copy_(nth_piece(pieces, i, near_->size()));
    }
  }
}

void TwoLevelGroup::reduce(const at::Tensor& flat, Reduction how, Wire wire) {
  PackedMessages messages(wire);
  at::Tensor sum;
  // 1.
  if (alternate_) near_->reduce_scatter(flat, {}, how);
  // The other hosts' first: they wait for it.
  for (int k = 1; k <= hosts(); ++k) {
    const int host = (host_ + k) % hosts();
    const at::Tensor reduced =
        alternate_ ? nth_piece(flat, counterpart(host), size()) : reduced_inside(host, flat, how);
    if (host == host_) {
      sum = reduced;
      continue;
    }
    messages.send(counterpart(host), reduced);
    const int from = counterpart((host_ + hosts() - k) % hosts());
    messages.expect(from, reduced);
  }
  // 2.
  messages.run([this](const auto& sends, const auto& receives) { flat_->exchange(sends, receives); });
  // 3.
  const at::Tensor result = nth_piece(flat, rank(), size());
  RunningReduction reducer(result, sum, hosts(), how);
  const at::Tensor scratch = wire == Wire::exact ? at::Tensor() : at::empty_like(result);
  for (int i = 0; i < messages.expected(); ++i) reducer.join(messages.arrived(i, scratch));
}

void TwoLevelGroup::do_all_gather(const at::Tensor& buffer) {
  const Call call(*this, "all_gather", buffer);
  gather(buffer.view(-1));
}

void TwoLevelGroup::do_reduce_scatter(const at::Tensor& buffer, Reduction how) {
  const Call call(*this, verb_of("reduce_scatter", how).c_str(), buffer);
  reduce(buffer.view(-1), how);
}

void TwoLevelGroup::do_packed_all_gather(const at::Tensor& buffer, Wire wire) {
  const Call call(*this, cat("all_gather (", wire, ")").c_str(), buffer);
  gather(buffer.view(-1), wire);
}

void TwoLevelGroup::do_packed_reduce_scatter(const at::Tensor& buffer, Reduction how, Wire wire) {
  const Call call(*this, cat(verb_of("reduce_scatter", how), " (", wire, ")").c_str(), buffer);
  reduce(buffer.view(-1), how, wire);
}

void TwoLevelGroup::do_all_reduce(const at::Tensor& buffer, Reduction how) {
  const Call call(*this, verb_of("all_reduce", how).c_str(), buffer);
  if (buffer.nbytes() <= kFlatReduceBytes) {
    flat_->all_reduce(buffer, {}, how);
    return;
  }
  in_equal_pieces(buffer, size(), [&](const at::Tensor& pieces) {
    reduce(pieces, how);
    gather(pieces);
  });
}

void TwoLevelGroup::do_broadcast(const at::Tensor& buffer, int root) {
  const Call call(*this, cat("broadcast of ", buffer.numel(), " x ", buffer.scalar_type(), " from member ", root));
  // 1.
  int root_host = 0, place = -1;
  for (int host = 0; host < hosts(); ++host) {
    const auto& members = hosts_[static_cast<size_t>(host)];
    const auto found = std::ranges::find(members, root);
    if (found == members.end()) continue;
    root_host = host;
    place = static_cast<int>(found - members.begin());
  }
  if (rank() == root) {
    std::vector<Message> sends;
    for (int k = 1; k < hosts(); ++k) sends.push_back({counterpart((host_ + k) % hosts()), buffer.view(-1)});
    flat_->exchange(sends, {});
  } else if (near_->rank() == place) {
    flat_->exchange({}, {{counterpart(root_host), buffer.view(-1)}});
  }
  // 2.
  near_->broadcast(buffer, place);
}

void TwoLevelGroup::do_exchange(const std::vector<Message>& sends, const std::vector<Message>& receives) {
  const Call call(*this, "exchange", /*collective=*/false);
  flat_->exchange(sends, receives);
}

void TwoLevelGroup::do_barrier(std::string_view what) {
  const Call call(*this, what.empty() ? "barrier" : std::string(what));
  flat_->barrier({}, what);
}

std::optional<Watched::Pending> TwoLevelGroup::pending() const {
  std::lock_guard lock(mutex_);
  return pending_;
}

// What the inner groups do, or do next, fails: the verb that they do it for need not look by itself.
void TwoLevelGroup::abort(const Verdict& verdict) {
  flat_->abort(verdict);
  near_->abort(verdict);
  std::lock_guard lock(mutex_);
  verdict_ = verdict;
}

// The inner groups know what happened, and to whom; this one for which unit and step.
void TwoLevelGroup::rethrow(const std::string& what, const std::exception& cause) {
  {
    std::lock_guard lock(mutex_);
    pending_.reset();  // also if agree() threw
  }
  if (dynamic_cast<const TwoLevelDisagreement*>(&cause)) {
    liveness_.dispute(*this, {Verdict::Kind::mismatch, {}, cause.what()}).raise(what);
  }
  {
    std::unique_lock lock(mutex_);
    if (const auto verdict = verdict_) {
      lock.unlock();
      verdict->raise(what);
    }
  }
  const std::string text = cat(what, ": ", cause.what());
  if (const auto* lost = dynamic_cast<const PeerLost*>(&cause)) {
    // A rank may have left because members disagreed: this group is told so, the inner ones are not.
    liveness_.judge(*this, lost->ranks.front(), cause.what()).raise(what);
  }
  if (const auto* late = dynamic_cast<const Timeout*>(&cause)) throw Timeout("Group", text, late->silent, late->absent);
  if (dynamic_cast<const Mismatch*>(&cause)) throw Mismatch("Group", text);
  throw CommError("Group", text);
}

}  // namespace tesserae::comm
