#include "tesserae/checkpoint/manifest.h"

#include <gmock/gmock.h>

#include "tesserae/base/checksum.h"
#include "tesserae/checkpoint/fault.h"
#include "tesserae/checkpoint/manifest_text.h"

namespace tesserae::checkpoint {
namespace {

using ::testing::HasSubstr;

Manifest sample() {
  Manifest manifest;
  manifest.step = 7;
  manifest.attempt = "abc-0";
  manifest.layout = mesh::Layout(4, {2, 2, 4});
  manifest.block_bytes = 512;
  manifest.files = {{"rank-0.safetensors", 1000, {1, 2}}, {"rank-1.safetensors", 512, {~uint64_t{0}}}};
  manifest.tensors = {{"model/a", Dtype::F32, {3, 5}, {{0, {0, 10}, 64}, {1, {10, 15}, 0}}},
                      {"model/none", Dtype::U8, {0}, {}},
                      {"optimizer/step/a", Dtype::F32, {}, {{0, {0, 1}, 104}}}};
  manifest.training = {{"lr", 0.25}, {"nested", {{"list", {1, -2, nullptr, true}}}}};
  return manifest;
}

std::string refusal_of(const std::string& text, Coverage coverage = Coverage::checkpoint) {
  try {
    parse_manifest_unchecked(text, "m.json", coverage);
  } catch (const Damaged& damaged) {
    return damaged.fault().text();
  }
  return "";
}

std::string replaced(std::string text, const std::string& from, const std::string& to) {
  const size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return text.replace(at, from.size(), to);
}

TEST(Manifest, TextComesBack) {
  const Manifest before = sample();
  const std::string text = to_text(before);
  EXPECT_EQ(nlohmann::json::parse(text)["step"], 7);  // any reader of JSON can
  const Manifest after = parse_manifest(text, "m.json");
  EXPECT_EQ(after.step, 7);
  EXPECT_EQ(after.attempt, "abc-0");
  EXPECT_EQ(after.layout, before.layout);
  EXPECT_EQ(after.block_bytes, 512u);
  EXPECT_EQ(after.files[1].blocks, before.files[1].blocks);
  EXPECT_EQ(after.files[0].bytes, 1000u);
  EXPECT_EQ(after.training, before.training);
  ASSERT_EQ(after.tensors.size(), 3u);
  EXPECT_EQ(after.find("model/a")->extents[1].elements, (mesh::Range{10, 15}));
  EXPECT_EQ(after.find("model/a")->extents[0].offset, 64u);
  EXPECT_EQ(after.find("model/zzz"), nullptr);
  EXPECT_EQ(to_text(after), text);
}

TEST(Manifest, EveryChangedByteIsFound) {
  const std::string text = to_text(sample());
  for (size_t i = 0; i < text.size(); ++i) {
    std::string changed = text;
    changed[i] = static_cast<char>(changed[i] ^ (1 << i % 8));
    EXPECT_THROW(parse_manifest(changed, "m.json"), Damaged) << i;
    EXPECT_THROW(parse_manifest(text.substr(0, i), "m.json"), Damaged) << i;
  }
  EXPECT_THROW(parse_manifest(text + "\n", "m.json"), Damaged);
}

TEST(Manifest, NewerVersionsAreToldApartFromDamage) {
  const std::string newer = replaced(to_text(sample()), "\"version\":1", "\"version\":3");
  EXPECT_THROW(parse_manifest_unchecked(newer, "m.json", Coverage::checkpoint), InvalidArgument);
  EXPECT_THROW(parse_manifest(newer, "m.json"), Damaged);  // nobody wrote that text
}

TEST(Manifest, RefusesWhatCanNotBe) {
  const std::string text = to_text(sample());
  EXPECT_EQ(refusal_of(text), "");
  const std::vector<std::array<std::string, 3>> cases{
      {"\"step\":7", "\"step\":-7", "step: expected an integer of 0 or more, found a negative number"},
      {"\"step\":7", "\"step\":7,\"step\":7", "step: key occurs twice"},
      {"\"step\":7,\n", "", "key \"step\" is missing"},
      {"\"step\":7", "\"step\":7,\"more\":1", "more: unknown key"},
      {"\"step\":7", "\"step\":\"7\"", "found a string"},
      {"\"ranks\":4", "\"ranks\":6", "layout"},
      {"\"ranks\":4", "\"ranks\":0", "0 ranks"},
      {"\"block_bytes\":512", "\"block_bytes\":511", "no power of two"},
      {"\"block_bytes\":512", "\"block_bytes\":256", "no power of two"},
      {"\"block_bytes\":512", "\"block_bytes\":1073741824", "no power of two"},
      {"\"bytes\":1000", "\"bytes\":2000", "2 checksums for 4 blocks"},
      {"\"bytes\":1000", "\"bytes\":9223372036854775807", "2 checksums"},
      {"\"bytes\":1000", "\"bytes\":9223372036854775808", "too large"},
      {"rank-1.safetensors", "../rank-1.safetensors", "begins with a dot"},
      {"rank-1.safetensors", "a/b", "not allowed"},
      {"rank-1.safetensors", "rank-0.safetensors", "occurs twice"},
      {"ffffffffffffffff", "fffffffffffffffe", "is not that of its blocks"},
      {"ffffffffffffffff", "FFFFFFFFFFFFFFFF", "hexadecimal"},
      {"ffffffffffffffff", "fff", "16 digits"},
      {"\"model/a\"", "\"../a\"", "component \"..\""},
      {"\"model/a\"", "\"model/none\"", "stands behind"},
      {"\"model/a\"", "\"model/z\"", "stands behind"},
      {"\"F32\"", "\"F4\"", "cannot be cut"},
      {"\"F32\"", "\"nope\"", "unknown type"},
      {"[3,5]", "[3,6]", "elements [15, 18) are missing"},
      {"[3,5]", "[3,4]", "of 12 elements"},
      {"[3,5]", "[4294967296,4294967296]", "overflows"},
      {"[1,10,15,0]", "[1,9,15,0]", "begins before 10"},
      {"[1,10,15,0]", "[1,11,15,0]", "elements [10, 11) are missing"},
      {"[1,10,15,0]", "[2,10,15,0]", "file 2 of 2"},
      {"[1,10,15,0]", "[1,10,15,500]", "ends beyond"},
      {"[1,10,15,0]", "[1,10,15,9223372036854775807]", "ends beyond"},
      {"[1,10,15,0]", "[1,10,15,2]", "not aligned"},
      {"[1,10,15,0]", "[0,10,15,100]", "overlap"},
      {"[1,10,15,0]", "[1,15,10,0]", "part [15, 10)"},
      {"[1,10,15,0]", "[1,10,15]", "expected [file, begin, end, offset]"},
      {"[1,10,15,0]", "[1,10,15,0,0]", "too many values"},
      {"[1,10,15,0]", "[[1],10,15,0]", "found a list"},
      {"\"nested\"", "\"lr\"", "occurs twice"},
      {"{\"lr\"", "[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[{\"lr\"", "more than 32 levels"},
      {"tesserae-checkpoint", "something", "expected \"tesserae-checkpoint\""},
  };
  for (const auto& [from, to, expected] : cases) {
    EXPECT_THAT(refusal_of(replaced(text, from, to)), HasSubstr(expected)) << from << " -> " << to;
  }
}

Manifest split_sample() {
  Manifest manifest = sample();
  manifest.axes.tensor = 2;
  manifest.tensors[0].shape = {3, 5, 2};
  manifest.tensors[0].extents = {{0, {0, 10}, 64}, {1, {10, 30}, 0}};
  manifest.tensors[0].split = mesh::Split{.dim = 1, .parts = 5};
  return manifest;
}

TEST(Manifest, SplitTensorsComeBackAndNeedVersion2) {
  const std::string text = to_text(split_sample());
  EXPECT_THAT(text, HasSubstr("\"version\":2,"));
  EXPECT_THAT(to_text(sample()), HasSubstr("\"version\":1,"));
  const Manifest after = parse_manifest(text, "m.json");
  EXPECT_EQ(after.axes.tensor, 2);
  EXPECT_EQ(after.find("model/a")->split, (mesh::Split{.dim = 1, .parts = 5}));
  EXPECT_EQ(after.find("model/none")->split, mesh::Split{});
  EXPECT_EQ(to_text(after), text);
}

TEST(Manifest, RefusesSplitsThatCanNotBe) {
  const std::string text = to_text(split_sample());
  EXPECT_EQ(refusal_of(text), "");
  const std::string split = R"("split":{"dim":1,"parts":5,"blocks":1})";
  const std::vector<std::array<std::string, 3>> cases{
      {"\"version\":2", "\"version\":1", "says version 1 and is version 2"},
      {split, R"("split":{"dim":1,"parts":5})", "key \"blocks\" is missing"},
      {split, R"("split":{"dim":1,"parts":5,"blocks":1,"index":0})", "unknown key"},
      {split, R"("split":{"dim":1,"parts":5,"blocks":1,"blocks":1})", "occurs twice"},
      {split, R"("split":[1,5,1])", "found a list"},
      {split, R"("split":{"dim":1,"parts":4,"blocks":1})", "these numbers of parts would do: 1, 5"},
      {split, R"("split":{"dim":1,"parts":5,"blocks":2})", "no multiple of the number of blocks"},
      {split, R"("split":{"dim":3,"parts":5,"blocks":1})", "no such dimension"},
      {split, R"("split":{"dim":9223372036854775807,"parts":5,"blocks":1})", "dimension 9223372036854775807"},
      {split, R"("split":{"dim":1,"parts":9223372036854775807,"blocks":1})", "ranks"},
      {split, R"("split":{"dim":1,"parts":0,"blocks":1})", "0 ranks"},
      {split, R"("split":{"dim":1,"parts":1,"blocks":1})", "a split in one part"},
      {split, R"("split":{"dim":1,"parts":5,"blocks":0})", "0 ranks"},
      {split, R"("split":{"dim":0,"parts":3,"blocks":1})", "simpler name"},
      {"\"tensor\":2", "\"tensor\":0", "0 ranks"},
      {"\"tensor\":2", "\"tensor\":-1", "negative"},
      {"\"tensor\":2", "\"tensor\":9223372036854775807", "ranks"},
  };
  for (const auto& [from, to, expected] : cases) {
    EXPECT_THAT(refusal_of(replaced(text, from, to)), HasSubstr(expected)) << from << " -> " << to;
  }
}

TEST(Manifest, SplitsNameTheirAxes) {
  Manifest manifest = split_sample();
  const mesh::Split experts{.dim = 0, .parts = 3, .axis = mesh::Axis::expert};
  manifest.tensors[0].shape = {6, 5};
  manifest.tensors[0].split = {experts, {.dim = 1, .parts = 5}};
  const std::string text = to_text(manifest);
  const std::string split =
      R"("split":{"dim":0,"parts":3,"blocks":1,"axis":"expert","then":{"dim":1,"parts":5,"blocks":1}})";
  EXPECT_THAT(text, HasSubstr(split));
  const Manifest after = parse_manifest(text, "m.json");
  EXPECT_EQ(after.find("model/a")->split, manifest.tensors[0].split);
  EXPECT_EQ(after.find("model/none")->split, mesh::Split{});
  EXPECT_EQ(to_text(after), text);
  const std::vector<std::array<std::string, 3>> cases{
      {"\"expert\"", "\"experts\"", "unknown axis \"experts\"; there are tensor, context, data, expert"},
      {"\"expert\"", "\"tensor\"", "along an axis once"},
      {"\"expert\"", "7", "found an integer"},
      {R"("blocks":1}})", R"("blocks":1,"axis":"expert"}})", "along an axis once"},
      {R"("blocks":1}})", R"("blocks":1,"then":{"dim":1,"parts":5,"blocks":1}}})", "unknown key"},
      {R"("parts":5,"blocks":1}})", R"("parts":1,"blocks":1}})", "a split in one part"},
      {R"("parts":5,"blocks":1}})", R"("parts":5}})", "key \"blocks\" is missing"},
      {R"("parts":5,"blocks":1}})", R"("parts":4,"blocks":1}})", "these numbers of parts would do: 1, 5"},
      {R"("parts":3)", R"("parts":6)", "simpler name"},
  };
  for (const auto& [from, to, expected] : cases) {
    EXPECT_THAT(refusal_of(replaced(text, from, to)), HasSubstr(expected)) << from << " -> " << to;
  }
}

TEST(Manifest, LayoutsNameTheAxesOfTheMesh) {
  Manifest manifest = sample();
  manifest.axes = {.tensor = 2, .context = 2, .expert = 4};
  const std::string text = to_text(manifest);
  EXPECT_THAT(text, HasSubstr("\"tensor\":2,\"context\":2,\"expert\":4}"));
  const Manifest after = parse_manifest(text, "m.json");
  EXPECT_EQ(after.axes, manifest.axes);
  EXPECT_EQ(to_string(after.mesh()), "8 ranks = tensor 2 x context 2 x data 2 = tensor 2 x expert 4 x expert_data 1");
  EXPECT_EQ(to_text(after), text);
  EXPECT_THAT(refusal_of(replaced(text, "\"context\":2", "\"context\":3")), HasSubstr("does not divide the 4 ranks"));
  EXPECT_THAT(refusal_of(replaced(text, "\"context\":2", "\"data\":2")), HasSubstr("unknown key"));
  EXPECT_THAT(refusal_of(replaced(text, "\"tensor\":2", "\"tensor\":16777216")), HasSubstr("67108864 ranks"));
  manifest.axes.expert = 3;
  EXPECT_THROW(to_text(manifest), InvalidArgument);
}

TEST(Manifest, FragmentsMayHaveGaps) {
  const std::string text = replaced(to_text(sample()), "[3,5]", "[3,6]");
  EXPECT_EQ(refusal_of(text, Coverage::fragment), "");
}

Manifest fragment(int rank, std::vector<StoredTensor> tensors) {
  Manifest manifest = sample();
  manifest.files = {{cat("rank-", rank, ".safetensors"), 512, {5}}};
  manifest.tensors = std::move(tensors);
  return manifest;
}

TEST(Manifest, JoinsWhatRanksWrote) {
  const Manifest whole =
      join({fragment(0, {{"a", Dtype::F32, {4}, {{0, {2, 4}, 64}}}}),
            fragment(1, {{"a", Dtype::F32, {4}, {{0, {0, 2}, 128}}}, {"b", Dtype::U8, {1}, {{0, {0, 1}, 0}}}})});
  EXPECT_EQ(whole.files.size(), 2u);
  ASSERT_EQ(whole.tensors.size(), 2u);
  EXPECT_EQ(whole.tensors[0].extents[0].file, 1);
  EXPECT_EQ(whole.tensors[0].extents[1].file, 0);
}

TEST(Manifest, JoinFindsWhatDoesNotFit) {
  auto failure = [](std::vector<Manifest> fragments) -> std::string {
    try {
      join(std::move(fragments));
    } catch (const InvalidArgument& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_THAT(failure({}), HasSubstr("no rank"));
  EXPECT_THAT(failure({fragment(0, {{"a", Dtype::F32, {4}, {{0, {2, 4}, 64}}}})}), HasSubstr("[0, 2) are missing"));
  EXPECT_THAT(failure({fragment(0, {{"a", Dtype::F32, {4}, {{0, {0, 4}, 64}}}}),
                       fragment(1, {{"a", Dtype::F32, {4}, {{0, {2, 4}, 64}}}})}),
              HasSubstr("begins before 4"));
  EXPECT_THAT(failure({fragment(0, {{"a", Dtype::F32, {4}, {{0, {0, 2}, 64}}}}),
                       fragment(1, {{"a", Dtype::F32, {5}, {{0, {2, 4}, 64}}}})}),
              HasSubstr("disagree about type, shape or split of tensor \"a\""));
}

TEST(Checksum, IsXxh3) {
  // Of xxHash's own test program: XXH3_64bits of nothing, seed 0.
  EXPECT_EQ(to_hex(checksum("")), "2d06800538d394c2");
  EXPECT_EQ(from_hex("2d06800538d394c2"), checksum(""));
  EXPECT_EQ(from_hex("2D06800538D394C2"), std::nullopt);
  EXPECT_EQ(from_hex("2d06800538d394c"), std::nullopt);
  EXPECT_NE(checksum_of_blocks({1, 2}), checksum_of_blocks({2, 1}));
}

}  // namespace
}  // namespace tesserae::checkpoint
