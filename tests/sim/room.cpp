#include "tests/sim/room.h"

#include <algorithm>
#include <numeric>

namespace tesserae::sim {

using Clock = std::chrono::steady_clock;

Communicator::Communicator(std::string name, int size)
    : name_(std::move(name)),
      size_(size),
      entered_(static_cast<size_t>(size)),
      aborted_(static_cast<size_t>(size)),
      next_(static_cast<size_t>(size)) {}

void Communicator::check_locked(int member) const {
  if (!disagreement_.empty()) throw OrderMismatch("sim", disagreement_);
  if (aborted_[static_cast<size_t>(member)]) {
    throw Aborted("sim", cat("member ", member, " aborted group ", name_, "; make another one"));
  }
}

void Communicator::check(int member) {
  const std::lock_guard lock(mutex_);
  check_locked(member);
}

bool Communicator::wait(Lock& lock, int member, Clock::time_point until, const std::function<bool()>& ready) {
  const auto over = [&] { return ready() || !disagreement_.empty() || aborted_[static_cast<size_t>(member)]; };
  changed_.wait_until(lock, until, over);
  return ready();
}

std::string Communicator::missing(const std::vector<bool>& present) const {
  std::string names;
  for (size_t i = 0; i < present.size(); ++i) {
    if (!present[i]) names += cat(names.empty() ? "" : ", ", i);
  }
  return names;
}

void Communicator::enter(int member, std::chrono::milliseconds deadline) {
  Lock lock(mutex_);
  check_locked(member);
  entered_[static_cast<size_t>(member)] = true;
  changed_.notify_all();
  const auto all = [&] { return std::ranges::all_of(entered_, [](bool entered) { return entered; }); };
  if (wait(lock, member, Clock::now() + deadline, all)) return;
  check_locked(member);
  throw NotEntered("sim", cat("communicator ", name_, " of ", size_, " members is not made after ", deadline.count(),
                              " ms: members ", missing(entered_),
                              " never used it; all members must use a group "
                              "once, in the same order of groups, before some of them can use it alone"));
}

uint64_t Communicator::announce(int member, const std::string& what) {
  const std::lock_guard lock(mutex_);
  check_locked(member);
  const uint64_t number = next_[static_cast<size_t>(member)]++;
  Meeting& meeting = meetings_[number];
  if (meeting.described_by < 0) {
    meeting.what = what;
    meeting.described_by = member;
    meeting.offers.resize(static_cast<size_t>(size_));
    meeting.present.resize(static_cast<size_t>(size_));
  } else if (meeting.what != what) {
    disagreement_ =
        cat("collective ", number, " of group ", name_, " is ", meeting.what, " for member ", meeting.described_by,
            " and ", what, " for member ", member, "; all members call the same collectives in one order");
    changed_.notify_all();
    check_locked(member);
  }
  return number;
}

void Communicator::meet(uint64_t number, int member, Offer offer, const std::function<void(Offers&)>& move,
                        std::chrono::milliseconds deadline) {
  Lock lock(mutex_);
  check_locked(member);
  Meeting& meeting = meetings_.at(number);
  meeting.offers[static_cast<size_t>(member)] = std::move(offer);
  meeting.present[static_cast<size_t>(member)] = true;
  if (++meeting.arrived == size_) {
    lock.unlock();  // nobody else touches it now: all are here, and wait
    try {
      move(meeting.offers);
    } catch (...) {
      meeting.failure = std::current_exception();
    }
    lock.lock();
    meeting.done = true;
    changed_.notify_all();
  } else if (!wait(lock, member, Clock::now() + deadline, [&] { return meeting.done; })) {
    // All have come: they are being served, and nobody can take its memory back.
    if (meeting.arrived == size_) changed_.wait(lock, [&] { return meeting.done; });
  }
  if (meeting.done) {
    const std::exception_ptr failure = meeting.failure;
    if (++meeting.left == size_) meetings_.erase(number);
    if (failure) std::rethrow_exception(failure);
    return;
  }
  const std::string others = missing(meeting.present);
  meeting.present[static_cast<size_t>(member)] = false;
  --meeting.arrived;
  check_locked(member);
  throw CollectiveTimeout(
      "sim", cat("collective ", number, " of group ", name_, " (", meeting.what, ") timed out after ", deadline.count(),
                 " ms on member ", member, ": members ", others, " did not run it"));
}

void Communicator::receive(Lock& lock, int member, const Message& message, Clock::time_point until) {
  auto& box = mail_[{message.peer, member}];
  if (!wait(lock, member, until, [&] { return !box.empty(); })) {
    check_locked(member);
    throw CollectiveTimeout(
        "sim", cat("member ", member, " of group ", name_, " timed out: no message of member ", message.peer, " came"));
  }
  const auto parcel = box.front();
  box.pop_front();
  if (parcel->data.numel() != message.data.numel() || parcel->data.scalar_type() != message.data.scalar_type()) {
    disagreement_ = cat("member ", message.peer, " of group ", name_, " sends ", parcel->data.numel(), " elements of ",
                        parcel->data.scalar_type(), ", and member ", member, " receives ", message.data.numel(), " of ",
                        message.data.scalar_type(), "; both sides must agree");
    changed_.notify_all();
    check_locked(member);
  }
  message.data.view(-1).copy_(parcel->data.view(-1));
  parcel->taken = true;
  changed_.notify_all();
}

void Communicator::exchange(int member, const std::vector<Message>& sends, const std::vector<Message>& receives,
                            std::chrono::milliseconds deadline) {
  const auto until = Clock::now() + deadline;
  Lock lock(mutex_);
  check_locked(member);
  std::vector<std::shared_ptr<Parcel>> sent;
  for (const Message& message : sends) {
    sent.push_back(std::make_shared<Parcel>(Parcel{message.data}));
    mail_[{member, message.peer}].push_back(sent.back());
  }
  changed_.notify_all();
  // Whatever happens, nobody reads the memory of this member after it has gone on.
  const auto take_back = [&] {
    for (size_t i = 0; i < sends.size(); ++i) std::erase(mail_[{member, sends[i].peer}], sent[i]);
  };
  try {
    for (const Message& message : receives) receive(lock, member, message, until);
    const auto all_taken = [&] { return std::ranges::all_of(sent, [](const auto& parcel) { return parcel->taken; }); };
    if (!wait(lock, member, until, all_taken)) {
      check_locked(member);
      throw CollectiveTimeout(
          "sim", cat("member ", member, " of group ", name_, " timed out: a message that it sent was never received"));
    }
  } catch (...) {
    take_back();
    throw;
  }
}

void Communicator::abort(int member) {
  const std::lock_guard lock(mutex_);
  aborted_[static_cast<size_t>(member)] = true;
  changed_.notify_all();
}

std::shared_ptr<Communicator> Room::all() {
  std::vector<int> members(static_cast<size_t>(size_));
  std::iota(members.begin(), members.end(), 0);
  return find("", members);
}

std::shared_ptr<Communicator> Room::pair(int low, int high) {
  return find(cat(":", low, "-", high), {low, high});
}

std::shared_ptr<Communicator> Room::find(const std::string& suffix, const std::vector<int>& members) {
  const std::lock_guard lock(mutex_);
  auto& communicator = communicators_[suffix];
  if (!communicator) {
    communicator = make_ ? make_(name_ + suffix, members)
                         : std::make_shared<Communicator>(name_ + suffix, static_cast<int>(members.size()));
  }
  return communicator;
}

}  // namespace tesserae::sim
