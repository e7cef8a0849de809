#include "tesserae/comm/group.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/scalar_tensor.h>

#include <array>
#include <charconv>
#include <numeric>

#include "tesserae/comm/call_log.h"
#include "tesserae/comm/equal_pieces.h"
#include "tesserae/comm/group_table.h"
#include "tesserae/comm/link_log.h"
#include "tesserae/comm/transports/packed_messages.h"

namespace tesserae::comm {

namespace {

at::Tensor flattened(const at::Tensor& tensor) {
  return tensor.dim() == 1 ? tensor : tensor.view(-1);
}

void scale_to(const at::Tensor& output, const at::Tensor& input, double scale) {
  at::Tensor out = flattened(output);
  at::mul_out(out, flattened(input), at::scalar_tensor(scale, at::kDouble));
}

/// The lane that a group was made for, which its name begins with.
std::string_view lane_of(const std::string& name) {
  for (const Traffic traffic : all_traffic) {
    if (name.starts_with(traffic_name(traffic))) return traffic_name(traffic);
  }
  return "other";
}

}  // namespace

Group::Group(std::string name, std::vector<int> members, int rank)
    : name_(std::move(name)), members_(std::move(members)), rank_(rank) {}

std::string Group::describe(std::string_view verb, const Label& label) const {
  std::string text = cat(verb, " #", sequence_, " of group ", name_, " on rank ", members_[rank_]);
  if (!label.unit.empty()) text += cat(", unit ", label.unit);
  if (label.step >= 0) text += cat(", step ", label.step);
  return text;
}

std::string contents_text(uint32_t contents) {
  std::array<char, 8> digits{};
  const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), contents, 16).ptr;
  return contents == 0 ? "" : cat(" of contents #", std::string_view(digits.data(), end));
}

void Group::check_buffer(std::string_view verb, const at::Tensor& buffer, int64_t pieces) const {
  if (!buffer.defined() || !buffer.is_contiguous()) {
    throw InvalidArgument(verb, cat("group ", name_, ": the buffer must be a contiguous tensor"));
  }
  if (buffer.numel() % pieces != 0) {
    throw InvalidArgument(verb,
                          cat("group ", name_, ": ", buffer.numel(), " elements are not ", pieces, " equal pieces"));
  }
}

void Group::check_reduction(std::string_view verb, const at::Tensor& buffer, Reduction how) const {
  if (can_reduce(how, buffer.scalar_type())) return;
  throw InvalidArgument(verb, cat("group ", name_, ": there is no ", how, " of ", buffer.scalar_type()));
}

void Group::check_piece(std::string_view verb, const at::Tensor& piece, const at::Tensor& buffer) const {
  check_buffer(verb, piece, 1);
  check_buffer(verb, buffer, size());
  if (piece.numel() * size() == buffer.numel() && piece.scalar_type() == buffer.scalar_type()) return;
  throw InvalidArgument(verb, cat("group ", name_, ": ", piece.numel(), " x ", piece.scalar_type(), " is no piece of ",
                                  buffer.numel(), " x ", buffer.scalar_type(), " for ", size(), " members"));
}

// Runs one verb of the transport: counts it, keeps it out of autograd, and makes its failure a CommError that stays.
template <class Body>
void Group::run(std::string_view verb, Counters::Verb& counter, int64_t bytes, const Label& label, const Body& body) {
  if (failure_) std::rethrow_exception(failure_);
  if (made_.in_child()) throw ForkedChild(verb);
  ++sequence_;
  contents_ = label.contents;
  counter.calls += 1;
  counter.bytes += static_cast<uint64_t>(bytes);
  CallLog* const log = CallLog::current();
  const Waiting waiting;
  take_carrier();
  const os::TimePoint begin = os::now();
  try {
    // Below autograd and its version counters: gathered parameters are filled behind autograd's back on purpose.
    at::AutoDispatchBelowADInplaceOrView guard;
    body();
    const os::TimePoint end = os::now();
    if (const std::string_view link = take_carrier(); !link.empty() && bytes > 0) {
      // On a device the host has only queued it.
      const double seconds = blocks_host() ? std::chrono::duration<double>(end - begin).count() : 0;
      LinkLog::of_process().add(link, lane_of(name_), verb, size(), static_cast<uint64_t>(bytes), seconds);
    }
    if (log != nullptr) {
      log->add({.verb = verb,
                .unit = std::string(label.unit),
                .bytes = static_cast<uint64_t>(bytes),
                .begin = begin,
                .end = end});
    }
  } catch (const std::exception& cause) {
    try {
      rethrow(describe(verb, label), cause);
    } catch (...) {
      failure_ = std::current_exception();
      throw;
    }
  }
}

at::Tensor Group::share(int64_t /*bytes*/) {
  return {};
}

at::Tensor Group::to_host(const at::Tensor& result) {
  at::Tensor host = result.cpu();
  require_intact();
  return host;
}

// Below that many bytes a message costs its latency: there is nothing to gain.
constexpr size_t kPackedBytes = 4096;

Wire Group::wire_for(Wire asked, const at::Tensor& buffer) const {
  if (asked == Wire::exact || !buffer.is_floating_point()) return Wire::exact;
  return buffer.nbytes() / members_.size() < kPackedBytes ? Wire::exact : travels_as(asked);
}

int64_t Group::piece_bytes(const at::Tensor& buffer, Wire wire) const {
  return packed_bytes(buffer.numel() / size(), buffer.element_size(), wire);
}

void Group::all_gather(const at::Tensor& buffer, Label label, Wire asked) {
  if (size() == 1) return;
  check_buffer("all_gather", buffer, size());
  const Wire wire = wire_for(asked, buffer);
  const int64_t bytes = piece_bytes(buffer, wire) * (size() - 1);
  run("all_gather", counters_->all_gather, bytes, label,
      [&] { wire == Wire::exact ? do_all_gather(buffer) : do_packed_all_gather(buffer, wire); });
}

void Group::all_gather_to(const at::Tensor& output, const at::Tensor& input, Label label) {
  check_piece("all_gather", input, output);
  if (size() == 1) {
    at::AutoDispatchBelowADInplaceOrView guard;
    output.view(-1).copy_(input.view(-1));
    return;
  }
  const int64_t bytes = static_cast<int64_t>(input.nbytes()) * (size() - 1);
  run("all_gather", counters_->all_gather, bytes, label, [&] { do_all_gather_to(output, input); });
}

void Group::do_all_gather_to(const at::Tensor& output, const at::Tensor& input) {
  nth_piece(output, rank_, size()).copy_(input.view(-1));
  do_all_gather(output);
}

void Group::reduce_scatter(const at::Tensor& buffer, Label label, Reduction how, Wire asked) {
  if (size() == 1) return;
  check_buffer("reduce_scatter", buffer, size());
  check_reduction("reduce_scatter", buffer, how);
  const Wire wire = wire_for(asked, buffer);
  const int64_t bytes = piece_bytes(buffer, wire) * (size() - 1);
  run("reduce_scatter", counters_->reduce_scatter, bytes, label,
      [&] { wire == Wire::exact ? do_reduce_scatter(buffer, how) : do_packed_reduce_scatter(buffer, how, wire); });
}

void Group::do_packed_all_gather(const at::Tensor& buffer, Wire wire) {
  const at::Tensor own = nth_piece(buffer, rank_, size()), packed = pack(own, wire);
  PackedMessages messages(wire);
  for (int k = 1; k < size(); ++k) {
    messages.send_packed((rank_ + k) % size(), packed);
    const int from = (rank_ + size() - k) % size();
    messages.receive(from, nth_piece(buffer, from, size()));
  }
  messages.run([&](const auto& sends, const auto& receives) {
    do_packed_exchange(cat("all_gather (", wire, ")"), buffer, sends, receives);
  });
  unpack(packed, wire, own);
}

void Group::do_packed_reduce_scatter(const at::Tensor& buffer, Reduction how, Wire wire) {
  const at::Tensor own = nth_piece(buffer, rank_, size());
  PackedMessages messages(wire);
  for (int k = 1; k < size(); ++k) {
    const int to = (rank_ + k) % size();
    messages.send(to, nth_piece(buffer, to, size()));
    messages.expect((rank_ + size() - k) % size(), own);
  }
  messages.run([&](const auto& sends, const auto& receives) {
    do_packed_exchange(cat(verb_of("reduce_scatter", how), " (", wire, ")"), buffer, sends, receives);
  });
  RunningReduction sum(own, own, size(), how);
  const at::Tensor scratch = at::empty_like(own);
  for (int i = 0; i < messages.expected(); ++i) sum.join(messages.arrived(i, scratch));
}

void Group::do_packed_exchange(const std::string& /*verb*/, const at::Tensor& /*buffer*/,
                               const std::vector<Message>& sends, const std::vector<Message>& receives) {
  do_exchange(sends, receives);
}

void Group::do_packed_all_reduce(const at::Tensor& buffer, Reduction how, Wire wire) {
  in_equal_pieces(buffer, size(), [&](const at::Tensor& pieces) {
    do_packed_reduce_scatter(pieces, how, wire);
    do_all_gather(pieces);
  });
}

void Group::reduce_scatter_to(const at::Tensor& output, const at::Tensor& input, Label label, Reduction how) {
  check_piece("reduce_scatter", output, input);
  check_reduction("reduce_scatter", input, how);
  if (size() == 1) {
    at::AutoDispatchBelowADInplaceOrView guard;
    output.view(-1).copy_(input.view(-1));
    return;
  }
  const int64_t bytes = static_cast<int64_t>(output.nbytes()) * (size() - 1);
  run("reduce_scatter", counters_->reduce_scatter, bytes, label, [&] { do_reduce_scatter_to(output, input, how); });
}

void Group::do_reduce_scatter_to(const at::Tensor& output, const at::Tensor& input, Reduction how) {
  const at::Tensor pieces = input.view(-1).clone();
  do_reduce_scatter(pieces, how);
  output.view(-1).copy_(nth_piece(pieces, rank_, size()));
}

void Group::reduce_scatter_scaled(const at::Tensor& output, const at::Tensor& buffer, double scale, Label label,
                                  Wire asked) {
  check_piece("reduce_scatter", output, buffer);
  check_reduction("reduce_scatter", buffer, Reduction::sum);
  if (!buffer.is_floating_point() && !buffer.is_complex()) {
    throw InvalidArgument("reduce_scatter", cat("group ", name_, ": sums of ", buffer.scalar_type(), " have no scale"));
  }
  if (size() == 1) {
    at::AutoDispatchBelowADInplaceOrView guard;
    scale_to(output, buffer, scale);
    return;
  }
  const Wire wire = wire_for(asked, buffer);
  const int64_t bytes = piece_bytes(buffer, wire) * (size() - 1);
  run("reduce_scatter", counters_->reduce_scatter, bytes, label, [&] {
    if (wire == Wire::exact) {
      if (!buffer.is_complex()) return do_reduce_scatter_scaled(output, buffer, scale);
      return Group::do_reduce_scatter_scaled(output, buffer, scale);  // no transport scales such as it adds them up
    }
    do_packed_reduce_scatter(buffer, Reduction::sum, wire);
    scale_to(output, nth_piece(buffer, rank_, size()), scale);
  });
}

void Group::do_reduce_scatter_scaled(const at::Tensor& output, const at::Tensor& buffer, double scale) {
  do_reduce_scatter(buffer, Reduction::sum);
  scale_to(output, nth_piece(buffer, rank_, size()), scale);
}

void Group::all_reduce(const at::Tensor& buffer, Label label, Reduction how, Wire asked) {
  if (size() == 1) return;
  check_buffer("all_reduce", buffer, 1);
  check_reduction("all_reduce", buffer, how);
  const Wire wire = wire_for(asked, buffer);
  // What a bandwidth-optimal all-reduce sends; small buffers may take fewer, larger steps.
  const int64_t whole = static_cast<int64_t>(buffer.nbytes());
  const int64_t added = wire == Wire::exact ? whole : packed_bytes(buffer.numel(), buffer.element_size(), wire);
  const int64_t bytes = (added + whole) * (size() - 1) / size();
  run("all_reduce", counters_->all_reduce, bytes, label,
      [&] { wire == Wire::exact ? do_all_reduce(buffer, how) : do_packed_all_reduce(buffer, how, wire); });
}

void Group::broadcast(const at::Tensor& buffer, int root, Label label) {
  if (root < 0 || root >= size()) {
    throw InvalidArgument("broadcast", cat("group ", name_, ": root ", root, " is no member index below ", size()));
  }
  if (size() == 1) return;
  check_buffer("broadcast", buffer, 1);
  const int64_t bytes = rank_ == root ? static_cast<int64_t>(buffer.nbytes()) * (size() - 1) : 0;
  run("broadcast", counters_->broadcast, bytes, label, [&] { do_broadcast(buffer, root); });
}

void Group::all_to_all(const at::Tensor& output, const at::Tensor& input, const std::vector<int64_t>& output_counts,
                       const std::vector<int64_t>& input_counts, Label label) {
  const auto check = [&](const char* which, const at::Tensor& tensor, const std::vector<int64_t>& counts) {
    check_buffer("all_to_all", tensor, 1);
    const int64_t sum = std::accumulate(counts.begin(), counts.end(), int64_t{0});
    if (counts.size() != members_.size() || sum != tensor.numel()) {
      throw InvalidArgument("all_to_all", cat("group ", name_, ": ", counts.size(), " ", which, " counts for ", size(),
                                              " members sum to ", sum, " of ", tensor.numel(), " elements"));
    }
  };
  check("output", output, output_counts);
  check("input", input, input_counts);
  const at::Tensor from = input.view(-1), to = output.view(-1);
  std::vector<Message> sends, receives;
  for (int64_t member = 0, at_input = 0, at_output = 0; member < size(); ++member) {
    if (input_counts[member] > 0) {
      sends.push_back({static_cast<int>(member), from.narrow(0, at_input, input_counts[member])});
    }
    if (output_counts[member] > 0) {
      receives.push_back({static_cast<int>(member), to.narrow(0, at_output, output_counts[member])});
    }
    at_input += input_counts[member];
    at_output += output_counts[member];
  }
  exchange(sends, receives, label);
}

void Group::exchange(const std::vector<Message>& sends, const std::vector<Message>& receives, Label label) {
  std::vector<Message> out, in, self_out, self_in;  // messages to oneself are copies, never transport
  int64_t bytes = 0;
  for (const auto* list : {&sends, &receives}) {
    for (const auto& message : *list) {
      if (message.peer < 0 || message.peer >= size()) {
        throw InvalidArgument("exchange",
                              cat("group ", name_, ": peer ", message.peer, " is no member index below ", size()));
      }
      check_buffer("exchange", message.data, 1);
      const bool self = message.peer == rank_, sent = list == &sends;
      (self ? (sent ? self_out : self_in) : (sent ? out : in)).push_back(message);
      if (!self && sent) bytes += static_cast<int64_t>(message.data.nbytes());
    }
  }
  if (self_out.size() != self_in.size()) {
    throw InvalidArgument("exchange", cat("group ", name_, ": member ", rank_, " sends itself ", self_out.size(),
                                          " messages and receives ", self_in.size()));
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  for (size_t i = 0; i < self_in.size(); ++i) self_in[i].data.copy_(self_out[i].data);
  if (out.empty() && in.empty()) return;
  run("exchange", counters_->exchange, bytes, label, [&] { do_exchange(out, in); });
}

void Group::barrier(Label label, std::string_view what) {
  if (size() == 1) return;
  run("barrier", counters_->barrier, 0, label, [&] { do_barrier(what); });
}

}  // namespace tesserae::comm
