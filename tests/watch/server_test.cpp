#include "tesserae/watch/server.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <filesystem>
#include <memory>
#include <vector>

#include "tesserae/base/error.h"
#include "tesserae/dial/launcher_file.h"
#include "tesserae/dial/server.h"
#include "tesserae/os/limits.h"
#include "tesserae/os/process.h"
#include "tesserae/os/seconds.h"
#include "tests/os/scratch.h"
#include "tests/watch/talk.h"

namespace tesserae::watch {
namespace {

using dial::Json;
using std::chrono::seconds;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

class WatchServer : public os::Scratch {
 protected:
  WatchServer() {
    os::files().make_directories(folder_ / "monitor");
    os::files().write(folder_ / "metrics.jsonl", "{\"step\": 7, \"loss\": 2.5, \"tokens_per_second\": 900.0}\n");
    os::files().write(folder_ / "monitor/events.jsonl", "{\"kind\": \"started\"}\n");
    write_now();
    start();
  }
  void write_now() {
    const Json now = {
        {"state", "running"},
        {"time", os::time_of_day()},
        {"step", 7},
        {"step_seconds", 0.25},
        {"job", {{"ranks", 2}, {"steps", 10}}},
        {"stages", {"forward", "reduce"}},
        {"seconds", {{0.1, 0.05}, {0.2, nullptr}}},
        {"slow", {{{"rank", 1}, {"stage", "forward"}, {"seconds", 0.1}, {"share", 0.4}}}},
        {"memory", {{"categories", {"a \"b\"", "c"}}, {"bytes", {{1, 2}, {3, 4}}}, {"limit", {nullptr, 9}}}},
        {"load", {{"kinds", {"tokens"}}, {"amounts", {{64}, {32}}}, {"imbalance", {1.5}}}},
        {"links",
         {{"hops", {{{"link", "tcp"}, {"lane", "reduce"}, {"verb", "all_reduce"}, {"ranks", 2}}}},
          {"bytes", {{4096}, {0}}},
          {"speed", {{1000000}, {nullptr}}}}},
        {"ranks", "nonsense"}};
    os::files().write(folder_ / "monitor/now.json", now.dump());
  }
  void start(ServerOptions options = {}) {
    server_.reset();
    server_ = std::make_unique<Server>(folder_, options);
  }
  Talk talk() const { return Talk(server_->port()); }
  Talk::Answer ask(const std::string& head, const std::string& headers = "Host: localhost\r\n",
                   const std::string& body = "") const {
    Talk talk(server_->port());
    talk.send(head + " HTTP/1.1\r\n" + headers +
              (body.empty() ? "" : "Content-Length: " + std::to_string(body.size()) + "\r\n") + "\r\n" + body);
    return talk.answer();
  }
  Talk::Answer get(const std::string& path) const { return ask("GET " + path); }
  Talk::Answer turn(const std::string& body, const std::string& more = "Content-Type: application/json\r\n") const {
    return ask("POST /api/dial?token=t", "Host: localhost\r\n" + more, body);
  }

  std::unique_ptr<Server> server_;
};

// Who asks without an end would otherwise halve the speed of a rank that has one processor.
TEST_F(WatchServer, TrainingComesFirst) {
  ASSERT_TRUE(talk().connected());
  const auto modest = [] {
    int threads = 0;
    for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
      threads += ::getpriority(PRIO_PROCESS, static_cast<id_t>(std::stol(task.path().filename()))) == 19 ? 1 : 0;
    }
    return threads;
  };
  const os::Deadline end(std::chrono::seconds(30));  // a thread yields once it has begun, and others may be before it
  while (modest() < 3 && !end.passed()) os::sleep_for(std::chrono::milliseconds(1));
  EXPECT_EQ(modest(), 3);
  EXPECT_LT(::getpriority(PRIO_PROCESS, 0), 19) << "what trains is not one of them";
}

TEST_F(WatchServer, ServesThePageAndNothingElseToIt) {
  const Talk::Answer page = get("/");
  EXPECT_EQ(page.status, 200);
  EXPECT_EQ(page.headers.at("Content-Type"), "text/html; charset=utf-8");
  EXPECT_THAT(page.body, StartsWith("<!doctype html>"));
  EXPECT_LT(page.body.size(), 200'000u);
  EXPECT_THAT(page.body, Not(HasSubstr("@NONCE@")));
  EXPECT_THAT(page.body, Not(HasSubstr("@S")));
  const std::string policy = page.headers.at("Content-Security-Policy");
  EXPECT_THAT(policy, StartsWith("default-src 'none'; script-src 'nonce-"));
  const std::string nonce = policy.substr(policy.find("nonce-") + 6, 32);
  EXPECT_THAT(page.body, HasSubstr("<script nonce=\"" + nonce + "\">"));
  EXPECT_THAT(get("/").headers.at("Content-Security-Policy"), Not(HasSubstr(nonce))) << "a nonce is used once";
}

TEST_F(WatchServer, ServesWhatTheFilesSay) {
  const Talk::Answer run = get("/api/run");
  EXPECT_EQ(run.status, 200);
  EXPECT_EQ(run.headers.at("Cache-Control"), "no-store");
  EXPECT_EQ(run.headers.at("X-Content-Type-Options"), "nosniff");
  EXPECT_THAT(run.headers.at("Content-Security-Policy"), StartsWith("default-src 'none'"));
  const Json told = Json::parse(run.body);
  EXPECT_EQ(told["name"], folder_.filename().native());
  EXPECT_TRUE(told["live"]);
  EXPECT_FALSE(told["allow_control"]);
  EXPECT_EQ(Json::parse(get("/api/now").body)["step"], 7);
  EXPECT_EQ(get("/api/timeline").status, 404);
  const Talk::Answer metrics = get("/api/metrics?from=0");
  EXPECT_THAT(metrics.body, StartsWith("{\"step\": 7"));
  EXPECT_EQ(metrics.headers.at("X-Next"), std::to_string(metrics.body.size()));
  EXPECT_EQ(get("/api/metrics?from=" + metrics.headers.at("X-Next")).body, "");
  EXPECT_EQ(get("/api/events").body, "{\"kind\": \"started\"}\n");
  EXPECT_EQ(get("/api/metrics?from=-1").status, 400);
  EXPECT_EQ(get("/api/metrics?from=1e3").status, 400);
  EXPECT_EQ(get("/api/metrics?from=99999999999999999999").status, 400);
  EXPECT_EQ(get("/api/metrics?from=18446744073709551615").headers.at("X-From"), "0");
  os::files().write(folder_ / "monitor/timeline.json", R"({"step": 7, "ranks": [{"rank": 0}, {"rank": 1}]})");
  EXPECT_EQ(Json::parse(get("/api/timeline?rank=1").body)["ranks"][0]["rank"], 1);
  EXPECT_EQ(Json::parse(get("/api/timeline?from=0&count=1").body)["total"], 2);
}

TEST_F(WatchServer, SendsWhatIsNewOnly) {
  const std::string tag = get("/api/now").headers.at("ETag");
  const std::string if_none = "Host: localhost\r\nIf-None-Match: " + tag + "\r\n";
  EXPECT_EQ(ask("GET /api/now", if_none).status, 304);
  os::files().write(folder_ / "monitor/now.json", R"({"step": 8})");
  EXPECT_EQ(ask("GET /api/now", if_none).status, 200);
}

TEST_F(WatchServer, TakesNoPathFromAnAddress) {
  os::files().write(folder_ / "secret", "do not tell");
  for (const char* path : {"/secret", "/../secret", "/monitor/now.json", "/api/../secret", "/%2e%2e/secret", "//secret",
                           "/api/run/../../secret", "/api/timeline/..%2f..%2fsecret", "/api/metrics%00", "/api/run/"}) {
    const Talk::Answer answer = get(path);
    EXPECT_EQ(answer.status, 404) << path;
    EXPECT_THAT(answer.body, Not(HasSubstr("do not tell")));
  }
  EXPECT_EQ(ask("PUT /api/run").status, 415);
  EXPECT_EQ(ask("DELETE /", "Host: localhost\r\nContent-Type: application/json\r\n").status, 405);
  Talk talk = this->talk();
  talk.send("HEAD / HTTP/1.1\r\nHost: localhost\r\n\r\nGET /api/run HTTP/1.1\r\nHost: localhost\r\n\r\n");
  EXPECT_EQ(talk.answer(seconds(30), /*head=*/true).status, 200);
  EXPECT_THAT(talk.answer().body, StartsWith("{\"name\"")) << "a second request of the same connection";
}

TEST_F(WatchServer, SpeaksToPrometheus) {
  const Talk::Answer answer = get("/metrics");
  EXPECT_THAT(answer.headers.at("Content-Type"), StartsWith("text/plain; version=0.0.4"));
  for (const char* line :
       {"# TYPE tesserae_step gauge\ntesserae_step 7\n", "tesserae_up 1\n", "tesserae_loss 2.5\n",
        "tesserae_tokens_per_second 900.0\n", "tesserae_step_seconds 0.25\n",
        "tesserae_stage_seconds{rank=\"1\",stage=\"forward\"} 0.2\n",
        "tesserae_memory_bytes{rank=\"0\",category=\"a \\\"b\\\"\"} 1\n", "tesserae_memory_limit_bytes{rank=\"1\"} 9\n",
        "tesserae_slow_share{rank=\"1\",stage=\"forward\"} 0.4\n", "tesserae_load{rank=\"1\",kind=\"tokens\"} 32\n",
        "tesserae_load_imbalance{kind=\"tokens\"} 1.5\n",
        "tesserae_link_bytes{rank=\"0\",link=\"tcp\",lane=\"reduce\",verb=\"all_reduce\",ranks=\"2\"} 4096\n",
        "tesserae_link_bytes_per_second{rank=\"0\",link=\"tcp\",lane=\"reduce\",verb=\"all_reduce\",ranks=\"2\"} "
        "1000000\n"}) {
    EXPECT_THAT(answer.body, HasSubstr(line));
  }
  EXPECT_THAT(answer.body, Not(HasSubstr("null")));
  EXPECT_THAT(answer.body, Not(HasSubstr("tesserae_link_bytes{rank=\"1\""))) << "it sent nothing";
  for (const char* now : {"[]", "7", "{\"seconds\": 3, \"stages\": {}, \"slow\": [7, {}], \"memory\": [1]}",
                          "{\"ranks\": [1]}", "{\"load\": [1], \"links\": {\"bytes\": [[1, 2], 3], \"hops\": [{}]}}",
                          "{\"load\": {\"amounts\": [[1]], \"imbalance\": [2]}}"}) {
    os::files().write(folder_ / "monitor/now.json", now);
    EXPECT_EQ(get("/metrics").status, 200) << now;
    EXPECT_EQ(get("/api/run").status, 200) << now;
  }
}

// A run that was resumed: its monitor knows the step once the next one is over.
TEST_F(WatchServer, TellsPrometheusTheStepOfTheMetricsBeforeTheMonitorKnowsIt) {
  os::files().write(folder_ / "monitor/now.json", R"({"step": 0})");
  EXPECT_THAT(get("/metrics").body, HasSubstr("\ntesserae_step 7\n"));
}

TEST_F(WatchServer, AnswersUnderNamesOfThisHostOnly) {
  for (const char* host : {"localhost", "localhost:1234", "127.0.0.1:80", "[::1]:80"}) {
    EXPECT_EQ(ask("GET /api/run", std::string("Host: ") + host + "\r\n").status, 200) << host;
  }
  for (const char* host :
       {"evil.example", "localhost.evil.example", "127.0.0.1.evil.example:80", "", "[::1", "10.0.0.1"}) {
    EXPECT_EQ(ask("GET /api/run", std::string("Host: ") + host + "\r\n").status, 421) << host;
  }
  EXPECT_EQ(ask("GET /api/run", "").status, 421);
}

TEST_F(WatchServer, AnswersUnderItsOwnAddress) {
  start({.host = "127.0.0.2"});
  const std::string url = server_->url();
  EXPECT_THAT(url, StartsWith("http://127.0.0.2:"));
  const std::string host = url.substr(7, url.rfind('/') - 7);
  for (const auto& [named, status] : {std::pair(host, 200), {"localhost", 200}, {"127.0.0.3", 421}}) {
    Talk talk(server_->port(), "127.0.0.2");
    talk.send("GET /api/run HTTP/1.1\r\nHost: " + named + "\r\n\r\n");
    EXPECT_EQ(talk.answer().status, status) << named;
  }
}

// An address and a cookie carry it as it is.
TEST_F(WatchServer, TakesNoTokenThatAnAddressCannotCarry) {
  for (const char* token : {"a+b", "a b", "a%41", "a;b", "a&b", "\xc3\xbc"}) {
    EXPECT_THROW(start({.token = token}), InvalidArgument) << token;
  }
  start({.token = "aZ09-._~"});
  EXPECT_EQ(get("/?token=aZ09-._~").status, 200);
}

TEST_F(WatchServer, WantsItsToken) {
  start({.token = "wonder"});
  EXPECT_THAT(server_->url(), ::testing::EndsWith("/?token=wonder"));
  EXPECT_EQ(get("/").status, 401);
  EXPECT_EQ(get("/metrics").status, 401);
  EXPECT_EQ(get("/none").status, 401);
  EXPECT_EQ(get("/?token=wonde").status, 401);
  EXPECT_EQ(get("/?token=wonderx").status, 401);
  EXPECT_EQ(get("/?token=").status, 401);
  const Talk::Answer page = get("/?token=wonder");
  EXPECT_EQ(page.status, 200);
  const std::string cookie = page.headers.at("Set-Cookie");
  EXPECT_THAT(cookie, HasSubstr("HttpOnly; SameSite=Strict"));
  const std::string pair = cookie.substr(0, cookie.find(';'));
  EXPECT_EQ(ask("GET /api/run", "Host: localhost\r\nCookie: other=1; " + pair + "\r\n").status, 200);
  EXPECT_EQ(ask("GET /api/run", "Host: localhost\r\nCookie: x" + pair + "\r\n").status, 401);
  EXPECT_EQ(turn("{}").status, 401);
}

TEST_F(WatchServer, MakesATokenWhereOthersCanConnect) {
  start({.host = "0.0.0.0"});
  const std::string url = server_->url();
  const std::string token = url.substr(url.find("token=") + 6);
  EXPECT_EQ(token.size(), 32u);
  EXPECT_EQ(get("/").status, 401);
  EXPECT_EQ(ask("GET /?token=" + token, "Host: trainer.example\r\n").status, 200);
  start({.host = "0.0.0.0"});
  EXPECT_NE(server_->url().substr(server_->url().find("token=") + 6), token);
}

TEST_F(WatchServer, TurnsTheDialOnlyWhereItMay) {
  EXPECT_EQ(get("/api/dial").status, 404) << "nobody listens";
  EXPECT_EQ(turn(R"({"degree": 2})").status, 403);
  start({.allow_control = true});
  EXPECT_THAT(server_->url(), HasSubstr("?token=")) << "dial.sock is its user's alone, and so is this";
  EXPECT_EQ(turn(R"({"degree": 2})").status, 401);
  start({.token = "t", .allow_control = true});
  EXPECT_EQ(turn(R"({"degree": 2})").status, 404);
  dial::note_launcher(folder_, os::parent_id());
  EXPECT_EQ(get("/api/dial?token=t").status, 503) << "nobody does for now";
  dial::Server dial(folder_, 4);
  dial.set_status({{"event", "status"}, {"step", 3}, {"degrees", {1, 1, 4}}});
  EXPECT_EQ(Json::parse(get("/api/dial?token=t").body)["degrees"][2], 4);
  const Talk::Answer accepted = turn(R"({"degree": 2})");
  EXPECT_EQ(accepted.status, 200);
  EXPECT_EQ(Json::parse(accepted.body)["event"], "accepted");
  const auto asked = dial.take();
  ASSERT_EQ(asked.size(), 1u);
  EXPECT_EQ(asked[0].request.degrees->parameters, 2);
  const Talk::Answer wrong = turn(R"({"degree": 3})");
  EXPECT_EQ(wrong.status, 409);
  EXPECT_THAT(wrong.body, HasSubstr("3"));
  EXPECT_EQ(turn("{}").status, 400);
  EXPECT_EQ(turn("[[[[").status, 400);
  EXPECT_EQ(turn(R"({"degree": 2})", "").status, 415) << "a form of another site";
  EXPECT_EQ(turn(R"({"degree": 2})", "Content-Type: application/json\r\nOrigin: http://evil.example\r\n").status, 403);
  EXPECT_EQ(turn(R"({"degree": 2})", "Content-Type: application/json\r\nOrigin: http://localhost\r\n").status, 200);
}

TEST_F(WatchServer, SaysWhyItCannotServe) {
  const auto error_of = [](const os::Path& folder, uint16_t port,
                           const std::string& host = "127.0.0.1") -> std::string {
    try {
      Server server(folder, {.host = host, .port = port});
      return "";
    } catch (const os::AddressInUse& error) {
      return std::string("in use: ") + error.what();
    } catch (const Error& error) {
      return error.what();
    }
  };
  EXPECT_THAT(error_of(folder_, server_->port()), StartsWith("in use: "));
  EXPECT_THAT(error_of(folder_, server_->port()), HasSubstr("give another, or 0"));
  EXPECT_THAT(error_of(folder_ / "nowhere", 0), HasSubstr("there is no folder"));
  os::files().make_directories(folder_ / "empty");
  EXPECT_THAT(error_of(folder_ / "empty", 0), HasSubstr("not a run's folder"));
  EXPECT_THAT(error_of(folder_, 0, "no such host"), HasSubstr("no address of this host"));
  const uint16_t port = server_->port();
  server_.reset();
  EXPECT_EQ(error_of(folder_, port), "") << "the port is free at once";
}

TEST_F(WatchServer, RefusesEndlessHeaders) {
  Talk large = talk();
  large.send("GET / HTTP/1.1\r\nHost: localhost\r\nA: " + std::string(1 << 20, 'a'));
  EXPECT_EQ(large.answer().status, 431);
  Talk endless = talk();
  endless.send("GET / HTTP/1.1\r\n");
  int sent = 0;
  while (sent < 1000 && endless.send("A: " + std::string(100'000, 'b') + "\r\n")) ++sent;
  EXPECT_LT(sent, 1000) << "it was hung up on";
  Talk body = talk();
  body.send("POST /api/dial HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n");
  EXPECT_EQ(body.answer().status, 413);
  Talk garbage = talk();
  garbage.send(std::string("\x16\x03\x01\x02\x00\x01\r\n\r\n", 10));
  EXPECT_EQ(garbage.answer().status, 400);
  EXPECT_EQ(get("/api/run").status, 200);
}

TEST_F(WatchServer, ServesOthersWhileSomeAreSlow) {
  start({.patience = std::chrono::milliseconds(1500)});
  std::vector<std::unique_ptr<Talk>> slow;
  for (int i = 0; i < 60; ++i) {
    slow.push_back(std::make_unique<Talk>(server_->port()));
    slow.back()->send(i % 2 == 0 ? "GET / HTT" : "");
  }
  const os::TimePoint begin = os::now();
  EXPECT_EQ(get("/api/run").status, 200);
  EXPECT_LT(os::seconds_since(begin), 10);
  // One byte at a time gains nothing.
  int bytes = 0;
  while (bytes < 3000 && slow[0]->send("a")) {
    os::sleep_for(std::chrono::milliseconds(10));
    ++bytes;
  }
  EXPECT_LT(bytes, 3000);
  for (const auto& talk : slow) EXPECT_TRUE(talk->closed());
}

TEST_F(WatchServer, KeepsARoomForWhoComesNext) {
  std::vector<std::unique_ptr<Talk>> idle;
  for (int i = 0; i < 300; ++i) idle.push_back(std::make_unique<Talk>(server_->port()));
  EXPECT_EQ(get("/api/run").status, 200);
  EXPECT_TRUE(idle[0]->closed()) << "who came first and said nothing has gone";
}

TEST_F(WatchServer, ServesAHundredAtOnce) {
  std::vector<std::unique_ptr<Talk>> clients;
  for (int i = 0; i < 100; ++i) {
    clients.push_back(std::make_unique<Talk>(server_->port()));
    ASSERT_TRUE(clients.back()->connected());
  }
  for (int round = 0; round < 3; ++round) {
    for (const auto& client : clients) client->send("GET / HTTP/1.1\r\nHost: localhost\r\n\r\n");
    for (const auto& client : clients) EXPECT_EQ(client->answer().status, 200);
  }
}

TEST_F(WatchServer, ReadersThatStopDoNotHoldOthers) {
  std::string lines;
  while (lines.size() < 3'000'000) lines += "{\"step\": 1, \"text\": \"" + std::string(200, 'x') + "\"}\n";
  os::files().write(folder_ / "metrics.jsonl", lines);
  std::vector<std::unique_ptr<Talk>> readers;
  for (int i = 0; i < 100; ++i) {  // 100 MB, of which nobody reads a byte
    readers.push_back(std::make_unique<Talk>(server_->port()));
    readers.back()->send("GET /api/metrics?from=0 HTTP/1.1\r\nHost: localhost\r\n\r\n");
  }
  EXPECT_EQ(get("/api/run").status, 200);
}

TEST_F(WatchServer, NeedsFewThreads) {
  const auto threads = [] {
    return std::distance(std::filesystem::directory_iterator("/proc/self/task"), std::filesystem::directory_iterator());
  };
  const auto with = threads();
  server_.reset();
  EXPECT_LE(with - threads(), 4);
}

TEST_F(WatchServer, EndsWhileClientsWait) {
  Talk half = talk();
  half.send("GET / HT");
  Talk idle = talk();
  const os::TimePoint begin = os::now();
  server_.reset();
  EXPECT_LT(os::seconds_since(begin), 20);
  EXPECT_TRUE(half.closed());
}

}  // namespace
}  // namespace tesserae::watch
