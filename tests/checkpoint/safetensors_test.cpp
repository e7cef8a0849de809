#include "tesserae/checkpoint/safetensors.h"

#include <gmock/gmock.h>

#include "tesserae/checkpoint/fault.h"
#include "tests/checkpoint/header_cases.h"
#include "tests/checkpoint/memory_files.h"

namespace tesserae::checkpoint {
namespace {

using ::testing::HasSubstr;

SafetensorsHeader read(const std::string& bytes) {
  testing::MemoryFiles memory;
  memory.write("/x.safetensors", bytes);
  const auto file = memory.open("/x.safetensors");
  return read_safetensors_header(*file, bytes.size(), "x.safetensors");
}

Fault fault_of(const std::string& bytes) {
  try {
    read(bytes);
  } catch (const Damaged& damaged) {
    return damaged.fault();
  }
  ADD_FAILURE() << "the header was taken";
  return {};
}

TEST(Safetensors, TakesAndRefusesTheCases) {
  for (const testing::HeaderCase& header : testing::header_cases()) {
    if (header.we_take) {
      EXPECT_NO_THROW(read(header.file)) << header.name;
    } else {
      EXPECT_THROW(read(header.file), Damaged) << header.name;
    }
    EXPECT_TRUE(header.package_takes || !header.we_take) << header.name << ": looser than the package";
  }
}

TEST(Safetensors, SaysWhatAHeaderHolds) {
  const auto header = read(
      testing::safetensors_file(R"({"b":{"dtype":"F32","shape":[2,1],"data_offsets":[2,10]},"__metadata__":{"k":"v"},)"
                                R"("a":{"dtype":"BF16","shape":[],"data_offsets":[0,2]}})",
                                "0123456789"));
  ASSERT_EQ(header.tensors.size(), 2u);
  EXPECT_EQ(header.tensors[0].name, "a");
  EXPECT_EQ(header.tensors[1].name, "b");
  EXPECT_EQ(header.tensors[1].dtype, Dtype::F32);
  EXPECT_EQ(header.tensors[1].shape, (std::vector<int64_t>{2, 1}));
  EXPECT_EQ(header.tensors[1].begin, 2u);
  EXPECT_EQ(header.tensors[1].end, 10u);
  EXPECT_EQ(header.tensors[1].elements(), 2);
  EXPECT_EQ(header.metadata.at("k"), "v");
}

TEST(Safetensors, FaultsNameFileTensorAndByte) {
  const std::string json = R"({"w":{"dtype":"F32","shape":[2],"data_offsets":[0,"x"]}})";
  const Fault wrong_type = fault_of(testing::safetensors_file(json));
  EXPECT_EQ(wrong_type.file, "x.safetensors");
  EXPECT_EQ(wrong_type.tensor, "w");
  EXPECT_THAT(wrong_type.what, HasSubstr("w.data_offsets[1]: expected an integer"));
  EXPECT_NEAR(static_cast<double>(wrong_type.offset.value()), static_cast<double>(8 + json.find("\"x\"")), 4);

  const Fault overlap = fault_of(testing::safetensors_file(
      R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}})",
      "123"));
  EXPECT_EQ(overlap.tensor, "b");
  EXPECT_THAT(overlap.text(), HasSubstr("tensor \"b\""));
}

TEST(Safetensors, ComposedHeadersAreParsed) {
  std::vector<FileTensor> tensors{{"wide \"quoted\" \u00e9", Dtype::F64, {3}},
                                  {"a[0:7]", Dtype::F32, {7}},
                                  {"none", Dtype::F32, {0}},
                                  {"narrow", Dtype::U8, {5, 1}}};
  const std::string header = compose_safetensors_header(tensors, {{"step", "3"}});
  EXPECT_EQ(header.size() % 64, 0u);
  const auto parsed = read(header + std::string(24 + 28 + 5, 'x'));
  EXPECT_EQ(parsed.data_begin, header.size());
  ASSERT_EQ(parsed.tensors.size(), 4u);
  EXPECT_EQ(parsed.tensors[0].name, tensors[0].name);
  EXPECT_EQ(parsed.tensors[3].begin, 52u);
  EXPECT_EQ(parsed.metadata.at("step"), "3");
}

TEST(Safetensors, NamesThatReadersRefuseAreNotWritten) {
  for (const std::string name : {"", "../x", "a/../b", "/x", "a\nb", "__metadata__", "bad\xff"}) {
    std::vector<FileTensor> tensors{{name, Dtype::U8, {1}}};
    EXPECT_THROW(compose_safetensors_header(tensors, {}), InvalidArgument) << name;
  }
}

}  // namespace
}  // namespace tesserae::checkpoint
