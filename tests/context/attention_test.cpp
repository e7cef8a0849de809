#include "tesserae/context/attention.h"

#include <ATen/autocast_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "tesserae/base/work.h"
#include "tests/context/numbers.h"
#include "tests/context/patterns.h"
#include "tests/support/ranks.h"

namespace tesserae::context {
namespace {

using testing::apart;
using ::testing::HasSubstr;
using testing::numbers;
using ::testing::ThrowsMessage;

constexpr int64_t batch = 2, width = 8;

std::shared_ptr<comm::MeshFabric> context_mesh(std::shared_ptr<comm::Fabric> job) {
  const mesh::Mesh mesh(job->size(), {.context = job->size()});
  return std::make_shared<comm::MeshFabric>(std::move(job), mesh);
}

/// Outputs and gradients of all positions, as one process computes them with a mask.
struct Reference {
  at::Tensor q, k, v, gradient, out;

  Reference(const Pattern& pattern, int64_t heads, int64_t kv_heads, at::ScalarType dtype)
      : q(numbers({batch, heads, pattern.length(), width}, 1, dtype).set_requires_grad(true)),
        k(numbers({batch, kv_heads, pattern.length(), width}, 2, dtype).set_requires_grad(true)),
        v(numbers({batch, kv_heads, pattern.length(), width}, 3, dtype).set_requires_grad(true)),
        gradient(numbers({batch, heads, pattern.length(), width}, 4, dtype)) {
    out = at::scaled_dot_product_attention(q, k.repeat_interleave(heads / kv_heads, 1),
                                           v.repeat_interleave(heads / kv_heads, 1), testing::mask_of(pattern), 0.0,
                                           false, 0.4);
    out.backward(gradient);
  }
};

void expect_reference(const ParallelPtr& parallel, const Pattern& pattern, int64_t heads, int64_t kv_heads,
                      const Pattern& cut_for, at::ScalarType dtype = at::kDouble, double tolerance = 1e-12) {
  SCOPED_TRACE(cat(to_string(pattern), " over ", parallel->size(), ", heads ", heads, " and ", kv_heads));
  const Reference whole(pattern, heads, kv_heads, dtype);
  const auto sequence = std::make_shared<const Sequence>(parallel, cut_for);
  const auto own = [&](const at::Tensor& x) { return sequence->own(x.detach(), 2); };
  const auto leaf = [&](const at::Tensor& x) { return own(x).clone().set_requires_grad(true); };
  const at::Tensor q = leaf(whole.q), k = leaf(whole.k), v = leaf(whole.v);
  const auto counted = [] { return static_cast<int64_t>(work_of_this_thread()[static_cast<size_t>(Work::pairs)]); };
  const int64_t before = counted();
  const at::Tensor out = attention(q, k, v, sequence, {.scale = 0.4, .pattern = pattern});
  if (parallel->method_for(heads, kv_heads) != Method::all_to_all) {
    int64_t pairs = 0;
    for (const Span& span : sequence->spans()) pairs += pattern.pairs(span);
    EXPECT_EQ(counted() - before, batch * pairs);
  } else {
    EXPECT_EQ(counted() - before, batch * (pattern.pairs({0, pattern.length()}) / parallel->size()));
  }
  EXPECT_LE(apart(out, own(whole.out)), tolerance);
  out.backward(own(whole.gradient));
  EXPECT_LE(counted() - before, batch * pattern.pairs({0, pattern.length()})) << "a backward does not count";
  EXPECT_LE(apart(q.grad(), own(whole.q.grad())), tolerance) << "queries";
  EXPECT_LE(apart(k.grad(), own(whole.k.grad())), tolerance) << "keys";
  EXPECT_LE(apart(v.grad(), own(whole.v.grad())), tolerance) << "values";
}

void expect_all_patterns(const ParallelPtr& parallel, bool every_length) {
  for (const Pattern& pattern : testing::patterns(13)) expect_reference(parallel, pattern, 4, 4, pattern);
  const Pattern causal(29);
  for (const int64_t kv_heads : {4, 8}) expect_reference(parallel, causal, 8, kv_heads, causal);
  // Cut for one pattern, attending by another: layers that differ in their windows.
  expect_reference(parallel, Pattern(29, true, 5), 4, 4, causal);
  if (!every_length) return;
  for (int64_t length = 1; length <= 9; ++length) {
    expect_reference(parallel, Pattern(length), 4, 4, Pattern(length));
    expect_reference(parallel, Pattern(length, false), 4, 4, Pattern(length, false));
  }
}

class Methods : public ::testing::TestWithParam<std::tuple<int, Method>> {};
INSTANTIATE_TEST_SUITE_P(All, Methods,
                         ::testing::Combine(::testing::Values(1, 2, 4),
                                            ::testing::Values(Method::p2p, Method::all_gather, Method::all_to_all)),
                         [](const auto& info) {
                           return cat(to_string(std::get<1>(info.param)), "_", std::get<0>(info.param));
                         });

TEST_P(Methods, AreAttention) {
  const auto [ranks, method] = GetParam();
  comm::run_local(
      ranks,
      [method = method](comm::Fabric& fabric) {
        const std::shared_ptr<comm::Fabric> job(&fabric, [](comm::Fabric*) {});
        expect_all_patterns(std::make_shared<const Parallel>(context_mesh(job), method), true);
      },
      std::chrono::minutes(1));
}

TEST_P(Methods, RoundOnceInBf16) {
  const auto [ranks, method] = GetParam();
  comm::run_local(
      ranks,
      [method = method](comm::Fabric& fabric) {
        const std::shared_ptr<comm::Fabric> job(&fabric, [](comm::Fabric*) {});
        const auto parallel = std::make_shared<const Parallel>(context_mesh(job), method);
        expect_reference(parallel, Pattern(40), 4, 4, Pattern(40), at::kBFloat16, 0.06);
        expect_reference(parallel, Pattern(40), 4, 4, Pattern(40), at::kFloat, 5e-6);
      },
      std::chrono::minutes(1));
}

// As processes: memory that ranks share, and the choice.
RANK_MAIN(attends_in_processes) {
  comm::FabricOptions options;
  options.backend = args.at(0);
  const auto job = comm::Fabric::connect(mesh::World::from_environment(), options);
  const auto mesh = context_mesh(job);
  const bool shares = args.at(0) == "shm";
  const auto parallel = std::make_shared<const Parallel>(mesh);
  EXPECT_EQ(parallel->method_for(4, 4), shares ? Method::shared : Method::all_to_all);
  EXPECT_EQ(parallel->method_for(3, 3), shares ? Method::shared : Method::p2p);
  expect_all_patterns(parallel, job->size() == 2);
  if (shares) {
    // Longer ones after shorter ones: the shared memory grows.
    for (const int64_t length : {64, 300, 10}) expect_reference(parallel, Pattern(length), 4, 2, Pattern(length));
  } else {
    EXPECT_THAT([&] { Parallel(mesh, Method::shared); },
                ThrowsMessage<InvalidArgument>(HasSubstr("needs ranks that share a host's memory")));
  }
}

TEST(ContextProcesses, ShareKeysAndValues) {
  for (const int ranks : {2, 4}) {
    const auto results = tesserae::testing::run_ranks("attends_in_processes", ranks, {"shm"});
    EXPECT_TRUE(results.all_succeeded()) << results.text();
  }
}

TEST(ContextProcesses, ExchangeThemOverGloo) {
  const auto results = tesserae::testing::run_ranks("attends_in_processes", 2, {"gloo"});
  EXPECT_TRUE(results.all_succeeded()) << results.text();
}

TEST(ContextAttention, RefusesWhatCannotBe) {
  comm::run_local(2, [](comm::Fabric& fabric) {
    const std::shared_ptr<comm::Fabric> job(&fabric, [](comm::Fabric*) {});
    const auto mesh = context_mesh(job);
    const auto parallel = std::make_shared<const Parallel>(mesh, Method::all_to_all);
    const auto sequence = std::make_shared<const Sequence>(parallel, Pattern(8));
    const auto refused = [&](const at::Tensor& q, const at::Tensor& k, const char* why) {
      EXPECT_THAT([&] { attention(q, k, k, sequence); }, ThrowsMessage<InvalidArgument>(HasSubstr(why)));
    };
    const at::Tensor x = numbers({2, 4, 4, 8}, 1);
    refused(numbers({2, 4, 8, 8}, 1), x, "dimension 2 has the positions of this rank");
    refused(x, numbers({2, 3, 4, 8}, 1), "the heads are a multiple");
    refused(x, numbers({1, 4, 4, 8}, 1), "batch and width are the same");
    refused(x[0], x, "tensors are [batch, heads, tokens, width]");
    refused(numbers({2, 3, 4, 8}, 1), numbers({2, 3, 4, 8}, 1), "2 ranks do not divide 3 heads");
    EXPECT_THAT([&] { attention(x, x, x, sequence, {.pattern = Pattern(9)}); },
                ThrowsMessage<InvalidArgument>(HasSubstr("the pattern has 9 positions, the sequence 8")));
  });
  EXPECT_THAT([] { method_from_name("ring"); },
              ThrowsMessage<InvalidArgument>(HasSubstr("none of auto, shared, p2p, all_gather, all_to_all")));
}

// Features that do not lie side by side: torch's kernel for the CPU would read others.
TEST(ContextAttention, TakesAnyStrides) {
  const auto sequence = std::make_shared<const Sequence>(std::make_shared<const Parallel>(), Pattern(9));
  const auto turned = [](uint64_t seed) { return numbers({2, 4, 8, 9}, seed).set_requires_grad(true); };
  const at::Tensor x = turned(1), y = x.detach().clone().set_requires_grad(true);
  const at::Tensor gradient = numbers({2, 4, 8, 9}, 2).transpose(2, 3);
  const auto attended = [&](const at::Tensor& q) { return attention(q, q, q, sequence); };
  const at::Tensor out = attended(x.transpose(2, 3)), expected = attended(y.transpose(2, 3).contiguous());
  EXPECT_LE(apart(out, expected), 1e-12);
  EXPECT_LE(apart(out, at::scaled_dot_product_attention(y.transpose(2, 3), y.transpose(2, 3), y.transpose(2, 3), {},
                                                        0.0, true)),
            1e-12);
  out.backward(gradient);
  expected.backward(gradient.contiguous());
  EXPECT_LE(apart(x.grad(), y.grad()), 1e-12);
}

TEST(ContextAttention, RanksWithOtherTokensAreNamed) {
  comm::run_local(2, [](comm::Fabric& fabric) {
    const std::shared_ptr<comm::Fabric> job(&fabric, [](comm::Fabric*) {});
    const Parallel parallel(context_mesh(job));
    const at::Tensor tokens = at::arange(6, at::kLong).view({2, 3});
    parallel.require_same(tokens);
    EXPECT_THAT([&] { parallel.require_same(tokens + fabric.rank()); },
                ThrowsMessage<InvalidArgument>(HasSubstr("context ranks 0 and 1 were given different tokens")));
    EXPECT_THAT([&] { parallel.require_same(tokens.narrow(1, 0, 2 + fabric.rank())); },
                ThrowsMessage<InvalidArgument>(HasSubstr("(4 and 6 of them)")));
  });
}

TEST(ContextAttention, ComputesAsAutocastSays) {
  const auto sequence = std::make_shared<const Sequence>(std::make_shared<const Parallel>(), Pattern(8));
  const at::Tensor x = numbers({2, 4, 8, 8}, 1, at::kFloat);
  at::autocast::set_autocast_enabled(at::kCPU, true);
  const at::Tensor out = attention(x, x.to(at::kBFloat16), x, sequence);
  at::autocast::set_autocast_enabled(at::kCPU, false);
  EXPECT_EQ(out.scalar_type(), at::kBFloat16);
}

}  // namespace
}  // namespace tesserae::context
