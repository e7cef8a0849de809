#include "tesserae/offload/activations.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tesserae/base/error.h"

namespace tesserae::offload {
namespace {

using testing::HasSubstr;

constexpr int64_t mebibyte = 1 << 20;

class ActivationsTest : public testing::Test {
 protected:
  ~ActivationsTest() override { std::filesystem::remove_all(folder_); }

  std::shared_ptr<Activations> make(int horizon, int64_t smallest = mebibyte) const {
    return Activations::make({.horizon = horizon, .smallest = smallest, .folder = folder_});
  }

  /// Of 4 MiB, different for each seed.
  static at::Tensor values(int64_t seed) { return at::arange(mebibyte, at::kFloat).mul_(0.5).add_(seed); }

  /// A forward of so many units that put 4 MiB each, and its backward; returns whether all of it was right.
  static bool run_pass(Activations& activations, int units, int64_t seed) {
    std::vector<std::shared_ptr<Saved>> saved;
    for (int i = 0; i < units; ++i) {
      activations.begin_unit();
      saved.push_back(activations.put(values(seed + i)));
      activations.end_unit();
    }
    bool right = true;
    for (int i = units; i-- > 0;) {
      right = right && at::equal(saved.back()->take(), values(seed + i));
      saved.pop_back();
    }
    return right;
  }

 private:
  const std::string folder_ = cat(testing::TempDir(), "tesserae-activations-", ::getpid());
};

TEST_F(ActivationsTest, WhatWasChangedInPlaceSinceIsAnError) {
  for (const int horizon : {1, 9}) {  // it leaves, or stays
    const auto activations = make(horizon);
    for (int pass = 0; pass < 2; ++pass) {
      at::Tensor tensor = values(1), same = values(1);
      activations->begin_unit();
      const auto changed = activations->put(tensor), untouched = activations->put(same);
      activations->end_unit();
      tensor.add_(1);
      EXPECT_TRUE(at::equal(untouched->take(), same));
      try {
        changed->take();
        ADD_FAILURE() << "horizon " << horizon << ", pass " << pass;
      } catch (const InvalidArgument& error) {
        EXPECT_THAT(error.what(), HasSubstr("a tensor of [1048576] in Float that autograd had saved"));
      }
    }
  }
}

TEST_F(ActivationsTest, WhatWasPutComesBack) {
  const auto activations = make(2);
  for (int pass = 0; pass < 4; ++pass) EXPECT_TRUE(run_pass(*activations, 7, 100 * pass)) << pass;
  EXPECT_THAT(activations->shelf(), HasSubstr("disk ("));
  EXPECT_EQ(activations->counters().away, 0);
}

// From the second pass on it is known which units come first in the backward.
TEST_F(ActivationsTest, WhatIsNeededWithinTheHorizonStays) {
  for (const int horizon : {1, 2, 5}) {
    const auto activations = make(horizon);
    run_pass(*activations, 6, 0);
    const ActivationCounters first = activations->counters();
    EXPECT_EQ(first.out, 24 * mebibyte);
    EXPECT_EQ(first.in, 24 * mebibyte);
    EXPECT_EQ(first.most_away, 24 * mebibyte);
    EXPECT_EQ(activations->forecast(), (6 - horizon) * 4 * mebibyte);
    run_pass(*activations, 6, 1);
    const ActivationCounters second = activations->counters();
    EXPECT_EQ(second.out - first.out, (6 - horizon) * 4 * mebibyte);
    EXPECT_EQ(second.in - first.in, (6 - horizon) * 4 * mebibyte);
    EXPECT_EQ(second.stayed - first.stayed, horizon * 4 * mebibyte);
    EXPECT_EQ(second.passes, 1);  // the second is not over
    EXPECT_EQ(activations->forecast(), (6 - horizon) * 4 * mebibyte);
  }
}

TEST_F(ActivationsTest, AStorageIsOneThing) {
  const auto activations = make(1);
  const at::Tensor fused = values(3).view({512, 2048});
  const at::Tensor left = fused.narrow(1, 0, 1024), right = fused.narrow(1, 1024, 1024).t();
  activations->begin_unit();
  auto a = activations->put(left);
  activations->end_unit();
  activations->begin_unit();
  auto b = activations->put(right), c = activations->put(fused);
  EXPECT_EQ(activations->counters().out, 4 * mebibyte);
  activations->end_unit();
  const at::Tensor back = b->take();
  EXPECT_EQ(back.strides(), right.strides());
  EXPECT_TRUE(at::equal(back, right));
  EXPECT_TRUE(at::equal(a->take(), left));
  EXPECT_TRUE(back.is_alias_of(c->take()));
  b = c = nullptr;
  EXPECT_TRUE(at::equal(back, right)) << "what was given out stays";
  EXPECT_TRUE(at::equal(a->take(), left)) << "and can be asked for again";
}

TEST_F(ActivationsTest, AStorageThatWasChangedMeanwhileIsAnother) {
  const auto activations = make(1);
  const at::Tensor buffer = values(0);
  activations->begin_unit();
  const auto before = activations->put(buffer);
  buffer.add_(1);
  const auto after = activations->put(buffer);
  activations->end_unit();
  EXPECT_THROW(before->take(), InvalidArgument) << "as autograd has it without hooks";
  EXPECT_TRUE(at::equal(after->take(), values(1)));
}

TEST_F(ActivationsTest, OnlyActivationsLeave) {
  const auto activations = make(1);
  EXPECT_EQ(activations->put(values(0)), nullptr) << "outside of units";
  const at::Tensor parameter = values(0);
  activations->keep(parameter);
  activations->begin_unit();
  EXPECT_EQ(activations->put(parameter.view({1024, 1024}).t()), nullptr);
  EXPECT_EQ(activations->put(values(0).set_requires_grad(true)), nullptr) << "a parameter of somebody else";
  EXPECT_EQ(activations->put(at::empty({mebibyte / 4 - 1})), nullptr) << "small";
  EXPECT_EQ(activations->put(values(0).narrow(0, 0, 100)), nullptr) << "a part of something large";
  EXPECT_EQ(activations->put(values(0).to_sparse()), nullptr);
  EXPECT_EQ(activations->put(at::empty({4096, 4096}, at::kMeta)), nullptr);
  EXPECT_EQ(activations->put(at::Tensor()), nullptr);
  EXPECT_NE(activations->put(values(0)), nullptr);
  activations->end_unit();
  EXPECT_EQ(activations->counters().out, 4 * mebibyte);
}

/// Says what is asked of it, by the number with which a storage begins.
class TellingShelf final : public Shelf {
 public:
  class Told final : public Shelved {
   public:
    Told(TellingShelf& shelf, const c10::Storage& storage) : shelf_(shelf), storage_(storage) {}
    void load() override {
      if (!std::exchange(loaded_, true)) shelf_.events.push_back(cat("load ", number()));
    }
    c10::Storage take() override {
      EXPECT_TRUE(loaded_);
      shelf_.events.push_back(cat("take ", number()));
      return storage_;
    }

   private:
    float number() const { return *static_cast<const float*>(storage_.data()); }
    TellingShelf& shelf_;
    c10::Storage storage_;
    bool loaded_ = false;
  };

  void reserve(int64_t /*bytes*/) override {}
  std::shared_ptr<Shelved> put(const c10::Storage& storage) override { return std::make_shared<Told>(*this, storage); }
  void end_unit() override {}
  void begin_backward() override {}
  void end_pass(int64_t window) override { windows.push_back(window / mebibyte); }
  std::string describe() const override { return "telling"; }

  std::vector<std::string> events;
  std::vector<int64_t> windows;
};

TEST_F(ActivationsTest, ComesBackSoManyUnitsAhead) {
  const auto shelf = std::make_shared<TellingShelf>();
  const auto activations = Activations::make({.horizon = 2, .smallest = 1, .folder = {}}, shelf);
  const auto pass = [&](const std::vector<int>& order) {
    shelf->events.clear();
    std::vector<std::shared_ptr<Saved>> saved;
    for (int i = 0; i < 5; ++i) {
      activations->begin_unit();
      saved.push_back(activations->put(values(i)));
      activations->end_unit();
    }
    for (const int i : order) saved[static_cast<size_t>(i)]->take();
    return shelf->events;
  };
  using Events = std::vector<std::string>;
  const Events reversed{"load 4", "load 3", "load 2", "take 4", "load 1",
                        "take 3", "load 0", "take 2", "take 1", "take 0"};
  EXPECT_EQ(pass({4, 3, 2, 1, 0}), reversed);
  // 4 and 3 stay, being needed at once; what comes after them is known from the pass before.
  EXPECT_EQ(pass({4, 3, 0, 2, 1}), (Events{"load 2", "load 1", "load 0", "take 0", "take 2", "take 1"}));
  EXPECT_EQ(pass({4, 3, 0, 2, 1}), (Events{"load 0", "load 2", "load 1", "take 0", "take 2", "take 1"}));
  EXPECT_EQ(shelf->windows, (std::vector<int64_t>{12, 12}));
}

// GPipe's order, forwards without a backward, and an order that changes.
TEST_F(ActivationsTest, AnyOrderGivesTheSameValues) {
  const auto activations = make(2);
  for (const std::vector<int>& order : std::vector<std::vector<int>>{
           {3, 2, 1, 0, 7, 6, 5, 4}, {3, 2, 1, 0, 7, 6, 5, 4}, {0, 4, 1, 5, 2}, {7, 3, 6, 2, 5, 1, 4, 0}}) {
    std::vector<std::shared_ptr<Saved>> saved;
    for (int i = 0; i < 8; ++i) {
      activations->begin_unit();
      saved.push_back(activations->put(values(i)));
      activations->end_unit();
    }
    for (const int i : order) {
      EXPECT_TRUE(at::equal(saved[static_cast<size_t>(i)]->take(), values(i)));
      saved[static_cast<size_t>(i)] = nullptr;
    }
  }
  EXPECT_EQ(activations->counters().away, 0);
}

TEST_F(ActivationsTest, AForwardThatThrewIsForgotten) {
  const auto activations = make(1);
  activations->begin_unit();
  const auto lost = activations->put(values(0));
  activations->forget_units();
  EXPECT_EQ(activations->put(values(0)), nullptr);
  activations->end_unit();  // of a call around it
  EXPECT_TRUE(run_pass(*activations, 3, 5));
  EXPECT_TRUE(at::equal(lost->take(), values(0)));
}

TEST_F(ActivationsTest, AFolderThatCannotBeIsNamed) {
  const auto activations = Activations::make({.horizon = 1, .folder = "/proc/nowhere"});
  activations->begin_unit();
  try {
    activations->put(values(0));
    FAIL();
  } catch (const IoError& error) {
    EXPECT_THAT(error.what(), HasSubstr("/proc/nowhere"));
  }
}

TEST_F(ActivationsTest, OptionsAreChecked) {
  try {
    make(0);
    FAIL();
  } catch (const InvalidArgument& error) {
    EXPECT_THAT(error.what(), HasSubstr("[Activations::make] a horizon of 0 units"));
  }
}

}  // namespace
}  // namespace tesserae::offload
