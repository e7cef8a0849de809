#include "tesserae/checkpoint/weights.h"

#include <gmock/gmock.h>

#include <cstring>
#include <nlohmann/json.hpp>

#include "tesserae/checkpoint/fault.h"
#include "tesserae/checkpoint/model_state.h"
#include "tests/checkpoint/memory_files.h"
#include "tests/checkpoint/trained.h"

namespace tesserae::checkpoint {
namespace {

using testing::borrowed;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::Trained;
using testing::with_degrees;

using Bytes = std::map<std::string, std::string>;

Bytes bytes_in(const WeightFiles& files) {
  Bytes bytes;
  for (const auto& [name, tensor] : files.tensors()) {
    std::string& data = bytes[name];
    data.resize(tensor.end - tensor.begin);
    files.read(name, 0, data);
  }
  return bytes;
}

Bytes bytes_of_model(shard::Sharded& sharded, std::optional<c10::ScalarType> type = {}) {
  Bytes bytes;
  sharded.visit_parameters([&](const std::string& name, const at::Tensor& value) {
    const at::Tensor data = value.to(type.value_or(value.scalar_type())).contiguous();
    bytes[name] = {static_cast<const char*>(data.const_data_ptr()), data.nbytes()};
  });
  return bytes;
}

class Weights : public ::testing::Test {
 protected:
  testing::MemoryFiles memory_;
  os::ScopedFiles scoped_{memory_};
};

TEST_F(Weights, LiveModelsGoOutAndIn) {
  Bytes expected;
  comm::run_local(4, [&](comm::Fabric& fabric) {
    Trained trained(fabric, testing::NetOptions{}, with_degrees({2, 4, 4}));
    trained.step();
    export_weights(trained.sharded(), "/out");
    export_weights(trained.sharded(), "/small", {.dtype = at::kBFloat16, .file_bytes = 2000});
    const Bytes bytes = bytes_of_model(trained.sharded());
    const Bytes small = bytes_of_model(trained.sharded(), at::kBFloat16);
    if (fabric.rank() != 0) return;
    expected = bytes;
    EXPECT_EQ(bytes_in(WeightFiles::open("/small")), small);
  });
  EXPECT_EQ(bytes_in(WeightFiles::open("/out")), expected);
  EXPECT_THAT(memory_.list("/out"), ElementsAre("model.safetensors"));
  EXPECT_GE(memory_.list("/small").size(), 4u);
  EXPECT_TRUE(memory_.exists("/small/model.safetensors.index.json"));
  EXPECT_TRUE(memory_.exists("/small/model-00001-of-0000" + std::to_string(memory_.list("/small").size() - 1) +
                             ".safetensors"));
  const auto index = nlohmann::json::parse(memory_.read("/small/model.safetensors.index.json"));
  EXPECT_EQ(index["weight_map"].size(), expected.size());

  comm::run_local(3, [&](comm::Fabric& fabric) {
    Trained trained(fabric, testing::NetOptions{}, with_degrees({3, 3, 3}));
    trained.step();
    import_weights(WeightFiles::open("/out"), trained.sharded());
    EXPECT_EQ(bytes_of_model(trained.sharded()), expected);
  });
  comm::run_local(2, [&](comm::Fabric& fabric) {
    Trained trained(fabric, testing::NetOptions{}, with_degrees({1, 1, 2}));
    import_weights(WeightFiles::open("/small"), trained.sharded());
    EXPECT_EQ(bytes_of_model(trained.sharded(), at::kBFloat16), bytes_in(WeightFiles::open("/small")));
  });
}

TEST_F(Weights, BuffersOfLiveModelsGoOutAlsoEmptyOnes) {
  const std::vector<std::pair<std::string, at::Tensor>> buffers = {{"steps", at::arange(3, at::kDouble)},
                                                                   {"nothing", at::zeros({0})}};
  comm::run_local(2, [&](comm::Fabric& fabric) {
    Trained trained(fabric, testing::NetOptions{}, with_degrees({2, 2, 2}));
    export_weights(trained.sharded(), "/out", {.file_bytes = 8}, buffers);
  });
  const WeightFiles files = WeightFiles::open("/out");
  EXPECT_EQ(files.tensors().at("nothing").shape, std::vector<int64_t>{0});
  std::vector<double> steps(3);
  files.read("steps", 0, {reinterpret_cast<char*>(steps.data()), 3 * sizeof(double)});
  EXPECT_THAT(steps, ElementsAre(0, 1, 2));
}

TEST_F(Weights, CheckpointsGoOutAndIn) {
  Bytes expected;
  comm::run_local(4, [&](comm::Fabric& fabric) {
    Trained trained(fabric, testing::NetOptions{}, with_degrees({2, 2, 4}));
    trained.step();
    Saver saver(borrowed(fabric), {.folder = "/f", .block_bytes = 512});
    saver.save(trained.state());
    const Bytes bytes = bytes_of_model(trained.sharded());
    if (fabric.rank() == 0) expected = bytes;
  });
  const Checkpoint checkpoint = Checkpoint::open("/f/step-1");
  const NameMap names({{"block*.first", "transformer.h.*.fc.weight"}, {"embedding", "wte.weight"}});
  export_weights(checkpoint, "/plain");
  EXPECT_EQ(bytes_in(WeightFiles::open("/plain")), expected);
  export_weights(checkpoint, "/named", {.file_bytes = 3000, .names = names});
  const WeightFiles named = WeightFiles::open("/named");
  EXPECT_EQ(bytes_in(named).at("transformer.h.1.fc.weight"), expected.at("block1.first"));
  EXPECT_EQ(bytes_in(named).at("wte.weight"), expected.at("embedding"));

  const os::Path back = checkpoint_from_weights(named, "/back", names);
  EXPECT_EQ(back, "/back/step-0");
  comm::run_local(2, [&](comm::Fabric& fabric) {
    Trained trained(fabric, testing::NetOptions{}, with_degrees({2, 2, 2}));
    load_model(Checkpoint::open(back), trained.sharded(), nullptr);
    publish_model(trained.sharded());
    EXPECT_EQ(bytes_of_model(trained.sharded()), expected);
  });
}

TEST_F(Weights, WhatDoesNotFitIsRefusedBeforeAnythingChanges) {
  comm::run_local(2, [&](comm::Fabric& fabric) {
    Trained trained(fabric, testing::NetOptions{}, with_degrees({1, 1, 2}));
    export_weights(trained.sharded(), "/out");
    EXPECT_THROW(export_weights(trained.sharded(), "/out"), Error) << "the folder has weights";
    const WeightFiles files = WeightFiles::open("/out");
    auto refusal = [&](Trained& into, const ImportOptions& options) -> std::string {
      const Bytes before = bytes_of_model(into.sharded());
      try {
        import_weights(files, into.sharded(), options);
      } catch (const InvalidArgument& error) {
        EXPECT_EQ(bytes_of_model(into.sharded()), before);
        return error.what();
      }
      return "";
    };
    Trained larger(fabric, {.blocks = 4}, with_degrees({1, 1, 2}));
    EXPECT_THAT(refusal(larger, {}), HasSubstr("no tensor for parameter \"block3.first\""));
    EXPECT_EQ(refusal(larger, {.may_miss = {"block3.first", "block3.second", "block3.bias", "block3.scale"}}), "");
    Trained smaller(fabric, {.blocks = 2}, with_degrees({1, 1, 2}));
    EXPECT_THAT(refusal(smaller, {}), HasSubstr("no parameter \"block2."));
    EXPECT_EQ(refusal(smaller, {.ignore_unknown = true}), "");
    Trained wider(fabric, {.hidden = 31}, with_degrees({1, 1, 2}));
    EXPECT_THAT(refusal(wider, {}), HasSubstr("has shape"));
    EXPECT_THAT(refusal(trained, {.names = NameMap(NameMap::Rules{{"block0.bias", "block1.bias"}})}),
                HasSubstr("both stand for"));
    // Tied: the files have either name.
    Trained tied(fabric, {.tied = true}, with_degrees({1, 1, 2}));
    EXPECT_EQ(refusal(tied, {}), "");
  });
}

TEST_F(Weights, AFullDiskLeavesNoHalfFilesAndEveryRankHears) {
  class FullDisk : public testing::MemoryFiles {
   public:
    void rename(const os::Path&, const os::Path&) override { throw IoError("FullDisk", "No space left on device"); }
  } full;
  const os::ScopedFiles scoped(full);
  comm::run_local(2, [&](comm::Fabric& fabric) {
    Trained trained(fabric, testing::NetOptions{}, with_degrees({1, 1, 2}));
    EXPECT_THROW(export_weights(trained.sharded(), "/out"), IoError);
    fabric.everyone().barrier();
  });
  EXPECT_TRUE(full.list("/out").empty());
}

TEST_F(Weights, HostileIndexesAreRefused) {
  memory_.make_directory("/w");
  auto refusal = [&](const std::string& index) -> std::string {
    memory_.write("/w/model.safetensors.index.json", index);
    try {
      WeightFiles::open("/w");
    } catch (const Damaged& damaged) {
      return damaged.fault().what;
    }
    return "";
  };
  EXPECT_THAT(refusal(R"({"weight_map":{"a":"../../etc/passwd"}})"), HasSubstr("begins with a dot"));
  EXPECT_THAT(refusal(R"({"weight_map":{"a":"x/y"}})"), HasSubstr("not allowed"));
  EXPECT_THAT(refusal(R"({"weight_map":{"a":"m.safetensors"}})"), HasSubstr("missing"));
  EXPECT_THAT(refusal(R"({"weight_map":{"a":1}})"), HasSubstr("expected a string"));
  EXPECT_THAT(refusal(R"({"weight_map":{"a":"m","a":"m"}})"), HasSubstr("occurs twice"));
  EXPECT_THAT(refusal("{}"), HasSubstr("\"weight_map\" is missing"));
  memory_.write("/w/m.safetensors", std::string("\x02\0\0\0\0\0\0\0{}", 10));
  EXPECT_THAT(refusal(R"({"metadata":{"total_size":1},"weight_map":{"a":"m.safetensors"}})"), HasSubstr("not there"));
  memory_.make_directory("/none");
  EXPECT_THROW(WeightFiles::open("/none"), InvalidArgument);
  EXPECT_THROW(WeightFiles::open("/nowhere"), InvalidArgument);
}

TEST(NameMap, RenamesBothWays) {
  const NameMap map({{"blocks.*.attention.out.weight", "model.layers.*.self_attn.o_proj.weight"},
                     {"embedding", "model.embed_tokens.weight"},
                     {"*.x.*", "y.*.z.*.w"},
                     {"layer*", "l.*"}});
  const std::vector<std::pair<std::string, std::string>> pairs{
      {"blocks.0.attention.out.weight", "model.layers.0.self_attn.o_proj.weight"},
      {"blocks.17.attention.out.weight", "model.layers.17.self_attn.o_proj.weight"},
      {"embedding", "model.embed_tokens.weight"},
      {"a.x.b", "y.a.z.b.w"},
      {"layer12", "l.12"},
      {"unknown.name", "unknown.name"}};
  for (const auto& [ours, theirs] : pairs) {
    EXPECT_EQ(map.theirs(ours), theirs);
    EXPECT_EQ(map.ours(theirs), ours);
  }
  EXPECT_EQ(map.theirs("blocks..attention.out.weight"), "blocks..attention.out.weight") << "a star is not nothing";
  EXPECT_EQ(map.theirs("blocks.1.2.attention.out.weight"), "blocks.1.2.attention.out.weight") << "nor has it dots";
  EXPECT_EQ(map.theirs("embedding.more"), "embedding.more");
  EXPECT_THROW(NameMap(NameMap::Rules{{"a.*", "b"}}), InvalidArgument);
  EXPECT_EQ(NameMap::from_json(nlohmann::ordered_json::parse(R"({"a.*":"b.*"})")).theirs("a.1"), "b.1");
  EXPECT_THROW(NameMap::from_json(nlohmann::ordered_json::parse("[]")), InvalidArgument);
  EXPECT_THROW(NameMap::from_json(nlohmann::ordered_json::parse(R"({"a":1})")), InvalidArgument);
}

}  // namespace
}  // namespace tesserae::checkpoint
