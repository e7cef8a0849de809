#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "tesserae/cost/facts.h"
#include "tesserae/cost/links.h"
#include "tesserae/dial/belief.h"
#include "tesserae/mesh/layout.h"

namespace tesserae::dial {

struct TunerOptions {
  double headroom = 0.1;      ///< share of a place's memory that stays free
  double budget = 0.02;       ///< share of all steps that may be spent on trying
  int64_t planned_steps = 0;  ///< of the run from here on, if they are known: their share may be spent in advance
  int allowance = 24;         ///< so many may be spent in advance anyway; paid back after allowance / budget steps
  int settle_steps = 3;       ///< of a run: not measured, since they pay for buffers and caches
  int reference_steps = 5;    ///< measured of the layout in use before others are tried
  int trial_steps = 3;        ///< measured at a visit of a layout that is tried
  int window = 10;            ///< steps whose median is compared with the reference
  double worth = 0.01;        ///< how much faster a layout must be to be kept
  double drift = 0.1;         ///< how much the step time must move to search again

  bool operator==(const TunerOptions&) const = default;
};

/// What the ranks saw of one step.
struct Observation {
  int64_t step = 0;           ///< that has just ended
  mesh::Degrees degrees;      ///< with which it ran
  double seconds = 0;         ///< of the slowest rank
  double change_seconds = 0;  ///< of a change of degrees right before it; not in `seconds`
  double place = 0;           ///< bytes of memory of the fullest place, a host or a device; 0: unknown
  double free = 0;            ///< the least that was free of it during the step
};

/// Use these degrees from the next step edge on. If they are in use already: only something to say.
struct Decision {
  mesh::Degrees degrees;
  std::string why;
};

/// The automatic choice of degrees: begins with what the plan predicts of each layout (cost/step_time.h), runs steps
/// with those that could still be faster than the best as far as the prediction may be wrong (belief.h), keeps what is
/// fastest and fits. tuner.cpp opens with the rules, docs/auto.md explains them.
///
/// A function of what it is told and of nothing else: it has no clock, no communication and no tensor, so a log of its
/// observations gives the same decisions again (record.h).
class Tuner {
 public:
  Tuner(const cost::Facts& facts, const cost::Links& links, TunerOptions options = {});

  /// Tells of each step in turn. A decision may take effect one step later than the next edge; until then the tuner
  /// waits. Changes that others make are taken as they come.
  std::optional<Decision> observe(const Observation& seen);

  double steps_spent() const { return spent_; }  ///< on trying, changes counted in steps
  double steps_allowed() const;                  ///< so far
  /// What it is doing, for people: "holding P=2 G=2 O=2, 103.1 ms a step".
  std::string state() const;

 private:
  enum class Phase { settling, trying, holding };
  struct Layout {
    mesh::Degrees degrees;
    double memory = 0;  // cost::memory_of()
    double moving = 0;  // cost::moving_time(), all of it
  };
  struct Refused {
    mesh::Degrees degrees;
    double free = 0;  // predicted_free() then
  };

  void take(const Observation& seen);
  bool arrived(const Observation& seen);
  std::optional<Decision> relieve(const Observation& seen);
  std::optional<Decision> next();
  std::optional<size_t> next_visit();
  std::optional<size_t> worth_a_visit() const;
  bool begin_search(double visit);
  std::optional<Decision> end_search();
  std::optional<Decision> turn(const mesh::Degrees& degrees, Phase phase, std::string why);
  void expect_anew(const mesh::Degrees& degrees);
  void refer();
  void search_anew();
  bool drifted() const;
  bool relaxed() const;
  bool eased();

  size_t index_of(const mesh::Degrees& degrees) const;
  const Layout& layout_of(const mesh::Degrees& degrees) const { return all_[index_of(degrees)]; }
  bool may_run(size_t layout) const;
  size_t believed_best() const;
  std::string compared() const;
  double predicted_free(const mesh::Degrees& degrees) const;
  bool fits(const mesh::Degrees& degrees) const;
  bool was_refused(const mesh::Degrees& degrees) const;
  int measured() const { return static_cast<int>(samples_.size()); }

  TunerOptions options_;
  std::vector<Layout> all_;

  Phase phase_ = Phase::settling;
  std::optional<mesh::Degrees> current_;    // of the last observation
  std::optional<mesh::Degrees> expected_;   // what was decided last, or what others chose
  std::optional<mesh::Degrees> incumbent_;  // the best so far: where a search begins, and ends unless it finds another
  bool pending_ = false;                    // decided, not yet seen
  int waited_ = 0;

  std::deque<double> samples_, free_;  // of the current layout, the last `window` steps
  int skip_ = 0;                       // steps that are not measured
  double place_ = 0;
  double reference_ = 0, spread_ = 0;  // seconds of the incumbent; relative noise of a step
  bool refer_again_ = false;           // the reference is that of a search: few steps, and the best of some

  std::vector<std::vector<double>> stages_;  // of all_, as predicted
  Belief belief_;                            // from visits since conditions have changed
  bool searching_ = false, search_due_ = false;
  double search_began_ = 0, search_ends_ = 0;  // at so many steps spent
  bool trial_on_ = false;                      // steps count as spent until the incumbent runs again
  std::optional<mesh::Degrees> too_big_;       // what ran out of memory
  std::vector<Refused> refused_;               // what was decided and never came
  double change_steps_ = 0;                    // what a change costs, in steps
  double spent_ = 0;
  std::optional<int64_t> first_step_;
  int64_t steps_ = 0;
};

}  // namespace tesserae::dial
