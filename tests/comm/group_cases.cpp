#include "tests/comm/group_cases.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/add.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/count_nonzero.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <initializer_list>
#include <numeric>
#include <span>

#include "tesserae/comm/several.h"
#include "tesserae/os/clock.h"

namespace tesserae::comm {

namespace {

// Where the tensors of a case lie: on the device of the fabric that it runs on, one a thread.
thread_local c10::Device device_of_case = c10::kCPU;

at::TensorOptions of(at::ScalarType dtype) {
  return at::TensorOptions().dtype(dtype).device(device_of_case);
}

template <void (*body)(Fabric& fabric)>
void run_case(Fabric& fabric) {
  device_of_case = fabric.device();
  body(fabric);
}

const at::ScalarType kDtypes[] = {at::kFloat, at::kBFloat16, at::kHalf, at::kLong};
// Elements of a piece: nothing, one, odd, more than one chunk of a pipelined transfer.
constexpr int64_t kLarge = (int64_t{5} << 20) / 4 + 7;
const int64_t kPieces[] = {0, 1, 3, 1009, kLarge};

std::vector<int> everyone_backwards(const Fabric& fabric) {
  std::vector<int> members(static_cast<size_t>(fabric.size()));
  std::iota(members.rbegin(), members.rend(), 0);
  return members;
}

// Members of a host need not lie side by side: those of gradient groups do not.
std::vector<int> everyone_even_first(Fabric& fabric) {
  std::vector<int> members = fabric.everyone().members();
  std::ranges::stable_partition(members, [](int rank) { return rank % 2 == 0; });
  return members;
}

std::vector<std::vector<int>> orders(Fabric& fabric) {
  return {fabric.everyone().members(), everyone_backwards(fabric), everyone_even_first(fabric)};
}

// Small integers, so that sums over a few members are exact in every dtype: 1 to 7 over and over, times the factor, as
// they are `from` elements into it. Copies of one tile: the cases compare hundreds of millions of elements.
at::Tensor sevens(int factor, int64_t elements, at::ScalarType dtype, int64_t from = 0) {
  constexpr int64_t row = int64_t{7} << 12;
  const auto tile = at::arange(from % 7, from % 7 + row, of(at::kLong)).remainder(7).add(1).mul(factor).to(dtype);
  const int64_t rows = (elements + row - 1) / row;
  return tile.expand({rows, row}).reshape({rows * row}).narrow(0, 0, elements);
}

at::Tensor pattern(int member, int64_t elements, at::ScalarType dtype) {
  return sevens(member + 1, elements, dtype);
}

at::Tensor pattern_sum(int members, int64_t elements, at::ScalarType dtype, int64_t from = 0) {
  return sevens(members * (members + 1) / 2, elements, dtype, from);
}

at::Tensor noise(const Fabric& fabric, int64_t elements) {
  auto values = at::randn({elements}, of(at::kFloat));
  return values.mul_(fabric.rank() + 1);
}

/// Calls body(group, dtype, elements) for groups of all orders, dtypes and sizes. Large ones in all orders, and of all
/// dtypes, but not each in each: making and comparing them is nearly all that a case takes.
template <typename Body>
void for_all_pieces(Fabric& fabric, Traffic traffic, std::span<const at::ScalarType> dtypes, const Body& body) {
  const auto all = orders(fabric);
  for (const auto& members : all) {
    auto& group = fabric.group(members, traffic);
    for (const auto dtype : dtypes) {
      for (const int64_t elements : kPieces) {
        if (elements == kLarge && dtype != at::kFloat && &members != &all.back()) continue;
        SCOPED_TRACE(::testing::Message() << dtype << " x " << elements);
        body(group, dtype, elements);
      }
    }
  }
}

at::Tensor piece(const at::Tensor& buffer, int index, int pieces) {
  const int64_t length = buffer.numel() / pieces;
  return buffer.narrow(0, index * length, length);
}

void all_gather_fills_the_pieces_of_the_others(Fabric& fabric) {
  for_all_pieces(fabric, Traffic::gather, kDtypes, [](Group& group, at::ScalarType dtype, int64_t elements) {
    const int size = group.size();
    auto buffer = at::full({elements * size}, 99, of(dtype));
    piece(buffer, group.rank(), size).copy_(pattern(group.rank(), elements, dtype));
    group.all_gather(buffer);
    for (int member = 0; member < size; ++member) {
      EXPECT_TRUE(at::equal(piece(buffer, member, size), pattern(member, elements, dtype))) << "member " << member;
    }
  });
}

void all_gather_to_fills_another_buffer(Fabric& fabric) {
  constexpr at::ScalarType dtypes[] = {at::kFloat, at::kBFloat16};
  for_all_pieces(fabric, Traffic::gather, dtypes, [](Group& group, at::ScalarType dtype, int64_t elements) {
    const int size = group.size();
    const auto own = pattern(group.rank(), elements, dtype), input = own.clone();
    auto output = at::full({elements * size}, 99, of(dtype));
    if (group.rank() == 1) {  // whoever has its piece there already
      piece(output, group.rank(), size).copy_(own);
      group.all_gather(output);
    } else {
      group.all_gather_to(output, input);
    }
    EXPECT_TRUE(at::equal(input, own));
    for (int member = 0; member < size; ++member) {
      EXPECT_TRUE(at::equal(piece(output, member, size), pattern(member, elements, dtype))) << "member " << member;
    }
  });
  for (const auto& members : orders(fabric)) {
    auto& group = fabric.group(members, Traffic::gather);
    const int size = group.size();
    EXPECT_THROW(group.all_gather_to(at::zeros({2 * size + 1}, of(at::kFloat)), at::zeros({2}, of(at::kFloat))),
                 InvalidArgument);
    EXPECT_THROW(group.all_gather_to(at::zeros({2 * size}, of(at::kFloat)), at::zeros({2}, of(at::kLong))),
                 InvalidArgument);
  }
}

void shared_memory_is_the_same_for_all_members(Fabric& fabric) {
  constexpr int64_t page = 4096;
  auto& group = fabric.everyone();
  at::Tensor memory = group.share(page * group.size());
  const auto have = at::full({1}, memory.defined() ? 1 : 0, of(at::kLong));
  group.all_reduce(have);
  EXPECT_EQ(have.item<int64_t>(), memory.defined() ? group.size() : 0) << "all have it, or none";
  if (!memory.defined()) return;
  EXPECT_EQ(memory.scalar_type(), at::kByte);
  ASSERT_EQ(memory.numel(), page * group.size());
  EXPECT_EQ(memory.count_nonzero().item<int64_t>(), 0);
  group.barrier();
  piece(memory, group.rank(), group.size()).fill_(group.rank() + 1);
  group.barrier();
  const auto expect_all = [&] {
    for (int member = 0; member < group.size(); ++member) {
      EXPECT_TRUE(at::equal(piece(memory, member, group.size()), at::full({page}, member + 1, at::kByte))) << member;
    }
  };
  expect_all();
  group.barrier();
  if (group.rank() == 0) memory.reset();  // who made it
  group.barrier();
  if (memory.defined()) expect_all();
}

void reduce_scatter_leaves_the_sum_in_the_own_piece(Fabric& fabric) {
  for_all_pieces(fabric, Traffic::reduce, kDtypes, [](Group& group, at::ScalarType dtype, int64_t elements) {
    auto buffer = pattern(group.rank(), elements * group.size(), dtype);
    const auto sum = pattern_sum(group.size(), elements, dtype, elements * group.rank());  // of the own piece
    group.reduce_scatter(buffer);
    EXPECT_TRUE(at::equal(piece(buffer, group.rank(), group.size()), sum));
  });
}

void reduce_scatter_scaled_leaves_the_same_sum_elsewhere(Fabric& fabric) {
  constexpr at::ScalarType dtypes[] = {at::kFloat, at::kBFloat16, at::kHalf};
  for_all_pieces(fabric, Traffic::reduce, dtypes, [](Group& group, at::ScalarType dtype, int64_t elements) {
    const int size = group.size();
    auto in_place = pattern(group.rank(), elements * size, dtype), buffer = in_place.clone();
    auto output = at::full({elements}, 99, of(dtype));
    group.reduce_scatter(in_place);
    group.reduce_scatter_scaled(output, buffer, 0.25);
    EXPECT_TRUE(at::equal(output, piece(in_place, group.rank(), size).mul(0.25)));
  });
}

// Of sizes and dtypes that are packed, and of one that is not.
std::vector<at::Tensor> several(const Group& group) {
  std::vector<at::Tensor> buffers;
  for (const auto& [elements, dtype] : std::initializer_list<std::pair<int64_t, at::ScalarType>>{{3, at::kFloat},
                                                                                                 {1009, at::kBFloat16},
                                                                                                 {200'000, at::kFloat},
                                                                                                 {0, at::kFloat},
                                                                                                 {1009, at::kFloat},
                                                                                                 {1, at::kBFloat16},
                                                                                                 {5, at::kHalf}}) {
    buffers.push_back(pattern(group.rank(), elements * group.size(), dtype));
  }
  return buffers;
}

void several_buffers_end_as_each_by_itself(Fabric& fabric) {
  for (const auto& members : orders(fabric)) {
    auto& group = fabric.group(members, Traffic::reduce);
    const int size = group.size(), own = group.rank();
    const auto each = [&](const auto& run, const auto& run_all, bool only_own) {
      auto alone = several(group), together = several(group);
      for (const auto& buffer : alone) run(buffer);
      run_all(together);
      for (size_t i = 0; i < alone.size(); ++i) {
        const auto seen = [&](const at::Tensor& buffer) { return only_own ? piece(buffer, own, size) : buffer; };
        EXPECT_TRUE(at::equal(seen(together[i]), seen(alone[i]))) << "buffer " << i;
      }
    };
    each([&](const auto& buffer) { group.all_gather(buffer); },
         [&](const auto& buffers) { all_gather(group, buffers, {}); }, false);
    each([&](const auto& buffer) { group.all_reduce(buffer); },
         [&](const auto& buffers) { all_reduce(group, buffers, {}); }, false);
    each([&](const auto& buffer) { group.reduce_scatter(buffer); },
         [&](const auto& buffers) {
           std::vector<ReduceScatter> all;
           for (const auto& buffer : buffers) all.push_back({buffer});
           reduce_scatter(group, all, {});
         },
         true);

    auto alone = several(group), together = several(group);
    std::vector<ReduceScatter> all;
    std::vector<at::Tensor> outputs;
    for (size_t i = 0; i < alone.size(); ++i) {
      outputs.push_back(at::full({together[i].numel() / size}, 99, of(together[i].scalar_type())));
      group.reduce_scatter(alone[i]);
      all.push_back({together[i], outputs[i], 0.25});
    }
    reduce_scatter(group, all, {});
    for (size_t i = 0; i < alone.size(); ++i) {
      EXPECT_TRUE(at::equal(outputs[i], piece(alone[i], own, size).mul(0.25))) << "buffer " << i;
    }
  }
}

void all_reduce_gives_all_the_same_bits(Fabric& fabric) {
  auto& group = fabric.everyone();
  for (const int64_t elements : {int64_t{0}, int64_t{1}, int64_t{1009}, int64_t{300'007}, int64_t{3'000'001}}) {
    for (const auto dtype : kDtypes) {
      if (elements > kLarge && dtype != at::kFloat) continue;
      auto buffer = pattern(group.rank(), elements, dtype);
      group.all_reduce(buffer);
      EXPECT_TRUE(at::equal(buffer, pattern_sum(group.size(), elements, dtype))) << dtype << " x " << elements;
    }
    for (const auto dtype : {at::kFloat, at::kBFloat16}) {
      auto mine = noise(fabric, elements).to(dtype);
      group.all_reduce(mine);
      auto first = mine.clone();
      group.broadcast(first, 0);
      EXPECT_TRUE(at::equal(mine, first)) << dtype << " x " << elements;
    }
  }
}

// 256 + 1 is 256 in bf16: sums that were rounded at each member would forget all ones. What crosses hosts has bf16's
// eight bits once more.
void sums_of_low_precision_are_formed_in_fp32(Fabric& fabric) {
  for (const auto& members : orders(fabric)) {
    auto& group = fabric.group(members, Traffic::reduce);
    const int size = group.size();
    const double expected = 256 + size - 1;
    for (const int64_t elements : {int64_t{5}, int64_t{100'003}}) {
      auto buffer = at::full({elements * size}, group.rank() == 0 ? 256 : 1, of(at::kBFloat16));
      auto everywhere = buffer.clone();
      group.reduce_scatter(buffer);
      group.all_reduce(everywhere);
      for (const auto& sum : {piece(buffer, group.rank(), size), everywhere}) {
        EXPECT_LE((sum.to(at::kFloat) - expected).abs().max().item<double>(), expected / 256) << "x " << elements;
      }
    }
  }
}

void sums_are_the_same_every_time(Fabric& fabric) {
  auto& group = fabric.group(fabric.everyone().members(), Traffic::reduce);
  const auto values = noise(fabric, 400'000 * group.size());
  auto first = values.clone(), second = values.clone();
  group.reduce_scatter(first);
  group.reduce_scatter(second);
  EXPECT_TRUE(at::equal(piece(first, group.rank(), group.size()), piece(second, group.rank(), group.size())));
}

// The blocks that a scale is shared by are pieces of a member's own: the bound is that of the largest element of all.
void what_is_packed_is_as_close_as_its_wire(Fabric& fabric) {
  for (const auto& [wire, share] : {std::pair(Wire::int8, 1.0 / 254), std::pair(Wire::int4, 1.0 / 14)}) {
    for (const auto& members : orders(fabric)) {
      auto& group = fabric.group(members, Traffic::gather);
      const int size = group.size();
      for (const int64_t elements : {int64_t{3}, int64_t{4001}, int64_t{300'007}}) {
        const auto values = noise(fabric, elements * size);
        auto exact = values.clone(), packed = values.clone();
        auto bound = at::full({1}, values.abs().max().item<double>(), of(at::kDouble));
        group.all_reduce(bound, {}, Reduction::maximum);
        const double off = share * bound.item<double>() * 1.001;
        const auto distance = [](const at::Tensor& a, const at::Tensor& b) {
          return (a - b).abs().max().item<double>();
        };

        group.all_gather(exact);
        group.all_gather(packed, {}, wire);
        EXPECT_LE(distance(packed, exact), off) << wire << " x " << elements;
        auto of_first = packed.clone();
        group.broadcast(of_first, 0);
        EXPECT_TRUE(at::equal(packed, of_first)) << "all members have the same bits";

        exact.copy_(values), packed.copy_(values);
        group.reduce_scatter(exact);
        group.reduce_scatter(packed, {}, Reduction::sum, wire);
        const auto own = [&](const at::Tensor& buffer) { return piece(buffer, group.rank(), size); };
        EXPECT_LE(distance(own(packed), own(exact)), off * (size - 1)) << wire << " x " << elements;

        exact = values.narrow(0, 0, elements * size - 1).clone(), packed = exact.clone();  // not of equal pieces
        of_first = exact.clone();
        group.all_reduce(exact);
        group.all_reduce(packed, {}, Reduction::sum, wire);
        EXPECT_LE(distance(packed, exact), off * (size - 1)) << wire << " x " << elements;
        of_first.copy_(packed);
        group.broadcast(of_first, 0);
        EXPECT_TRUE(at::equal(packed, of_first)) << "all members have the same bits";
      }
    }
  }
}

void broadcast_gives_all_what_the_root_has(Fabric& fabric) {
  auto& group = fabric.everyone();
  for (int root = 0; root < group.size(); ++root) {
    for (const int64_t elements : kPieces) {
      auto buffer = pattern(group.rank(), elements, at::kBFloat16);
      group.broadcast(buffer, root);
      EXPECT_TRUE(at::equal(buffer, pattern(root, elements, at::kBFloat16))) << "root " << root << " x " << elements;
    }
  }
}

// Member i sends i + j elements to member j; each pair carries a pattern of its own.
void all_to_all_delivers_uneven_counts(Fabric& fabric) {
  auto& group = fabric.everyone();
  const int self = group.rank();
  std::vector<int64_t> counts;
  std::vector<at::Tensor> outgoing, expected;
  for (int peer = 0; peer < group.size(); ++peer) {
    counts.push_back(self + peer);
    outgoing.push_back(pattern(self * 10 + peer, self + peer, at::kLong));
    expected.push_back(pattern(peer * 10 + self, self + peer, at::kLong));
  }
  const auto input = at::cat(outgoing);
  auto output = at::zeros_like(input);
  group.all_to_all(output, input, counts, counts);
  EXPECT_TRUE(at::equal(output, at::cat(expected)));
}

// A ring of which the last member is left out: it does not call. Messages between two members match in order.
void exchange_runs_between_those_that_take_part(Fabric& fabric) {
  auto& group = fabric.everyone();
  const int ring = std::max(2, group.size() - 1);
  if (group.rank() >= ring) return;
  const int next = (group.rank() + 1) % ring, previous = (group.rank() + ring - 1) % ring;
  const auto a = pattern(group.rank(), 1000, at::kFloat), b = pattern(group.rank() + 20, 1000, at::kFloat);
  auto first = at::zeros({1000}, of(at::kFloat)), second = at::zeros({1000}, of(at::kFloat));
  group.exchange({{next, a}, {next, b}}, {{previous, first}, {previous, second}});
  EXPECT_TRUE(at::equal(first, pattern(previous, 1000, at::kFloat)));
  EXPECT_TRUE(at::equal(second, pattern(previous + 20, 1000, at::kFloat)));
}

void messages_to_oneself_are_copies(Fabric& fabric) {
  auto& group = fabric.everyone();
  auto here = at::zeros({5}, of(at::kFloat));
  group.exchange({{group.rank(), pattern(3, 5, at::kFloat)}}, {{group.rank(), here}});
  EXPECT_TRUE(at::equal(here, pattern(3, 5, at::kFloat)));
}

void barrier_waits_for_the_last(Fabric& fabric) {
  auto& group = fabric.everyone();
  auto latest = at::zeros({1}, of(at::kLong));
  os::sleep_for(std::chrono::milliseconds(50 * fabric.rank()));
  const auto clock = [] { return std::chrono::nanoseconds(os::now().time_since_epoch()).count(); };
  if (fabric.rank() == fabric.size() - 1) latest.fill_(clock());
  group.barrier();
  const auto passed = clock();
  group.all_reduce(latest);
  EXPECT_GE(passed, latest.item<int64_t>());
}

void small_groups_work_side_by_side(Fabric& fabric) {
  const int neighbour = fabric.rank() ^ 1;
  if (neighbour >= fabric.size()) return;
  auto& pair = fabric.group({std::min(fabric.rank(), neighbour), std::max(fabric.rank(), neighbour)}, Traffic::gather);
  auto buffer = at::full({2}, fabric.rank(), of(at::kLong));
  pair.all_gather(buffer);
  EXPECT_EQ(buffer[pair.rank()].item<int64_t>(), fabric.rank());
  EXPECT_EQ(buffer[1 - pair.rank()].item<int64_t>(), neighbour);
  EXPECT_EQ(&pair, &fabric.group(pair.members(), Traffic::gather)) << "a group is made once";
}

void lanes_run_beside_each_other(Fabric& fabric) {
  const auto& members = fabric.everyone().members();
  auto& gather = fabric.group(members, Traffic::gather);
  auto& reduce = fabric.group(members, Traffic::reduce);
  const int size = fabric.size();
  constexpr int kRounds = 6;
  const int64_t elements = 100'003;
  std::vector<at::Tensor> gathered, reduced;
  std::vector<Ticket> tickets;
  for (int round = 0; round < kRounds; ++round) {
    gathered.push_back(at::zeros({elements * size}, of(at::kFloat)));
    piece(gathered.back(), fabric.rank(), size).copy_(pattern(fabric.rank() + round, elements, at::kFloat));
    reduced.push_back(pattern(fabric.rank(), elements * size, at::kFloat));
    // Ranks submit to the two lanes in different orders: lanes do not wait for each other.
    const auto submit_gather = [&, buffer = gathered.back()] {
      tickets.push_back(fabric.lane(Traffic::gather).submit([&gather, buffer] { gather.all_gather(buffer); }));
    };
    const auto submit_reduce = [&, buffer = reduced.back()] {
      tickets.push_back(fabric.lane(Traffic::reduce).submit([&reduce, buffer] { reduce.reduce_scatter(buffer); }));
    };
    if (fabric.rank() % 2 == 0) submit_gather();
    submit_reduce();
    if (fabric.rank() % 2 != 0) submit_gather();
  }
  for (const auto& ticket : tickets) ticket.wait();
  for (int round = 0; round < kRounds; ++round) {
    for (int member = 0; member < size; ++member) {
      EXPECT_TRUE(at::equal(piece(gathered[round], member, size), pattern(member + round, elements, at::kFloat)));
    }
    EXPECT_TRUE(at::equal(piece(reduced[round], fabric.rank(), size),
                          pattern_sum(size, elements, at::kFloat, elements * fabric.rank())));
  }
}

void counters_count_what_left_this_rank(Fabric& fabric) {
  std::vector<int> members = fabric.everyone().members();
  std::rotate(members.begin(), members.begin() + 1, members.end());
  auto& group = fabric.group(members, Traffic::control);
  const auto before = group.counters();
  const auto total_before = fabric.counters().bytes();
  const auto others = static_cast<uint64_t>(group.size() - 1);
  const auto buffer = at::zeros({12 * group.size()}, of(at::kFloat));
  group.all_gather(buffer);
  group.reduce_scatter(buffer);
  group.all_reduce(buffer);
  group.broadcast(buffer, 0);
  group.barrier();
  const auto& after = group.counters();
  EXPECT_EQ(after.all_gather.bytes - before.all_gather.bytes, 48 * others);
  EXPECT_EQ(after.reduce_scatter.bytes - before.reduce_scatter.bytes, 48 * others);
  EXPECT_EQ(after.all_reduce.bytes - before.all_reduce.bytes, 2 * 48 * others);
  EXPECT_EQ(after.broadcast.bytes - before.broadcast.bytes, group.rank() == 0 ? 48 * others * group.size() : 0);
  EXPECT_EQ(after.calls() - before.calls(), 5u);
  EXPECT_EQ(fabric.counters().bytes() - total_before, after.bytes() - before.bytes());
}

void arguments_are_checked_before_anything_is_sent(Fabric& fabric) {
  auto& group = fabric.everyone();
  EXPECT_THROW(group.all_gather(at::zeros({group.size() * 3 + 1}, of(at::kFloat))), InvalidArgument);
  EXPECT_THROW(group.all_reduce(at::zeros({4, 4}, of(at::kFloat)).t()), InvalidArgument);
  EXPECT_THROW(group.broadcast(at::zeros({1}, of(at::kFloat)), group.size()), InvalidArgument);
  EXPECT_THROW(
      group.reduce_scatter_scaled(at::zeros({2}, of(at::kFloat)), at::zeros({group.size()}, of(at::kFloat)), 0.5),
      InvalidArgument);
  const auto whole_numbers = at::ones({group.size()}, of(at::kLong));
  EXPECT_THROW(group.reduce_scatter_scaled(at::ones({1}, of(at::kLong)), whole_numbers, 0.5), InvalidArgument);
  EXPECT_THROW(group.exchange({{group.size(), at::zeros({1}, of(at::kFloat))}}, {}), InvalidArgument);
  EXPECT_THROW(fabric.group({fabric.rank(), fabric.rank()}, Traffic::control), InvalidArgument);
  group.barrier();  // the group is as good as before
}

template <class Call>
std::string mismatch_text(const Call& call) {
  try {
    call();
  } catch (const Mismatch& mismatch) {
    return mismatch.what();
  }
  ADD_FAILURE() << "no Mismatch was thrown";
  return {};
}

}  // namespace

const std::vector<GroupCase>& group_cases() {
#define CASE(function) \
  { #function, run_case < function> }
  static const std::vector<GroupCase> cases = {
      CASE(all_gather_fills_the_pieces_of_the_others),
      CASE(all_gather_to_fills_another_buffer),
      CASE(reduce_scatter_leaves_the_sum_in_the_own_piece),
      CASE(reduce_scatter_scaled_leaves_the_same_sum_elsewhere),
      CASE(several_buffers_end_as_each_by_itself),
      CASE(all_reduce_gives_all_the_same_bits),
      CASE(sums_are_the_same_every_time),
      CASE(sums_of_low_precision_are_formed_in_fp32),
      CASE(what_is_packed_is_as_close_as_its_wire),
      CASE(broadcast_gives_all_what_the_root_has),
      CASE(all_to_all_delivers_uneven_counts),
      CASE(exchange_runs_between_those_that_take_part),
      CASE(messages_to_oneself_are_copies),
      CASE(barrier_waits_for_the_last),
      CASE(shared_memory_is_the_same_for_all_members),
      CASE(small_groups_work_side_by_side),
      CASE(lanes_run_beside_each_other),
      CASE(counters_count_what_left_this_rank),
      CASE(arguments_are_checked_before_anything_is_sent),
  };
#undef CASE
  return cases;
}

void members_that_call_different_verbs_get_mismatch(Fabric& fabric) {
  auto& group = fabric.everyone();
  const auto buffer = at::zeros({2 * group.size()});
  const auto text = mismatch_text([&] {
    if (group.rank() == 0) {
      group.all_gather(buffer, {.unit = "blocks.3", .step = 17});
    } else {
      group.reduce_scatter(buffer, {.unit = "blocks.3", .step = 17});
    }
  });
  EXPECT_NE(text.find("all_gather of"), std::string::npos) << text;
  EXPECT_NE(text.find("reduce_scatter of"), std::string::npos) << text;
  EXPECT_NE(text.find("blocks.3"), std::string::npos) << text;
  EXPECT_NE(text.find("step 17"), std::string::npos) << text;
  EXPECT_EQ(mismatch_text([&] { group.barrier(); }), text) << "a failed group stays failed";
}

void members_that_bring_different_sizes_get_mismatch(Fabric& fabric) {
  auto& group = fabric.everyone();
  const int64_t elements = group.rank() == 0 ? 200'000 : 100'000;
  const auto text = mismatch_text([&] { group.all_reduce(at::zeros({elements})); });
  EXPECT_NE(text.find("100000 x Float"), std::string::npos) << text;
  EXPECT_NE(text.find("200000 x Float"), std::string::npos) << text;
}

void members_that_mean_different_contents_get_mismatch(Fabric& fabric) {
  auto& group = fabric.everyone();
  const auto buffer = at::zeros({1000 * group.size()});
  group.all_reduce(buffer, {.unit = "blocks.3", .contents = 0xabc});
  const auto text = mismatch_text(
      [&] { group.reduce_scatter(buffer, {.unit = "blocks.3", .contents = group.rank() == 1 ? 0xdefu : 0xabcu}); });
  EXPECT_NE(text.find("#abc"), std::string::npos) << text;
  EXPECT_NE(text.find("#def"), std::string::npos) << text;
}

void members_that_call_different_packed_verbs_get_mismatch(Fabric& fabric) {
  auto& group = fabric.everyone();
  const auto buffer = at::zeros({20'000 * group.size()});
  const auto text = mismatch_text([&] {
    if (group.rank() == 0) {
      group.all_gather(buffer, {}, Wire::int8);
    } else {
      group.reduce_scatter(buffer, {}, Reduction::sum, Wire::int8);
    }
  });
  EXPECT_NE(text.find("all_gather"), std::string::npos) << text;
  EXPECT_NE(text.find("reduce_scatter"), std::string::npos) << text;
}

void a_member_that_never_calls_makes_the_others_time_out(Fabric& fabric, std::chrono::milliseconds absence) {
  auto& group = fabric.everyone();
  if (fabric.rank() == fabric.size() - 1) return os::sleep_for(absence);
  try {
    group.barrier({.unit = "root", .step = 3});
    ADD_FAILURE() << "no Timeout was thrown";
  } catch (const Timeout& timeout) {
    EXPECT_TRUE(timeout.silent.empty()) << timeout.what();
    EXPECT_EQ(timeout.absent, std::vector<int>{fabric.size() - 1}) << timeout.what();
    EXPECT_NE(std::string(timeout.what()).find("barrier #1"), std::string::npos) << timeout.what();
  }
}

}  // namespace tesserae::comm
