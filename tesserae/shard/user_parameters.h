#pragma once

#include <memory>
#include <vector>

#include "tesserae/shard/local_parameters.h"
#include "tesserae/shard/step_observer.h"

namespace tesserae::shard {

/// Which of its unit's flat buffers it is.
size_t index_of(const FlatBuffer& buffer);

/// Keeps the user's own tensors (LocalParameters) and a unit's shards in step, so that an optimizer made for plain
/// parameters trains the unit: takes values at each forward of the root outside an accumulation, since no optimizer
/// says when it has written, and gradients before a reduction adds to them; shows gradients afterwards. Values are
/// taken again after an evaluation within a step, and those of a unit that follows others when its own forward begins.
class UserParameters final : public StepObserver {
 public:
  /// The user's tensors show the shards of `unit` from now on: one list for each of its flat buffers, as
  /// LocalParameters takes them. Throws InvalidArgument unless there are as many lists.
  static std::shared_ptr<UserParameters> attach(ShardedUnit& unit, std::vector<UserTensors> parameters);
  static std::shared_ptr<UserParameters> attach(ShardedUnit& unit,
                                                const std::vector<std::vector<at::Tensor>>& parameters);

  /// Those of the unit's flat buffer of that number, until the next change of degrees. Throws InvalidArgument where one
  /// has failed half-way.
  LocalParameters& of(size_t index) const;

  /// Whether the user sees the compute parameters between steps, too, and so freezes these; else, the tensors here.
  void set_shows_computed(bool shows) { shows_computed_ = shows; }

  void begin_step(ShardedUnit& unit, bool accumulating) override;
  void begin_alone(ShardedUnit& unit) override;
  void before_forward(ShardedUnit& unit) override;
  void begin_backward(ShardedUnit& unit, bool boundary) override;
  void before_reduce(FlatBuffer& buffer) override;
  void take_values(ShardedUnit& unit) override;
  void take_gradients(ShardedUnit& unit) override;
  void show_gradients(ShardedUnit& unit) override;
  void before_recut(FlatBuffer& buffer) override;
  void after_recut(FlatBuffer& buffer) override;
  void after_cast(FlatBuffer& buffer) override;

 private:
  explicit UserParameters(std::vector<UserTensors> parameters) : parameters_(std::move(parameters)) {}
  void show(FlatBuffer& buffer, size_t index);
  void show_requires_grad(ShardedUnit& unit);
  void show_thawed(ShardedUnit& unit);
  void publish(ShardedUnit& unit);

  std::vector<UserTensors> parameters_;
  std::vector<std::unique_ptr<LocalParameters>> local_;  // by flat buffer of the unit; null while one is recut
  bool shows_computed_ = false;
  bool waits_ = false;      // to be published when the unit's forward begins
  bool evaluated_ = false;  // what was published last: the values may have been others for that
};

}  // namespace tesserae::shard
