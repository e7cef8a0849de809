#include "tesserae/watch/http.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tesserae/os/seconds.h"

namespace tesserae::watch {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

int status_of(std::string bytes) {
  try {
    return take_request(bytes) ? 200 : 0;
  } catch (const BadRequest& error) {
    return error.status();
  }
}

TEST(Http, ReadsARequest) {
  std::string bytes =
      "GET /api/timeline?from=3&count=16&text=a%2Bb+c HTTP/1.1\r\nHost: localhost:80\r\nCookie:  a=b \r\n\r\nGET";
  const auto request = take_request(bytes);
  ASSERT_TRUE(request);
  EXPECT_EQ(request->method, "GET");
  EXPECT_EQ(request->path, "/api/timeline");
  EXPECT_EQ(request->parameter("from"), "3");
  EXPECT_EQ(request->parameter("text"), "a+b c");
  EXPECT_EQ(request->parameter("none"), "");
  EXPECT_EQ(request->header("host"), "localhost:80");
  EXPECT_EQ(request->header("cookie"), "a=b");
  EXPECT_TRUE(request->keep_alive);
  EXPECT_EQ(bytes, "GET") << "the next request stays";
}

TEST(Http, WaitsForTheBody) {
  const std::string whole = "POST /api/dial HTTP/1.1\r\nContent-Length: 12\r\n\r\n{\"degree\":4}";
  for (size_t size = 0; size < whole.size(); ++size) {
    std::string bytes = whole.substr(0, size);
    EXPECT_FALSE(take_request(bytes)) << size;
  }
  std::string bytes = whole;
  EXPECT_EQ(take_request(bytes)->body, "{\"degree\":4}");
}

TEST(Http, ClosesWhereItIsAsked) {
  std::string bytes = "GET / HTTP/1.1\r\nConnection: Close\r\n\r\nGET / HTTP/1.0\r\n\r\n";
  EXPECT_FALSE(take_request(bytes)->keep_alive);
  EXPECT_FALSE(take_request(bytes)->keep_alive);
}

TEST(Http, RefusesWhatCouldBeReadInTwoWays) {
  EXPECT_EQ(status_of("GET / HTTP/1.1\r\n\r\n"), 200);
  EXPECT_EQ(status_of("GET /\r\n\r\n"), 400);
  EXPECT_EQ(status_of("\x16\x03\x01 hello\r\n\r\n"), 400) << "TLS";
  EXPECT_EQ(status_of("GET http://a/ HTTP/1.1\r\n\r\n"), 400);
  EXPECT_EQ(status_of("GET / HTTP/2.0\r\n\r\n"), 505);
  EXPECT_EQ(status_of("GET /%zz HTTP/1.1\r\n\r\n"), 400);
  EXPECT_EQ(status_of("GET /%4 HTTP/1.1\r\n\r\n"), 400);
  EXPECT_EQ(status_of("GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n"), 400);
  EXPECT_EQ(status_of("GET / HTTP/1.1\r\nHost : a\r\n\r\n"), 400);
  EXPECT_EQ(status_of("GET / HTTP/1.1\r\nA: b\r\n folded\r\n\r\n"), 400);
  EXPECT_EQ(status_of("GET / HTTP/1.1\r\nno colon\r\n\r\n"), 400);
  EXPECT_EQ(status_of("POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab"), 400);
  EXPECT_EQ(status_of("POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n"), 400);
  EXPECT_EQ(status_of("POST / HTTP/1.1\r\nContent-Length: 99999\r\n\r\n"), 413);
  EXPECT_EQ(status_of("POST / HTTP/1.1\r\nContent-Length: 99999999999999999999999\r\n\r\n"), 413);
  EXPECT_EQ(status_of("POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"), 501);
  EXPECT_EQ(status_of("GET /" + std::string(most_head_bytes, 'a')), 431);
  EXPECT_EQ(status_of(std::string("GET / HTTP/1.1\r\nA: b\0c\r\n\r\n", 27)), 400);
}

TEST(Http, SurvivesEveryCutAndChangeOfARequest) {
  const std::string whole = "POST /a?b=c%20d HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\n\r\nabc";
  for (size_t at = 0; at < whole.size(); ++at) {
    for (int value = 0; value < 256; ++value) {
      std::string bytes = whole;
      bytes[at] = static_cast<char>(value);
      status_of(bytes);  // any answer will do
      status_of(bytes.substr(0, at));
    }
  }
}

TEST(Http, AnswersHaveALength) {
  EXPECT_THAT(to_bytes({.body = "{}"}, true),
              StartsWith("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n"));
  EXPECT_THAT(to_bytes({.body = "{}"}, true, /*head=*/true), ::testing::EndsWith("\r\n\r\n"));
  EXPECT_THAT(to_bytes({.status = 304}, false), HasSubstr("Connection: close"));
  EXPECT_THAT(refusal(404, "a \"quote\"").body, HasSubstr("a \\\"quote\\\""));
}

}  // namespace
}  // namespace tesserae::watch
