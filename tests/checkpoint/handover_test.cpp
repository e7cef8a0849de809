#include "tesserae/checkpoint/handover.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <gmock/gmock.h>

#include <string>
#include <vector>

#include "tesserae/comm/fabric.h"
#include "tesserae/mesh/world.h"
#include "tests/support/ranks.h"

// What ranks hand each other arrives where it belongs, to the bit: real processes, and windows that are smaller than
// the tensors, so that most of them pass in several turns.

namespace tesserae::checkpoint {
namespace {

constexpr int ranks = 4;

/// Numbers of the whole tensor, so that each element says where it belongs.
at::Tensor part_of(const std::vector<int64_t>& shape, const mesh::Splits& split, c10::ScalarType type) {
  int64_t elements = 1;
  for (const int64_t size : shape) elements *= size;
  const at::Tensor whole = at::arange(elements).to(type);
  at::Tensor part = at::full({mesh::part_elements(shape, split)}, -1, type);
  mesh::for_each_run(shape, split, {0, part.numel()}, {}, [&](const mesh::Range& own, const mesh::Range& there) {
    part.narrow(0, own.begin, own.size()).copy_(whole.narrow(0, there.begin, there.size()));
  });
  return part;
}

/// Chunk `index` of `chunks` of a part.
Piece piece_of(const std::string& name, const std::vector<int64_t>& shape, const mesh::Splits& split, int64_t index,
               int64_t chunks, c10::ScalarType type = at::kFloat) {
  const at::Tensor part = part_of(shape, split, type);
  const mesh::Range range{part.numel() * index / chunks, part.numel() * (index + 1) / chunks};
  return {.name = name,
          .shape = shape,
          .split = split,
          .elements = range,
          .data = part.narrow(0, range.begin, range.size()).clone()};
}

/// All of a tensor's kinds that there are in a job, with experts shared out over `experts` ranks and rows of matrices
/// over `tensor` ones.
std::vector<Piece> pieces_of(int rank, int experts, int tensor) {
  const int t = rank % tensor, e = rank / tensor % experts, x = rank / tensor / experts;
  const int others = ranks / tensor / experts;
  const mesh::Split by_expert{.dim = 0, .parts = experts, .index = e, .axis = mesh::Axis::expert};
  const mesh::Split columns{.dim = 2, .parts = tensor, .index = t, .axis = mesh::Axis::tensor};
  const mesh::Splits stacks = tensor == 1 ? mesh::Splits(by_expert) : mesh::Splits(by_expert, columns);
  const int64_t state = rank / tensor;
  std::vector<Piece> pieces = {
      piece_of("model/experts", {4, 3, 10}, stacks, x, others),
      piece_of("optimizer/exp_avg/experts", {4, 3, 10}, stacks, x, others, at::kBFloat16),
      piece_of("model/dense", {7, 11}, {}, state, ranks / tensor),
      replicated("buffer/bias", at::arange(5).to(at::kDouble), rank),
  };
  pieces[2].written = t == 0;
  if (state == 0) {
    pieces.push_back(piece_of("optimizer/step/dense", {}, {}, 0, 1, at::kLong));
    pieces.back().written = t == 0;
  }
  return pieces;
}

/// args: experts and tensor before, and after; bytes of the window.
RANK_MAIN(hands_over) {
  const auto fabric = comm::Fabric::connect(mesh::World::from_environment());
  const auto number = [&args](size_t i) { return std::stoi(args.at(i)); };
  const std::vector<Piece> from = pieces_of(fabric->rank(), number(0), number(1));
  const std::vector<Piece> expected = pieces_of(fabric->rank(), number(2), number(3));
  std::vector<Piece> to = expected;
  for (Piece& piece : to) piece.data = at::full_like(piece.data, -2);
  to.push_back({.name = "optimizer/step/other", .elements = {0, 1}, .data = at::full({1}, 7.0), .optional = true});
  const at::Tensor window = fabric->everyone().share(number(4));
  ASSERT_TRUE(window.defined());
  const Handover handover(*fabric, window, from);
  EXPECT_TRUE(handover.has("model/experts"));
  EXPECT_FALSE(handover.has("optimizer/step/other"));
  handover.fill(to);
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_TRUE(to[i].data.equal(expected[i].data)) << expected[i].name << " " << to[i].data;
  }
  EXPECT_EQ(to.back().data.item<double>(), 7) << "it is nobody's";
}

TEST(Handover, EveryElementArrives) {
  for (const testing::RankArgs& args : {testing::RankArgs{"2", "1", "4", "1", "256"},
                                        {"4", "1", "1", "1", "65536"},
                                        {"1", "1", "2", "1", "128"},
                                        {"2", "2", "1", "2", "192"},
                                        {"1", "2", "2", "2", "4096"},
                                        {"2", "2", "4", "1", "320"}}) {
    const auto results = testing::run_ranks("hands_over", ranks, args);
    EXPECT_TRUE(results.all_succeeded()) << args[0] << args[1] << args[2] << args[3] << results.text();
  }
}

RANK_MAIN(says_what_cannot_be) {
  const auto fabric = comm::Fabric::connect(mesh::World::from_environment());
  const at::Tensor window = fabric->everyone().share(4096);
  const auto refused = [](const auto& body) -> std::string {
    try {
      body();
    } catch (const InvalidArgument& error) {
      return error.what();
    }
    return "";
  };
  std::vector<Piece> from = pieces_of(fabric->rank(), 2, 1);
  std::vector<Piece> to = from;
  to.push_back({.name = "model/other", .elements = {0, 1}, .data = at::full({1}, 7.0)});
  EXPECT_THAT(refused([&] { Handover(*fabric, window, from).fill(to); }),
              ::testing::HasSubstr("tensor \"model/other\" is nobody's"));
  to.back() = from.front();
  to.back().data = to.back().data.to(at::kDouble);
  EXPECT_THAT(refused([&] { Handover(*fabric, window, from).fill(to); }),
              ::testing::HasSubstr("tensor \"model/experts\" is of another type or shape here"));
  if (fabric->rank() == 1) from.front().written = false;
  EXPECT_THAT(refused([&] { Handover(*fabric, window, from); }), ::testing::HasSubstr("the ranks have "));
  if (fabric->rank() == 1) from = pieces_of(1, 2, 1), from[2].shape = {11, 7};
  EXPECT_THAT(refused([&] { Handover(*fabric, window, from); }),
              ::testing::HasSubstr("rank 1 has tensor \"model/dense\" in another type or shape than ranks before it"));
}

TEST(Handover, SaysWhatCannotBe) {
  const auto results = testing::run_ranks("says_what_cannot_be", ranks);
  EXPECT_TRUE(results.all_succeeded()) << results.text();
}

}  // namespace
}  // namespace tesserae::checkpoint
