#include "tesserae/comm/transports/shm_group.h"

#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "tesserae/base/copy.h"
#include "tesserae/comm/transports/shm_call.h"

namespace tesserae::comm {
namespace {

using shm::bytes_of;
using shm::Verb;

// As for Gloo: below this a message costs its latency, and all add all copies in the order of members.
constexpr int64_t kShmWholeReduceBytes = 64 * 1024;
// So many blocks a writer is ahead of what it reads itself.
constexpr int64_t kLead = 2;
static_assert(kLead < static_cast<int64_t>(ShmRoom::ring_blocks), "a writer that is ahead must find a free block");

// Memory of a ring or a buffer, as elements of what is reduced.
at::Tensor elements_at(std::byte* data, int64_t bytes, const at::Tensor& like) {
  const int64_t elements = bytes / static_cast<int64_t>(like.element_size());
  return at::from_blob(data, {elements}, at::TensorOptions().dtype(like.scalar_type()));
}

}  // namespace

// In bytes; the same pieces as over Gloo.
ShmGroup::Starts ShmGroup::even_starts(const at::Tensor& buffer) const {
  const int64_t elements = buffer.numel();
  const int64_t piece = (elements + size() - 1) / size();
  const int64_t length = elements % size() == 0 ? piece : (piece + 63) / 64 * 64;
  Starts starts;
  for (int i = 0; i <= size(); ++i) {
    starts.push_back(std::min(elements, i * length) * static_cast<int64_t>(buffer.element_size()));
  }
  return starts;
}

void ShmGroup::gather_pieces(Call& call, const at::Tensor& buffer, const Starts& starts, const std::byte* own) {
  const auto block = static_cast<int64_t>(room_->shape().ring_bytes);
  const auto blocks_of = [&](int i) { return (starts[i + 1] - starts[i] + block - 1) / block; };
  const auto length = [&](int i, int64_t index) {
    return static_cast<size_t>(std::min(block, starts[i + 1] - starts[i] - index * block));
  };
  std::byte* const whole = bytes_of(buffer);
  const shm::LandingCopy land(static_cast<int64_t>(buffer.nbytes()) * size());
  const auto place = [&](int i, int64_t index) { return whole + starts[i] + index * block; };
  int64_t posted = 0;
  for (int64_t index = 0; index < blocks_of(0); ++index) {  // no piece is longer than the first
    for (; posted < std::min(index + kLead, blocks_of(rank())); ++posted) {
      const size_t bytes = length(rank(), posted);
      const std::byte* const written =
          call.post([&](std::byte* data) { copy_memory(data, own + posted * block, bytes); });
      // From the ring, where it is in the cache; the others need not wait for it.
      if (own != whole + starts[rank()]) land(place(rank(), posted), written, bytes);
    }
    for (int k = 1; k < size(); ++k) {
      const int from = call.behind(k);
      if (index >= blocks_of(from)) continue;
      call.take(from, [&](std::byte* data) { land(place(from, index), data, length(from, index)); });
    }
  }
}

// A block holds a part of every other member's piece, in the order in which they follow this one. Each adds what it
// reads to its own piece, in the order rank, rank - 1, rank - 2, ..., and leaves `scale` times the sum at `result`.
void ShmGroup::reduce_pieces(Call& call, const at::Tensor& buffer, const Starts& starts, std::byte* result,
                             double scale) {
  const int64_t part = static_cast<int64_t>(room_->shape().ring_bytes) / (size() - 1) / 64 * 64;
  const int64_t blocks = (starts[1] - starts[0] + part - 1) / part;
  const auto range = [&](int i, int64_t index) {
    const int64_t begin = std::min(starts[i + 1], starts[i] + index * part);
    return std::pair(begin, std::min(part, starts[i + 1] - begin));
  };
  int64_t posted = 0;
  for (int64_t index = 0; index < blocks; ++index) {
    for (; posted < std::min(index + kLead, blocks); ++posted) {
      call.post([&](std::byte* data) {
        for (int k = 1; k < size(); ++k) {
          const auto [begin, length] = range(call.ahead(k), posted);
          copy_memory(data + (k - 1) * part, bytes_of(buffer) + begin, static_cast<size_t>(length));
        }
      });
    }
    const auto [begin, length] = range(rank(), index);
    RunningReduction sum(elements_at(result + (begin - starts[rank()]), length, buffer),
                         elements_at(bytes_of(buffer) + begin, length, buffer), size(), call.reduction(), scale);
    for (int k = 1; k < size(); ++k) {
      call.take(call.behind(k), [&, length = length](std::byte* data) {
        sum.join(elements_at(data + (k - 1) * part, length, buffer));
      });
    }
  }
}

// All add all copies in the order of members; this member's own is read from the ring, too.
void ShmGroup::reduce_whole(Call& call, const at::Tensor& buffer) {
  const at::Tensor flat = buffer.view(-1);
  const auto bytes = static_cast<int64_t>(buffer.nbytes());
  std::byte* const own =
      call.post([&](std::byte* data) { copy_memory(data, bytes_of(buffer), static_cast<size_t>(bytes)); });
  std::optional<RunningReduction> sum;
  for (int member = 0; member < size(); ++member) {
    const auto use = [&](std::byte* data) {
      const at::Tensor theirs = elements_at(data, bytes, buffer);
      if (member > 0) return sum->join(theirs);
      flat.copy_(theirs);
      sum.emplace(flat, flat, size(), call.reduction());
    };
    member == rank() ? use(own) : call.take(member, use);
  }
}

void ShmGroup::do_all_gather(const at::Tensor& buffer) {
  Call call(*this, Verb::all_gather, buffer);
  const Starts starts = even_starts(buffer);
  gather_pieces(call, buffer, starts, bytes_of(buffer) + starts[rank()]);
}

void ShmGroup::do_all_gather_to(const at::Tensor& output, const at::Tensor& input) {
  Call call(*this, Verb::all_gather, output);
  gather_pieces(call, output, even_starts(output), static_cast<const std::byte*>(input.const_data_ptr()));
}

void ShmGroup::do_reduce_scatter(const at::Tensor& buffer, Reduction how) {
  const Starts starts = even_starts(buffer);
  Call call(*this, Verb::reduce_scatter, buffer, -1, how);
  reduce_pieces(call, buffer, starts, bytes_of(buffer) + starts[rank()]);
}

void ShmGroup::do_reduce_scatter_to(const at::Tensor& output, const at::Tensor& input, Reduction how) {
  Call call(*this, Verb::reduce_scatter, input, -1, how);
  reduce_pieces(call, input, even_starts(input), bytes_of(output));
}

void ShmGroup::do_reduce_scatter_scaled(const at::Tensor& output, const at::Tensor& buffer, double scale) {
  Call call(*this, Verb::reduce_scatter, buffer);
  reduce_pieces(call, buffer, even_starts(buffer), bytes_of(output), scale);
}

void ShmGroup::do_all_reduce(const at::Tensor& buffer, Reduction how) {
  Call call(*this, Verb::all_reduce, buffer, -1, how);
  const auto bytes = static_cast<int64_t>(buffer.nbytes());
  if (bytes * (size() - 1) <= kShmWholeReduceBytes) {
    reduce_whole(call, buffer);
  } else {
    const Starts starts = even_starts(buffer);
    reduce_pieces(call, buffer, starts, bytes_of(buffer) + starts[rank()]);
    gather_pieces(call, buffer, starts, bytes_of(buffer) + starts[rank()]);
  }
}

void ShmGroup::do_broadcast(const at::Tensor& buffer, int root) {
  Call call(*this, Verb::broadcast, buffer, root);
  const auto block = static_cast<int64_t>(room_->shape().ring_bytes);
  const auto bytes = static_cast<int64_t>(buffer.nbytes());
  const shm::LandingCopy land(bytes * size());
  for (int64_t begin = 0; begin < bytes; begin += block) {
    const auto length = static_cast<size_t>(std::min(block, bytes - begin));
    if (rank() == root) {
      call.post([&](std::byte* data) { copy_memory(data, bytes_of(buffer) + begin, length); });
    } else {
      call.take(root, [&](std::byte* data) { land(bytes_of(buffer) + begin, data, length); });
    }
  }
}

void ShmGroup::do_barrier(std::string_view what) {
  Call call(*this, Verb::barrier, {}, -1, Reduction::sum, what);
  call.post([&](std::byte* data) { copy_memory(data, what.data(), std::min(what.size(), shm::longest_text)); });
  for (int k = 1; k < size(); ++k) call.take(call.behind(k), [](std::byte*) {});
}

// Whatever can move moves: a member that waits for one peer still serves the others.
void ShmGroup::do_exchange(const std::vector<Message>& sends, const std::vector<Message>& receives) {
  Call call(*this, Verb::exchange, {});
  std::vector<Mail> mail;
  for (const bool out : {true, false}) {
    const size_t first = mail.size();
    for (int peer = 0; peer < size(); ++peer) mail.emplace_back(*room_, rank(), peer, out);
    for (const auto& message : out ? sends : receives)
      mail[first + static_cast<size_t>(message.peer)].add(message.data);
  }
  std::erase_if(mail, [](const Mail& one) { return one.done(); });
  for (size_t told = 0; !mail.empty();) {
    if (std::exchange(told, mail.size()) != mail.size()) {
      std::vector<int> peers;
      for (const Mail& one : mail) peers.push_back(members()[static_cast<size_t>(one.peer())]);
      call.waits_for(peers);
    }
    call.wait([&] { return std::ranges::any_of(mail, [&](const Mail& one) { return one.ready(call); }); });
    for (Mail& one : mail) {
      if (one.ready(call)) one.move();
    }
    std::erase_if(mail, [](const Mail& one) { return one.done(); });
  }
}

}  // namespace tesserae::comm
