// The verbs stand with the Call that each of them runs in: its protocol is what makes them correct.
#include "tesserae/comm/transports/gloo_group.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <cstdlib>
#include <optional>

#include "tesserae/comm/link_log.h"
#include "tesserae/comm/liveness/time_limiter.h"
#include "tesserae/os/signals.h"

namespace tesserae::comm {

namespace {

using Clock = std::chrono::steady_clock;

// Below this a message costs its latency, not its bytes: all send everything to all.
constexpr int64_t kWholeReduceBytes = 64 * 1024;
// A chunk is added while the next ones are on their way; kDepth of them may be.
constexpr int64_t kChunkBytes = 4 * 1024 * 1024;
constexpr int kDepth = 3;
// The liveness channel enforces the deadline and can say why it passed. Should it be stuck itself, Gloo's own limit
// ends the wait this much later.
constexpr std::chrono::seconds kBackstop{15};

// The tag of probes; fingerprints are below.
constexpr int kProbe = 0x40000000;

struct TransportFailure : std::runtime_error {
  TransportFailure(int member, const std::string& text) : std::runtime_error(text), member(member) {}
  int member;
};
struct Aborted : std::runtime_error {
  Aborted() : std::runtime_error("aborted") {}
};

uint32_t mix(uint32_t hash, uint64_t value) {
  for (int i = 0; i < 8; ++i, value >>= 8) hash = (hash ^ static_cast<uint32_t>(value & 0xff)) * 16777619u;
  return hash;
}

}  // namespace

GlooDevice make_gloo_device(bool one_host) {
  os::survive_broken_pipes();  // Gloo writes to its sockets as if nobody could have closed them
  if (one_host) return c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1");
  if (const char* interface = std::getenv("GLOO_SOCKET_IFNAME"); interface && *interface) {
    return c10d::ProcessGroupGloo::createDeviceForInterface(interface);
  }
  return c10d::ProcessGroupGloo::createDefaultDevice();
}

c10::intrusive_ptr<c10d::Backend> make_gloo_messages(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                                     bool one_host, std::chrono::milliseconds timeout) {
  auto options = c10d::ProcessGroupGloo::Options::create(timeout);
  options->devices.push_back(make_gloo_device(one_host));
  options->threads = 1;
  const auto prefixed = c10::make_intrusive<c10d::PrefixStore>("messages", store);
  return c10::make_intrusive<c10d::ProcessGroupGloo>(prefixed, rank, size, std::move(options));
}

void close_gloo_connections(c10d::Backend& backend) {
  // torch has no call for it: its group keeps what it is made of for classes that derive from it.
  struct Open : c10d::ProcessGroupGloo {
    static const auto& contexts(const c10d::ProcessGroupGloo& group) { return group.*(&Open::contexts_); }
  };
  const auto* const gloo = dynamic_cast<const c10d::ProcessGroupGloo*>(&backend);
  if (gloo == nullptr) return;
  for (const auto& context : Open::contexts(*gloo)) context->closeConnections();
}

// The protocol of a verb:
// 1. begin: what members must agree on becomes visible to the liveness channel; a verdict that came before is thrown;
// 2. send and receive start transfers under the operation's fingerprint;
// 3. wait blocks for one of them: it ends, fails (its peer is the suspect) or is aborted by the channel;
// 4. end: no transfer is left that could still touch the caller's memory, whether the verb succeeded or not.
class GlooGroup::Call {
 public:
  Call(GlooGroup& group, std::string verb, const at::Tensor& buffer, int root = -1, bool collective = true)
      : group_(group), verb_(std::move(verb)), root_(root), contents_(group.contents()), since_(Clock::now()) {
    carried_by("tcp");
    if (buffer.defined()) {
      elements_ = buffer.numel();
      dtype_ = buffer.scalar_type();
    }
    if (collective) sequence_ = ++group.collectives_;
    std::lock_guard lock(group.mutex_);
    if (group.verdict_) throw Aborted();
    group.call_ = this;
  }

  ~Call() {
    std::vector<Transfer> left;
    std::lock_guard lock(group_.mutex_);
    group_.call_ = nullptr;
    left.swap(group_.transfers_);
  }

  size_t send(const at::Tensor& data, int peer, uint64_t salt = 0) {
    return start(data, peer, salt, &c10d::ProcessGroupGloo::send);
  }
  size_t receive(const at::Tensor& data, int peer, uint64_t salt = 0) {
    return start(data, peer, salt, &c10d::ProcessGroupGloo::recv);
  }

  void wait(size_t index) {
    Transfer transfer;
    {
      std::lock_guard lock(group_.mutex_);
      if (group_.verdict_) throw Aborted();
      transfer = group_.transfers_[index];
    }
    if (!transfer.work) return;
    while (!completes(transfer)) {
      {
        std::lock_guard lock(group_.mutex_);
        if (group_.verdict_) throw Aborted();
      }
      probe(transfer.peer);
    }
    std::lock_guard lock(group_.mutex_);
    group_.transfers_[index].work.reset();
  }

  void wait_all() {
    for (size_t i = 0; i < group_.transfers_.size(); ++i) wait(i);
  }

  Pending pending() const {
    std::string text = verb_;
    if (dtype_) text += cat(" of ", elements_, " x ", *dtype_);
    if (root_ >= 0) text += cat(" from member ", root_);
    return {sequence_, text + contents_text(contents_), since_};
  }

 private:
  using Starter = c10::intrusive_ptr<c10d::Work> (c10d::ProcessGroupGloo::*)(std::vector<at::Tensor>&, int, int);

  size_t start(const at::Tensor& data, int peer, uint64_t salt, Starter starter) {
    c10::intrusive_ptr<c10d::Work> work;
    if (data.numel() > 0) {  // both sides know that an empty message needs no sending
      std::vector<at::Tensor> one{data};
      try {
        work = (*group_.gloo_.*starter)(one, peer, fingerprint(salt));
      } catch (const std::exception& failure) {
        throw TransportFailure(peer, failure.what());
      }
    }
    std::lock_guard lock(group_.mutex_);
    if (group_.verdict_) throw Aborted();
    group_.transfers_.push_back({std::move(work), peer});
    return group_.transfers_.size() - 1;
  }

  // False: the liveness channel ended the wait.
  bool completes(const Transfer& transfer) const {
    const auto limit = group_.options_.deadline + (group_.options_.liveness ? kBackstop : std::chrono::seconds(0));
    const auto used = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - since_);
    try {
      return transfer.work->wait(std::max(limit - used, std::chrono::milliseconds(1)));
    } catch (const std::exception& failure) {
      throw TransportFailure(transfer.peer, failure.what());
    }
  }

  // Gloo may forget to tell a send whose connection breaks in the middle. It refuses to start anything on a broken
  // connection, though; a receive that nobody answers does no harm otherwise.
  void probe(int peer) const {
    std::vector<at::Tensor> one{at::zeros({1}, at::kByte)};
    try {
      group_.gloo_->recv(one, peer, kProbe);
    } catch (const std::exception& failure) {
      throw TransportFailure(peer, failure.what());
    }
  }

  int fingerprint(uint64_t salt) const {
    uint32_t hash = 2166136261u;
    for (const char c : verb_) hash = mix(hash, static_cast<uint64_t>(c));
    hash = mix(mix(mix(hash, sequence_), static_cast<uint64_t>(elements_)), contents_);
    hash = mix(mix(hash, dtype_ ? static_cast<uint64_t>(*dtype_) : 255), salt);
    return static_cast<int>(mix(hash, static_cast<uint64_t>(root_)) & 0x3fffffffu);
  }

  GlooGroup& group_;
  std::string verb_;
  int root_;
  uint32_t contents_;
  Clock::time_point since_;
  int64_t elements_ = 0;
  std::optional<at::ScalarType> dtype_;
  uint64_t sequence_ = 0;
};

GlooGroup::GlooGroup(std::string name, std::vector<int> members, int rank, const c10::intrusive_ptr<c10d::Store>& store,
                     Options options)
    : Group(std::move(name), std::move(members), rank), options_(std::move(options)) {
  if (options_.chunk_bytes <= 0) options_.chunk_bytes = kChunkBytes;
  auto gloo_options = c10d::ProcessGroupGloo::Options::create(options_.connect_deadline);
  gloo_options->devices.push_back(options_.device);
  gloo_options->threads = 1;  // its worker threads run only Gloo's own collectives, which are not used
  const auto connect = [store, rank, size = size(), gloo_options] {
    return c10::make_intrusive<c10d::ProcessGroupGloo>(store, rank, size, gloo_options);
  };
  // Connections to a member that ends after it told where it listens are waited for until the deadline.
  std::vector<int> gone;
  const auto all_live = [&] {
    if (options_.liveness) gone = options_.liveness->gone_among(this->members());
    return gone.empty();
  };
  std::optional<Liveness::Wait> waiting;
  if (options_.liveness) waiting.emplace(*options_.liveness);
  TimeLimiter limiter;
  auto connected = limiter.call_while(all_live, connect);
  if (!connected) throw lost_while_made(this->name(), std::move(gone));
  gloo_ = *std::move(connected);
  if (options_.liveness) options_.liveness->watch(this);
}

GlooGroup::~GlooGroup() {
  if (options_.liveness) options_.liveness->forget(this);
}

GlooGroup::Starts GlooGroup::even_starts(int64_t elements) const {
  // A multiple of 64 bytes of the narrowest dtype, so that adding starts on a cache line.
  const int64_t piece = (elements + size() - 1) / size();
  const int64_t length = elements % size() == 0 ? piece : (piece + 63) / 64 * 64;
  Starts starts;
  for (int i = 0; i <= size(); ++i) starts.push_back(std::min(elements, i * length));
  return starts;
}

at::Tensor GlooGroup::scratch(int64_t elements, at::ScalarType dtype) {
  const int64_t bytes = elements * static_cast<int64_t>(c10::elementSize(dtype));
  if (!scratch_.defined() || scratch_.numel() < bytes) scratch_ = at::empty({bytes}, at::kByte);
  return scratch_.narrow(0, 0, bytes).view(dtype);
}

void GlooGroup::gather_pieces(Call& call, const at::Tensor& flat, const Starts& starts) {
  const auto piece = [&](int i) { return flat.narrow(0, starts[i], starts[i + 1] - starts[i]); };
  const auto own = piece(rank());
  for (int k = 1; k < size(); ++k) {
    const int from = (rank() - k + size()) % size(), to = (rank() + k) % size();
    call.receive(piece(from), from, /*salt=*/1);
    call.send(own, to, /*salt=*/1);
  }
  call.wait_all();
}

// Pairwise exchange: in round k each member receives its piece from member rank - k and adds it, so the order of
// summation is rank, rank - 1, rank - 2, ... Pieces travel in chunks, all rounds of a chunk before the next chunk.
// then_gather: a chunk goes to all others as soon as it is summed. It lands where this member's own part of that chunk
// was, which its owner has by then: the sum came out of it.
void GlooGroup::reduce_pieces(Call& call, const at::Tensor& flat, const Starts& starts, Reduction how,
                              bool then_gather) {
  const int64_t chunk = std::max<int64_t>(1, options_.chunk_bytes / static_cast<int64_t>(flat.element_size()));
  const int64_t rounds = size() - 1;
  const auto chunks_of = [&](int i) { return (starts[i + 1] - starts[i] + chunk - 1) / chunk; };
  const auto chunk_at = [&](int i, int64_t index) {
    const int64_t start = starts[i] + index * chunk;
    return flat.narrow(0, start, std::min(chunk, starts[i + 1] - start));
  };
  const auto ahead = [&](int64_t k) { return static_cast<int>((rank() + k) % size()); };
  const auto behind = [&](int64_t k) { return static_cast<int>((rank() + size() - k) % size()); };
  const int64_t steps = chunks_of(rank()) * rounds;
  const int64_t slot = std::min(chunk, starts[rank() + 1] - starts[rank()]);
  const auto slots = scratch(slot * kDepth, flat.scalar_type());
  std::vector<size_t> received(static_cast<size_t>(steps));
  const auto landing = [&](int64_t step) {
    return slots.narrow(0, step % kDepth * slot, chunk_at(rank(), step / rounds).numel());
  };
  const auto receive = [&](int64_t step) {
    received[static_cast<size_t>(step)] = call.receive(landing(step), behind(step % rounds + 1));
  };

  for (int64_t step = 0; step < std::min<int64_t>(kDepth, steps); ++step) receive(step);
  for (int64_t index = 0; index < chunks_of(0); ++index) {  // no piece is longer than the first
    for (int64_t k = 1; k <= rounds; ++k) {
      if (index < chunks_of(ahead(k))) call.send(chunk_at(ahead(k), index), ahead(k));
    }
    for (int64_t k = 1; then_gather && k <= rounds; ++k) {
      if (index < chunks_of(behind(k))) call.receive(chunk_at(behind(k), index), behind(k), /*salt=*/1);
    }
  }
  std::optional<RunningReduction> reducer;  // of the chunk that is being summed
  for (int64_t step = 0; step < steps; ++step) {
    call.wait(received[static_cast<size_t>(step)]);
    const auto sum = chunk_at(rank(), step / rounds);
    if (step % rounds == 0) reducer.emplace(sum, sum, size(), how);
    reducer->join(landing(step));
    if (step + kDepth < steps) receive(step + kDepth);
    const bool summed = step % rounds == rounds - 1;
    for (int64_t k = 1; then_gather && summed && k <= rounds; ++k) call.send(sum, ahead(k), /*salt=*/1);
  }
  call.wait_all();
}

// All get all copies and add them in the order of members.
void GlooGroup::reduce_whole(Call& call, const at::Tensor& flat, Reduction how) {
  const int64_t elements = flat.numel();
  const auto copies = scratch(elements * size(), flat.scalar_type()).view({size(), elements});
  copies[rank()].copy_(flat);
  for (int k = 1; k < size(); ++k) {
    const int from = (rank() - k + size()) % size(), to = (rank() + k) % size();
    call.receive(copies[from], from);
    call.send(copies[rank()], to);
  }
  call.wait_all();
  flat.copy_(copies[0]);
  RunningReduction sum(flat, flat, size(), how);
  for (int i = 1; i < size(); ++i) sum.join(copies[i]);
}

void GlooGroup::do_all_gather(const at::Tensor& buffer) {
  Call call(*this, "all_gather", buffer);
  gather_pieces(call, buffer.view(-1), even_starts(buffer.numel()));
}

void GlooGroup::do_reduce_scatter(const at::Tensor& buffer, Reduction how) {
  Call call(*this, verb_of("reduce_scatter", how), buffer);
  reduce_pieces(call, buffer.view(-1), even_starts(buffer.numel()), how, /*then_gather=*/false);
}

void GlooGroup::do_all_reduce(const at::Tensor& buffer, Reduction how) {
  Call call(*this, verb_of("all_reduce", how), buffer);
  const auto flat = buffer.view(-1);
  if (static_cast<int64_t>(buffer.nbytes()) * (size() - 1) <= kWholeReduceBytes) {
    reduce_whole(call, flat, how);
  } else {
    reduce_pieces(call, flat, even_starts(buffer.numel()), how, /*then_gather=*/true);
  }
}

void GlooGroup::do_broadcast(const at::Tensor& buffer, int root) {
  Call call(*this, "broadcast", buffer, root);
  if (rank() == root) {
    for (int k = 1; k < size(); ++k) call.send(buffer, (root + k) % size());
  } else {
    call.receive(buffer, root);
  }
  call.wait_all();
}

void GlooGroup::do_exchange(const std::vector<Message>& sends, const std::vector<Message>& receives) {
  Call call(*this, "exchange", {}, -1, /*collective=*/false);
  const auto salt = [](const at::Tensor& data) {
    return static_cast<uint64_t>(data.nbytes()) * 256 + static_cast<uint64_t>(data.scalar_type());
  };
  for (const auto& message : receives) call.receive(message.data, message.peer, salt(message.data));
  for (const auto& message : sends) call.send(message.data, message.peer, salt(message.data));
  call.wait_all();
}

void GlooGroup::do_packed_exchange(const std::string& verb, const at::Tensor& buffer, const std::vector<Message>& sends,
                                   const std::vector<Message>& receives) {
  Call call(*this, verb, buffer);
  for (const auto& message : receives) call.receive(message.data, message.peer);
  for (const auto& message : sends) call.send(message.data, message.peer);
  call.wait_all();
}

void GlooGroup::do_barrier(std::string_view what) {
  Call call(*this, what.empty() ? "barrier" : std::string(what), {});
  const auto token = at::zeros({2}, at::kByte);
  // In round d all know of 2d members that they came.
  for (int distance = 1; distance < size(); distance *= 2) {
    call.receive(token.narrow(0, 0, 1), (rank() - distance + size()) % size(), static_cast<uint64_t>(distance));
    call.send(token.narrow(0, 1, 1), (rank() + distance) % size(), static_cast<uint64_t>(distance));
    call.wait_all();
  }
}

std::optional<Watched::Pending> GlooGroup::pending() const {
  std::lock_guard lock(mutex_);
  if (!call_) return std::nullopt;
  return call_->pending();
}

void GlooGroup::check_connections() {
  std::lock_guard lock(mutex_);
  for (const auto& transfer : transfers_) {
    if (transfer.work) transfer.work->abort();
  }
}

void GlooGroup::abort(const Verdict& verdict) {
  std::lock_guard lock(mutex_);
  if (!verdict_) verdict_ = verdict;
  for (const auto& transfer : transfers_) {
    if (transfer.work) transfer.work->abort();
  }
}

void GlooGroup::rethrow(const std::string& what, const std::exception& cause) {
  if (const auto* failure = dynamic_cast<const TransportFailure*>(&cause)) {
    const int suspect = members()[failure->member];
    if (options_.liveness) options_.liveness->judge(*this, suspect, failure->what()).raise(what);
    const bool late = std::string_view(failure->what()).find("Timed out") != std::string_view::npos;
    Verdict{late ? Verdict::Kind::timeout : Verdict::Kind::lost, {suspect}, failure->what()}.raise(what);
  }
  if (dynamic_cast<const Aborted*>(&cause)) verdict_->raise(what);
  throw CommError("Group", cat(what, ": ", cause.what()));
}

}  // namespace tesserae::comm
