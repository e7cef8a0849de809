#include "tesserae/os/line_server.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <thread>

#include "tests/os/scratch.h"

namespace tesserae::os {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::HasSubstr;

/// Answers "twice x" with two lines x, throws for "fail", and lets all others wait for what the test tells them.
class Lines : public Scratch {
 protected:
  Lines() { serve(); }

  void serve(const std::function<void(LineServer::Service&)>& change = [](LineServer::Service&) {}) {
    server_.reset();
    LineServer::Service service{
        .name = "the test",
        .answer = [this](int64_t client, const std::string& line) { return answer(client, line); },
        .refusal = [](const std::string& why) { return "no: " + why; },
        .farewell = "it is over"};
    change(service);
    server_ = std::make_unique<LineServer>(folder_ / "s", std::move(service));
  }

  LineServer::Answer answer(int64_t client, const std::string& line) {
    if (line == "fail") throw std::runtime_error("it failed");
    if (line.starts_with("twice ")) return {.lines = {line.substr(6), line.substr(6)}};
    const std::scoped_lock lock(mutex_);
    asked_.push_back({client, line});
    return {.lines = {"wait"}, .last = false};
  }

  static Deadline soon() { return Deadline(seconds(60)); }

  Descriptor connected() const { return connect_local(folder_ / "s"); }
  Descriptor sent(const std::string& bytes) const {
    Descriptor connection = connected();
    try {
      send_some(connection.get(), bytes);
    } catch (const IoError&) {
      // It has answered and hung up.
    }
    return connection;
  }
  /// All that comes until the server hangs up, or until it ends so.
  static std::string read(const Descriptor& connection, std::string_view end = "until it hangs up") {
    std::string all;
    try {
      while (!all.ends_with(end)) {
        if (wait_readable({connection.get()}, soon()).empty()) return all + "... and no more came";
        const std::string bytes = read_some(connection.get());
        if (bytes.empty()) break;
        all += bytes;
      }
    } catch (const IoError&) {
      // It hung up before it had read all that was sent to it.
    }
    return all;
  }
  std::pair<int64_t, std::string> next_asked() {
    for (const Deadline end = soon(); !end.passed(); sleep_for(milliseconds(1))) {
      const std::scoped_lock lock(mutex_);
      if (asked_.empty()) continue;
      const auto first = asked_.front();
      asked_.erase(asked_.begin());
      return first;
    }
    ADD_FAILURE() << "nobody asked";
    return {};
  }

  std::mutex mutex_;
  std::vector<std::pair<int64_t, std::string>> asked_;
  std::unique_ptr<LineServer> server_;
};

/// Leaves this process `free` descriptors while it lives.
class FewDescriptors {
 public:
  explicit FewDescriptors(int free) {
    ::getrlimit(RLIMIT_NOFILE, &before_);
    const Descriptor lowest_free(::dup(0));
    const rlimit few{static_cast<rlim_t>(lowest_free.get() + free), before_.rlim_max};
    ::setrlimit(RLIMIT_NOFILE, &few);
  }
  ~FewDescriptors() { ::setrlimit(RLIMIT_NOFILE, &before_); }

 private:
  rlimit before_{};
};

TEST_F(Lines, AnswersAndHangsUp) {
  EXPECT_EQ(read(sent("twice a\n")), "a\na\n");
  EXPECT_EQ(read(sent("twice \n")), "\n\n");
}

TEST_F(Lines, OnlyItsOwnerMayAsk) {
  struct stat facts {};
  ASSERT_EQ(::stat((folder_ / "s").c_str(), &facts), 0);
  EXPECT_EQ(facts.st_mode & 0777, 0600u);
}

TEST_F(Lines, TellsWhoWaitsUntilTheLastLine) {
  const Descriptor first = sent("one\n"), second = sent("two\n");
  std::map<std::string, int64_t> client;
  for (int i = 0; i < 2; ++i) {
    const auto [id, line] = next_asked();
    client[line] = id;
  }
  server_->tell(client["two"], "b", true);
  server_->tell(client["one"], "a", false);
  EXPECT_EQ(read(second), "wait\nb\n");
  EXPECT_EQ(read(first, "a\n"), "wait\na\n");
  EXPECT_TRUE(wait_readable({first.get()}, Deadline(milliseconds(50))).empty()) << "it waits for more";
  server_->tell(client["one"], "c", true);
  EXPECT_EQ(read(first), "c\n");
}

TEST_F(Lines, ARequestMayComeInPieces) {
  const Descriptor connection = sent("twi");
  sleep_for(milliseconds(20));
  send_some(connection.get(), "ce a\n");
  EXPECT_EQ(read(connection), "a\na\n");
}

TEST_F(Lines, OneRequestAConnection) {
  const Descriptor connection = sent("one\ntwice a\n");
  const auto [client, line] = next_asked();
  EXPECT_EQ(line, "one");
  send_some(connection.get(), "twice b\n");
  server_->tell(client, "end", true);
  EXPECT_EQ(read(connection), "wait\nend\n");
}

TEST_F(Lines, WhatTheServiceThrowsIsRefused) {
  EXPECT_EQ(read(sent("fail\n")), "no: it failed\n");
  EXPECT_EQ(read(sent("twice a\n")), "a\na\n") << "others are served";
}

TEST_F(Lines, RefusesALineThatIsTooLong) {
  serve([](LineServer::Service& service) { service.longest_request = 8; });
  EXPECT_EQ(read(sent("twice ab\n")), "ab\nab\n");
  EXPECT_EQ(read(sent("twice abc\n")), "no: a request has at most 8 bytes\n");
  EXPECT_EQ(read(sent(std::string(5000, 'x'))), "no: a request has at most 8 bytes\n");
}

TEST_F(Lines, ARequestThatDoesNotComeIsGivenUp) {
  serve([](LineServer::Service& service) { service.arrival = milliseconds(50); });
  EXPECT_EQ(read(sent("twi")), "");
}

TEST_F(Lines, ServesAsManyAsItIsTold) {
  serve([](LineServer::Service& service) { service.most_clients = 3; });
  std::vector<Descriptor> silent;
  for (int i = 0; i < 3; ++i) silent.push_back(connected());
  EXPECT_EQ(read(sent("twice a\n")), "no: 3 others are being served; try again\n");
  silent.clear();
  for (const Deadline end = soon(); !end.passed();) {
    if (read(sent("twice a\n")) == "a\na\n") return;
  }
  FAIL() << "their places are not given back";
}

TEST_F(Lines, AClientThatGoesAwayHarmsNobody) {
  sent("one\n").reset();
  const auto [client, line] = next_asked();
  EXPECT_EQ(line, "one") << "what was asked for counts";
  for (int i = 0; i < 3; ++i) server_->tell(client, "a", i == 2);
  server_->tell(client + 1000, "nobody", true);
  EXPECT_EQ(read(sent("twice a\n")), "a\na\n");
}

TEST_F(Lines, AClientThatDoesNotReadIsDropped) {
  const Descriptor deaf = sent("one\n");
  const int64_t client = next_asked().first;
  const std::string line(10'000, 'x');
  for (int i = 0; i < 1000; ++i) server_->tell(client, line, false);  // 10 MB
  EXPECT_LT(read(deaf).size(), 2'000'000u) << "and no more came";
}

TEST_F(Lines, ALongAnswerArrivesWholeIfItMayWait) {
  serve([](LineServer::Service& service) { service.most_unread = 32 << 20; });
  const Descriptor reads = sent("one\n");
  const int64_t client = next_asked().first;
  server_->tell(client, std::string(10'000'000, 'x'), true);
  EXPECT_EQ(read(reads).size(), 10'000'001 + std::string("wait\n").size());
}

TEST_F(Lines, SaysFarewellToThoseWhoWait) {
  const Descriptor waits = sent("one\n"), silent = connected();
  next_asked();
  server_.reset();
  EXPECT_EQ(read(waits), "wait\nno: it is over\n");
  EXPECT_EQ(read(silent), "");
  EXPECT_FALSE(files().exists(folder_ / "s"));
}

TEST_F(Lines, OneServerASocket) {
  EXPECT_THROW(LineServer(folder_ / "s", {}), AddressInUse);
  EXPECT_EQ(read(sent("twice a\n")), "a\na\n");
}

TEST_F(Lines, OutlivesAMomentWithoutDescriptors) {
  Descriptor connection;
  {
    const FewDescriptors none_for_the_server(1);
    connection = sent("twice a\n");
    EXPECT_TRUE(wait_readable({connection.get()}, Deadline(seconds(1))).empty());
  }
  EXPECT_EQ(read(connection), "a\na\n") << "it is served once there are some again";
}

TEST_F(Lines, MayBeToldFromManyThreads) {
  constexpr int threads = 8, rounds = 100;
  const Descriptor connection = sent("one\n");
  const int64_t client = next_asked().first;
  std::vector<std::jthread> tellers;
  for (int i = 0; i < threads; ++i) {
    tellers.emplace_back([&] {
      for (int round = 0; round < rounds; ++round) server_->tell(client, "abc", false);
    });
  }
  tellers.clear();
  server_->tell(client, "end", true);
  std::string all = "wait\n";
  for (int i = 0; i < threads * rounds; ++i) all += "abc\n";
  EXPECT_EQ(read(connection), all + "end\n");
}

}  // namespace
}  // namespace tesserae::os
