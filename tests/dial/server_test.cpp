#include "tesserae/dial/server.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <thread>

#include "tesserae/dial/client.h"
#include "tesserae/dial/launcher_file.h"
#include "tesserae/os/process.h"
#include "tests/os/scratch.h"

namespace tesserae::dial {
namespace {

using std::chrono::seconds;
using ::testing::HasSubstr;

class DialServer : public os::Scratch {
 protected:
  static os::Deadline soon() { return os::Deadline(seconds(20)); }

  Json event(Client& client) const {
    const auto next = client.next(soon());
    return next ? *next : Json{{"event", "nothing came"}};
  }
  /// What the server answers to a line that is sent as it is.
  Json answer_to(const std::string& line) const {
    const os::Descriptor connection = os::connect_local(folder_ / socket_name);
    try {
      os::send_some(connection.get(), line);
    } catch (const IoError&) {
      // It has answered and hung up.
    }
    std::string answer;
    while (answer.find('\n') == std::string::npos) {
      if (os::wait_readable({connection.get()}, soon()).empty()) return "no answer";
      const std::string bytes = os::read_some(connection.get());
      if (bytes.empty()) break;
      answer += bytes;
    }
    return Json::parse(answer, nullptr, false);
  }
  std::string refusal_of(const std::string& line) const {
    const Json answer = answer_to(line);
    return answer.is_object() ? answer.value("message", answer.dump()) : "no answer";
  }
  std::vector<Server::Asked> wait_for_request() {
    for (const os::Deadline end = soon(); !end.passed(); os::sleep_for(std::chrono::milliseconds(2))) {
      if (auto asked = server_->take(); !asked.empty()) return asked;
    }
    return {};
  }

  std::unique_ptr<Server> server_ = std::make_unique<Server>(folder_, 4);
};

TEST_F(DialServer, AnswersShowByItself) {
  server_->set_status({{"event", "status"}, {"step", 12}});
  Client client(folder_, {{"ask", "show"}});
  EXPECT_EQ(event(client)["step"], 12);
  EXPECT_TRUE(server_->take().empty());
}

TEST_F(DialServer, HandsOnARequestAndTellsTheClientWhatBecameOfIt) {
  Client client(folder_, {{"ask", "turn"}, {"degree", 2}});
  EXPECT_EQ(event(client), (Json{{"event", "accepted"}, {"degrees", {2, 2, 2}}}));
  const auto asked = wait_for_request();
  ASSERT_EQ(asked.size(), 1u);
  EXPECT_EQ(asked[0].request.kind, Request::Kind::turn);
  EXPECT_EQ(asked[0].request.degrees, (mesh::Degrees{2, 2, 2}));
  EXPECT_FALSE(client.next(os::Deadline(std::chrono::milliseconds(50)))) << "nothing yet";
  server_->tell(asked[0].client, {{"event", "changed"}, {"seconds", 0.5}});
  server_->tell(asked[0].client, {{"event", "timed"}, {"step", 7}});
  EXPECT_EQ(event(client)["seconds"], 0.5);
  EXPECT_EQ(event(client)["step"], 7);
}

TEST_F(DialServer, ServesSeveralAtOnceAndKeepsThemApart) {
  Client first(folder_, {{"ask", "turn"}, {"degree", 1}});
  EXPECT_EQ(event(first)["event"], "accepted");
  Client second(folder_, {{"ask", "turn"}, {"degrees", {1, 2, 4}}});
  EXPECT_EQ(event(second)["degrees"], (Json{1, 2, 4}));
  Client third(folder_, {{"ask", "auto"}});
  std::vector<Server::Asked> asked;
  while (asked.size() < 3) {
    for (const auto& one : wait_for_request()) asked.push_back(one);
    if (HasFailure()) return;
  }
  EXPECT_EQ(asked[2].request.kind, Request::Kind::automatic);
  server_->tell(asked[1].client, {{"event", "unchanged"}, {"degrees", {1, 2, 4}}});
  server_->tell(asked[0].client, error_event("another request came after this one"));
  EXPECT_EQ(event(first)["event"], "error");
  EXPECT_EQ(event(second)["event"], "unchanged");
}

TEST_F(DialServer, RefusesWhatIsNoRequest) {
  EXPECT_THAT(refusal_of("garbage\n"), HasSubstr("a request is one line like"));
  EXPECT_THAT(refusal_of("[[[[]]]]\n"), HasSubstr("a request is one line like"));
  EXPECT_THAT(refusal_of("{\"ask\": \"stop\"}\n"), HasSubstr("not 'stop'"));
  EXPECT_THAT(refusal_of("{\"ask\": \"turn\"}\n"), HasSubstr("either degree or degrees"));
  EXPECT_THAT(refusal_of(R"({"ask": "turn", "offload": {"optimiser": "disk"}})"
                         "\n"),
              HasSubstr("parameters, gradients and optimizer, not 'optimiser'"));
  EXPECT_THAT(refusal_of(R"({"ask": "turn", "offload": {"optimizer": "tape"}})"
                         "\n"),
              HasSubstr("device, host and disk"));
  EXPECT_THAT(refusal_of(R"({"ask": "turn", "offload": "disk"})"
                         "\n"),
              HasSubstr("a state and its tier"));
  EXPECT_THAT(refusal_of("{\"ask\": \"turn\", \"degree\": \"4\"}\n"), HasSubstr("a positive number"));
  EXPECT_THAT(refusal_of("{\"ask\": \"turn\", \"degree\": 1e99}\n"), HasSubstr("a positive number"));
  EXPECT_THAT(refusal_of("{\"ask\": \"turn\", \"degrees\": [1, 2]}\n"), HasSubstr("three numbers"));
  EXPECT_THAT(refusal_of("{\"ask\": \"turn\", \"degree\": 3}\n"),
              HasSubstr("does not divide the 4 ranks; nearest valid: 2, 4"));
  EXPECT_THAT(refusal_of("{\"ask\": \"turn\", \"degrees\": [2, 3, 4]}\n"), HasSubstr("nearest valid: P="));
  EXPECT_THAT(refusal_of(std::string(5000, 'x')), HasSubstr("at most 4096 bytes"));
  EXPECT_THAT(refusal_of(std::string(4096, '[') + "\n"), HasSubstr("a request is one line like"));
  EXPECT_THAT(refusal_of("\xff\xfe\n"), HasSubstr("a request is one line like"));
  EXPECT_TRUE(server_->take().empty());
}

TEST_F(DialServer, ARequestMayComeInPieces) {
  const os::Descriptor connection = os::connect_local(folder_ / socket_name);
  os::send_some(connection.get(), "{\"ask\": ");
  os::sleep_for(std::chrono::milliseconds(20));
  os::send_some(connection.get(), "\"auto\"}\n");
  EXPECT_EQ(wait_for_request().size(), 1u);
}

TEST_F(DialServer, SurvivesClientsThatGoAway) {
  { Client client(folder_, {{"ask", "turn"}, {"degree", 4}}); }
  const auto asked = wait_for_request();
  ASSERT_EQ(asked.size(), 1u) << "what was asked for counts";
  for (int i = 0; i < 3; ++i) server_->tell(asked[0].client, {{"event", "changed"}});
  Client next(folder_, {{"ask", "show"}});
  EXPECT_EQ(event(next)["event"], "status");
}

TEST_F(DialServer, ServesAtMostSixteen) {
  std::vector<os::Descriptor> silent;
  for (int i = 0; i < 16; ++i) silent.push_back(os::connect_local(folder_ / socket_name));
  EXPECT_THAT(refusal_of("{\"ask\": \"show\"}\n"), HasSubstr("16 others are being served"));
  silent.clear();
  for (const os::Deadline end = soon(); !end.passed();) {
    if (answer_to("{\"ask\": \"show\"}\n")["event"] == "status") return;
  }
  FAIL() << "their places are not given back";
}

TEST_F(DialServer, TellsThoseWhoWaitThatTheRunHasEnded) {
  Client client(folder_, {{"ask", "turn"}, {"degree", 4}});
  EXPECT_EQ(event(client)["event"], "accepted");
  server_.reset();
  EXPECT_EQ(event(client)["message"], "the run has ended");
  EXPECT_FALSE(os::files().exists(folder_ / socket_name));
}

TEST_F(DialServer, OneLiveRunAFolder) {
  EXPECT_THROW(Server(folder_, 4), os::AddressInUse);
  Client client(folder_, {{"ask", "show"}});
  EXPECT_EQ(event(client)["event"], "status");
}

/// A job whose ranks meet again, as its clients see it: a launcher, and a rank 0 that comes and goes.
class DialAfterALoss : public DialServer {
 protected:
  DialAfterALoss() { note_launcher(folder_, launcher_.id()); }

  /// Nobody listens; in a moment somebody does again.
  void meet_again() {
    server_.reset();
    comes_ = std::jthread([this] {
      os::sleep_for(std::chrono::milliseconds(100));
      server_ = std::make_unique<Server>(folder_, 4);
    });
  }
  void end_launcher() {
    launcher_.signal(SIGKILL);
    launcher_.wait(soon());
  }

  os::Process launcher_ = os::Process::spawn({.arguments = {"sleep", "600"}, .die_with_parent = true});
  std::jthread comes_;
};

TEST_F(DialAfterALoss, WhoAsksMeanwhileIsServedByTheNextOneThatListens) {
  meet_again();
  Client client(folder_, {{"ask", "show"}}, soon());
  EXPECT_EQ(event(client)["event"], "status");
}

TEST_F(DialAfterALoss, WhatWasNotAnsweredIsAskedAgain) {
  Client client(folder_, {{"ask", "auto"}}, soon());
  ASSERT_EQ(wait_for_request().size(), 1u);
  meet_again();
  EXPECT_FALSE(client.next(os::Deadline(std::chrono::milliseconds(10)))) << "nobody listens yet";
  std::jthread answers([this] {
    comes_.join();
    for (const auto& asked : wait_for_request()) server_->tell(asked.client, {{"event", "automatic"}});
  });
  EXPECT_EQ(event(client)["event"], "automatic");
}

TEST_F(DialAfterALoss, WhatWasAcceptedIsNotAndItsClientHearsThatTheJobGoesOn) {
  Client client(folder_, {{"ask", "turn"}, {"degree", 4}}, soon());
  EXPECT_EQ(event(client)["event"], "accepted");
  ASSERT_EQ(wait_for_request().size(), 1u);
  meet_again();
  EXPECT_THAT(event(client)["message"].get<std::string>(), HasSubstr("has lost a rank before this was done"));
  comes_.join();
  os::sleep_for(std::chrono::milliseconds(50));
  EXPECT_TRUE(server_->take().empty());
}

TEST_F(DialAfterALoss, WhereNobodyComesTheDeadlineEndsIt) {
  server_.reset();
  try {
    Client client(folder_, {{"ask", "show"}}, os::Deadline(std::chrono::milliseconds(50)));
    FAIL() << "nobody listens";
  } catch (const IoError& error) {
    EXPECT_THAT(error.what(), HasSubstr("lives, but nobody listens at"));
  }
}

TEST_F(DialAfterALoss, AJobWhoseLauncherIsGoneHasEnded) {
  Client client(folder_, {{"ask", "turn"}, {"degree", 4}}, soon());
  EXPECT_EQ(event(client)["event"], "accepted");
  end_launcher();
  server_.reset();
  EXPECT_EQ(event(client)["message"], "the run has ended");
  EXPECT_THROW(Client(folder_, {{"ask", "show"}}, soon()), InvalidArgument);
}

TEST(DialClient, SaysWhatIsNotThere) {
  const auto error_of = [](const os::Path& folder) -> std::string {
    try {
      Client client(folder, {{"ask", "show"}});
      return "no error";
    } catch (const InvalidArgument& error) {
      return error.what();
    }
  };
  EXPECT_EQ(error_of("/no/such/run"), "[dial] there is no run folder /no/such/run");
  EXPECT_THAT(error_of("/tmp"), HasSubstr("no run listens in /tmp: it has ended, or its rank 0 runs on another host"));
}

}  // namespace
}  // namespace tesserae::dial
