#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <gmock/gmock.h>

#include <nlohmann/json.hpp>

#include "tesserae/checkpoint/fault.h"
#include "tesserae/checkpoint/load.h"
#include "tesserae/checkpoint/placement.h"
#include "tesserae/checkpoint/saver.h"
#include "tesserae/checkpoint/verify.h"
#include "tesserae/checkpoint/weights.h"
#include "tesserae/tensor/split_parameters.h"
#include "tests/checkpoint/memory_files.h"
#include "tests/checkpoint/trained.h"

// Tensors that are split among tensor-parallel ranks, each part of them cut by a layout once more.
namespace tesserae::checkpoint {
namespace {

using ::testing::HasSubstr;

struct Whole {
  std::string name;
  at::Tensor values;
  int dim = -1;  ///< -1: every tensor-parallel rank has all of it
  int blocks = 1;

  mesh::Split split(int parts, int index) const {
    return dim < 0 ? mesh::Split{} : mesh::Split{.dim = dim, .parts = parts, .index = index, .blocks = blocks};
  }
};

/// Values tell their place, so that any mistake shows.
std::vector<Whole> tensors() {
  auto counted = [](const std::vector<int64_t>& shape, c10::ScalarType type = at::kFloat) {
    int64_t elements = 1;
    for (const int64_t size : shape) elements *= size;
    return at::arange(elements, at::kFloat).to(type).view(shape);
  };
  return {{"model/column", counted({64, 40}), 0},
          {"model/row", counted({40, 96}), 1},
          {"model/fused", counted({24, 40}), 0, 3},
          {"model/fused_last", counted({8, 5, 24}), 2, 3},
          {"model/middle", counted({5, 8, 7}), 1},
          {"model/vocabulary", counted({13, 50}), 0},
          {"model/norm", counted({9})},
          {"model/half", counted({6, 16}, at::kBFloat16), 1},
          {"optimizer/step/norm", at::full({}, 3.0F), -1}};
}

struct SplitJob {
  int tensor;
  mesh::Layout layout;

  int ranks() const { return tensor * layout.ranks(); }
  std::string name() const { return cat("T", tensor, "-N", layout.ranks(), "-", to_string(layout.degrees())); }
};

std::vector<SplitJob> all_split_jobs() {
  std::vector<SplitJob> jobs;
  for (const int tensor : {1, 2, 4}) {
    for (const int ranks : {1, 2, 4}) {
      if (tensor * ranks > 8) continue;
      for (const auto& degrees : mesh::all_degrees(ranks)) {
        if (degrees.gradients == degrees.optimizer) jobs.push_back({tensor, {ranks, degrees}});
      }
    }
  }
  return jobs;
}

constexpr double unset = -7;

/// What one rank holds. `fill`: with the values of the tensors, padding with other ones; otherwise with `unset`.
std::vector<Piece> pieces_of(const std::vector<Whole>& wholes, const SplitJob& job, int rank, bool fill,
                             c10::ScalarType type = at::kFloat) {
  const int index = rank % job.tensor;  // tensor-parallel ranks are neighbours
  const int data_rank = rank / job.tensor;
  std::vector<Piece> pieces;
  for (const Whole& whole : wholes) {
    const mesh::Split split = whole.split(job.tensor, index);
    at::Tensor part = tensor::part_of(whole.values, split).reshape({-1}).clone();
    const int64_t real = mesh::part_elements(whole.values.sizes().vec(), split);
    if (real < part.numel()) part.narrow(0, real, part.numel() - real).fill_(99);
    const mesh::Range owned = mesh::owned(job.layout, part.numel(), 4, data_rank);
    at::Tensor data = part.narrow(0, owned.begin, owned.size()).clone();
    if (!fill) data = at::full({owned.size()}, unset, type == at::kFloat ? data.scalar_type() : type);
    pieces.push_back({.name = whole.name,
                      .shape = whole.values.sizes().vec(),
                      .split = split,
                      .elements = owned,
                      .data = data,
                      .written = job.layout.replica(data_rank) == 0 && (!split.whole() || index == 0)});
  }
  return pieces;
}

class SplitTensors : public ::testing::Test {
 protected:
  os::Path save(const SplitJob& job, int64_t block_bytes = 512) {
    comm::run_local(job.ranks(), [&](comm::Fabric& fabric) {
      Saver saver(testing::borrowed(fabric), {.folder = "/" + job.name(), .block_bytes = block_bytes});
      saver.save({.step = 5,
                  .layout = job.layout,
                  .axes = {.tensor = job.tensor},
                  .pieces = pieces_of(wholes_, job, fabric.rank(), true)},
                 /*asynchronous=*/job.tensor == 2);
      saver.finish();
    });
    return os::Path("/" + job.name()) / "step-5";
  }

  const std::vector<Whole> wholes_ = tensors();
  testing::MemoryFiles memory_;
  os::ScopedFiles scoped_{memory_};
};

/// What differs between pieces that were loaded and what they should be; padding must be as it was.
std::string difference(const std::vector<Piece>& loaded, const std::vector<Piece>& expected) {
  for (size_t i = 0; i < loaded.size(); ++i) {
    const Piece& piece = loaded[i];
    at::Tensor values = expected[i].data.clone();
    const int64_t real = mesh::part_elements(piece.shape, piece.split) - piece.elements.begin;
    if (real < values.numel()) {
      const int64_t begin = std::max<int64_t>(real, 0);
      values.narrow(0, begin, values.numel() - begin).fill_(unset);
    }
    if (!values.to(piece.data.scalar_type()).equal(piece.data)) return piece.name;
  }
  return "";
}

TEST_F(SplitTensors, LoadAnywhereBitwise) {
  const std::vector<SplitJob> jobs = all_split_jobs();
  ASSERT_EQ(jobs.size(), 24u);
  for (const SplitJob& from : jobs) {
    const os::Path path = save(from);
    const Checkpoint checkpoint = Checkpoint::open(path);
    EXPECT_EQ(checkpoint.manifest().axes.tensor, from.tensor);
    EXPECT_EQ(checkpoint.manifest().layout, from.layout);
    EXPECT_TRUE(verify(path).faults.empty()) << from.name();
    for (const SplitJob& to : jobs) {
      for (int rank = 0; rank < to.ranks(); ++rank) {
        const std::vector<Piece> pieces = pieces_of(wholes_, to, rank, false);
        load(checkpoint, pieces);
        ASSERT_EQ(difference(pieces, pieces_of(wholes_, to, rank, true)), "")
            << from.name() << " -> " << to.name() << " rank " << rank;
      }
    }
  }
}

TEST_F(SplitTensors, TypesAreConverted) {
  const Checkpoint checkpoint = Checkpoint::open(save({4, {2, {1, 1, 2}}}));
  const SplitJob to{2, {2, {2, 2, 2}}};
  for (int rank = 0; rank < to.ranks(); ++rank) {
    const std::vector<Piece> pieces = pieces_of(wholes_, to, rank, false, at::kDouble);
    load(checkpoint, pieces);
    EXPECT_EQ(difference(pieces, pieces_of(wholes_, to, rank, true)), "") << rank;
  }
}

// Each rank writes one run of each tensor, whatever the split; older programs read what has none.
TEST_F(SplitTensors, AreWrittenInLongRuns) {
  const Checkpoint checkpoint = Checkpoint::open(save({4, {2, {1, 2, 2}}}));
  const Manifest& manifest = checkpoint.manifest();
  for (const StoredTensor& tensor : manifest.tensors) EXPECT_LE(tensor.extents.size(), 8u) << tensor.name;
  EXPECT_EQ(manifest.find("model/row")->split, (mesh::Split{.dim = 1, .parts = 4}));
  EXPECT_EQ(manifest.find("model/fused")->split, (mesh::Split{.dim = 0, .parts = 4, .blocks = 3}));
  EXPECT_EQ(manifest.find("model/column")->split, mesh::Split{}) << "its parts lie in row-major order";
  EXPECT_EQ(manifest.find("model/vocabulary")->split, mesh::Split{});
  EXPECT_EQ(manifest.find("model/norm")->extents.size(), 2u) << "of one tensor-parallel rank";
  EXPECT_EQ(manifest.find("model/vocabulary")->elements(), 13 * 50);
  const std::string text = memory_.read("/T4-N2-P=1 G=2 O=2/step-5/manifest.json");
  EXPECT_THAT(text, HasSubstr("\"version\":2,"));
  EXPECT_THAT(text, HasSubstr("\"shape\":[40,96],\"split\":{\"dim\":1,\"parts\":4,\"blocks\":1},"));
  EXPECT_THAT(text, HasSubstr("\"optimizer\":2,\"tensor\":4}"));
  save({1, {2, {1, 2, 2}}});
  EXPECT_THAT(memory_.read("/T1-N2-P=1 G=2 O=2/step-5/manifest.json"), HasSubstr("\"version\":1,"));
}

TEST_F(SplitTensors, DamageIsFound) {
  const os::Path path = save({4, {1, {1, 1, 1}}});
  const Checkpoint checkpoint = Checkpoint::open(path);
  const Extent& extent = checkpoint.manifest().find("model/row")->extents[2];
  memory_.bytes(path / checkpoint.manifest().files[static_cast<size_t>(extent.file)].name)[extent.offset + 2000] ^= 1;
  EXPECT_EQ(verify(path).faults.size(), 1u);
  int damaged = 0;
  const SplitJob to{2, {2, {2, 2, 2}}};
  for (int rank = 0; rank < to.ranks(); ++rank) {
    try {
      load(checkpoint, pieces_of(wholes_, to, rank, false));
    } catch (const Damaged& error) {
      ++damaged;
      EXPECT_EQ(error.fault().tensor, "model/row");
    }
  }
  EXPECT_GE(damaged, 1);
}

TEST_F(SplitTensors, GoOutAsWholeTensors) {
  for (const SplitJob& job : {SplitJob{4, {2, {1, 2, 2}}}, SplitJob{2, {1, {1, 1, 1}}}}) {
    const os::Path folder = "/out-" + job.name();
    export_weights(Checkpoint::open(save(job)), folder);
    const WeightFiles files = WeightFiles::open(folder);
    ASSERT_EQ(files.tensors().size(), wholes_.size() - 1);
    for (const Whole& whole : wholes_) {
      const auto found = files.tensors().find(whole.name.substr(std::string_view("model/").size()));
      if (!whole.name.starts_with("model/")) continue;
      ASSERT_NE(found, files.tensors().end()) << whole.name;
      EXPECT_EQ(found->second.shape, whole.values.sizes().vec());
      std::string bytes(whole.values.nbytes(), '\0');
      files.read(found->first, 0, bytes);
      EXPECT_EQ(bytes, std::string_view(static_cast<const char*>(whole.values.const_data_ptr()), bytes.size()))
          << whole.name;
    }
  }
}

TEST_F(SplitTensors, RanksThatDisagreeAreRefused) {
  const SplitJob job{2, {1, {1, 1, 1}}};
  EXPECT_THROW(comm::run_local(2,
                               [&](comm::Fabric& fabric) {
                                 std::vector<Piece> pieces = pieces_of(wholes_, job, fabric.rank(), true);
                                 std::erase_if(pieces, [](const Piece& piece) { return piece.name != "model/row"; });
                                 if (fabric.rank() == 1)
                                   pieces[0].split = mesh::Split{.dim = 1, .parts = 2, .index = 1, .blocks = 2};
                                 Saver saver(testing::borrowed(fabric), {.folder = "/f"});
                                 saver.save({.step = 1, .layout = job.layout, .axes = {.tensor = 2}, .pieces = pieces});
                               }),
               SaveFailed);
}

// However many runs there are between two splits, few places are kept: a block is read whole anyway.
TEST(Placement, JoinsRunsOverSmallGaps) {
  const Piece piece{.name = "a",
                    .shape = {1 << 12, 1 << 10},
                    .split = mesh::Split{.dim = 1, .parts = 8, .index = 3},
                    .elements = {0, 1 << 19},
                    .data = at::full({1 << 19}, 0.0)};
  EXPECT_EQ(Placement(piece, {}, at::kFloat).runs(0).size(), 1u << 12);
  const std::vector<mesh::Range> joined = Placement(piece, {}, at::kFloat).runs(1 << 10);
  ASSERT_EQ(joined.size(), 1u);
  EXPECT_EQ(joined[0], (mesh::Range{3 << 7, (1 << 22) - (4 << 7)}));
  EXPECT_FALSE(Placement(piece, {}, at::kFloat).contiguous());
  EXPECT_TRUE(Placement(piece, mesh::Split{.dim = 1, .parts = 8}, at::kFloat).contiguous());
  const std::vector<mesh::Range> two = Placement(piece, mesh::Split{.dim = 1, .parts = 16}, at::kFloat).runs(100);
  ASSERT_EQ(two.size(), 1u) << "parts 6 and 7 of 16 are neighbours";
  EXPECT_EQ(two[0], (mesh::Range{6 << 18, 8 << 18}));
}

// A tensor stored cut along two axes, read into parts of other cuts in stretches of any length.
TEST(Placement, ReadsWhatIsCutAlongTwoAxes) {
  const std::vector<int64_t> shape{4, 6, 4};
  const mesh::Split experts{.dim = 0, .parts = 2, .axis = mesh::Axis::expert};
  const std::vector<mesh::Splits> cuts{{},
                                       experts,
                                       {experts, {.dim = 1, .parts = 3}},
                                       {experts, {.dim = 2, .parts = 2}},
                                       {{.dim = 0, .parts = 4, .axis = mesh::Axis::expert}, {.dim = 1, .parts = 2}},
                                       {{.dim = 1, .parts = 2, .blocks = 3}, experts}};
  auto parts_of = [](const mesh::Splits& cut) {
    std::vector<mesh::Splits> parts;
    mesh::Split first = cut.first(), second = cut.second();
    for (first.index = 0; first.index < first.parts; ++first.index) {
      for (second.index = 0; second.index < second.parts; ++second.index) parts.emplace_back(first, second);
    }
    return parts;
  };
  auto part_of = [](at::Tensor whole, const mesh::Splits& cut) {
    whole = tensor::part_of(whole, cut.first());
    return tensor::part_of(whole, cut.second()).reshape({-1}).clone();
  };
  const at::Tensor whole = at::arange(96, at::kFloat).view(shape);
  for (const mesh::Splits& stored : cuts) {
    std::vector<at::Tensor> stretches;
    for (const mesh::Splits& part : parts_of(stored)) stretches.push_back(part_of(whole, part));
    const at::Tensor bytes = at::cat(stretches);
    for (const mesh::Splits& cut : cuts) {
      for (const mesh::Splits& part : parts_of(cut)) {
        const at::Tensor expected = part_of(whole, part);
        const Piece piece{.name = "a",
                          .shape = shape,
                          .split = part,
                          .elements = {0, expected.numel()},
                          .data = at::full_like(expected, unset)};
        const Placement placement(piece, stored, at::kFloat);
        for (int64_t first = 0; first < 96; first += 7) {
          const int64_t count = std::min<int64_t>(7, 96 - first);
          placement.put(first,
                        {static_cast<const char*>(bytes.const_data_ptr()) + first * 4, static_cast<size_t>(count) * 4});
        }
        EXPECT_TRUE(piece.data.equal(expected)) << to_string(stored) << " to " << to_string(part);
      }
    }
  }
}

}  // namespace
}  // namespace tesserae::checkpoint
