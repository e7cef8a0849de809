#include "tesserae/comm/transports/local_group.h"

#include <algorithm>
#include <utility>

#include "tesserae/comm/equal_pieces.h"
#include "tesserae/comm/link_log.h"
#include "tesserae/comm/rank_list.h"

namespace tesserae::comm {

namespace {

// Carry the kind of failure from the transport to rethrow(), which knows the operation's description.
struct Departed : std::runtime_error {
  explicit Departed(std::vector<int> ranks) : std::runtime_error("departed"), ranks(std::move(ranks)) {}
  std::vector<int> ranks;
};
struct Late : std::runtime_error {
  Late(const std::string& what, std::vector<int> absent) : std::runtime_error(what), absent(std::move(absent)) {}
  std::vector<int> absent;
};
struct LocalDisagreement : std::runtime_error {
  using std::runtime_error::runtime_error;
};

std::string content_of(const at::Tensor& tensor) {
  return tensor.defined() ? cat(tensor.numel(), " x ", tensor.scalar_type()) : "no data";
}

std::string content_of(int job_rank, const LocalRoom::Offer& offer) {
  return cat("rank ", job_rank, ": ", offer.verb, " of ", content_of(offer.buffer), contents_text(offer.contents),
             ", root ", offer.root);
}

bool agree(const LocalRoom::Offer& a, const LocalRoom::Offer& b) {
  if (a.verb != b.verb || a.root != b.root || a.contents != b.contents || a.buffer.defined() != b.buffer.defined())
    return false;
  return !a.buffer.defined() ||
         (a.buffer.numel() == b.buffer.numel() && a.buffer.scalar_type() == b.buffer.scalar_type());
}

}  // namespace

LocalGroup::LocalGroup(std::string name, std::shared_ptr<LocalRoom> room, int rank, std::chrono::milliseconds deadline)
    : Group(std::move(name), room->members, rank), room_(std::move(room)), deadline_(deadline) {}

// Waits for `condition`, as long as it can still come true: `missing(member)` says whose departure would end that.
template <class Condition, class Missing>
void LocalGroup::wait(std::unique_lock<std::mutex>& lock, const Condition& condition, const Missing& missing) {
  std::vector<int> departed;
  const auto hopeless = [&] {
    departed.clear();
    for (const int rank : room_->gone) {
      const auto member = std::find(members().begin(), members().end(), rank) - members().begin();
      if (missing(static_cast<int>(member))) departed.push_back(rank);
    }
    return !departed.empty();
  };
  const auto over = [&] { return condition() || room_->late || hopeless(); };
  const bool in_time = room_->changed.wait_for(lock, deadline_, over);
  if (condition()) return;
  if (in_time && !room_->late) throw Departed(departed);
  room_->late = true;
  room_->changed.notify_all();
  std::vector<int> absent;
  for (int member = 0; member < size(); ++member) {
    if (member != rank() && missing(member)) absent.push_back(members()[member]);
  }
  throw Late(cat("the deadline of ", deadline_.count(), " ms passed"), absent);
}

template <class Move>
void LocalGroup::meet(LocalRoom::Offer offer, const Move& move) {
  carried_by("threads");
  auto& room = *room_;
  std::unique_lock lock(room.mutex);
  if (!room.disagreement.empty()) throw LocalDisagreement(room.disagreement);
  offer.contents = contents();
  room.offers[rank()] = std::move(offer);
  if (++room.arrived < room.offers.size()) {
    const uint64_t round = room.round;
    wait(
        lock, [&] { return room.round != round; }, [&](int member) { return !room.offers[member].present; });
    if (!room.disagreement.empty()) throw LocalDisagreement(room.disagreement);
    return;
  }
  const auto& offers = room.offers;
  const auto other = std::find_if(offers.begin(), offers.end(), [&](const auto& o) { return !agree(o, offers[0]); });
  if (other == offers.end()) {
    move(offers);
  } else {
    const auto index = other - offers.begin();
    room.disagreement = cat(content_of(members()[0], offers[0]), "; ", content_of(members()[index], *other));
  }
  for (auto& done : room.offers) done = {};
  room.arrived = 0;
  ++room.round;
  room.changed.notify_all();
  if (!room.disagreement.empty()) throw LocalDisagreement(room.disagreement);
}

void LocalGroup::do_all_gather(const at::Tensor& buffer) {
  meet({"all_gather", 0, buffer, true}, [](const std::vector<LocalRoom::Offer>& offers) {
    const auto size = static_cast<int>(offers.size());
    for (int to = 0; to < size; ++to) {
      for (int i = 0; i < size; ++i) {
        if (to != i) nth_piece(offers[to].buffer, i, size).copy_(nth_piece(offers[i].buffer, i, size));
      }
    }
  });
}

void LocalGroup::do_reduce_scatter(const at::Tensor& buffer, Reduction how) {
  meet({verb_of("reduce_scatter", how), 0, buffer, true}, [how](const std::vector<LocalRoom::Offer>& offers) {
    // Nobody's piece p but p's own is written, so the pieces can be summed one after the other.
    const auto size = static_cast<int>(offers.size());
    for (int p = 0; p < size; ++p) {
      at::Tensor sum = nth_piece(offers[0].buffer, p, size).clone();
      RunningReduction reducer(sum, sum, size, how);
      for (int i = 1; i < size; ++i) reducer.join(nth_piece(offers[i].buffer, p, size));
      nth_piece(offers[p].buffer, p, size).copy_(sum);
    }
  });
}

void LocalGroup::do_all_reduce(const at::Tensor& buffer, Reduction how) {
  meet({verb_of("all_reduce", how), 0, buffer, true}, [how](const std::vector<LocalRoom::Offer>& offers) {
    const at::Tensor& sum = offers[0].buffer;
    RunningReduction reducer(sum, sum, static_cast<int>(offers.size()), how);
    for (size_t i = 1; i < offers.size(); ++i) reducer.join(offers[i].buffer);
    for (size_t i = 1; i < offers.size(); ++i) offers[i].buffer.copy_(sum);
  });
}

void LocalGroup::do_broadcast(const at::Tensor& buffer, int root) {
  meet({"broadcast", root, buffer, true}, [root](const std::vector<LocalRoom::Offer>& offers) {
    for (const auto& to : offers) {
      if (&to != &offers[root]) to.buffer.copy_(offers[root].buffer);
    }
  });
}

void LocalGroup::do_barrier(std::string_view what) {
  meet({what.empty() ? "barrier" : std::string(what), 0, {}, true}, [](const std::vector<LocalRoom::Offer>&) {});
}

void LocalGroup::do_exchange(const std::vector<Message>& sends, const std::vector<Message>& receives) {
  carried_by("threads");
  auto& room = *room_;
  std::vector<LocalRoom::Parcel> parcels;
  for (const auto& message : sends) parcels.push_back({message.data, false, {}});
  std::unique_lock lock(room.mutex);
  for (size_t i = 0; i < sends.size(); ++i) room.mail[{rank(), sends[i].peer}].push_back(&parcels[i]);
  room.changed.notify_all();
  try {
    for (const auto& message : receives) {
      auto& box = room.mail[{message.peer, rank()}];
      wait(
          lock, [&] { return !box.empty(); }, [&](int member) { return member == message.peer; });
      auto& parcel = *box.front();
      box.pop_front();
      if (parcel.data.numel() != message.data.numel() || parcel.data.scalar_type() != message.data.scalar_type()) {
        parcel.refusal = cat("rank ", members()[message.peer], " sends ", content_of(parcel.data), "; rank ",
                             members()[rank()], " receives ", content_of(message.data));
      } else {
        message.data.copy_(parcel.data);
      }
      parcel.taken = true;
      room.changed.notify_all();
      if (!parcel.refusal.empty()) throw LocalDisagreement(parcel.refusal);
    }
    const auto waits_for = [&](int member) {
      for (size_t i = 0; i < parcels.size(); ++i) {
        if (sends[i].peer == member && !parcels[i].taken) return true;
      }
      return false;
    };
    const auto taken = [](const auto& parcel) { return parcel.taken; };
    wait(
        lock, [&] { return std::all_of(parcels.begin(), parcels.end(), taken); }, waits_for);
  } catch (...) {
    // The parcels end with this call: nobody may find them any more.
    for (const auto& message : sends) room.mail[{rank(), message.peer}].clear();
    throw;
  }
  for (const auto& parcel : parcels) {
    if (!parcel.refusal.empty()) throw LocalDisagreement(parcel.refusal);
  }
}

void LocalGroup::do_packed_exchange(const std::string& verb, const at::Tensor& buffer,
                                    const std::vector<Message>& sends, const std::vector<Message>& receives) {
  do_barrier(cat(verb, " of ", buffer.numel(), " x ", buffer.scalar_type(), contents_text(contents())));
  do_exchange(sends, receives);
}

void LocalGroup::rethrow(const std::string& what, const std::exception& cause) {
  if (const auto* departed = dynamic_cast<const Departed*>(&cause)) {
    throw PeerLost("Group", cat(what, ": ", rank_list(departed->ranks), " ended before it took part"), departed->ranks);
  }
  if (const auto* late = dynamic_cast<const Late*>(&cause)) {
    throw Timeout("Group", cat(what, ": ", cause.what(), "; it waited for ", rank_list(late->absent)), {},
                  late->absent);
  }
  if (dynamic_cast<const LocalDisagreement*>(&cause)) {
    throw Mismatch("Group", cat(what, ": the ranks disagree: ", cause.what()));
  }
  throw CommError("Group", cat(what, ": ", cause.what()));
}

}  // namespace tesserae::comm
