#include "tesserae/dial/dial.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <utility>

#include "tesserae/base/log.h"
#include "tesserae/comm/agree.h"
#include "tesserae/cost/estimate.h"
#include "tesserae/cost/fabric_facts.h"
#include "tesserae/cost/measure_links.h"
#include "tesserae/cost/memory.h"
#include "tesserae/cost/place_memory.h"
#include "tesserae/dial/facts.h"

// At the edge after a step:
//  1. rank 0 sees what is wanted: the schedule's entry for this edge; requests from outside, the last one counts and
//     is stronger; else what the tuner decided after the step before;
//  2. all ranks add up one row of numbers: what rank 0 wants, and in places of their own what each rank saw of the
//  step;
//  3. all take the same turn and the same view from the sums; rank 0 tells its tuner of the step, for the next edge;
//  4. the caller changes the degrees and says so: rank 0 tells people and who asked; the second step afterwards is
//     measured for them, since the first still pays for new buffers.
namespace tesserae::dial {
namespace {

enum Head : size_t { parameters, gradients, optimizer, begin_tuner, scale, share_out, tiers, head_words = tiers + 3 };
enum Word : size_t { seconds, used, transient, free_now, total, rank_words };

constexpr int64_t timed_after = 2;  // steps after a change

std::string megabytes(double bytes) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f MB", bytes / 1e6);
  return text;
}

std::string in_seconds(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3f s", value);
  return text;
}

constexpr const char* no_facts = "the tuner would know nothing of this job: give it DialOptions::facts (facts_of())";

/// That share out the state: fewer than the fabric's where layers are split.
int ranks_of(const DialOptions& options, const comm::Fabric& fabric) {
  return options.facts.ranks() > 0 ? options.facts.ranks() : fabric.size();
}

DialOptions checked(DialOptions options, const comm::Fabric& fabric) {
  if (options.automatic && !options.schedule.empty())
    throw InvalidArgument("Dial", "automatic beside a schedule; give one of them");
  if (options.automatic && options.facts.ranks() == 0) throw InvalidArgument("Dial", no_facts);
  int64_t before = std::numeric_limits<int64_t>::min();
  for (const auto& [step, degrees] : options.schedule) {
    (void)mesh::Layout(ranks_of(options, fabric), degrees);
    if (step < before) throw InvalidArgument("Dial", cat("the schedule has step ", step, " after step ", before));
    before = step;
  }
  return options;
}

}  // namespace

Dial::Dial(std::shared_ptr<comm::Fabric> fabric, const shard::Setting& now, DialOptions options)
    : fabric_(std::move(fabric)),
      setting_(now),
      options_(checked(std::move(options), *fabric_)),
      automatic_(options_.automatic) {
  tuner_wanted_ = automatic_;
  if (!options_.folder.empty()) {
    open();
    learn();
  }
  cost::place_memory(fabric_->device());  // peaks count from here on
}

Dial::~Dial() = default;

/// Rank 0's files; a folder that another run has is an error for all.
void Dial::open() {
  std::string taken;
  if (leads()) {
    const int ranks = ranks_of(options_, *fabric_);
    try {
      server_ = std::move(options_.server);
      os::files().make_directories(options_.folder);
      if (!server_) server_ = std::make_shared<Server>(options_.folder, ranks);
      server_->set_ranks(ranks);
      server_->set_status(status(0));
    } catch (const os::AddressInUse& error) {
      taken = error.what();
    } catch (const IoError& error) {
      log(LogLevel::warning, cat(error.what(), "; the run takes no requests from outside"));
    }
  }
  if (comm::lowest_rank_with(*fabric_, !taken.empty()) < 0) return;
  throw os::AddressInUse("dial", taken.empty() ? cat("a live run has the folder ", options_.folder.native()) : taken);
}

std::optional<shard::Setting> Dial::at_step_edge(int64_t step, double step_seconds) {
  return from_sums(step, comm::sums_over_ranks(*fabric_, to_sum(step, step_seconds)));
}

std::vector<double> Dial::to_sum(int64_t step, double step_seconds) {
  std::vector<double> row(head_words + rank_words * static_cast<size_t>(fabric_->size()), 0.0);
  if (leads()) {
    follow_schedule(step);  // 1
    take_requests();
    if (wanted_) {
      const shard::Setting& to = wanted_->setting;
      row[parameters] = to.degrees.parameters;
      row[gradients] = to.degrees.gradients;
      row[optimizer] = to.degrees.optimizer;
      const auto asked = {to.tiers.parameters, to.tiers.gradients, to.tiers.optimizer};
      std::ranges::transform(asked, &row[tiers], [](offload::Tier tier) { return static_cast<double>(tier); });
      deciding_ = std::exchange(wanted_, std::nullopt);
    }
    row[begin_tuner] = std::exchange(tuner_wanted_, false) ? 1 : 0;
    if (scaling_wanted_) {
      row[scale] = scaling_wanted_->ranks;
      row[share_out] = scaling_wanted_->experts;
    }
  }
  const cost::PlaceMemory memory = here_ = cost::place_memory(fabric_->device());
  double* const own = row.data() + head_words + rank_words * static_cast<size_t>(fabric_->rank());
  own[seconds] = step_seconds;
  own[used] = memory.used;
  own[transient] = memory.transient;
  own[free_now] = memory.free;
  own[total] = memory.total;
  return row;
}

std::optional<shard::Setting> Dial::from_sums(int64_t step, std::span<const double> sums) {
  step_ = step;
  read_sums(sums);  // 3
  scaling_.reset();
  if (sums[scale] > 0 || sums[share_out] > 0) {
    scaling_ = {.ranks = static_cast<int>(sums[scale]), .experts = static_cast<int>(sums[share_out])};
    if (leads()) scaling_ = std::exchange(scaling_wanted_, std::nullopt);
  }
  if (sums[begin_tuner] > 0) begin_tuning();
  if (leads()) {
    tune(step);
    time(step);
    if (server_) server_->set_status(status(step));
  }
  change_seconds_ = 0;
  if (sums[optimizer] == 0) return std::nullopt;
  const auto tier = [&sums](size_t state) { return static_cast<offload::Tier>(static_cast<int>(sums[tiers + state])); };
  return shard::Setting{.degrees = {.parameters = static_cast<int>(sums[parameters]),
                                    .gradients = static_cast<int>(sums[gradients]),
                                    .optimizer = static_cast<int>(sums[optimizer])},
                        .tiers = {.parameters = tier(0), .gradients = tier(1), .optimizer = tier(2)}};
}

void Dial::follow_schedule(int64_t step) {
  // The last entry that is due: a run that was resumed may begin behind several.
  while (next_scheduled_ < options_.schedule.size() && options_.schedule[next_scheduled_].step <= step) {
    const Scheduled& due = options_.schedule[next_scheduled_++];
    wanted_.reset();
    if (due.degrees != setting_.degrees) wanted_ = {.setting = {due.degrees, setting_.tiers}, .why = "as scheduled"};
  }
}

void Dial::take_requests() {
  if (!server_) return;
  // What a request does not name stays, or becomes what is scheduled for this edge.
  const shard::Setting from = wanted_ ? wanted_->setting : setting_;
  for (const Server::Asked& asked : server_->take()) {
    if (asked.request.kind == Request::Kind::automatic) {
      want_tuner(asked.client);
      continue;
    }
    if (asked.request.kind == Request::Kind::scale) {
      want_ranks({.ranks = asked.request.ranks, .client = asked.client});
      continue;
    }
    if (asked.request.kind == Request::Kind::experts) {
      want_experts({.experts = asked.request.experts, .client = asked.client});
      continue;
    }
    automatic_ = tuner_wanted_ = false;
    tuner_.reset();
    if (wanted_) tell(wanted_->client, error_event("another request came after this one"));
    wanted_.reset();
    const shard::Setting to = asked.request.from(from);
    if (to == setting_) {
      tell(asked.client, {{"event", "unchanged"}, {"degrees", to_json(to.degrees)}, {"offload", to_json(to.tiers)}});
    } else {
      wanted_ = {.setting = to, .why = "as requested", .client = asked.client};
    }
  }
}

void Dial::want_tuner(int64_t client) {
  if (options_.facts.ranks() == 0) return tell(client, error_event(no_facts));
  const offload::Tiers& tiers = wanted_ ? wanted_->setting.tiers : setting_.tiers;
  if (tiers.uses(offload::Tier::disk)) {
    return tell(client, error_event(cat(to_string(tiers), ": \"auto\" does not know what that costs; bring ",
                                        "the state back into memory first")));
  }
  tuner_wanted_ = tuner_wanted_ || !automatic_;
  automatic_ = true;
  tell(client, {{"event", "automatic"}});
}

void Dial::want_ranks(const Scaling& asked) {
  const int now = fabric_->size();
  if (asked.ranks == now) return tell_of_no_change(asked.client, "scaled", now);
  want(asked,
       options_.cannot_scale ? options_.cannot_scale(asked.ranks) : "this job cannot change the number of its ranks");
}

void Dial::want_experts(const Scaling& asked) {
  const int now = options_.experts;
  if (now > 0 && asked.experts == now) return tell_of_no_change(asked.client, "shared_out", now);
  std::string why = now == 0 ? "the model has no experts"
                    : !options_.cannot_share_out
                        ? "this job cannot change over how many ranks its experts are shared out"
                        : options_.cannot_share_out(asked.experts);
  if (why.empty()) why = no_room_for_experts(asked.experts);
  want(asked, why);
}

/// `why_not`: empty if it can be.
void Dial::want(const Scaling& asked, const std::string& why_not) {
  if (!why_not.empty()) return refuse(asked, why_not);
  if (scaling_wanted_) refuse(*scaling_wanted_, "another request came after this one");
  scaling_wanted_ = asked;
}

void Dial::tell_of_no_change(int client, const char* event, int now) {
  tell(client, {{"event", event},
                {"step", step_},
                {"from", now},
                {"to", now},
                {"degrees", to_json(setting_.degrees)},
                {"seconds", 0}});
}

/// By the formulas, in the place that has least to spare.
std::string Dial::no_room_for_experts(int degree) const {
  if (seen_.place <= 0 || setting_.tiers.uses(offload::Tier::disk)) return "";
  const cost::Facts then = shared_out(options_.facts, degree);
  const double more = cost::memory_of(then, setting_.degrees) - cost::memory_of(options_.facts, setting_.degrees);
  if (more <= seen_.free) return "";
  return cat("it would take ", megabytes(more), " more of a place where ", megabytes(seen_.free), " are free");
}

void Dial::refuse(const Scaling& scaling, const std::string& why) {
  if (!leads()) return;
  const std::string line =
      scaling.experts > 0
          ? cat("experts stay shared out over ", options_.experts, " ranks, not ", scaling.experts, ": ", why)
          : cat("the job keeps its ", fabric_->size(), " ranks, not ", scaling.ranks, ": ", why);
  log(LogLevel::warning, line);
  tell(scaling.client, error_event(line));
}

/// All ranks: what needs all of them is found out together.
void Dial::learn() {
  if (!options_.links) options_.links = cost::measure_links(*fabric_);
  options_.facts.shared_copy = cost::ranks_can_share(*fabric_);
  options_.facts.two_levels = cost::goes_in_two_levels(options_.facts);
  if (!server_ || options_.facts.parameters == 0) return;
  constexpr size_t most = 40;  // a line for each is what people still read
  const std::vector<mesh::Degrees> choices = mesh::all_degrees(options_.facts.ranks());
  for (const mesh::Degrees& degrees : choices) {
    const bool even = degrees.parameters == degrees.gradients && degrees.gradients == degrees.optimizer;
    if (choices.size() <= most || even) layouts_.push_back(layout_of(degrees));
  }
}

void Dial::begin_tuning() {
  if (options_.folder.empty()) learn();
  if (!leads()) return;
  tuner_.emplace(options_.facts, *options_.links, options_.tuner);
  if (options_.folder.empty()) return;
  try {
    if (!record_) record_ = std::make_unique<Record>(options_.folder / "dial.jsonl");
    record_->begin(options_.facts, *options_.links, options_.tuner);
  } catch (const IoError& error) {
    log(LogLevel::warning, cat(error.what(), "; the tuner's decisions are not recorded"));
    record_.reset();
  }
}

/// What the ranks saw; of memory, the place that has the smallest share to spare.
void Dial::read_sums(std::span<const double> sums) {
  seen_ = {};
  const auto row = [&](int rank) {
    return sums.subspan(head_words + rank_words * static_cast<size_t>(rank), rank_words);
  };
  for (int rank = 0; rank < fabric_->size(); ++rank) {
    seen_.seconds = std::max(seen_.seconds, row(rank)[seconds]);
    seen_.memory = std::max(seen_.memory, row(rank)[used]);
  }
  for (int begin = 0, end = 0; begin < fabric_->size(); begin = end) {
    end = options_.facts.ranks_share_place ? fabric_->world().host_ranks(begin).back() + 1 : begin + 1;
    const double place = row(begin)[total];
    double free = row(begin)[free_now];
    for (int rank = begin; rank < end; ++rank) free = std::min(free, row(rank)[free_now]);
    // Ranks of a host reach their peaks at about the same time.
    for (int rank = begin; rank < end; ++rank) free -= row(rank)[transient];
    free = std::max(0.0, free);
    if (place <= 0 || (seen_.place > 0 && free / place >= seen_.free / seen_.place)) continue;
    seen_.place = place;
    seen_.free = free;
  }
}

void Dial::tune(int64_t step) {
  if (!tuner_) return;
  const Observation observation{.step = step,
                                .degrees = setting_.degrees,
                                .seconds = seen_.seconds,
                                .change_seconds = change_seconds_,
                                .place = seen_.place,
                                .free = seen_.free};
  const std::optional<Decision> decision = tuner_->observe(observation);
  figures_.steps_spent = tuner_->steps_spent();
  try {
    if (record_) record_->add(observation, decision);
  } catch (const IoError& error) {
    log(LogLevel::warning, cat(error.what(), "; the tuner's decisions are recorded no longer"));
    record_.reset();
  }
  if (!decision) return;
  if (decision->degrees == setting_.degrees) {
    say(cat("step ", step, ": ", to_string(setting_), " stays (auto; ", decision->why, ")"));
  } else {
    wanted_ = {.setting = {decision->degrees, setting_.tiers}, .why = cat("auto; ", decision->why)};
  }
}

void Dial::changed(const shard::Resharding& change) {
  setting_ = change.to;
  change_seconds_ += change.seconds;
  const double bytes = comm::sum_over_ranks(*fabric_, static_cast<double>(change.bytes));
  ++figures_.changes;
  figures_.seconds += change.seconds;
  figures_.bytes += bytes;
  cost::place_memory(fabric_->device());  // what the change itself needed is no memory of a step
  if (!leads()) return;
  const Turn turn = std::exchange(deciding_, std::nullopt).value_or(Turn{.setting = change.to, .why = "by the script"});
  say(cat("step ", step_, ": ", to_string(change.from), " -> ", to_string(change.to), " in ",
          in_seconds(change.seconds), ", ", megabytes(bytes), " moved (", turn.why, ")"));
  last_change_ = {{"step", step_},
                  {"from", to_json(change.from.degrees)},
                  {"to", to_json(change.to.degrees)},
                  {"offload_from", to_json(change.from.tiers)},
                  {"offload_to", to_json(change.to.tiers)},
                  {"seconds", change.seconds},
                  {"bytes", static_cast<uint64_t>(bytes)},
                  {"why", turn.why}};
  if (turn.client == 0) return;
  Json event = {{"event", "changed"}};
  event.update(last_change_);
  tell(turn.client, event);
  timings_.push_back({.client = turn.client, .at_step = step_ + timed_after, .before = seen_.seconds});
}

void Dial::refused(const std::string& why) {
  if (!leads()) return;
  const Turn turn = std::exchange(deciding_, std::nullopt).value_or(Turn{.setting = setting_, .why = ""});
  const std::string line =
      cat("step ", step_, ": ", to_string(setting_), " stays, ", to_string(turn.setting), " cannot be had: ", why);
  log(LogLevel::warning, line);
  tell(turn.client, error_event(line));
}

void Dial::time(int64_t step) {
  std::erase_if(timings_, [&](const Timing& timing) {
    if (step < timing.at_step) return false;
    tell(timing.client,
         {{"event", "timed"}, {"step", step}, {"step_seconds", seen_.seconds}, {"step_seconds_before", timing.before}});
    return true;
  });
}

void Dial::tell(int64_t client, const Json& event) {
  if (server_ && client != 0) server_->tell(client, event);
}

void Dial::say(const std::string& line) const {
  options_.say ? options_.say(line) : log(LogLevel::info, line);
}

Json Dial::status(int64_t step) const {
  Json status = {{"event", "status"},
                 {"step", step},
                 {"ranks", fabric_->size()},
                 {"experts", options_.experts},
                 {"degrees", to_json(setting_.degrees)},
                 {"offload", to_json(setting_.tiers)},
                 {"automatic", automatic_},
                 {"tuner", tuner_ ? Json(tuner_->state()) : Json(nullptr)},
                 {"step_seconds", seen_.seconds},
                 {"memory_bytes", seen_.memory},
                 {"place_bytes", seen_.place},
                 {"free_bytes", seen_.free},
                 {"last_change", last_change_},
                 {"layouts", layouts()}};
  return status;
}

/// Of the fullest rank, whose memory a shared copy is, too.
Dial::Layout Dial::layout_of(const mesh::Degrees& degrees) const {
  const cost::Facts& facts = options_.facts;
  const cost::Facts experts = cost::experts_of(facts, 0);
  const auto copy_of = [](const cost::Facts& part, const mesh::Degrees& by) {
    const bool shares = part.parameters > 0 && cost::shares_gathered(part, by, 0);
    return shares ? static_cast<double>(part.parameters) * part.compute_bytes : 0;
  };
  const double copies = copy_of(facts, degrees) + copy_of(experts, mesh::limited(degrees, experts.ranks()));
  return {.degrees = degrees,
          .memory = cost::memory_of_rank(facts, degrees, 0).total() + copies,
          .seconds = cost::moving_seconds(facts, *options_.links, degrees)};
}

/// What a step would take with other degrees: what it takes now, and by how much the formulas differ.
Json Dial::layouts() const {
  Json all = Json::array();
  if (layouts_.empty() || seen_.seconds <= 0 || setting_.tiers.uses(offload::Tier::disk)) return all;
  const Layout now = layout_of(setting_.degrees);
  for (const Layout& layout : layouts_) {
    all.push_back({{"degrees", to_json(layout.degrees)},
                   {"step_seconds", std::max(0.0, seen_.seconds + layout.seconds - now.seconds)},
                   {"memory_bytes", std::max(0.0, seen_.memory + layout.memory - now.memory)}});
  }
  return all;
}

Dial::Figures Dial::figures() const {
  return figures_;
}

}  // namespace tesserae::dial
