#include "tesserae/data/loader.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <set>

#include "tesserae/base/error.h"
#include "tesserae/data/token_writer.h"
#include "tests/data/folder.h"

namespace tesserae::data {
namespace {

using testing::Folder;
using ::testing::HasSubstr;

/// Tokens that count up from 0: a sample's first token tells which sample it is.
std::shared_ptr<TokenStream> counting_stream(const Folder& folder, uint32_t tokens) {
  std::vector<uint32_t> numbers(tokens);
  for (uint32_t i = 0; i < tokens; ++i) numbers[i] = i;
  const auto path = folder.write_tokens("counting.bin", numbers);
  return std::make_shared<TokenStream>(StreamOptions{.paths = {path}, .format = Format::uint32, .vocabulary = tokens});
}

/// The first tokens of a batch's samples, after a check of the rest.
std::vector<int64_t> firsts(const Batch& batch) {
  const int64_t length = batch.tokens.size(1);
  EXPECT_TRUE(batch.targets.equal(batch.tokens.add(1)));
  EXPECT_TRUE(batch.tokens.slice(1, 1, length).equal(batch.targets.slice(1, 0, length - 1)));
  std::vector<int64_t> values;
  for (int64_t i = 0; i < batch.tokens.size(0); ++i) {
    values.push_back(batch.tokens[i][0].item<int64_t>());
    EXPECT_EQ(values.back() % length, 0);
  }
  return values;
}

/// The samples of step `step` as all ranks together see them, in the order of micro-batches and ranks.
std::vector<int64_t> global_batch(const std::shared_ptr<TokenStream>& stream, LoaderOptions options, int64_t step) {
  std::vector<int64_t> samples;
  for (int64_t micro = 0; micro < options.accumulate; ++micro) {
    for (options.rank = 0; options.rank < options.ranks; ++options.rank) {
      Loader loader(stream, options);
      const auto part = firsts(loader.training_batch(loader.after(step), micro));
      samples.insert(samples.end(), part.begin(), part.end());
    }
  }
  return samples;
}

TEST(Loader, TheGlobalOrderIsTheSameForEveryDivision) {
  const Folder folder;
  const auto stream = counting_stream(folder, 5 * 100 + 1);
  LoaderOptions one{.sequence_length = 5, .batch_per_rank = 8, .seed = 9};
  for (int64_t step = 0; step < 15; ++step) {  // 95 samples an epoch: steps 11 and on are in the second
    const auto expected = global_batch(stream, one, step);
    EXPECT_EQ(expected.size(), 8u);
    for (const int ranks : {1, 2, 4}) {
      for (const int64_t accumulate : {1, 2}) {
        LoaderOptions many = one;
        many.ranks = ranks;
        many.accumulate = accumulate;
        many.batch_per_rank = 8 / (ranks * accumulate);
        EXPECT_EQ(global_batch(stream, many, step), expected) << ranks << " " << accumulate << " " << step;
      }
    }
  }
}

TEST(Loader, EachSampleOnceAnEpochInANewOrder) {
  const Folder folder;
  const auto stream = counting_stream(folder, 4 * 80 + 3);
  Loader loader(stream, {.sequence_length = 4, .batch_per_rank = 19, .seed = 5, .validation_fraction = 0.05});
  EXPECT_EQ(loader.training_samples(), 76);
  EXPECT_EQ(loader.validation_samples(), 4);
  std::vector<std::vector<int64_t>> epochs;
  for (int64_t epoch = 0; epoch < 3; ++epoch) {
    std::vector<int64_t> order;
    for (int64_t step = 0; step < 4; ++step) {
      const auto part = firsts(loader.training_batch(loader.after(4 * epoch + step)));
      order.insert(order.end(), part.begin(), part.end());
    }
    std::set<int64_t> distinct(order.begin(), order.end());
    EXPECT_EQ(distinct.size(), 76u);
    EXPECT_EQ(*distinct.rbegin(), 75 * 4) << "validation samples are not trained on";
    epochs.push_back(order);
  }
  EXPECT_NE(epochs[0], epochs[1]);
  EXPECT_NE(epochs[1], epochs[2]);
}

TEST(Loader, AStepMayStraddleTwoEpochs) {
  const Folder folder;
  const auto stream = counting_stream(folder, 10 * 3 + 1);
  Loader loader(stream, {.sequence_length = 3, .batch_per_rank = 4, .validation_fraction = 0});
  std::map<int64_t, int> hits;
  for (int64_t step = 0; step < 5; ++step) {  // 20 samples: two epochs of 10
    for (const int64_t first : firsts(loader.training_batch(loader.after(step)))) ++hits[first];
  }
  EXPECT_EQ(hits.size(), 10u);
  for (const auto& [first, count] : hits) EXPECT_EQ(count, 2) << first;
  EXPECT_EQ(loader.after(5), (Position{2, 0}));
}

TEST(Loader, TrainingGoesOnFromAPositionAtAnotherBatchSize) {
  const Folder folder;
  const auto stream = counting_stream(folder, 30 * 3 + 1);
  Loader before(stream, {.sequence_length = 3, .batch_per_rank = 6, .seed = 1, .validation_fraction = 0});
  const Position saved = before.after(3);
  EXPECT_EQ(saved, (Position{0, 18}));
  Loader after(stream, {.sequence_length = 3, .batch_per_rank = 4, .seed = 1, .validation_fraction = 0});
  std::set<int64_t> seen;
  for (int64_t step = 0; step < 3; ++step) {
    for (const int64_t first : firsts(before.training_batch(before.after(step)))) seen.insert(first);
    for (const int64_t first : firsts(after.training_batch(after.after(step, saved)))) seen.insert(first);
  }
  EXPECT_EQ(seen.size(), 30u);
}

TEST(Loader, ValidationIsSharedOutAndRepeats) {
  const Folder folder;
  const auto stream = counting_stream(folder, 100 * 2 + 1);
  std::vector<int64_t> seen;
  for (int64_t index = 0; index < 5; ++index) {
    for (int rank = 0; rank < 2; ++rank) {
      Loader loader(stream,
                    {.sequence_length = 2, .batch_per_rank = 1, .rank = rank, .ranks = 2, .validation_fraction = 0.1});
      EXPECT_EQ(loader.validation_samples(), 10);
      const auto part = firsts(loader.validation_batch(index));
      EXPECT_EQ(part, firsts(loader.validation_batch(index)));
      EXPECT_EQ(part, firsts(loader.validation_batch(index + 5))) << "begins anew after all ten";
      seen.insert(seen.end(), part.begin(), part.end());
    }
  }
  std::sort(seen.begin(), seen.end());
  for (int64_t i = 0; i < 10; ++i) EXPECT_EQ(seen[static_cast<size_t>(i)], 2 * (90 + i));
}

TEST(Loader, AMixtureIsTheSameForEveryNumberOfRanks) {
  const Folder folder;
  const auto stream = [&](const std::string& name, uint32_t first, uint32_t samples) {
    std::vector<uint32_t> numbers(samples * 4 + 1);
    for (uint32_t i = 0; i < numbers.size(); ++i) numbers[i] = first + i;
    const auto path = folder.write_tokens(name, numbers);
    return std::make_shared<TokenStream>(
        StreamOptions{.paths = {path}, .format = Format::uint32, .vocabulary = 10'000});
  };
  const std::vector<Source> sources = {{stream("a.bin", 0, 50), 3}, {stream("b.bin", 1'000, 20), 1}};
  const LoaderOptions one{.sequence_length = 4, .batch_per_rank = 8, .seed = 9, .validation_fraction = 0.1};
  const auto order = [&](int ranks, int64_t steps) {
    std::vector<int64_t> seen;
    std::vector<Loader> loaders;
    for (int rank = 0; rank < ranks; ++rank) {
      LoaderOptions options = one;
      options.rank = rank;
      options.ranks = ranks;
      options.batch_per_rank = 8 / ranks;
      loaders.emplace_back(sources, options);
    }
    for (int64_t step = 0; step < steps; ++step) {
      for (Loader& loader : loaders) {
        const auto part = firsts(loader.training_batch(loader.after(step)));
        seen.insert(seen.end(), part.begin(), part.end());
      }
    }
    return seen;
  };
  const auto expected = order(1, 20);
  EXPECT_EQ(order(2, 20), expected);
  EXPECT_EQ(order(4, 20), expected);
  for (size_t i = 0; i < expected.size(); i += 4) {
    const auto quarter = std::count_if(expected.begin() + static_cast<std::ptrdiff_t>(i),
                                       expected.begin() + static_cast<std::ptrdiff_t>(i) + 4,
                                       [](int64_t token) { return token >= 1'000; });
    ASSERT_EQ(quarter, 1) << i;
  }
  Loader loader(sources, one);
  EXPECT_EQ(loader.training_samples(), 45 + 18);
  EXPECT_EQ(loader.validation_samples(), 5 + 2);
  for (int64_t index = 0; index < 4; ++index) {
    for (const int64_t token : firsts(loader.validation_batch(index))) {
      EXPECT_TRUE((token >= 45 * 4 && token < 1'000) || token >= 1'000 + 18 * 4) << token << " was trained on";
    }
  }
}

// docs/data.md has these lines, too.
TEST(Loader, TheLoopOfThePage) {
  const Folder folder;
  for (const char* name : {"web.bin", "code.bin"}) {
    TokenWriter writer(folder.path() / name, {.vocabulary = 300});
    writer.add(std::vector<uint32_t>(1024 * 30, name[0] == 'w' ? 7 : 8));
    writer.finish();
  }
  const auto before = std::filesystem::current_path();
  std::filesystem::current_path(folder.path());
  int64_t of_web = 0, seen = 0;
  const auto train = [&](const at::Tensor& tokens, const at::Tensor& targets) {
    EXPECT_TRUE(tokens.equal(targets));
    of_web += tokens.select(1, 0).eq(7).sum().item<int64_t>();
    seen += tokens.size(0);
  };
  const int rank = 0, ranks = 1;
  const int64_t steps = 5;
  // clang-format off
const auto stream = [](const std::string& path) {
  return std::make_shared<TokenStream>(StreamOptions{.paths = {path}, .format = Format::tokens});
};
Loader loader({{stream("web.bin"), 0.8}, {stream("code.bin"), 0.2}},
              {.sequence_length = 1024, .batch_per_rank = 8, .rank = rank, .ranks = ranks, .seed = 1});
Position position;  // all that a checkpoint needs to keep
for (int64_t step = 0; step < steps; ++step, position = loader.after(1, position)) {
  const Batch batch = loader.training_batch(position);
  train(batch.tokens, batch.targets);
}
  // clang-format on
  std::filesystem::current_path(before);
  EXPECT_EQ(seen, 40);
  EXPECT_EQ(of_web, 32);
}

TEST(Loader, SourcesThatCannotBeMixed) {
  const Folder folder;
  const auto few = counting_stream(folder, 10);
  const auto more = counting_stream(folder, 20);
  const LoaderOptions options{.sequence_length = 2, .validation_fraction = 0};
  EXPECT_THROW(Loader({{few}, {more}}, options), InvalidArgument) << "of different vocabularies";
  EXPECT_THROW(Loader({{few, 1}, {few, 0}}, options), InvalidArgument);
  EXPECT_THROW(Loader(std::vector<Source>{}, options), InvalidArgument);
  EXPECT_THROW(Loader(std::vector<Source>(1), options), InvalidArgument);
}

TEST(Loader, NumbersThatCannotBe) {
  const Folder folder;
  const auto stream = counting_stream(folder, 20);
  EXPECT_THROW(Loader(stream, {.sequence_length = 2, .accumulate = int64_t{1} << 62}), InvalidArgument);
  Loader nothing_held_out(stream, {.sequence_length = 2, .validation_fraction = 0});
  EXPECT_THROW(nothing_held_out.validation_batch(0), InvalidArgument);
}

TEST(Loader, RealTextComesOutAsItIs) {
  const Folder folder;
  folder.write("poem.txt", "So much depends upon a red wheel barrow glazed with rain water");
  auto stream = std::make_shared<TokenStream>(StreamOptions{.paths = {folder.path()}});
  Loader loader(stream, {.sequence_length = 62, .batch_per_rank = 1, .validation_fraction = 0});
  const auto batch = loader.training_batch({});
  EXPECT_EQ(batch.tokens.sizes(), at::IntArrayRef({1, 62}));
  std::string text;
  for (int64_t t = 0; t < 62; ++t) text += static_cast<char>(batch.tokens[0][t].item<int64_t>());
  EXPECT_EQ(text, "So much depends upon a red wheel barrow glazed with rain water");
  EXPECT_EQ(batch.targets[0][61].item<int64_t>(), end_of_file_token);
}

TEST(Loader, TooLittleDataIsAnError) {
  const Folder folder;
  const auto stream = counting_stream(folder, 10);
  auto message = [&](const LoaderOptions& options) -> std::string {
    try {
      Loader loader(stream, options);
    } catch (const InvalidArgument& error) {
      return error.what();
    }
    return "nothing was thrown";
  };
  EXPECT_THAT(message({.sequence_length = 10, .validation_fraction = 0}), HasSubstr("the data has 10 tokens"));
  EXPECT_EQ(message({.sequence_length = 9, .validation_fraction = 0}), "nothing was thrown");
  EXPECT_THAT(message({.sequence_length = 9}), HasSubstr("one to validate with"));
  EXPECT_EQ(message({.sequence_length = 4}), "nothing was thrown");
  EXPECT_THAT(message({.sequence_length = 0}), HasSubstr("sequence_length is 0"));
  EXPECT_THAT(message({.sequence_length = 2, .rank = 2, .ranks = 2}), HasSubstr("rank is 2 of 2"));
  EXPECT_THAT(message({.sequence_length = 2, .validation_fraction = 1}), HasSubstr("validation_fraction"));
}

}  // namespace
}  // namespace tesserae::data
